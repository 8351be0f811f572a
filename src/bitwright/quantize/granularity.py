"""Which numbers share a scale, and the matrix cut into such groups.

A tensor is looked at as a matrix [rows, columns] whose last dimension is the one that a matmul sums over: a weight is
[out_features, in_features], activations are [tokens, in_features].

    tensor      one scale                                         scales [1, 1]
    row         one scale per row: a weight's output channel,     scales [rows, 1]
                an activation's token
    group(n)    one scale per n consecutive columns of a row      scales [rows, ceil(columns / n)]
    block(r,c)  one scale per r rows × c columns                  scales [ceil(rows / r), ceil(columns / c)]

Where n does not divide the columns the last group is shorter: nothing is padded in storage, and whoever hands the
tensor to an engine that refuses ragged groups can ask `has_ragged_group`. A scale per attention head is `row` or
`group(head_dim)`, by how the heads were laid out as a matrix; it needs no scope of its own.

Legend: N rows, K columns, R rows of groups, G groups along a row, g elements of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from bitwright.errors import SchemeError

if TYPE_CHECKING:  # schemes are read and shown without torch
    from torch import Tensor

Scope = Literal["tensor", "row", "group", "block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """The set of elements that share one scale.

    Raises:
        SchemeError: an unknown scope, or sizes that do not go with it.
    """

    #: "tensor", "row" (channel of a weight, token of an activation), "group" (consecutive columns of one row) or
    #: "block" (a rectangle of rows and columns).
    scope: Scope
    #: Columns per group or block; 0 otherwise.
    group_size: int = 0
    #: Rows per block; 0 unless scope is "block".
    block_rows: int = 0

    def __post_init__(self) -> None:
        for name, size in (("group_size", self.group_size), ("block_rows", self.block_rows)):
            if not isinstance(size, int) or size < 0:
                raise SchemeError(f"{name} is {size!r}; give a whole number of elements, 0 where it does not apply")
        if self.scope not in get_args(Scope):
            raise SchemeError(f"unknown scope {self.scope!r}; use one of {', '.join(get_args(Scope))}")
        if (self.scope in ("group", "block")) != (self.group_size > 0):
            raise SchemeError(
                f"group_size is {self.group_size} for scope {self.scope!r}; it is positive for groups and blocks only"
            )
        if (self.scope == "block") != (self.block_rows > 0):
            raise SchemeError(
                f"block_rows is {self.block_rows} for scope {self.scope!r}; it is positive for blocks only"
            )

    def group_columns(self, columns: int) -> int:
        """Columns under one scale of a row of `columns` elements."""
        return min(self.group_size, columns) if self.group_size else columns

    def group_rows(self, rows: int) -> int:
        """Rows under one scale of a matrix of `rows` rows; at least 1."""
        if self.scope == "tensor":
            return max(rows, 1)
        return max(min(self.block_rows, rows), 1)

    def num_groups(self, columns: int) -> int:
        """Scales along one row."""
        return -(-columns // self.group_columns(columns)) if columns else 0

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape [R, G] of the scales of a [rows, columns] matrix."""
        if self.scope == "tensor":
            return 1, 1
        return -(-rows // self.group_rows(rows)), self.num_groups(columns)

    def num_scales(self, rows: int, columns: int) -> int:
        """Scales of a whole [rows, columns] matrix."""
        scale_rows, scale_columns = self.scale_shape(rows, columns)
        return scale_rows * scale_columns

    def has_ragged_group(self, columns: int) -> bool:
        """Whether the last group of a row is shorter than the others."""
        return self.group_size > 0 and columns % self.group_size != 0

    def __str__(self) -> str:
        match self.scope:
            case "group":
                return f"group({self.group_size})"
            case "block":
                return f"block({self.block_rows}, {self.group_size})"
            case scope:
                return scope


TENSOR = Granularity(scope="tensor")
ROW = Granularity(scope="row")


def group(size: int) -> Granularity:
    """Groups of `size` consecutive elements of a row."""
    return Granularity(scope="group", group_size=size)


def block(rows: int, columns: int) -> Granularity:
    """Blocks of `rows` × `columns` elements."""
    return Granularity(scope="block", group_size=columns, block_rows=rows)


def to_groups(x_NK: Tensor, granularity: Granularity) -> Tensor:
    """View a matrix as groups [R, G, g]: [N, G, g] for rows and groups, [1, 1, N·K] per tensor.

    A short last group is filled up by repeating the row's last element (and a block the last row): minimum, maximum and
    amax stay what they are. `is_filling` tells the copies from the others.
    """
    rows, columns = x_NK.shape
    if granularity.scope == "tensor":
        return x_NK.reshape(1, 1, rows * columns)
    filled_rows, filled_columns = _filled_shape(rows, columns, granularity)
    if (filled_rows, filled_columns) != (rows, columns):
        filled = x_NK.new_empty(filled_rows, filled_columns)
        filled[:rows, :columns] = x_NK
        filled[:rows, columns:] = x_NK[:, -1:]
        filled[rows:] = filled[rows - 1 : rows]
        x_NK = filled
    return _cut(x_NK, rows, columns, granularity)


def from_groups(grouped: Tensor, rows: int, columns: int, granularity: Granularity) -> Tensor:
    """Undo `to_groups`: [R, G, g] → [N, K]."""
    if granularity.scope == "tensor":
        return grouped.reshape(rows, columns)
    filled_rows, filled_columns = _filled_shape(rows, columns, granularity)
    block_rows, width = granularity.group_rows(rows), max(granularity.group_columns(columns), 1)
    if block_rows > 1:
        grouped = grouped.reshape(filled_rows // block_rows, -1, block_rows, width).transpose(1, 2)
    whole = grouped.reshape(filled_rows, filled_columns)
    return whole if whole.shape == (rows, columns) else whole[:rows, :columns].contiguous()


def is_filling(x_NK: Tensor, granularity: Granularity) -> Tensor | None:
    """Which elements of `to_groups(x_NK)` are copies that fill up a short group: bool [R, G, g]; None if none is."""
    rows, columns = x_NK.shape
    filled_rows, filled_columns = _filled_shape(rows, columns, granularity)
    if (filled_rows, filled_columns) == (rows, columns):
        return None
    copies = x_NK.new_ones(filled_rows, filled_columns)
    copies[:rows, :columns] = 0
    return _cut(copies, rows, columns, granularity) > 0


def spread(per_group_RG: Tensor, rows: int, columns: int, granularity: Granularity) -> Tensor:
    """Repeat each group's number over its elements: [R, G] → [N, K], or what broadcasts to it where one covers all."""
    block_rows, width = granularity.group_rows(rows), granularity.group_columns(columns)
    if per_group_RG.shape[0] > 1 and block_rows > 1:
        per_group_RG = per_group_RG.repeat_interleave(block_rows, dim=0)[:rows]
    if per_group_RG.shape[1] > 1:
        per_group_RG = per_group_RG.repeat_interleave(width, dim=1)[:, :columns]
    return per_group_RG


def _filled_shape(rows: int, columns: int, granularity: Granularity) -> tuple[int, int]:
    """Rows and columns once every group is full."""
    if granularity.scope == "tensor":
        return rows, columns
    scale_rows, num_groups = granularity.scale_shape(rows, columns)
    return scale_rows * granularity.group_rows(rows), num_groups * granularity.group_columns(columns)


def _cut(filled_NK: Tensor, rows: int, columns: int, granularity: Granularity) -> Tensor:
    """Cut a matrix whose groups are all full into [R, G, g]; a view unless a block has several rows."""
    scale_rows, num_groups = granularity.scale_shape(rows, columns)
    block_rows, width = granularity.group_rows(rows), max(granularity.group_columns(columns), 1)
    if block_rows > 1:
        filled_NK = filled_NK.reshape(scale_rows, block_rows, num_groups, width).transpose(1, 2)
    return filled_NK.reshape(scale_rows, num_groups, block_rows * width)
