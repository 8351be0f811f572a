"""Choosing: the exact best assignment under the limits, and the whole front.

A multiple-choice knapsack. Each group of sites that must agree takes exactly one of its options; an option has a cost
(predicted KL, nats per token), stored bytes of its own, and whether they count for the effective bits:

    minimise    Σ_g Σ_o  objective_go · z_go
    subject to  Σ_o z_go = 1 for every group g,   Σ KL ≤ limit,   Σ bytes ≤ limit,   Σ decoder bytes ≤ limit,   z binary

Predicted KLs add up (the second-order expansion of KL is a sum over independent errors), which is what makes this a
linear program in binaries. It is solved by HiGHS to proven optimality; an option that another one beats in both KL and
bytes is dropped before. Rejected: the greedy by gain per byte, which is only optimal on the convex hull.

A solver works within tolerances, and a size limit is exact. So options that alone exceed a limit are dropped, every
row is divided by its limit (tolerances are then relative to it), and bytes are counted in their greatest common divisor
with half a unit of room above the limit: what keeps it lies a half below, what breaks it a half above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import highspy
import numpy as np
import numpy.typing as npt

Objective = Literal["kl", "bytes"]

#: What rounding in sums of floats may add to a limit, as a factor.
_SLACK = 1 + 1e-12
#: Largest option ÷ optimum up to which the solver's gap (1e-9 of the former) is small beside the latter.
_LARGEST_UNIT = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One choice for one group of sites."""

    #: What the caller knows the option by; unique in its group.
    key: str
    #: Predicted KL of the whole group under this choice, nats per token; finite and ≥ 0.
    kl: float
    #: Stored bytes of the whole group under this choice.
    num_bytes: int
    #: Whether they count for the effective bits (decoder linears do, embedding and head do not).
    counts_as_decoder: bool = True


