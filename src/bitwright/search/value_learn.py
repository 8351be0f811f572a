"""Scores for every value site and value scheme: from the cache where they are, else by one calibration pass.

The pass is one of its own, with labels drawn from the same seed as that of the weights. Static scales are kept as what
was found for a choice, under the names that a plan gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from bitwright.models import Site
from bitwright.models.value_sites import ValueSite
from bitwright.quantize import VALUE_SCHEMES
from bitwright.search.cache import Cache
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate
from bitwright.search.output import Output
from bitwright.search.progress import Progress
from bitwright.search.text import TextSet
from bitwright.search.value_observer import ValueObserver
from bitwright.search.value_scores import ValueLearned, sample_groups, score_values, value_candidates

#: What configs call the number of experts that a router chooses.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def default_value_schemes() -> tuple[str, ...]:
    """Names of the value schemes that a search chooses from unless it is told."""
    return tuple(name for name, scheme in VALUE_SCHEMES.items() if scheme.in_default_search)


def experts_per_token(model: nn.Module) -> int | None:
    """How many experts a model's routers choose; None where the config does not say."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((getattr(config, name) for name in _EXPERTS_PER_TOKEN if getattr(config, name, None)), None)


def learn_values(
    model: nn.Module,
    sites: Sequence[Site],
    value_sites: Sequence[ValueSite],
    text: TextSet,
    schemes: Sequence[str],
    *,
    seed: int,
    cache: Cache,
    progress: Progress,
    output: Output | None = None,
) -> ValueLearned:
    """Scores of the value schemes at those of the value sites that they fit.

    Args:
        model: fp32, parameters without gradients, in eval mode.
        sites: all weight sites of the model.
        value_sites: where values may be rounded.
        text: calibration text.
        schemes: names of value schemes; names of other schemes are left out.
        seed: of the sampled labels and tokens.
        cache: read before, written after.
        progress: shows the pass.
        output: what is compared; next tokens if left out.
    """
    wanted = {site.name: value_candidates(site, schemes) for site in value_sites}
    known, overflows = cache.read_scores(), cache.read_overflows()
    candidates = sorted({candidate for of_site in wanted.values() for candidate in of_site})
    missing = [c for c in candidates if any(c in cs and name not in known.get(c, {}) for name, cs in wanted.items())]
    tensors = {candidate: cache.read_found(candidate) for candidate in candidates if candidate not in missing}
    if missing:
        names = [candidate.scheme for candidate in missing]
        observer = ValueObserver(
            model,
            value_sites,
            num_tokens=text.input_ids.numel(),
            seed=seed,
            groups=sample_groups(value_sites, names),
            sites=sites,
        )
        with progress.stage("calibrate values", text.num_sequences) as stage:
            statistics = calibrate(model, (), text, seed=seed, stage=stage, observers=[observer], output=output)
        found = score_values(
            value_sites,
            observer.seen,
            names,
            num_scored=statistics.num_scored,
            experts_per_token=experts_per_token(model),
        )
        for candidate in missing:
            known[candidate] = {n: s[candidate] for n, s in found.scores.items() if candidate in s}
            overflows[candidate] = {n: s[candidate] for n, s in found.overflows.items() if candidate in s}
            tensors[candidate] = dict(found.tensors.get(candidate, {}))
            cache.write_found(candidate, tensors[candidate])
        cache.write_overflows(overflows)
        cache.write_scores(known)
    return ValueLearned(scores=_of_sites(wanted, known), overflows=_of_sites(wanted, overflows), tensors=tensors)


def _of_sites(
    wanted: dict[str, tuple[Candidate, ...]], known: dict[Candidate, dict[str, float]]
) -> dict[str, dict[Candidate, float]]:
    """Site → candidate → number, of the wanted pairs that are known; sites without any are absent."""
    found = {name: {c: known[c][name] for c in cs if name in known.get(c, {})} for name, cs in wanted.items()}
    return {name: numbers for name, numbers in found.items() if numbers}
