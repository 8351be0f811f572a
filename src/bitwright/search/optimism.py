"""How much better codes look on the text that they were found with than on other text.

A rounding that uses data lowers, on that data, the very sum that scores it: its scores come out too low, the more so
the fewer tokens there are for the columns of a matrix. For a few sites of every role, codes are found with one half of
the calibration text and scored on both halves:

    ρ = score on the other half / score on its own half          geometric mean over the sites of a role

With n tokens and p adjustable numbers the two scores of a least-squares fit are σ²(1 − p/n) and σ²(1 + p/n). With half
of the tokens ρ gives 2p/n; and a score on text that codes were found with, all of it, is too low by

    optimism = (1 + a) / (1 − a),        a = p/n = ½ (ρ − 1) / (ρ + 1)

Tokens are those that have gradients. Codes are found with the others too, but do not see which of them matter: counted
as tokens like any other, they left predictions at 0.7 of what was measured instead of 0.88
(int4 on 62 sites of SmolLM2-135M), and most where there are most columns.

That factor multiplies the scores of the role. Finding and scoring all codes on two halves would say the same of every
single site, for twice the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS
from bitwright.quantize.seen import Seen
from bitwright.search.calibrate import MatrixStatistics, Statistics
from bitwright.search.candidate import Candidate
from bitwright.search.joint_fits import seen_at
from bitwright.search.quantizer import Quantizer
from bitwright.search.score import weight_kls

#: Sites of each role that are looked at.
SITES_PER_ROLE = 2
#: Halves of fewer windows say nothing.
_MIN_WINDOWS = 4

#: (role, candidate) → factor on its scores; 1 where there is no entry.
Optimism = Mapping[tuple[str, Candidate], float]


def measure_optimism(
    model: nn.Module, sites: Sequence[Site], statistics: Statistics, candidates: Sequence[Candidate]
) -> Optimism:
    """The factor of every role and every candidate whose codes depend on data."""
    tried = [c for c in candidates if ROUNDINGS[c.rounding].needs_data]
    found: dict[tuple[str, Candidate], list[float]] = defaultdict(list)
    for site, matrix_name in _sample(sites, statistics) if tried else ():
        weight_NK = site_weight(model, site).contiguous()
        possible = [c for c in tried if TRANSFORMS[c.transform].why_not(SCHEMES[c.scheme], site.shape) is None]
        for candidate, ratio in _ratios(site, matrix_name, weight_NK, statistics, possible).items():
            found[site.role, candidate].append(math.log(ratio))
    return {key: optimism_of(math.exp(sum(logs) / len(logs))) for key, logs in found.items()}


def optimism_of(ratio: float) -> float:
    """(1 + a) / (1 − a) of a ratio ρ between two halves of the tokens; 1 where ρ is no more than 1."""
    a = max(0.0, 0.5 * (ratio - 1) / (ratio + 1))
    return (1 + a) / (1 - a)


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


def _ratios(
    site: Site, matrix_name: str, weight_NK: Tensor, statistics: Statistics, candidates: Sequence[Candidate]
) -> dict[Candidate, float]:
    middle = _half(statistics.matrices[matrix_name], statistics)
    own = seen_at(site, matrix_name, statistics, slice(0, middle))
    other = seen_at(site, matrix_name, statistics, slice(middle, 2 * middle))
    assert own is not None and other is not None
    errors = _errors(site, weight_NK, own, candidates)
    scores = [
        weight_kls(half, errors.__getitem__, candidates, weight_NK.numel(), statistics.num_scored)
        for half in (own, other)
    ]
    return {c: scores[1][c] / scores[0][c] for c in candidates if scores[0][c] > 0 and scores[1][c] > 0}


def _errors(site: Site, weight_NK: Tensor, seen: Seen, candidates: Sequence[Candidate]) -> Mapping[Candidate, Tensor]:
    quantizer = Quantizer(shapes={site.name: site.shape})
    errors = {}
    for candidate in candidates:
        run = quantizer.find(site.name, candidate, weight_NK, seen)
        errors[candidate] = run.transform.restore(run.quantize_weight(weight_NK)) - weight_NK
    return errors
