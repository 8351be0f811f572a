"""The proof: what a plan does on text that it was not chosen on, with intervals; and the same again, from scratch.

    prove(…)     one look at the *final* text, for the plan that was chosen
    verify(…)    anybody, later, elsewhere: load plan, model and text, and measure

What is run is the plan itself, with the scales in its tensors: the same path, whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bitwright.errors import PlanError
from bitwright.inference import Counters, Overflows, emulate_plan
from bitwright.models import Site, find_sites
from bitwright.models.load import BUILT_IN, load
from bitwright.models.loaded import LoadedModel
from bitwright.models.spool import InMemory, Originals
from bitwright.plan import Measured, Plan, Repetition
from bitwright.search.bootstrap import kl_estimate
from bitwright.search.documents import CALIBRATION_SETS, raise_if_no_source
from bitwright.search.output import Effects, Output, Reference, open_output
from bitwright.search.progress import Progress, Silent, Stage
from bitwright.search.repetition import NEW_TOKENS, repetition
from bitwright.search.speaker import Speaker
from bitwright.search.text import TextSet, split_text

#: Sequences on which the bf16 floor is measured.
FLOOR_SEQUENCES = 16


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts:
    """What does not depend on the plan, so that a second plan need not measure it again."""

    bf16_floor_kl: float
    #: None where the model continues no text.
    repetition: float | None


def reference_facts(
    loaded: LoadedModel,
    output: Output,
    reference: Reference,
    progress: Progress,
    originals: Originals | None = None,
) -> ReferenceFacts:
    """Measure the bf16 floor and the reference's own repetition; `originals` is where weights lie meanwhile."""
    text = reference.text
    with progress.stage("bf16 floor", min(FLOOR_SEQUENCES, text.num_sequences)) as stage:
        floor = bf16_floor(loaded.model, output, reference, stage, originals)
    return ReferenceFacts(
        bf16_floor_kl=floor, repetition=_repetition(loaded.model, output, text, "reference generations", progress)
    )


@torch.no_grad()
def bf16_floor(
    model: nn.Module, output: Output, reference: Reference, stage: Stage, originals: Originals | None = None
) -> float:
    """Mean KL of the same weights with the whole model run in bf16: what today's default already costs.

    Measured on the first FLOOR_SEQUENCES sequences, which is enough for a figure that plans are only held against.
    """
    with _in_bf16(model, InMemory() if originals is None else originals) as half:
        return output.compare(reference, half, stage, FLOOR_SEQUENCES).mean_kl


@contextmanager
def _in_bf16(model: nn.Module, originals: Originals) -> Iterator[nn.Module]:
    """The model itself, with parameters and buffers in bf16 for the time of the block: a copy would take memory."""
    buffers = dict(model.named_buffers())
    kept: list[str] = []
    try:
        for name, parameter in model.named_parameters():
            originals.keep(name, parameter.data)
            kept.append(name)
            parameter.data = parameter.data.to(torch.bfloat16)
        yield model.to(torch.bfloat16)
    finally:
        for name in kept:
            model.get_parameter(name).data = originals.read(name)
        for name, buffer in buffers.items():
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, buffer)


@dataclass(frozen=True, kw_only=True)
class PlanRun:
    """What running a plan on a text gave."""

    effects: Effects
    #: None where the model continues no text.
    repetition: float | None
    #: Counts over all values that were rounded on the way.
    rounded: Overflows


@torch.no_grad()
def prove(
    plan: Plan,
    loaded: LoadedModel,
    sites: Sequence[Site],
    reference: Reference,
    facts: ReferenceFacts,
    progress: Progress,
    *,
    output: Output,
    originals: Originals | None = None,
) -> Measured:
    """Measure a plan on the reference's text: KL and what else its output has, with 95 % intervals, and repetition.

    `originals` is where weights lie meanwhile.
    """
    text = reference.text
    counters: Counters = {}
    with emulate_plan(plan, loaded.model, sites, originals=originals, counters=counters) as model:
        with progress.stage("measure the plan", text.num_sequences) as stage:
            effects = output.compare(reference, model, stage)
        rounded = sum(counters.values(), Overflows())
        repeated = _repetition(model, output, text, "plan's generations", progress)
    run = PlanRun(effects=effects, repetition=repeated, rounded=rounded)
    return measured_record(run, output, facts, text, plan.seed)


def _repetition(model: nn.Module, output: Output, text: TextSet, name: str, progress: Progress) -> float | None:
    if not output.generates:
        return None
    with progress.stage(name, NEW_TOKENS) as stage:
        return repetition(model, text, stage)


