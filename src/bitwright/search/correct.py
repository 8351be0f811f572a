"""Probes: a handful of measurements that calibrate every prediction.

A second-order prediction is off by a factor that depends on the role (softmax damps errors of q, values pass theirs
on), by one that depends on the rounding (codes that saw the calibration text look too good on it, and `optimism.py`
finds but a part of that), and by another for many errors at once (they interact, and KL saturates). All are measured:

    rounding  all sites take one scheme under one rounding that needs data, and the KL is measured:
              factor_rounding = measured / predicted; roundings without data have none
    role      all sites of one role at a time take one scheme, and the KL is measured:
              factor_role = measured / (factor_rounding · predicted), drawn towards the mean of all roles (of weights,
              and of values)
    total     a few whole assignments along the front are measured. Their mean ratio of measured to sum is a factor on
              all weights (`levelled`); what is left is a curve: between them log KL_total is interpolated in log Σ,
              and beyond them it goes on in proportion

    site    corrected = factor_role · factor_rounding · raw score
    plan    predicted = total(Σ corrected)

Of the front's assignments weights make nearly all of the sum, so what is common to them is said of weights. A curve
that held it (1.12 and 1.28 at the two ends of a front) raised plans of values alone just as much, whose sums were too
high as they stood (SmolLM2-135M: 1.2 and 1.35 of what was measured in FP8, per token and per head).

Where a model chooses experts, a sum S of corrected sites costs S + c √S (`jumps.py`): factors are then those of the
smooth parts of what was measured, and totals are interpolated over S + c √S instead of S.

Factors are drawn to their mean as far as probes can err (`shrink.py`). Where roles differ by no more than that, factors
are noise that spoils the choice: SmolLM2-135M in int4 and int8, KL on other text with factors trusted by nine tenths
against none, + 2.6 % at 6.50 bits, + 3.3 % at 6.30, + 0.4 % at 5.31, + 0.7 % at 4.62.

A probe errs by no less than _PROBE_ERROR, and by as much as the standard error over its sequences: a residual stream
in bf16, whose KL lay in one sequence of eight, cost 5 times its prediction there and as much as predicted elsewhere.

A role's probe takes the scheme whose predicted KL lies nearest to PROBE_KL: large enough to stand out of the text's
noise, small enough for the second order to hold. Of a scheme's roundings it takes the best, which is what is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bitwright.models import Site
from bitwright.models.value_sites import ValueSite
from bitwright.plan import role_label
from bitwright.quantize import ROUNDINGS, SCHEMES
from bitwright.search.candidate import Candidate
from bitwright.search.jumps import Jumps
from bitwright.search.score import Scores
from bitwright.search.shrink import drawn_to_mean

#: Predicted KL that a role's probe aims for, nats per token; and that of all sites in one rounding.
PROBE_KL = 0.03
ROUNDING_PROBE_KL = 0.1
#: Standard deviation of log(measured / predicted) of one probe: the text's noise, and what the second order leaves out.
_PROBE_ERROR = 0.15
#: Totals that differ by less are level: no sum could be told from them.
_LEAST_RISE = 1.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One role's sites under one choice each: predicted before correction, and measured."""

    role: str
    #: What was run, for tables: "attn.q in int4_g128 clip".
    what: str
    scheme: str
    predicted: float
    measured: float
    #: Sites of values, not of weights.
    of_values: bool = False
    rounding: str = "rtn"
    #: Standard error of `measured` over the text's sequences, relative; 0 where it is not known.
    relative_error: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Turns raw scores into predictions."""

    role_factors: Mapping[str, float]
    #: Rounding → factor on scores of codes that it found.
    rounding_factors: Mapping[str, float] = field(default_factory=dict)
    #: Measured totals: (sum of corrected sites, measured KL), both rising; none means that sites simply add up.
    totals: tuple[tuple[float, float], ...] = ()
    #: What errors cost beyond the second order.
    jumps: Jumps = field(default_factory=Jumps)

    def site(self, role: str, raw: float, rounding: str = "rtn") -> float:
        """What one site adds to the sum of sites, nats per token."""
        return self.role_factors.get(role, 1.0) * self.rounding_factors.get(rounding, 1.0) * raw

    def levelled(self, points: Sequence[tuple[float, float, float]], of_weights: Collection[str]) -> Correction:
        """The same with what is common to measured assignments made a factor on the roles of weights.

        Args:
            points: (sum of weights, sum of values, measured KL), sums as this correction has them; those of which
                weights are not the larger part say nothing.
            of_weights: the labels of roles of weights.
        """
        ratios = [
            (self.jumps.smooth(measured) - of_values) / weights
            for weights, of_values, measured in points
            if weights > of_values and self.jumps.smooth(measured) > of_values
        ]
        if not ratios:
            return self
        level = math.exp(sum(map(math.log, ratios)) / len(ratios))
        roles = {role: factor * (level if role in of_weights else 1.0) for role, factor in self.role_factors.items()}
        return replace(self, role_factors=roles)

    def part(self, site_sum: float) -> float:
        """Predicted KL of one or a few sites that add up to `site_sum`: totals tell of whole assignments alone."""
        return self.jumps.total(site_sum)

    def total(self, site_sum: float) -> float:
        """Predicted KL of an assignment whose sites add up to `site_sum`."""
        points = tuple((self.jumps.total(known), measured) for known, measured in self.totals)
        return _interpolate(points, self.jumps.total(site_sum))

    def site_sum(self, total: float) -> float:
        """The sum of sites at which the total is predicted: the inverse of `total`."""
        points = tuple((measured, self.jumps.total(known)) for known, measured in self.totals)
        return self.jumps.smooth(_interpolate(points, total))

    def with_total(self, site_sum: float, measured: float) -> Correction:
        """The same with one more measured total.

        Totals rise with their sum; an older point that contradicts the new one (noise of the text) gives way.
        """
        if not (site_sum > 0 and measured > 0):
            return self
        low, high = measured / _LEAST_RISE, measured * _LEAST_RISE
        kept = [(s, m) for s, m in self.totals if (s < site_sum and m < low) or (s > site_sum and m > high)]
        return replace(self, totals=tuple(sorted([*kept, (site_sum, measured)])))


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear in log–log between points of positive rising coordinates, proportional beyond them, 0 at 0."""
    if x <= 0:
        return 0.0
    if not points:
        return x
    log_x = [math.log(point[0]) for point in points]
    log_y = [math.log(point[1]) for point in points]
    position = math.log(x)
    if position <= log_x[0]:
        return math.exp(log_y[0] + position - log_x[0])
    if position >= log_x[-1]:
        return math.exp(log_y[-1] + position - log_x[-1])
    return math.exp(float(np.interp(position, log_x, log_y)))


