"""The model in question, its sites and prices, and the text it is judged on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bitwright.errors import BudgetError, DataError
from bitwright.models import Site, find_sites
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.models.norm_readers import find_factor_homes
from bitwright.models.spool import OnDisk, Originals, Spool, output_head
from bitwright.models.value_sites import ValueSite, find_value_sites, values_left_out
from bitwright.search.cache import Cache, default_folder, open_cache
from bitwright.search.choices import Choices, asks_for_homes, find_choices
from bitwright.search.floor import raise_if_below_floor
from bitwright.search.output import Output, Reference, open_output, raise_if_not_measurable
from bitwright.search.price import END_ROLES, KEPT_ROLES, Prices, price_model
from bitwright.search.progress import Progress
from bitwright.search.settings import REFINEMENT_TEXT, Settings
from bitwright.search.speaker import Speaker
from bitwright.search.text import Splits, TextSet, split_text
from bitwright.search.verify import ReferenceFacts, reference_facts, vocabulary_size


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model in question and the text it is judged on."""

    loaded: LoadedModel
    sites: tuple[Site, ...]
    #: Value sites in question.
    value_sites: tuple[ValueSite, ...]
    prices: Prices
    #: What can be chosen where.
    choices: Choices
    splits: Splits
    #: What is compared.
    output: Output
    cache: Cache
    #: Values that were asked for and cannot be reached, a sentence each.
    values_left_out: tuple[str, ...] = ()
    #: Where memory is short: what lies on disk, and the weights there while others stand in their place.
    spool: Spool | None = None
    originals: Originals | None = None


def open_subject(
    model: str | Path | LoadedModel,
    settings: Settings,
    *,
    cache: Path | str | None,
    allow_pickle: bool,
    progress: Progress,
    spool_folder: Path | None = None,
) -> Subject:
    """Load the model, name and price its sites, cut the text, and open the cache that belongs to all of it.

    Args:
        model: as `optimize` takes it.
        settings: what was asked.
        cache: folder of all caches, "default" or None.
        allow_pickle: load pickled checkpoints, which can run code.
        progress: shows the stages.
        spool_folder: where what outgrows the memory may go; None keeps all in memory.

    Raises:
        ModelError, DataError: what cannot be read or cut, or a folder that cannot be written to.
    """
    with progress.stage("load", 1) as stage:
        loaded = (
            model
            if isinstance(model, LoadedModel)
            else load(model, allow_pickle=allow_pickle, seed=settings.seed, site_file=settings.site_file)
        )
        stage.advance()
    _raise_if_too_long(loaded, settings)
    output = open_output(settings.task, loaded)
    raise_if_not_measurable(settings.budget, output, settings.task)
    sites = find_sites(loaded.model, settings.site_file)
    prices, value_sites = _price(loaded, sites, settings)
    in_question = [site for site in sites if site.role not in kept_roles(settings)]
    choices = find_choices(
        in_question,
        value_sites,
        settings.candidates,
        settings.value_schemes,
        device=settings.ruling_device,
        engine=settings.engine,
        kernels_on=settings.kernel_device,
        sequence_length=settings.sequence_length,
        homes=find_factor_homes(loaded.model, in_question)
        if asks_for_homes(settings.candidates, settings.engine)
        else None,
    )
    raise_if_below_floor(prices, choices, settings.budget)
    folder = default_folder() if cache == "default" else None if cache is None else Path(cache)
    splits = cut_text(loaded, settings, folder=folder, progress=progress)
    spool = None if spool_folder is None else Spool(spool_folder)
    return Subject(
        loaded=loaded,
        sites=sites,
        value_sites=value_sites,
        prices=prices,
        choices=choices,
        splits=splits,
        output=output,
        values_left_out=_values_left_out(loaded, value_sites, settings),
        cache=open_cache(
            folder,
            model_hash=loaded.hash,
            text_hash=splits.calibrate.hash,
            seed=settings.seed,
            include_head=settings.include_head,
            shared=choices.shared,
        ),
        spool=spool,
        originals=None if spool is None else OnDisk(spool, output_head(loaded.model)),
    )


