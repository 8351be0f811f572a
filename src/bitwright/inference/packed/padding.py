"""Shapes that kernels take: multiples of 16, 32 or 128, and matrices of other shapes filled up with zeros.

Zeros add nothing to a product, so filling columns changes no output; filled rows and tokens are cut off again. Weights
are filled once, when they are prepared; inputs on every call, by a plan that is made once for each number of tokens and
kept with the matrix. What was filled is counted (`PaddingCounts`), since it is multiplied like everything else.

Legend: M tokens, N rows of the weight, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F

from bitwright.inference.counters import PaddingCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiples:
    """What the shape of a kernel's operands has to be a multiple of; 1: anything."""

    tokens: int = 1
    #: The least number of tokens.
    min_tokens: int = 0
    rows: int = 1
    columns: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedShape:
    """The tokens and columns of an input, and what they are filled up to."""

    tokens: int
    columns: int
    padded_tokens: int
    padded_columns: int

    @property
    def num_filled(self) -> int:
        """Numbers that are filling."""
        return self.padded_tokens * self.padded_columns - self.tokens * self.columns


@dataclass(kw_only=True, slots=True, eq=False)
class Padding:
    """Fills up the inputs of one matrix."""

    multiples: Multiples
    counts: PaddingCounts
    #: (tokens, columns) → plan.
    plans: dict[tuple[int, int], PaddedShape] = field(default_factory=dict)

    def plan(self, tokens: int, columns: int) -> PaddedShape:
        """The shape that an input is filled up to; found once for each."""
        known = self.plans.get((tokens, columns))
        if known is None:
            known = self.plans[tokens, columns] = PaddedShape(
                tokens=tokens,
                columns=columns,
                padded_tokens=up_to(max(tokens, self.multiples.min_tokens), self.multiples.tokens),
                padded_columns=up_to(columns, self.multiples.columns),
            )
        return known

    def pad(self, x_MK: Tensor) -> Tensor:
        """The input with zeros behind its columns and tokens, where its shape asks for them."""
        shape = self.plan(*x_MK.shape)
        self.counts.calls += 1
        self.counts.values += shape.padded_tokens * shape.padded_columns
        self.counts.padded_values += shape.num_filled
        return fill(x_MK, shape.padded_tokens, shape.padded_columns)


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def fill(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix with zeros behind its rows and columns; itself where it is as large already."""
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))
