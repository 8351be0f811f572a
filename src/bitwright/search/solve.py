"""Choosing: the exact best assignment under the limits, and the whole front.

A multiple-choice knapsack. Each group of sites that must agree takes exactly one of its options; an option has a cost
(predicted KL, nats per token), stored bytes of its own, and whether they count for the effective bits:

    minimise    Σ_g Σ_o  objective_go · z_go
    subject to  Σ_o z_go = 1 for every group g,   Σ KL ≤ limit,   Σ bytes ≤ limit,   Σ decoder bytes ≤ limit,   z binary

Predicted KLs add up (the second-order expansion of KL is a sum over independent errors), which is what makes this a
linear program in binaries. It is solved by HiGHS to proven optimality; an option that another one beats in both KL and
bytes is dropped before. Rejected: the greedy by gain per byte, which is only optimal on the convex hull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import highspy
import numpy as np
import numpy.typing as npt

Objective = Literal["kl", "bytes"]


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

    Ties (equal objective within the solver's tolerance) go to the smaller of the other quantity.
    """
    pruned = [undominated(options) for options in groups]
    if not pruned:
        return Solution(options=())
    flat = [option for options in pruned for option in options]
    kl = np.array([option.kl for option in flat])
    num_bytes = np.array([float(option.num_bytes) for option in flat])
    # scaled so that both quantities are of order one; a trace of the other one breaks ties
    kl_unit = max(float(kl.max()), 1e-30)
    bytes_unit = max(float(num_bytes.max()), 1.0)
    trace = 1e-9
    cost = (
        kl / kl_unit + trace * num_bytes / bytes_unit
        if minimize == "kl"
        else num_bytes / bytes_unit + trace * kl / kl_unit
    )
    decoder_bytes = num_bytes * np.array([float(option.counts_as_decoder) for option in flat])
    limits = [
        (quantity / unit, limit / unit)
        for quantity, unit, limit in (
            (kl, kl_unit, max_kl),
            (num_bytes, bytes_unit, max_bytes),
            (decoder_bytes, bytes_unit, max_decoder_bytes),
        )
        if limit is not None
    ]
    chosen = _binary_program(cost, [len(options) for options in pruned], limits)
    if chosen is None:
        return None
    return Solution(options=tuple(options[index] for options, index in zip(pruned, chosen, strict=True)))


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
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("threads", 1)
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    assert status == highspy.HighsModelStatus.kOptimal, f"the solver stopped with {status}"
    solution = np.array(solver.getSolution().col_value)
    return [int(np.argmax(solution[start:end])) for start, end in zip(starts[:-1], starts[1:], strict=True)]