def label_of(site: Site | ValueSite) -> str:
    """What predictions of a site are corrected by: its role, values apart from weights."""
    return role_label(site.kind, site.role)


def choose_role_probes(
    sites: Sequence[Site | ValueSite], scores: Scores, candidates: Sequence[Candidate]
) -> dict[str, dict[str, Candidate]]:
    """Role → assignment of all its scored sites, with a predicted sum as near to PROBE_KL as any scheme's best gives.

    Rows of a fused matrix read one input: a choice that rounds it is probed on all rows of the matrix.
    """
    probes: dict[str, dict[str, Candidate]] = {}
    scored = [site for site in sites if site.name in scores]
    for role in dict.fromkeys(label_of(site) for site in scored):
        own = [site.name for site in scored if label_of(site) == role]
        matrices = {site.tied_group for site in scored if label_of(site) == role} - {None}
        whole = [site.name for site in scored if label_of(site) == role or site.tied_group in matrices]
        names = {c: whole if matrices and SCHEMES[c.scheme].activations is not None else own for c in candidates}
        sums = {c: sum(scores[name].get(c, math.nan) for name in names[c]) for c in candidates}
        usable = {c: total for c, total in sums.items() if math.isfinite(total) and total > 0}
        # what is probed is what can be chosen: codes that saw the text are told too little, nearest ones are not
        least = {
            scheme: min(t for c, t in usable.items() if c.scheme == scheme) for scheme in {c.scheme for c in usable}
        }
        usable = {c: total for c, total in usable.items() if total == least[c.scheme]}
        if usable:
            best = min(usable, key=lambda c: (abs(math.log(usable[c] / PROBE_KL)), c))
            probes[role] = dict.fromkeys(names[best], best)
    return probes


def choose_rounding_probes(
    sites: Sequence[Site], scores: Scores, candidates: Sequence[Candidate]
) -> dict[str, dict[str, Candidate]]:
    """Rounding that needs data → assignment of all sites, with a predicted sum as near to ROUNDING_PROBE_KL as any."""
    probes: dict[str, dict[str, Candidate]] = {}
    for rounding in dict.fromkeys(c.rounding for c in candidates if ROUNDINGS[c.rounding].needs_data):
        kls: dict[Candidate, dict[str, float]] = {}
        for candidate in (c for c in candidates if c.rounding == rounding):
            found = {site.name: scores.get(site.name, {}).get(candidate, math.nan) for site in sites}
            kls[candidate] = {name: kl for name, kl in found.items() if math.isfinite(kl)}
        reach = max(len(found) for found in kls.values())
        sums = {c: math.fsum(f.values()) for c, f in kls.items() if len(f) == reach and math.fsum(f.values()) > 0}
        if sums:
            best = min(sums, key=lambda c: (abs(math.log(sums[c] / ROUNDING_PROBE_KL)), c))
            probes[rounding] = dict.fromkeys(kls[best], best)
    return probes


def fit_factors(probes: Sequence[Probe], roundings: Sequence[Probe] = (), jumps: Jumps | None = None) -> Correction:
    """Factors of all roundings, and of all roles, each drawn as far as its probe can err.

    Args:
        probes: of the roles.
        roundings: of all sites in one rounding each.
        jumps: what errors cost beyond the second order.
    """
    jumps = jumps if jumps is not None else Jumps()
    usable = [p for p in roundings if p.predicted > 0 and p.measured > 0]
    of_roundings = {p.rounding: jumps.smooth(p.measured) / p.predicted for p in usable}
    factors: dict[str, float] = {}
    for of_values in (False, True):
        usable = [p for p in probes if p.of_values == of_values and p.predicted > 0 and p.measured > 0]
        told = {p.role: p.predicted * of_roundings.get(p.rounding, 1.0) for p in usable}
        drawn = drawn_to_mean(
            {p.role: math.log(jumps.smooth(p.measured) / told[p.role]) for p in usable},
            {p.role: max(_PROBE_ERROR, p.relative_error) for p in usable},
        )
        factors |= {role: math.exp(log) for role, log in drawn.items()}
    return Correction(role_factors=factors, rounding_factors=of_roundings, jumps=jumps)