def measured_record(run: PlanRun, output: Output, facts: ReferenceFacts, text: TextSet, seed: int) -> Measured:
    """The record of a measurement: means with the intervals of a paired bootstrap over sequences."""
    repetitions = None
    if facts.repetition is not None and run.repetition is not None:
        repetitions = Repetition(base=facts.repetition, plan=run.repetition)
    any_rounded = run.rounded.num_values > 0
    return Measured(
        kl=kl_estimate(run.effects, seed).interval,
        unit=output.unit,
        bf16_floor_kl=facts.bf16_floor_kl,
        tokens=text.num_tokens,
        sequences=text.num_sequences,
        repetition=repetitions,
        overflows=run.rounded.per_million if any_rounded else None,
        fallback_rate=run.rounded.fallback_rate if any_rounded else None,
        source=text.source,
        hash=text.hash,
        **output.figures(run.effects, seed),
    )


def verify(
    plan: Plan,
    *,
    model: str | Path | LoadedModel | None = None,
    evaluation: str | Path | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Measured:
    """Measure a plan again, from scratch.

    Args:
        plan: the plan.
        model: the model it is for; by default where it was planned.
        evaluation: other text (a file or a built-in set); by default the plan's own final text.
        tokens: how many tokens to measure on; by default as many as the plan did.
        progress: shows the stages.
        allow_pickle: load pickled checkpoints.

    Raises:
        PlanError: the weights are not those the plan was made for, or the plan does not say what is needed.
        ModelError, DataError: the model or the text cannot be read.
    """
    shown = progress if progress is not None else Silent()
    again = reopen(plan, model=model, evaluation=evaluation, tokens=tokens, progress=shown, allow_pickle=allow_pickle)
    facts = reference_facts(again.loaded, again.output, again.reference, shown)
    return prove(plan, again.loaded, again.sites, again.reference, facts, shown, output=again.output)


@dataclass(frozen=True, kw_only=True)
class Reopened:
    """A plan's model, and its reference on the text that it is proved on."""

    loaded: LoadedModel
    sites: tuple[Site, ...]
    output: Output
    reference: Reference


def reopen(
    plan: Plan,
    *,
    model: str | Path | LoadedModel | None,
    evaluation: str | Path | None,
    tokens: int | None,
    progress: Progress,
    allow_pickle: bool,
) -> Reopened:
    """Load a plan's model and cut its final text again; arguments and errors are those of `verify`."""
    source = model if model is not None else _where_planned(plan, "model", plan.model.name, "--model")
    site_file = _where_planned(plan, "sites", "") or None
    if evaluation is not None:
        raise_if_no_source(evaluation)
    with progress.stage("load", 1) as stage:
        loaded = (
            source
            if isinstance(source, LoadedModel)
            else load(source, allow_pickle=allow_pickle, seed=plan.seed, site_file=site_file)
        )
        stage.advance()
    if loaded.hash != plan.model.hash:
        raise PlanError(
            f"the weights of {loaded.name!r} (hash {loaded.hash[:12]}) are not those that the plan was made for "
            f"({plan.model.name!r}, hash {plan.model.hash[:12]}); give the right model with --model, or plan anew"
        )
    if plan.options is None:
        raise PlanError(
            "the plan does not say how its text was cut (no options); make it again with bitwright optimize"
        )
    output = open_output(plan.task, loaded)
    sites = find_sites(loaded.model, site_file)
    splits = split_text(
        loaded.tokenizer,
        task=plan.task,
        calibration=_where_planned(plan, "calibration", plan.calibration.source),
        evaluation=evaluation
        if evaluation is not None
        else _where_planned(plan, "evaluation", plan.evaluation.source, "--evaluation"),
        calibration_tokens=plan.options.calibration_tokens,
        evaluation_tokens=tokens if tokens is not None else plan.options.evaluation_tokens,
        sequence_length=plan.options.sequence_length,
        seed=plan.seed,
        vocabulary_size=vocabulary_size(loaded),
        speaker=Speaker(loaded=loaded, sequence_length=plan.options.sequence_length, seed=plan.seed, progress=progress),
    )
    with progress.stage("reference", splits.final.num_sequences) as stage:
        reference = output.run_reference(loaded.model, splits.final, stage)
    return Reopened(loaded=loaded, sites=sites, output=output, reference=reference)


def lasting_path(source: str | Path) -> str:
    """A file or folder by its whole path, found from anywhere; built-in names and hub ids as they are."""
    path = Path(source)
    named = str(source) in {*CALIBRATION_SETS, *BUILT_IN}
    return str(source) if named or not path.exists() else str(path.resolve())


def _where_planned(plan: Plan, what: str, name: str, option: str | None = None) -> str:
    """Where a plan's model or text lay. Raises PlanError where a file or folder is gone."""
    where = plan.run.paths.get(what, name)
    if Path(where).is_absolute() and not Path(where).exists():
        needed = "it names the sites" if what == "sites" else "it tells which text must not be measured on"
        advice = f"give it with {option}" if option else f"put it back: {needed}"
        raise PlanError(f"the plan's {what} lay at '{where}' and is no longer there; {advice}")
    return where


def vocabulary_size(loaded: LoadedModel) -> int:
    """Rows of the model's embedding: ids must lie below."""
    embedding = loaded.model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])
