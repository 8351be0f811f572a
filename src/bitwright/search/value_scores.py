"""The KL that rounding values will cost, from the values and gradients that calibration kept.

Rounding a value v of token t to v + δ_t shifts the text's log-likelihood by g_tᵀ δ_t to first order, with g_t the
gradient at that very use of v. Errors of different tokens are independent (each is rounded under its own content), so

    KL per scored prediction ≈ ½ Σ_t (g_tᵀ δ_t)² / scored predictions

over the values of all heads of a token at once. Gradients at keys and values already hold what all later queries make
of them; those at p and at the sum of the softmax what the division makes of them. The operands of a product are
rounded independently: their shares add.

A router's logits choose experts. Where rounding changes which ones, the output jumps, which no gradient tells:
`value_router.py` adds the probability of that times its cost.

Overflows are expected counts per scored prediction: of values beyond a format's range those that were seen; under a
static scale, which covers everything that was seen, a further token exceeds the largest of n with probability
1 / (n + 1), whatever their distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.inference.values import ValueRule, scaled_operands
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
    #: (site, operand) → largest magnitude of each head, fp32 [H]: what static scales are made of.
    amax: Mapping[tuple[str, str], Tensor]

    def rule(self, site: ValueSite, choice: Candidate) -> ValueRule:
        """What a site runs with under a choice, static scales included."""
        scheme = VALUE_SCHEMES[choice.scheme]
        scales = {
            operand: static_scale(scheme, operand, self.amax[site.name, operand])
            for operand in scaled_operands(site, scheme)
        }
        return ValueRule(scheme=scheme, scales=scales)

    def rules(self, sites: Iterable[ValueSite], assignment: Mapping[str, Candidate]) -> dict[ValueSite, ValueRule]:
        """What `emulate_values` needs to run an assignment; sites that stay as they are have no rule."""
        chosen = {site: assignment[site.name] for site in sites if site.name in assignment}
        return {site: self.rule(site, choice) for site, choice in chosen.items() if choice.scheme in VALUE_SCHEMES}


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
    amax: dict[tuple[str, str], Tensor] = {}
    for site in sites:
        operands = {operand: seen[site.name, operand] for operand in site.operands if (site.name, operand) in seen}
        if len(operands) < len(site.operands):
            continue
        candidates = value_candidates(site, schemes)
        scores[site.name] = dict.fromkeys(candidates, 0.0)
        for operand, found in operands.items():
            if found.amax_H is not None:
                amax[site.name, operand] = found.amax_H
            values_RHD, g_RHD = found.rows()
            for candidate in candidates:
                scheme = VALUE_SCHEMES[candidate.scheme]
                share = found.per_kept / num_scored
                rounded_RHD = _rounded(values_RHD, scheme, operand, found)
                change_R = ((rounded_RHD - values_RHD) * g_RHD).flatten(1).sum(-1).double()
                scores[site.name][candidate] += 0.5 * share * float(change_R.square().sum())
                if site.role == "router" and experts_per_token is not None:
                    scores[site.name][candidate] += share * flip_kl(
                        values_RHD[:, 0], rounded_RHD[:, 0], g_RHD[:, 0], experts_per_token
                    )
                beyond = _overflows(values_RHD, scheme, operand, found) / num_scored
                if beyond > 0:
                    of_site = expected.setdefault(site.name, {})
                    of_site[candidate] = of_site.get(candidate, 0.0) + beyond
    return ValueLearned(scores=scores, overflows=expected, amax=amax)


def _rounded(values_RHD: Tensor, scheme: ValueScheme, operand: str, found: SeenValues) -> Tensor:
    scale = None
    if scheme.static:
        assert found.amax_H is not None
        scale = static_scale(scheme, operand, found.amax_H)
    return round_values(values_RHD.transpose(0, 1), scheme, scale).transpose(0, 1)


def _overflows(values_RHD: Tensor, scheme: ValueScheme, operand: str, found: SeenValues) -> float:
    """Expected overflows over the whole calibration text."""
    if scheme.static:
        num_scales = (found.amax_H.numel() if found.amax_H is not None else 0) if scheme.axis == "head" else 1
        return 0.0 if operand in OPERAND_BOUNDS else num_scales * found.num_seen / (found.num_seen + 1)
    beyond = overflows(values_RHD, scheme.values)
    if beyond is None:
        return 0.0
    sampled = float(beyond.sum()) * found.per_kept
    ever = found.amax_H is not None and overflows(found.amax_H, scheme.values)
    return max(sampled, 1.0) if ever is not False and bool(torch.as_tensor(ever).any()) else sampled