_QUANTITIES: Mapping[str, Callable[[Option], float]] = {
    "kl": lambda option: option.kl,
    "bytes": lambda option: option.num_bytes,
    "decoder bytes": lambda option: option.num_bytes if option.counts_as_decoder else 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """One option per group, in the order of the groups."""

    options: tuple[Option, ...]

    @property
    def kl(self) -> float:
        """Sum of predicted KLs."""
        return sum(option.kl for option in self.options)

    @property
    def num_bytes(self) -> int:
        """Sum of stored bytes."""
        return sum(option.num_bytes for option in self.options)

    @property
    def decoder_bytes(self) -> int:
        """Sum of the stored bytes that count for the effective bits."""
        return sum(option.num_bytes for option in self.options if option.counts_as_decoder)


def solve(
    groups: Sequence[Sequence[Option]],
    *,
    minimize: Objective,
    max_kl: float | None = None,
    max_bytes: float | None = None,
    max_decoder_bytes: float | None = None,
) -> Solution | None:
    """The best assignment, or None where no assignment keeps the limits.

    Of the assignments with the fewest bytes the one with the least KL is returned.
    """
    limits = {"kl": max_kl, "bytes": max_bytes, "decoder bytes": max_decoder_bytes}
    found = _minimize([undominated(options) for options in groups], minimize, limits)
    if found is None or minimize == "kl":
        return found
    return _minimize([undominated(options) for options in groups], "kl", {**limits, "bytes": found.num_bytes})


def undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options of one group that no other beats in both KL and bytes, by rising bytes."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.num_bytes, o.kl, o.key)):
        if not kept or option.kl < kept[-1].kl:
            kept.append(option)
    return tuple(kept)


def front(groups: Sequence[Sequence[Option]], num_points: int) -> tuple[Solution, ...]:
    """Least KL at `num_points` sizes from the smallest possible to the best possible, by rising bytes.

    Every point is the exact optimum of its size, so none dominates another; equal ones appear once.
    """
    pruned = [undominated(options) for options in groups]
    smallest = Solution(options=tuple(options[0] for options in pruned))
    largest = Solution(options=tuple(options[-1] for options in pruned))
    sizes = np.geomspace(max(smallest.num_bytes, 1), max(largest.num_bytes, 1), num_points)[1:-1]
    points = [smallest]
    for size in sizes:
        solution = solve(pruned, minimize="kl", max_bytes=float(size))
        if solution is not None and solution.kl < points[-1].kl:
            points.append(solution)
    if largest.kl < points[-1].kl:
        points.append(largest)
    return tuple(points)


def _minimize(
    groups: Sequence[Sequence[Option]], objective: Objective, limits: Mapping[str, float | None]
) -> Solution | None:
    rows = [(_QUANTITIES[name], limit) for name, limit in limits.items() if limit is not None]
    fitting = [[o for o in options if all(q(o) <= limit * _SLACK for q, limit in rows)] for options in groups]
    if any(not options for options in fitting) or any(limit < 0 for _, limit in rows):
        return None
    if not groups:
        return Solution(options=())
    quantity = _QUANTITIES[objective]
    while True:
        flat = [option for options in fitting for option in options]
        unit = max(quantity(option) for option in flat) or 1.0
        chosen = _binary_program(
            np.array([quantity(option) / unit for option in flat]),
            [len(options) for options in fitting],
            [_row(flat, *row) for row in rows],
        )
        if chosen is None:
            return None
        found = Solution(options=tuple(options[index] for options, index in zip(fitting, chosen, strict=True)))
        best = sum(quantity(option) for option in found.options)
        # the solver's gap is relative to `unit`: where one option dwarfs the optimum, solve again without it
        if best == 0 or unit <= _LARGEST_UNIT * best:
            return found
        fitting = [[option for option in options if quantity(option) <= best * _SLACK] for options in fitting]


def _row(
    flat: Sequence[Option], quantity: Callable[[Option], float], limit: float
) -> tuple[npt.NDArray[np.float64], float]:
    """Coefficients and right side of one limit, both of order one."""
    values = [quantity(option) for option in flat]
    if all(isinstance(value, int) for value in values):
        divisor = math.gcd(*(int(value) for value in values)) or 1
        whole = math.floor(limit * _SLACK / divisor) + 0.5
        return np.array([value // divisor / whole for value in values]), 1.0
    unit = limit if limit > 0 else 1.0
    return np.array([value / unit for value in values]), limit / unit * _SLACK


def _binary_program(
    cost: npt.NDArray[np.float64], group_sizes: Sequence[int], limits: Sequence[tuple[npt.NDArray[np.float64], float]]
) -> list[int] | None:
    """Index of the chosen option within each group, or None if infeasible."""
    num_columns = len(cost)
    model = highspy.HighsLp()
    model.num_col_ = num_columns
    model.num_row_ = len(group_sizes) + len(limits)
    model.col_cost_ = cost
    model.col_lower_ = np.zeros(num_columns)
    model.col_upper_ = np.ones(num_columns)
    model.integrality_ = [highspy.HighsVarType.kInteger] * num_columns
    infinity = highspy.kHighsInf
    model.row_lower_ = np.concatenate([np.ones(len(group_sizes)), np.full(len(limits), -infinity)])
    model.row_upper_ = np.concatenate([np.ones(len(group_sizes)), [limit for _, limit in limits]])
    starts = np.concatenate([[0], np.cumsum(group_sizes)])
    row_starts = np.concatenate([starts, starts[-1] + num_columns * np.arange(1, len(limits) + 1)])
    columns = np.concatenate([np.arange(num_columns)] * (1 + len(limits)))
    values = np.concatenate([np.ones(num_columns), *(coefficients for coefficients, _ in limits)])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = row_starts.astype(np.int32)
    model.a_matrix_.index_ = columns.astype(np.int32)
    model.a_matrix_.value_ = values
    solver = _QuietSolver()
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
    solver.setOptionValue("primal_feasibility_tolerance", 1e-9)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("threads", 1)
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    assert status == highspy.HighsModelStatus.kOptimal, f"the solver stopped with {status}"
    solution = np.array(solver.getSolution().col_value)
    return [int(np.argmax(solution[start:end])) for start, end in pairwise(starts)]


class _QuietSolver(highspy.Highs):  # type: ignore[misc]
    """HiGHS without output. Its constructor enables callbacks, which prints a banner unless output is off by then."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()