def cut_text(loaded: LoadedModel, settings: Settings, *, folder: Path | None, progress: Progress) -> Splits:
    """The three splits of the text that was asked for; `folder` keeps text that is sampled from the model.

    Raises:
        DataError: the text cannot be read or is too short.
    """
    with progress.stage("read the text", 1) as stage:
        splits = split_text(
            loaded.tokenizer,
            task=settings.task,
            calibration=settings.calibration,
            evaluation=settings.evaluation,
            calibration_tokens=settings.tokens,
            evaluation_tokens=settings.evaluation_tokens,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            vocabulary_size=vocabulary_size(loaded),
            further_tokens=(REFINEMENT_TEXT - 1) * settings.tokens if settings.effort == "high" else 0,
            speaker=Speaker(
                loaded=loaded,
                sequence_length=settings.sequence_length,
                seed=settings.seed,
                folder=folder,
                progress=progress,
            ),
        )
        stage.advance()
    return splits


def spool_folder(asked: Path | str | None, cache: Path | str | None) -> Path:
    """Where a spool lies: what was asked for, else the folder of the cache. (Temporary folders are often in memory.)"""
    if asked is not None:
        return Path(asked).expanduser()
    return default_folder() if cache is None or cache == "default" else Path(cache)


def kept_roles(settings: Settings) -> frozenset[str]:
    """Roles of weight sites that are not in question."""
    return KEPT_ROLES if settings.include_head else KEPT_ROLES | END_ROLES


def _price(loaded: LoadedModel, sites: Sequence[Site], settings: Settings) -> tuple[Prices, tuple[ValueSite, ...]]:
    """Prices, with all value sites where bytes or times depend on them; and the value sites that are in question."""
    wanted = settings.value_roles is None or bool(settings.value_roles)
    found = find_value_sites(loaded.model) if wanted or settings.workload.context is not None else ()
    prices = price_model(loaded, sites, value_sites=found, device=settings.device, workload=settings.workload)
    if not wanted:
        return prices, ()
    return prices, tuple(s for s in found if settings.value_roles is None or s.role in settings.value_roles)


def _values_left_out(loaded: LoadedModel, found: Sequence[ValueSite], settings: Settings) -> tuple[str, ...]:
    """What of the values that were asked for has no site; where they have none at all, that is said too."""
    roles = settings.value_roles
    left_out = values_left_out(loaded.model, roles)
    if left_out or found or (roles is not None and not roles):
        return left_out
    asked = "any role" if roles is None else " or ".join(sorted(roles))
    return (f"{loaded.name} neither computes nor keeps values of {asked}",)


def _raise_if_too_long(loaded: LoadedModel, settings: Settings) -> None:
    positions = loaded.num_positions
    if positions is None:
        return
    if settings.sequence_length > positions:
        raise DataError(
            f"sequences of {settings.sequence_length} tokens are longer than the {positions} positions of "
            f"{loaded.name!r}; lower --sequence-length to at most {positions}"
        )
    context = settings.workload.context
    if context is not None and context > positions:
        raise BudgetError(
            f"a context of {context} tokens is longer than the {positions} positions of {loaded.name!r}; "
            f"lower --context to at most {positions}"
        )


def known_reference(subject: Subject, text: TextSet, progress: Progress) -> Reference:
    """The fp32 reference on a text, from the cache where it was run before."""
    known = subject.cache.read_reference(text.hash)
    with progress.stage("reference", text.num_sequences) as stage:
        reference = subject.output.run_reference(subject.loaded.model, text, stage, known, subject.spool)
    if known is None and reference.kept is not None:
        subject.cache.write_reference(text.hash, reference.kept)
    return reference


def known_reference_facts(subject: Subject, reference: Reference, progress: Progress) -> ReferenceFacts:
    """The bf16 floor and the reference's repetition on its text, from the cache where they were measured before."""
    floor_key, repetition_key = (f"{name} {reference.text.hash}" for name in ("bf16 floor", "repetition"))
    known = subject.cache.read_measured()
    if floor_key in known and (repetition_key in known or not subject.output.generates):
        return ReferenceFacts(bf16_floor_kl=known[floor_key], repetition=known.get(repetition_key))
    facts = reference_facts(subject.loaded, subject.output, reference, progress, subject.originals)
    found = {floor_key: facts.bf16_floor_kl}
    if facts.repetition is not None:
        found[repetition_key] = facts.repetition
    subject.cache.write_measured({**subject.cache.read_measured(), **found})
    return facts
