"""Whether the difference between two plans exceeds the noise: both on the same text, sequence by sequence.

    difference_d = Σ_{s in draw d} (KL_second,s − KL_first,s) ÷ Σ_{s in draw d} scored predictions

over draws of whole sequences with replacement (paired bootstrap, `bootstrap.py`). What the text makes hard for both
cancels, so two plans can be told apart whose own intervals overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bitwright.inference import emulate_plan
from bitwright.inference.planned_model import sites_of
from bitwright.models import Site
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan, PlanComparison, diff_sites, verdict_of
from bitwright.search.bootstrap import Estimate, bootstrap, kl_estimate
from bitwright.search.output import Effects
from bitwright.search.progress import Progress, Silent
from bitwright.search.verify import Reopened, reopen


def kl_difference(first: Effects, second: Effects, seed: int) -> Estimate:
    """KL of the second less that of the first, nats per scored prediction, on the sequences that both were run on."""
    count = min(len(first.kl), len(second.kl))
    change, scored = second.kl[:count] - first.kl[:count], first.num_scored[:count]
    return bootstrap(lambda i: float(change[i].sum() / scored[i].sum()), count, seed)


def compare_plans(
    first: Plan,
    second: Plan,
    *,
    model: str | Path | LoadedModel | None = None,
    evaluation: str | Path | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> PlanComparison:
    """Diff two plans of one model site by site, and measure both on the first one's final text.

    Args:
        first, second: the plans.
        model: the model they are for; by default where the first was planned.
        evaluation: other text (a file or a built-in set); by default the first plan's own final text.
        tokens: how many tokens to measure on; by default as many as the first plan did.
        progress: shows the stages.
        allow_pickle: load pickled checkpoints.

    Raises:
        PlanError: the plans are for different weights, or the first does not say what is needed.
        ModelError, DataError: the model or the text cannot be read.
    """
    shown = progress if progress is not None else Silent()
    sites = diff_sites(first, second)
    again = reopen(first, model=model, evaluation=evaluation, tokens=tokens, progress=shown, allow_pickle=allow_pickle)
    # each by its own site file, where it has one
    named = (("first", first, again.sites), ("second", second, sites_of(second, again.loaded.model)))
    effects = [_effects(plan, again, known, name, shown) for name, plan, known in named]
    difference = kl_difference(effects[0], effects[1], first.seed).interval
    same_load = (first.hardware, first.workload) == (second.hardware, second.workload)
    times = [plan.latency.decode_s_per_token if plan.latency and same_load else None for plan in (first, second)]
    return PlanComparison(
        sites=sites,
        num_sites=len({site.name for plan in (first, second) for site in plan.sites}),
        first_bytes=first.summary.weight_bytes,
        second_bytes=second.summary.weight_bytes,
        first_decode_s=times[0],
        second_decode_s=times[1],
        first_kl=kl_estimate(effects[0], first.seed).interval,
        second_kl=kl_estimate(effects[1], first.seed).interval,
        difference=difference,
        sequences=len(effects[0].kl),
        source=again.reference.text.source,
        verdict=verdict_of(difference),
    )


@torch.no_grad()
def _effects(plan: Plan, again: Reopened, sites: Sequence[Site], name: str, progress: Progress) -> Effects:
    with (
        emulate_plan(plan, again.loaded.model, sites) as model,
        progress.stage(f"measure the {name} plan", again.reference.text.num_sequences) as stage,
    ):
        return again.output.compare(again.reference, model, stage)
