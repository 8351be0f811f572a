"""Choosing: the exact best assignment under any number of limits, and the whole front.

A multiple-choice knapsack in several dimensions. Each group of sites that must agree takes exactly one of its options;
an option has a predicted KL (nats per token) and an amount of whatever else is counted (bytes, seconds, overflows …):

    minimise    Σ_g Σ_o  amount_go(objective) · z_go
    subject to  Σ_o z_go = 1 for every group g,   Σ amount_go(quantity) · z_go ≤ limit for every limit,   z binary

Predicted KLs add up (the second-order expansion of KL is a sum over independent errors), and so do bytes, times of
operations that run one after the other, and expected overflows: that makes this a linear program in binaries. It is
solved by HiGHS to proven optimality; an option that another one beats in everything that is limited or made small is
dropped before. Rejected: the greedy by gain per byte, which is only optimal on the convex hull of one limit.

A solver works within tolerances, and a limit of bytes is exact. So options that alone exceed a limit are dropped, every
row is divided by its limit (tolerances are then relative to it), and whole numbers are counted in their greatest common
divisor with half a unit of room above the limit: what keeps it lies a half below, what breaks it a half above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import highspy
import numpy as np
import numpy.typing as npt

#: What the predicted KL is called among the quantities.
KL = "kl"

#: What rounding in sums of floats may add to a limit, as a factor.
_SLACK = 1 + 1e-12
#: The same for an optimum that becomes a limit: the solver's own tolerance.
_HELD = 1 + 1e-9
#: Largest option ÷ optimum up to which the solver's gap (1e-9 of the former) is small beside the latter.
_LARGEST_UNIT = 100.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One choice for one group of sites."""

    #: What the caller knows the option by; unique in its group.
    key: str
    #: Predicted KL of the whole group under this choice, nats per token; finite and ≥ 0.
    kl: float
    #: Quantity → amount of the whole group under this choice, in the quantity's unit; what is absent is 0. Whole
    #: numbers (bytes) are kept exactly.
    amounts: Mapping[str, float] = field(default_factory=dict)

    def amount(self, quantity: str) -> float:
        """The amount of a quantity; `KL` is one of them."""
        return self.kl if quantity == KL else self.amounts.get(quantity, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """One option per group, in the order of the groups."""

    options: tuple[Option, ...]

    @property
    def kl(self) -> float:
        """Sum of predicted KLs."""
        return sum(option.kl for option in self.options)

    def amount(self, quantity: str) -> float:
        """Sum of a quantity; exact where it is counted in whole numbers."""
        return sum(option.amount(quantity) for option in self.options)


def solve(
    groups: Sequence[Sequence[Option]], *, minimize: str, limits: Mapping[str, float] | None = None
) -> Solution | None:
    """The best assignment, or None where no assignment keeps the limits.

    Of the assignments with the least of the objective the one with the least KL is returned.

    Args:
        groups: options of each group.
        minimize: the quantity that is made small, `KL` or one of the options' own.
        limits: quantity → what its sum may be at most.
    """
    limits = limits or {}
    pruned = [undominated(options, (minimize, KL, *limits)) for options in groups]
    found = _minimize(pruned, minimize, limits)
    if found is None or minimize == KL:
        return found
    held = found.amount(minimize)
    return _minimize(pruned, KL, {**limits, minimize: held if isinstance(held, int) else held * _HELD}) or found


def undominated(options: Sequence[Option], quantities: Sequence[str]) -> tuple[Option, ...]:
    """Options of one group that no other beats in all of `quantities`, by rising amount of the first of them.

    Of options that are equal in all of them the first by key is kept.
    """
    names = tuple(dict.fromkeys(quantities))
    ordered = sorted(options, key=lambda option: (*(option.amount(name) for name in names), option.key))
    amounts_OQ = np.array([[option.amount(name) for name in names] for option in ordered], dtype=np.float64)
    kept: list[int] = []
    for index in range(len(ordered)):
        # what dominates an option sorts before it, and is itself kept or dominated by one that is
        if not kept or not (amounts_OQ[kept] <= amounts_OQ[index]).all(1).any():
            kept.append(index)
    return tuple(ordered[index] for index in kept)


def front(groups: Sequence[Sequence[Option]], num_points: int, quantity: str) -> tuple[Solution, ...]:
    """Least KL at `num_points` amounts of a quantity, from the least possible to the best possible, by rising amount.

    Every point is the exact optimum of its amount, so none dominates another; equal ones appear once.
    """
    pruned = [undominated(options, (quantity, KL)) for options in groups]
    least = Solution(options=tuple(options[0] for options in pruned))
    best = Solution(options=tuple(options[-1] for options in pruned))
    low, high = (max(end.amount(quantity), np.finfo(float).tiny) for end in (least, best))
    points = [least]
    for amount in np.geomspace(low, high, num_points)[1:-1]:
        solution = solve(pruned, minimize=KL, limits={quantity: float(amount)})
        if solution is not None and solution.kl < points[-1].kl:
            points.append(solution)
    if best.kl < points[-1].kl:
        points.append(best)
    return tuple(points)


def _minimize(groups: Sequence[Sequence[Option]], objective: str, limits: Mapping[str, float]) -> Solution | None:
    fitting = [[o for o in options if all(o.amount(q) <= m * _SLACK for q, m in limits.items())] for options in groups]
    if any(not options for options in fitting) or any(limit < 0 for limit in limits.values()):
        return None
    if not groups:
        return Solution(options=())
    while True:
        flat = [option for options in fitting for option in options]
        unit = max(option.amount(objective) for option in flat) or 1.0
        chosen = _binary_program(
            np.array([option.amount(objective) / unit for option in flat]),
            [len(options) for options in fitting],
            [_row([option.amount(quantity) for option in flat], limit) for quantity, limit in limits.items()],
        )
        if chosen is None:
            return None
        found = Solution(options=tuple(options[index] for options, index in zip(fitting, chosen, strict=True)))
        best = found.amount(objective)
        # the solver's gap is relative to `unit`: where one option dwarfs the optimum, solve again without it
        if best == 0 or unit <= _LARGEST_UNIT * best:
            return found
        fitting = [[option for option in options if option.amount(objective) <= best * _SLACK] for options in fitting]


def _row(values: Sequence[float], limit: float) -> tuple[Array, float]:
    """Coefficients and right side of one limit, both of order one."""
    if all(isinstance(value, int) for value in values):
        divisor = math.gcd(*(int(value) for value in values)) or 1
        whole = math.floor(limit * _SLACK / divisor) + 0.5
        return np.array([value // divisor / whole for value in values]), 1.0
    unit = limit if limit > 0 else 1.0
    return np.array([value / unit for value in values]), limit / unit * _SLACK


def _binary_program(cost: Array, group_sizes: Sequence[int], limits: Sequence[tuple[Array, float]]) -> list[int] | None:
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
