"""The plan before its proof: choices, reasons, predictions, the front, and what a reader must know."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch

from bitwright.models import Site
from bitwright.models.loaded import hash_each_weight
from bitwright.models.value_sites import ValueSite
from bitwright.plan import (
    FrontierPoint,
    ModelInfo,
    Plan,
    Prediction,
    SearchOptions,
    SiteChoice,
    Summary,
    TextInfo,
)
from bitwright.plan.rules import remarks, why_not
from bitwright.quantize import SCHEMES, VALUE_SCHEMES
from bitwright.search.binding import study_limits
from bitwright.search.candidate import Candidate
from bitwright.search.explain import reason_for, why_kept
from bitwright.search.floor import missed_at_rates
from bitwright.search.learn import MIN_TOKENS, Learned
from bitwright.search.mend import Mended
from bitwright.search.price import AS_LOADED, Assignment, Prices, device_memory, predict_latency
from bitwright.search.problem import Problem
from bitwright.search.progress import Progress
from bitwright.search.serving import VALUE_BITS
from bitwright.search.settings import Settings
from bitwright.search.subject import Subject
from bitwright.search.text import TextSet
from bitwright.search.value_scores import ValueLearned

#: Sites that a note names.
NAMED_SITES = 5


def draft_plan(
    subject: Subject,
    settings: Settings,
    mended: Mended,
    predictions: Sequence[Prediction],
    learned: Learned,
    values: ValueLearned | None,
    progress: Progress,
) -> Plan:
    """The plan before its proof: choices, reasons, predictions, the front."""
    problem, assignment, prices = mended.problem, mended.assignment, subject.prices
    tensors: dict[str, np.ndarray] = {}
    with progress.stage("write the codes", len(subject.sites)) as stage:
        for site in subject.sites:
            choice = assignment[site.name]
            if choice != AS_LOADED:
                tensors |= learned.quantizer.tensors(site.name, choice)
            stage.advance()
    for value_site in subject.value_sites:
        if values is not None and assignment[value_site.name] != AS_LOADED:
            tensors |= values.tensors_of(value_site, assignment[value_site.name])
    splits = subject.splits
    plan = Plan(
        model=ModelInfo(
            name=subject.loaded.name,
            hash=subject.loaded.hash,
            params=subject.loaded.num_parameters,
            notes=subject.loaded.notes,
        ),
        tensor_hashes=hash_each_weight(subject.loaded.model),
        hardware=settings.device.name,
        hardware_reason=settings.device_reason,
        task=settings.task,
        budget=settings.budget,
        workload=settings.workload,
        objective=settings.objective,
        objective_reason=settings.objective_reason,
        seed=settings.seed,
        options=SearchOptions(
            schemes=settings.schemes,
            roundings=settings.roundings or (),
            transforms=settings.transforms or (),
            value_schemes=settings.value_schemes if subject.value_sites else (),
            engine=None if settings.engine is None else settings.engine.name,
            effort=settings.effort,
            include_head=settings.include_head,
            sequence_length=settings.sequence_length,
            calibration_tokens=settings.tokens,
            evaluation_tokens=settings.evaluation_tokens,
        ),
        calibration=_text_info(splits.calibrate),
        repair=_text_info(splits.repair),
        evaluation=_text_info(splits.final),
        sites=(
            *(_weight_choice(site, mended, settings, subject, learned) for site in subject.sites),
            *(_value_choice(site, mended, settings) for site in subject.value_sites),
        ),
        summary=summary_of(prices, assignment, problem.total_kl(assignment)),
        met=False,
        frontier=_frontier(problem, assignment),
        predictions=tuple(predictions),
        repairs=mended.repairs,
        limit_studies=study_limits(problem, settings.budget, settings.objective, mended.max_total_kl),
        latency=predict_latency(prices, assignment),
        device_memory=device_memory(prices, assignment),
        ruled_out=subject.choices.ruled_out,
        notes=(
            *_notes(subject, assignment, settings, mended.unreachable),
            *_values_left_out(subject),
            *missed_at_rates(prices, subject.choices, settings.budget, problem.totals(assignment)),
            *_few_tokens(learned),
            *mended.notes,
        ),
        versions=_versions(),
    )
    return plan.attach(tensors=tensors)


def _weight_choice(site: Site, mended: Mended, settings: Settings, subject: Subject, learned: Learned) -> SiteChoice:
    choice = mended.assignment[site.name]
    num_bytes = subject.prices.site_bytes(site, choice)
    left = subject.choices.candidates.get(site.name)
    kept = why_kept(
        site,
        subject.loaded.loaded_format[site.parameter],
        include_head=settings.include_head,
        reached=learned.too_few.get(site.name),
        ruled_out=None if left else _first_reason(site, settings),
    )
    reason = reason_for(site, choice, mended, asked=(settings.budget, settings.objective), why_kept=kept)
    return weight_choice(
        site, choice, reason=reason, num_bytes=num_bytes, predicted_kl=mended.problem.site_kl(site, choice)
    )


def summary_of(prices: Prices, assignment: Assignment, predicted_kl: float) -> Summary:
    """What a plan says of all its weights together."""
    return Summary(
        effective_bits=prices.effective_bits(assignment),
        nominal_bits=prices.nominal_bits(assignment),
        weight_bytes=prices.model_bytes(assignment),
        predicted_kl=predicted_kl,
    )


def weight_choice(site: Site, choice: Candidate, *, reason: str, num_bytes: int, predicted_kl: float) -> SiteChoice:
    """What a plan says of a weight site."""
    return SiteChoice(
        name=site.name,
        kind=site.kind,
        role=site.role,
        module=site.module,
        rows=site.rows,
        tied_group=site.tied_group,
        shape=site.shape,
        scheme=choice.scheme,
        rounding=choice.rounding,
        transform=choice.transform,
        reason=reason,
        bytes=num_bytes,
        bits=8 * num_bytes / site.num_weights,
        predicted_kl=predicted_kl,
    )


def _first_reason(site: Site, settings: Settings) -> str | None:
    """Why the first scheme is ruled out at a site; None where it is not."""
    first = SCHEMES[settings.candidates[0].scheme]
    return why_not(
        site, first, device=settings.ruling_device, engine=settings.engine, kernels_on=settings.kernel_device
    )


def _value_choice(site: ValueSite, mended: Mended, settings: Settings) -> SiteChoice:
    choice, prices = mended.assignment[site.name], mended.problem.prices
    scheme = None if choice == AS_LOADED else VALUE_SCHEMES[choice.scheme]
    kept = "left as the reference computes it: no calibration token reached it, or every choice is ruled out here"
    return SiteChoice(
        name=site.name,
        kind=site.kind,
        role=site.role,
        module=site.module,
        rows=None,
        tied_group=site.tied_group,
        shape=site.shape,
        scheme=choice.scheme,
        rounding=choice.rounding,
        transform=choice.transform,
        reason=reason_for(site, choice, mended, asked=(settings.budget, settings.objective), why_kept=kept),
        bytes=int(prices.amounts(site, choice).get("device_bytes", 0)),
        bits=VALUE_BITS if scheme is None else scheme.stored_bits(site.head_dim),
        predicted_kl=mended.problem.site_kl(site, choice),
    )


def _frontier(problem: Problem, assignment: Assignment) -> tuple[FrontierPoint, ...]:
    """The front by rising size, with the plan itself among it."""
    assignments = [(problem.assignment(point), False) for point in problem.front()]
    shown = [_frontier_point(problem, found, chosen) for found, chosen in [*assignments, (dict(assignment), True)]]
    return tuple(sorted(shown, key=lambda point: (point.weight_bytes, point.chosen)))


def _frontier_point(problem: Problem, assignment: Assignment, chosen: bool) -> FrontierPoint:
    counts = Counter(assignment[site.name].scheme for site in problem.prices.decoder_sites)
    return FrontierPoint(
        effective_bits=problem.prices.effective_bits(assignment),
        weight_bytes=problem.prices.model_bytes(assignment),
        predicted_kl=problem.total_kl(assignment),
        counts=dict(sorted(counts.items())),
        chosen=chosen,
    )


def _notes(subject: Subject, assignment: Assignment, settings: Settings, unreachable: Sequence[str]) -> list[str]:
    notes = [*subject.splits.notes, *([settings.kernel_note] if settings.kernel_note else [])]
    ragged: Counter[str] = Counter()
    for site in subject.sites:
        weights = SCHEMES[assignment[site.name].scheme].weights
        if weights is not None and weights.scaling is not None:
            granularity, columns = weights.scaling.granularity, site.shape[1]
            if granularity.has_ragged_group(columns):
                last = columns % granularity.group_size
                ragged[f"{granularity} does not divide {columns}: the last group has {last}"] += 1
    notes += [
        f"{what} ({count} {'site' if count == 1 else 'sites'}); some engines refuse shorter last groups: choose a "
        "group size that divides"
        for what, count in sorted(ragged.items())
    ]
    chosen = dict.fromkeys(assignment[site.name].scheme for site in subject.sites)
    said = (remark for name in chosen for remark in remarks(SCHEMES[name], device=settings.ruling_device))
    notes += dict.fromkeys(said)
    if unreachable:
        limits_memory = settings.budget.limits.keys() & {"max_memory_bytes", "device_memory_bytes"}
        keeps_ends = limits_memory and not settings.include_head
        notes.append(
            f"no assignment of the allowed schemes is predicted to keep {' and '.join(unreachable)}; this plan is the "
            "nearest" + ("; --include-head makes embedding and head smaller too" if keeps_ends else "")
        )
    return notes


def _values_left_out(subject: Subject) -> list[str]:
    """Values that were asked for and cannot be reached: they stay as the model computes them."""
    left_out = subject.values_left_out
    if not left_out:
        return []
    more = f"; and {len(left_out) - NAMED_SITES} more like these" if len(left_out) > NAMED_SITES else ""
    return [
        f"values that were asked for and cannot be reached stay as they are: {'; '.join(left_out[:NAMED_SITES])}{more}"
    ]


def _few_tokens(learned: Learned) -> list[str]:
    """Sites that were kept high because too little of the calibration text reached them, by name."""
    few = learned.too_few
    if not few:
        return []
    named = ", ".join(f"{name} ({count})" for name, count in list(few.items())[:NAMED_SITES])
    more = f" and {len(few) - NAMED_SITES} more" if len(few) > NAMED_SITES else ""
    return [
        f"{len(few)} {'site' if len(few) == 1 else 'sites'} kept in the loaded format, for fewer than {MIN_TOKENS} "
        f"calibration tokens reached them: {named}{more}; more --tokens, or text that reaches them, makes them a choice"
    ]


def _text_info(text: TextSet) -> TextInfo:
    return TextInfo(source=text.source, tokens=text.num_tokens, sequences=text.num_sequences, hash=text.hash)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch threads": str(torch.get_num_threads())}
    for package in ("bitwright", "torch", "numpy", "transformers", "highspy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
