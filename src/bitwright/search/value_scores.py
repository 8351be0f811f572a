"""The KL that rounding values will cost, from the values and gradients that calibration kept.

Rounding a value v of token t to v + δ_t shifts the text's log-likelihood by g_tᵀ δ_t to first order, with g_t the
gradient at that very use of v. Errors of different tokens are independent (each is rounded under its own content), so

    KL per scored prediction ≈ ½ Σ_t Σ_h (g_thᵀ δ_th)² / scored predictions

with one term for each head, since heads are rounded by themselves, too. Gradients at keys and values already hold what
all later queries make of them; those at p and at the sum of the softmax what the division makes of them. The operands
of a product are rounded independently: their shares add.

One thing breaks the independence: INT8 probabilities. Most are smaller than half a step and all of those become zero,
so that errors of neighbouring tokens share a sign; what is predicted there is about half of what is measured. Floats,
which keep small numbers, show none of it.

A router's logits choose experts. Where rounding changes which ones, the output jumps, which no gradient tells:
`value_router.py` adds the probability of that times its cost.

Overflows are expected counts per scored prediction: of values beyond a format's range those that were seen; under a
static scale, which covers everything that was seen, a further token exceeds the largest of n with probability
1 / (n + 1), whatever their distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bitwright.inference import ValueRule, value_rule, value_tensors_of
from bitwright.models.value_sites import ValueSite
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.static_scales import overflows
from bitwright.quantize.value_rounding import round_values, static_scale
from bitwright.quantize.value_scheme import OPERAND_BOUNDS, ValueScheme
from bitwright.search.candidate import Candidate
from bitwright.search.score import Scores
from bitwright.search.value_observer import SeenValues
from bitwright.search.value_router import flip_kl


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueLearned:
    """What calibration knows of value sites."""

    #: Site → candidate → predicted KL before probes, nats per scored prediction; absent: sites that no token reached.
    scores: Scores
    #: Site → candidate → expected overflows per scored prediction; absent where there are none.
    overflows: dict[str, dict[Candidate, float]]
    #: Candidate → static scales of all sites, named as a plan keeps them (`inference.value_tensors_of`).
    tensors: Mapping[Candidate, Mapping[str, np.ndarray]]

    def rules(self, sites: Iterable[ValueSite], assignment: Mapping[str, Candidate]) -> dict[ValueSite, ValueRule]:
        """What `emulate` needs to run an assignment; sites that stay as they are have no rule."""
        chosen = {site: assignment[site.name] for site in sites if site.name in assignment}
        return {
            site: value_rule(site, VALUE_SCHEMES[choice.scheme], self.tensors.get(choice, {}))
            for site, choice in chosen.items()
            if choice.scheme in VALUE_SCHEMES
        }

    def tensors_of(self, site: ValueSite, choice: Candidate) -> dict[str, np.ndarray]:
        """What a plan keeps of a choice."""
        rules = self.rules([site], {site.name: choice})
        return {name: array for rule in rules.values() for name, array in value_tensors_of(site, rule).items()}


def value_candidates(site: ValueSite, schemes: Sequence[str]) -> tuple[Candidate, ...]:
    """The value schemes of a list that are meant for a site."""
    fitting = [name for name in schemes if name in VALUE_SCHEMES and VALUE_SCHEMES[name].fits(site.role, site.part)]
    return tuple(Candidate(scheme=name) for name in fitting)


def sample_groups(sites: Iterable[ValueSite], schemes: Sequence[str]) -> dict[str, int]:
    """Site → consecutive tokens that its candidates round together: what `ValueObserver` samples."""
    found = {
        site.name: max((VALUE_SCHEMES[c.scheme].group_tokens for c in value_candidates(site, schemes)), default=1)
        for site in sites
    }
    return {name: tokens for name, tokens in found.items() if tokens > 1}


def score_values(
    sites: Sequence[ValueSite],
    seen: Mapping[tuple[str, str], SeenValues],
    schemes: Sequence[str],
    *,
    num_scored: int,
    experts_per_token: int | None = None,
) -> ValueLearned:
    """Predicted KL and overflows of every fitting scheme at every site that calibration reached.

    Args:
        sites: value sites.
        seen: what a `ValueObserver` collected.
        schemes: names of value schemes.
        num_scored: scored predictions of the calibration text (`Statistics.num_scored`).
        experts_per_token: how many experts a router chooses; None for models without.
    """
    scores: Scores = {}
    expected: dict[str, dict[Candidate, float]] = {}
    tensors: dict[Candidate, dict[str, np.ndarray]] = {}
    for site in sites:
        operands = {
            o: seen[site.name, o] for o in site.operands if (site.name, o) in seen and seen[site.name, o].batches
        }
        if len(operands) < len(site.operands):
            continue
        candidates = value_candidates(site, schemes)
        scores[site.name] = dict.fromkeys(candidates, 0.0)
        rows = {operand: found.rows() for operand, found in operands.items()}
        for candidate in candidates:
            scheme = VALUE_SCHEMES[candidate.scheme]
            scales = {o: static_scale(scheme, o, operands[o].amax_H) for o in operands} if scheme.static else {}
            kept = value_tensors_of(site, ValueRule(scheme=scheme, scales=scales))
            tensors.setdefault(candidate, {}).update(kept)
            for operand, (values_RHD, g_RHD, weights_R) in rows.items():
                found, scale = operands[operand], scales.get(operand)
                rounded_RHD = round_values(values_RHD.transpose(0, 1), scheme, scale).transpose(0, 1)
                change_RH = ((rounded_RHD - values_RHD) * g_RHD).sum(-1).double()
                shift_R = weights_R * change_RH.square().sum(-1)
                scores[site.name][candidate] += 0.5 * float(shift_R.sum()) / num_scored
                if site.role == "router" and experts_per_token is not None:
                    scores[site.name][candidate] += (
                        flip_kl(values_RHD[:, 0], rounded_RHD[:, 0], g_RHD[:, 0], experts_per_token, weights_R)
                        / num_scored
                    )
                beyond = _overflows(values_RHD, weights_R, scheme, operand, found) / num_scored
                if beyond > 0:
                    of_site = expected.setdefault(site.name, {})
                    of_site[candidate] = of_site.get(candidate, 0.0) + beyond
    return ValueLearned(scores=scores, overflows=expected, tensors=tensors)


def _overflows(values_RHD: Tensor, weights_R: Tensor, scheme: ValueScheme, operand: str, found: SeenValues) -> float:
    """Expected overflows over the whole calibration text."""
    if scheme.static:
        num_scales = found.amax_H.numel() if scheme.axis == "head" else 1
        return 0.0 if operand in OPERAND_BOUNDS else num_scales * found.num_seen / (found.num_seen + 1)
    beyond = overflows(values_RHD, scheme.values)
    if beyond is None:
        return 0.0
    sampled = float((beyond.flatten(1).sum(-1) * weights_R).sum())
    ever = overflows(found.amax_H, scheme.values)
    return max(sampled, 1.0) if ever is not None and bool(ever.any()) else sampled
