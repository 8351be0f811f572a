"""The whole front over quality, memory, latency and stability, as far as a few points can show it.

    candidates   for each quantity alone, and for each pair of them, the least KL under limits on a grid of levels
                 (ε-constraint: every point is the exact optimum of its limits; Haimes, Lasdon and Wismer 1971)
    thinning     what another candidate beats in everything is dropped; of the rest the ends of every axis stay, and
                 then whichever lies furthest from all that were taken, on logarithmic axes
    measuring    each is run on the same sequences of the repair text: KL with its interval, overflows before the cast,
                 tokens that would fall back
    again        what is now beaten in everything is dropped, differences of less than a percent left aside

Memory is counted, latency is the roofline's and so *predicted*; quality and stability are measured. Rejected: weighted
sums of the objectives, which only find the convex hull of the front.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.inference import Counters, Overflows
from bitwright.plan import ParetoPoint
from bitwright.search.bootstrap import kl_estimate
from bitwright.search.limits import objective_quantity
from bitwright.search.measure import Meter
from bitwright.search.mend import Mended
from bitwright.search.price import Assignment
from bitwright.search.problem import Problem
from bitwright.search.progress import Progress
from bitwright.search.solve import KL, Solution

#: Sequences of the repair text that each point is run on.
NUM_SEQUENCES = 16
#: Levels of one quantity alone, and of each of a pair.
_LEVELS_ALONE, _LEVELS_IN_PAIRS = 6, 3
#: Relative differences of figures below which a point is not worth showing beside another.
VISIBLE = 0.01
#: Quantities whose options differ by less, relatively, are no axis.
_FLAT = 1e-3


@dataclass(frozen=True, slots=True)
class _Candidate:
    assignment: dict
    #: KL first, then every axis.
    figures: tuple[float, ...]


def pareto_front(
    mended: Mended, meter: Meter, own_meter: Meter, num_points: int, seed: int, progress: Progress
) -> tuple[ParetoPoint, ...]:
    """The measured front, by rising memory; the plan itself is among its points.

    Args:
        mended: the plan, and the problem with what was measured on the way.
        meter: measures on the repair text.
        own_meter: measures the plan there, with the codes that it has.
        num_points: how many points are measured at most, the plan included.
        seed: of the resampling.
        progress: shows the stages.
    """
    problem = mended.problem
    axes = front_axes(problem)
    solutions = _grid(problem, axes, progress)
    own = _candidate(problem, axes, mended.assignment)
    found = [_candidate(problem, axes, problem.assignment(solution)) for solution in solutions]
    rivals = undominated_rows([c for c in found if c.assignment != own.assignment], [c.figures for c in found])
    chosen = [own, *spread([own, *rivals], num_points)[1:]]
    count = min(NUM_SEQUENCES, meter.reference.text.num_sequences)
    points = []
    with progress.stage("measure the front", count * len(chosen)) as stage:
        for candidate in chosen:
            counters: Counters = {}
            measuring = own_meter if candidate is own else meter
            effects = measuring.effects(candidate.assignment, count, stage, counters)
            points.append(
                _point(problem, candidate.assignment, kl_estimate(effects, seed).interval, counters, meter, count)
            )
    return _measured_front(points)


def front_axes(problem: Problem) -> tuple[str, ...]:
    """The quantities in which the options of a problem differ: memory, time of a step, time of a prompt, overflows."""
    axes = []
    for quantity in (objective_quantity("memory", problem.prices), "decode_s", "prefill_s", "overflow"):
        least = sum(min(o.amount(quantity) for o in group.options) for group in problem.groups)
        most = sum(max(o.amount(quantity) for o in group.options) for group in problem.groups)
        if most - least > _FLAT * (most + problem.fixed.get(quantity, 0)):
            axes.append(quantity)
    return tuple(axes)


def _grid(problem: Problem, axes: Sequence[str], progress: Progress) -> list[Solution]:
    best = problem.best(KL, {})
    assert best is not None
    least = {q: sum(min(o.amount(q) for o in group.options) for group in problem.groups) for q in axes}
    requests: list[dict[str, float]] = [{}]
    for quantity in axes:
        requests += [{quantity: level} for level in _levels(least[quantity], best.amount(quantity), _LEVELS_ALONE)]
    for pair in itertools.combinations(axes, 2):
        levels = [_levels(least[q], best.amount(q), _LEVELS_IN_PAIRS) for q in pair]
        requests += [dict(zip(pair, limits, strict=True)) for limits in itertools.product(*levels)]
    solutions: list[Solution] = []
    with progress.stage("solve the front", len(requests)) as stage:
        for limits in requests:
            found = problem.best(KL, limits)
            if found is not None and found not in solutions:
                solutions.append(found)
            stage.advance()
    return solutions


def _levels(least: float, most: float, count: int) -> list[float]:
    """Levels of a limit from the least possible amount to just below what the best quality takes."""
    if most <= least:
        return [least * (1 + 1e-9)]
    if least <= 0:
        return [0.0, *np.geomspace(most * 1e-3, most, count, endpoint=False)[1:]]
    return [float(level) for level in np.geomspace(least * (1 + 1e-9), most, count, endpoint=False)]


def _candidate(problem: Problem, axes: Sequence[str], assignment: Assignment) -> _Candidate:
    totals = problem.totals(assignment)
    return _Candidate(dict(assignment), (problem.site_sum(assignment), *(totals.get(q, 0.0) for q in axes)))


def undominated_rows(items: Sequence[_Candidate], rows: Sequence[tuple[float, ...]]) -> list[_Candidate]:
    """Those items that none of `rows` beats: as small in everything and smaller in something."""
    return [item for item in items if not any(beats(row, item.figures) for row in rows)]


def beats(left: Sequence[float], right: Sequence[float], visible: float = 0.0) -> bool:
    """Whether figures are nowhere larger than others and somewhere smaller, by a share that is `visible` at least."""
    pairs = list(zip(left, right, strict=True))
    return all(a <= b * (1 + visible) for a, b in pairs) and any(a * (1 + visible) < b for a, b in pairs)


def spread(items: Sequence[_Candidate], count: int) -> list[_Candidate]:
    """The first item, the ends of every axis, then always the one furthest from all that were taken."""
    if len(items) <= count:
        return list(items)
    places = np.array([[math.log10(max(figure, 1e-12)) for figure in item.figures] for item in items])
    width = np.ptp(places, axis=0)
    places = (places - places.min(0)) / np.where(width > 0, width, 1.0)
    ends = [int(i) for axis in places.T for i in (axis.argmin(), axis.argmax())]
    taken = list(dict.fromkeys([0, *ends]))[:count]
    while len(taken) < count:
        distance = np.linalg.norm(places[:, None] - places[taken], axis=-1).min(1)
        taken.append(int(distance.argmax()))
    return [items[index] for index in taken]


def _point(
    problem: Problem, assignment: Assignment, kl: object, counters: Counters, meter: Meter, count: int
) -> ParetoPoint:
    totals, prices = problem.totals(assignment), problem.prices
    rounded = sum(counters.values(), Overflows())
    passed = count * meter.reference.text.input_ids.shape[1] * max(1, prices.num_values)
    return ParetoPoint(
        effective_bits=prices.effective_bits(assignment),
        weight_bytes=prices.model_bytes(assignment),
        device_bytes=int(totals["device_bytes"]) if prices.workload.context is not None else None,
        predicted_kl=problem.total_kl(assignment),
        kl=kl,  # type: ignore[arg-type]
        decode_s_per_token=totals.get("decode_s", 0.0),
        prefill_s=totals.get("prefill_s", 0.0),
        predicted_overflows=totals["overflow"],
        overflows=1e6 * rounded.num_overflows / passed,
        fallback_rate=rounded.fallback_rate,
        counts=dict(sorted(Counter(assignment[site.name].scheme for site in prices.decoder_sites).items())),
    )


def _measured_front(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Drop what is beaten in everything, now that quality and stability are measured; the plan, the first, stays."""

    def figures(point: ParetoPoint) -> tuple[float, ...]:
        return (
            point.kl.mean,
            point.memory_bytes,
            point.decode_s_per_token,
            point.prefill_s,
            point.overflows,
            point.fallback_rate,
        )

    own, *others = points
    own = own.model_copy(update={"chosen": True})
    kept = [p for p in others if not any(beats(figures(q), figures(p), VISIBLE) for q in points)]
    return tuple(sorted([own, *kept], key=lambda point: (point.weight_bytes, point.kl.mean)))
