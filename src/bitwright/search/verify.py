"""The proof: what a plan does on text that it was not chosen on, with intervals; and the same again, from scratch.

    prove(…)     one look at the *final* text, for the plan that was chosen
    verify(…)    anybody, later, elsewhere: load plan, model and text, and measure

What is run is the plan itself, with the scales in its tensors: the same path, whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bitwright.errors import PlanError
from bitwright.inference import emulate_plan
from bitwright.models import Site, find_sites
from bitwright.models.load import BUILT_IN, load
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Interval, Limit, Measured, Perplexity, Plan, Repetition
from bitwright.search import bootstrap
from bitwright.search.bootstrap import Estimate
from bitwright.search.compare import (
    FLOOR_SEQUENCES,
    Reference,
    TokenEffects,
    bf16_floor,
    compare,
    run_logits,
    run_reference,
)
from bitwright.search.documents import CALIBRATION_SETS
from bitwright.search.progress import Progress, Silent
from bitwright.search.repetition import NEW_TOKENS, repetition
from bitwright.search.text import TextSet, split_text

#: Tokens from which on the 99.9th percentile of token KL is told: a hundred tokens then lie beyond it.
TAIL_TOKENS = 100_000


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts:
    """What does not depend on the plan, so that a second plan need not measure it again."""

    bf16_floor_kl: float
    repetition: float


def reference_facts(loaded: LoadedModel, reference: Reference, progress: Progress) -> ReferenceFacts:
    """Measure the bf16 floor and the reference's own repetition."""
    text = reference.text
    with progress.stage("bf16 floor", min(FLOOR_SEQUENCES, text.num_sequences)) as stage:
        floor = bf16_floor(loaded.model, reference, stage)
    with progress.stage("reference generations", NEW_TOKENS) as stage:
        repeated = repetition(loaded.model, text, stage)
    return ReferenceFacts(bf16_floor_kl=floor, repetition=repeated)


@torch.no_grad()
def prove(
    plan: Plan,
    loaded: LoadedModel,
    sites: Sequence[Site],
    reference: Reference,
    facts: ReferenceFacts,
    progress: Progress,
) -> Measured:
    """Measure a plan on the reference's text: KL, perplexity, top-1 agreement with 95 % intervals, and repetition."""
    text = reference.text
    with emulate_plan(plan, loaded.model, sites) as model:
        with progress.stage("measure the plan", text.num_sequences) as stage:
            effects = compare(reference, lambda ids: run_logits(model, ids), stage)
        with progress.stage("plan's generations", NEW_TOKENS) as stage:
            repeated = repetition(model, text, stage)
    return measured_record(effects, facts, text, plan.seed, repeated)


def measured_record(
    effects: TokenEffects, facts: ReferenceFacts, text: TextSet, seed: int, repeated: float
) -> Measured:
    """The record of a measurement: means with the intervals of a paired bootstrap over sequences."""
    num_tokens = float(effects.num_scored.sum())
    ratio = bootstrap.ppl_ratio_estimate(effects, seed)
    return Measured(
        kl=_interval(bootstrap.kl_estimate(effects, seed)),
        bf16_floor_kl=facts.bf16_floor_kl,
        ppl=Perplexity(
            base=float(np.exp(effects.nll_reference.sum() / num_tokens)),
            plan=float(np.exp(effects.nll_plan.sum() / num_tokens)),
            ratio=ratio.mean,
            low=ratio.low,
            high=ratio.high,
        ),
        top1_agreement=_interval(bootstrap.agreement_estimate(effects, seed)),
        tokens=int(num_tokens),
        sequences=text.num_sequences,
        kl_p999=float(np.quantile(effects.token_kl, 0.999)) if num_tokens >= TAIL_TOKENS else None,
        repetition=Repetition(base=facts.repetition, plan=repeated),
        source=text.source,
        hash=text.hash,
    )


def judge(plan_limits: dict[str, float], values: dict[str, float]) -> tuple[Limit, ...]:
    """Every limit beside its measured value. Bytes are counted exactly, which is measuring them."""
    return tuple(
        Limit(name=name, limit=limit, value=values[name], status="measured" if values[name] <= limit else "missed")
        for name, limit in plan_limits.items()
    )


def _interval(estimate: Estimate) -> Interval:
    return Interval(mean=estimate.mean, low=estimate.low, high=estimate.high)


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
    source = model if model is not None else _where_planned(plan, "model", plan.model.name, "--model")
    with shown.stage("load", 1) as stage:
        loaded = source if isinstance(source, LoadedModel) else load(source, allow_pickle=allow_pickle, seed=plan.seed)
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
    sites = find_sites(loaded.model)
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
    )
    with shown.stage("reference", splits.final.num_sequences) as stage:
        reference = run_reference(loaded.model, splits.final, stage)
    return prove(plan, loaded, sites, reference, reference_facts(loaded, reference, shown), shown)


def lasting_path(source: str | Path) -> str:
    """A file or folder by its whole path, found from anywhere; built-in names and hub ids as they are."""
    path = Path(source)
    named = str(source) in {*CALIBRATION_SETS, *BUILT_IN}
    return str(source) if named or not path.exists() else str(path.resolve())


def _where_planned(plan: Plan, what: str, name: str, option: str | None = None) -> str:
    """Where a plan's model or text lay. Raises PlanError where a file or folder is gone."""
    where = plan.run.paths.get(what, name)
    if Path(where).is_absolute() and not Path(where).exists():
        advice = f"give it with {option}" if option else "put it back: it tells which text must not be measured on"
        raise PlanError(f"the plan's {what} lay at '{where}' and is no longer there; {advice}")
    return where


def vocabulary_size(loaded: LoadedModel) -> int:
    """Rows of the model's embedding: ids must lie below."""
    embedding = loaded.model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])
