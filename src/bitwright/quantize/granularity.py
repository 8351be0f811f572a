"""Which numbers share a scale.

A tensor is looked at as a matrix [rows, columns] whose last dimension is the one that a matmul sums over: a weight is
[out_features, in_features], activations are [tokens, in_features].

    tensor      one scale                                         scales [1, 1]
    row         one scale per row: a weight's output channel,     scales [rows, 1]
                an activation's token
    group(n)    one scale per n consecutive columns of a row      scales [rows, ceil(columns / n)]

Where n does not divide the columns the last group is shorter: nothing is padded in storage, and whoever hands the
tensor to an engine that refuses ragged groups can ask `has_ragged_group`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """The set of elements that share one scale."""

    #: "tensor", "row" (channel of a weight, token of an activation) or "group" (consecutive columns of one row).
    scope: Literal["tensor", "row", "group"]
    #: Elements per group along the columns; 0 unless scope is "group".
    group_size: int = 0

    def __post_init__(self) -> None:
        if (self.scope == "group") != (self.group_size > 0):
            raise ValueError(
                f"group_size is {self.group_size} for scope {self.scope!r}; it is positive for groups only"
            )

    def group_columns(self, columns: int) -> int:
        """Columns under one scale of a row of `columns` elements."""
        return min(self.group_size, columns) if self.scope == "group" else columns

    def num_groups(self, columns: int) -> int:
        """Scales along one row."""
        return -(-columns // self.group_columns(columns)) if columns else 0

    def num_scales(self, rows: int, columns: int) -> int:
        """Scales of a whole [rows, columns] matrix."""
        return 1 if self.scope == "tensor" else rows * self.num_groups(columns)

    def has_ragged_group(self, columns: int) -> bool:
        """Whether the last group of a row is shorter than the others."""
        return self.scope == "group" and columns % self.group_size != 0

    def __str__(self) -> str:
        return f"group({self.group_size})" if self.scope == "group" else self.scope


TENSOR = Granularity(scope="tensor")
ROW = Granularity(scope="row")


def group(size: int) -> Granularity:
    """Groups of `size` consecutive elements of a row."""
    return Granularity(scope="group", group_size=size)
