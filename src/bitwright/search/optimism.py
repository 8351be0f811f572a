"""How much better codes look on the text that they were found with than on other text.

A rounding that uses data lowers, on that data, the very sum that scores it: its scores come out too low, the more so
the fewer tokens there are for the columns of a matrix. For a few sites of every role, codes are found with one half of
the calibration text and scored on both halves:

    ρ = score on the other half / score on its own half          geometric mean over sites and both halves

On all of the text codes are better off than on half of it. A least-squares fit of p numbers to n tokens has log ρ near
2 p/n, which twice the tokens halve. Codes do not gain so fast: few tokens have most of the gradient, and it is of
labels that were sampled once. Measured on nine sites of SmolLM2-135M with int4 codes fed back under gradients, log ρ
with 1,024, 2,048 and 4,096 tokens: 1.47, 0.85 and 0.65 (the last on other documents; 0.27 of it on the same text with
labels sampled anew). So it is taken to fall with the root of the tokens,

    optimism = ρ^(1/√2)

Halving it had left predictions of such codes at 0.66 of what was measured. Halves of every second sequence say the same
as halves of the text (0.77 and 0.85): it is not the documents. With plain GPTQ, whose H knows no gradient, the three
are 0.45, 0.37 and 0.10.

Tokens are those that have gradients. Codes are found with the others too, but do not see which of them matter.

The factor multiplies the scores of the role: single sites differ by chance (heavy windows fall to one of the halves),
so that roles are drawn to the mean of all as far as their sites leave in doubt. Finding and scoring all codes on two
halves would say the same of every single site, for twice the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS
from bitwright.quantize.seen import Seen
from bitwright.search.candidate import Candidate
from bitwright.search.joint_fits import seen_at
from bitwright.search.quantizer import Quantizer
from bitwright.search.recorder import MatrixStatistics, Statistics
from bitwright.search.score import weight_kls
from bitwright.search.shrink import drawn_to_mean

#: Sites of each role that are looked at.
SITES_PER_ROLE = 2
#: Halves of fewer windows say nothing.
_MIN_WINDOWS = 4
#: Of log ρ among sites of a role, that roles can be told apart by no less.
_LEAST_VARIANCE = 1e-4

#: (role, candidate) → factor on its scores; 1 where there is no entry.
Optimism = Mapping[tuple[str, Candidate], float]


def measure_optimism(
    model: nn.Module, sites: Sequence[Site], statistics: Statistics, candidates: Sequence[Candidate]
) -> Optimism:
    """The factor of every role and every candidate whose codes depend on data."""
    tried = [c for c in candidates if ROUNDINGS[c.rounding].needs_data]
    found: dict[Candidate, dict[str, list[float]]] = {candidate: defaultdict(list) for candidate in tried}
    for site, matrix_name in _sample(sites, statistics) if tried else ():
        weight_NK = site_weight(model, site).contiguous()
        possible = [c for c in tried if TRANSFORMS[c.transform].why_not(SCHEMES[c.scheme], site.shape) is None]
        for candidate, logs in _log_ratios(site, matrix_name, weight_NK, statistics, possible).items():
            found[candidate][site.role].append(sum(logs) / len(logs))
    return {
        (role, candidate): optimism_of(math.exp(log))
        for candidate, by_role in found.items()
        for role, log in _by_role(by_role).items()
    }


def optimism_of(ratio: float) -> float:
    """ρ^(1/√2) of a ratio ρ between two halves of the tokens; 1 where ρ is no more than 1."""
    return max(1.0, ratio) ** math.sqrt(0.5)


def _by_role(logs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Role → mean log ρ, drawn to that of all roles by how far sites of one role are apart."""
    means = {role: sum(found) / len(found) for role, found in logs.items()}
    freedom = sum(len(found) - 1 for found in logs.values())
    if not freedom:
        return means
    squares = sum((log - means[role]) ** 2 for role, found in logs.items() for log in found)
    variance = max(squares / freedom, _LEAST_VARIANCE)
    return drawn_to_mean(means, {role: math.sqrt(variance / len(found)) for role, found in logs.items()})


def _half(matrix: MatrixStatistics, statistics: Statistics) -> int:
    """Half of the tokens that have gradients, in whole windows."""
    return matrix.g_TN.shape[0] // (2 * statistics.window_tokens) * statistics.window_tokens


def _sample(sites: Sequence[Site], statistics: Statistics) -> list[tuple[Site, str]]:
    """A few sites of every role, evenly spread over the model, that enough tokens reached."""
    by_role: dict[str, list[tuple[Site, str]]] = defaultdict(list)
    for matrix in matrices_of(sites):
        found = statistics.matrices.get(matrix.name)
        if found is not None and found.g_TN.shape[0] >= 2 * _MIN_WINDOWS * statistics.window_tokens:
            for site in matrix.sites:
                by_role[site.role].append((site, matrix.name))
    sampled = []
    for members in by_role.values():
        count = min(SITES_PER_ROLE, len(members))
        sampled += [members[(2 * i + 1) * len(members) // (2 * count)] for i in range(count)]
    return sampled


def _log_ratios(
    site: Site, matrix_name: str, weight_NK: Tensor, statistics: Statistics, candidates: Sequence[Candidate]
) -> dict[Candidate, list[float]]:
    """log(score on the other half / score on its own) of codes of either half, where both are positive."""
    middle = _half(statistics.matrices[matrix_name], statistics)
    halves = [seen_at(site, matrix_name, statistics, part) for part in (slice(0, middle), slice(middle, 2 * middle))]
    logs: dict[Candidate, list[float]] = {}
    for own, other in (halves, halves[::-1]):
        assert own is not None and other is not None
        errors = _errors(site, weight_NK, replace(own), candidates)  # a copy: the factors of its H go with it
        of_own, of_other = (
            weight_kls(half, errors.__getitem__, candidates, weight_NK.numel(), statistics.num_scored)
            for half in (own, other)
        )
        for candidate in candidates:
            if of_own[candidate] > 0 and of_other[candidate] > 0:
                logs.setdefault(candidate, []).append(math.log(of_other[candidate] / of_own[candidate]))
    return logs


def _errors(site: Site, weight_NK: Tensor, seen: Seen, candidates: Sequence[Candidate]) -> Mapping[Candidate, Tensor]:
    quantizer = Quantizer(shapes={site.name: site.shape})
    errors = {}
    for candidate in candidates:
        run = quantizer.find(site.name, candidate, weight_NK, seen)
        errors[candidate] = run.transform.restore(run.quantize_weight(weight_NK)) - weight_NK
    return errors
