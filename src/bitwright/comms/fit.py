"""Measured times → the latencies, rates and half sizes that explain them, and what they leave unexplained.

Two uses. `calibrate` keeps a topology and scales its latencies, ceilings and half sizes, each by one factor: for a
machine of a known kind, from as few as one row. `fit_curves` finds the curve of each (collective, algorithm) by itself:
for a machine that nobody has described (`comm fit`).

    minimise  Σ (ln t_model − ln t_measured)² / σ²  +  Σ (ln factor)² / prior²

Ratios count, not seconds: a 20 % error is one at 8 bytes and at 8 GiB. The second sum holds what the rows do not tell
(no small message says nothing of latency) where it was. Gauss–Newton on logarithms, which stay positive by themselves.
Rejected: least squares of seconds, which only see the largest message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bitwright.comms.cost_model import collective_time
from bitwright.comms.sizes import spell_count
from bitwright.comms.topology import Curve, Topology
from bitwright.comms.wire_bytes import WIRE_FORMS, Place
from bitwright.errors import CommsError

Floats = npt.NDArray[np.float64]

#: How far a row is trusted, and how far the factors of latency, ceiling and half size may go, as ln.
_ROW_SIGMA = 0.06
_PRIOR_SIGMA = (0.7, 0.3, 0.7)
_MAX_STEPS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One measured collective."""

    op: str
    num_bytes: int
    time_s: float
    #: None: whatever the library chose.
    algorithm: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A topology that explains measured times."""

    topology: Topology
    #: Row → model's time over the measured one, less 1.
    residuals: tuple[tuple[Timed, float], ...]

    @property
    def mean_absolute_error(self) -> float:
        """Mean of |residual|."""
        return float(np.mean([abs(error) for _, error in self.residuals]))


def calibrate(topology: Topology, rows: Sequence[Timed], *, launch: str = "graph") -> Fit:
    """Return the topology with its latencies, ceilings and half sizes scaled to explain the rows.

    Args:
        topology: of the ranks that took part.
        rows: at least one measured collective over all of them.
        launch: how they were started, a name in `LAUNCHES`.

    Raises:
        CommsError: no row, or a time that is not positive.
    """
    _raise_if_unusable(rows)

    def predicted(factors: Floats) -> Floats:
        latency, ceiling, half_size = np.exp(factors)
        scaled = topology.scaled(latency=latency, ceiling=ceiling, half_size=half_size)
        return np.array([collective_time(r.op, r.num_bytes, scaled, r.algorithm, launch=launch).time_s for r in rows])

    found = _least_squares(predicted, np.array([row.time_s for row in rows]), np.zeros(3), np.array(_PRIOR_SIGMA))
    latency, ceiling, half_size = np.exp(found)
    errors = predicted(found) / np.array([row.time_s for row in rows]) - 1
    return Fit(
        topology=topology.scaled(latency=latency, ceiling=ceiling, half_size=half_size),
        residuals=tuple(zip(rows, map(float, errors), strict=True)),
    )


def fit_curves(topology: Topology, rows: Sequence[Timed]) -> Fit:
    """Return a topology whose only curves are those that the rows say, one for each collective and algorithm.

    Args:
        topology: of one level, whose kind and link rate stay; the rows are of all its ranks.
        rows: measured collectives, each with the algorithm that ran.

    Raises:
        CommsError: several levels, fewer than three sizes of a collective by one algorithm, or a time that is not
            positive.
    """
    _raise_if_unusable(rows)
    if len(topology.spanned) != 1:
        raise CommsError(
            f"{topology.spelled} spans {len(topology.spanned)} levels, and times of all its ranks do not tell them "
            "apart; measure each level by itself"
        )
    level, members, below = topology.spanned[0]
    forms = {(form.op, form.algorithm): form for form in WIRE_FORMS}
    curves, residuals = [], []
    for op, algorithm in sorted({(row.op, row.algorithm or "") for row in rows}):
        if (op, algorithm) not in forms:
            raise CommsError(
                f"{op} by {algorithm or 'an algorithm that is not named'} has no curve; name its algorithm"
            )
        own = sorted((r for r in rows if (r.op, r.algorithm) == (op, algorithm)), key=lambda row: row.num_bytes)
        place = Place(n=topology.num_ranks, k=members, g=below, innermost=True)
        curve, errors = _one_curve(own, forms[op, algorithm].per_byte(place) / level.share(members))
        told = tuple((row.num_bytes, round(error, 4)) for row, error in zip(own, errors, strict=True))
        curves.append(replace(curve, algorithm=algorithm, ops=(op,), residuals=told))
        residuals += list(zip(own, errors, strict=True))
    fitted = replace(level, curves=tuple(curves), source="comm fit", certainty="measured")
    levels = tuple(fitted if item is level else item for item in topology.levels)
    return Fit(topology=replace(topology, levels=levels), residuals=tuple(residuals))


def _one_curve(rows: Sequence[Timed], per_byte: float) -> tuple[Curve, list[float]]:
    sizes = np.array([row.num_bytes for row in rows], dtype=np.float64)
    times = np.array([row.time_s for row in rows])
    if len(set(sizes)) < 3:
        raise CommsError(
            f"{rows[0].op} by {rows[0].algorithm} was measured at {spell_count(len(set(sizes)), 'size')}, and a curve "
            "needs three; give more sizes"
        )

    def predicted(logs: Floats) -> Floats:
        latency, rate, half_size = np.exp(logs)
        return latency + sizes * per_byte / rate * (1 + np.sqrt(half_size / sizes))

    start = np.log([times[0], sizes[-1] * per_byte / times[-1], np.sqrt(sizes[0] * sizes[-1])])
    found = _least_squares(predicted, times, start, np.array([2.0, 2.0, 4.0]))
    latency, rate, half_size = np.exp(found)
    curve = Curve(
        algorithm="",
        ceiling_gb_per_s=float(rate / 1e9),
        half_size_bytes=float(half_size),
        latency_s=float(latency),
    )
    return curve, [float(error) for error in predicted(found) / times - 1]


def _least_squares(predicted: Callable[[Floats], Floats], measured: Floats, start: Floats, prior: Floats) -> Floats:
    """Gauss–Newton with halved steps, over logarithms."""

    def residual(point: Floats) -> Floats:
        misfit = (np.log(predicted(point)) - np.log(measured)) / _ROW_SIGMA
        return np.concatenate([misfit, (point - start) / prior])

    point, current = start.copy(), residual(start)
    damping = 1e-3
    for _ in range(_MAX_STEPS):
        slopes = np.stack(
            [(residual(point + 1e-4 * unit) - current) / 1e-4 for unit in np.eye(len(start))],
            axis=1,
        )
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ current)
        tried = residual(point + step)
        if tried @ tried < current @ current:
            point, current, damping = point + step, tried, max(damping / 5, 1e-9)
            if float(np.abs(step).max()) < 1e-6:
                break
        else:
            damping *= 5
            if damping > 1e9:
                break
    return point


def _raise_if_unusable(rows: Sequence[Timed]) -> None:
    if not rows:
        raise CommsError("no measured time to fit to; give at least one")
    bad = [row for row in rows if not row.time_s > 0]
    if bad:
        raise CommsError(f"{bad[0].op} of {bad[0].num_bytes} bytes took {bad[0].time_s} s; times are positive")
