"""Codes in tiles of rows: where each code of a packed matrix lies so that a vector instruction expands 32 at once.

A *tile* is 64 rows, and all of its codes lie together. A *code vector* is 32 codes: 16 rows, two neighbouring columns
each, which is how dot products of bf16 pairs take their operands. Four code vectors are the 64 rows of a *pair* of
columns. Codes of b bits are cut out of words by shifts, so that they lie in *planes*:

    4 bits    one word holds a code of four code vectors: bits 0–3, 4–7, 8–11, 12–15
    8 bits    one word holds two
    6 bits    three words hold eight: two whole codes in each, and two more made up of what is left of the three
    3 bits    three words hold sixteen: five whole codes in each, and one made up of the three bits that are left

In general a *unit* of n vectors holds 16 n / b code vectors: each word ⌊16 / b⌋ whole codes from its lowest bit on, and
the bits that are left at the top of the words, one after the other, the rest of the codes. No bit is wasted; a matrix
is filled up to whole tiles and units only.

Of 16 bits, which are numbers as they stand, a word holds one.

Columns of a group of scales are filled up to whole units by themselves, so that no unit straddles two groups.

Rejected: codes as they are packed in files (each row of a tile would need shifts of its own, and a horizontal sum at
the end), and lanes along a row, for which a group's scale is a broadcast of its own in every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

#: Rows of a tile; rows of a code vector.
TILE_ROWS, VECTOR_ROWS = 64, 16
#: Code vectors of a pair of columns.
PAIR_VECTORS = TILE_ROWS // VECTOR_ROWS
#: Words of a vector.
VECTOR_WORDS = 32
WORD_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bits that lie together: `num_bits` from bit `shift` of a word on are those of a code from `target` on."""

    #: Which vector of the unit the word is in.
    vector: int
    shift: int
    num_bits: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """The vectors that hold whole codes together."""

    bits: int
    #: Vectors of 32 words.
    num_vectors: int
    #: Of each code vector, the pieces that make up its codes.
    codes: tuple[tuple[Piece, ...], ...]

    @property
    def repeats(self) -> int:
        """Units that hold whole pairs of columns together."""
        return max(1, PAIR_VECTORS // len(self.codes))

    @property
    def num_pairs(self) -> int:
        """Pairs of columns that so many units hold."""
        return len(self.codes) * self.repeats // PAIR_VECTORS


@cache
def unit_of(bits: int) -> Unit:
    """The unit of codes of 1 to 8 bits, and of 16."""
    num_whole, rest = divmod(WORD_BITS, bits)
    num_vectors = 1
    while rest * num_vectors % bits:
        num_vectors += 1
    codes: list[tuple[Piece, ...]] = [
        (Piece(vector=vector, shift=bits * i, num_bits=bits, target=0),)
        for vector in range(num_vectors)
        for i in range(num_whole)
    ]
    left = [(vector, WORD_BITS - rest + i) for vector in range(num_vectors) for i in range(rest)]
    codes += [_joined(left[i : i + bits]) for i in range(0, len(left), bits)]
    return Unit(bits=bits, num_vectors=num_vectors, codes=tuple(codes))


def _joined(places: list[tuple[int, int]]) -> tuple[Piece, ...]:
    """The pieces of a code whose bits lie at these (vector, bit)."""
    pieces = []
    for vector in sorted({vector for vector, _ in places}):
        of_vector = [i for i, (of, _) in enumerate(places) if of == vector]
        first = of_vector[0]
        pieces.append(Piece(vector=vector, shift=places[first][1], num_bits=len(of_vector), target=first))
    return tuple(pieces)


@cache
def unit_columns(bits: int) -> int:
    """Columns that are filled up together: 2, 4 or 8."""
    return 2 * unit_of(bits).num_pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The sizes of a matrix of codes in tiles."""

    rows: int
    columns: int
    bits: int
    #: Columns under one scale; all of them without groups.
    group_columns: int

    @property
    def num_tiles(self) -> int:
        """Tiles, the last one filled up."""
        return -(-self.rows // TILE_ROWS)

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return -(-self.columns // self.group_columns)

    @property
    def group_pairs(self) -> int:
        """Pairs of columns of every group but the last."""
        return self._pairs(self.group_columns)

    @property
    def last_pairs(self) -> int:
        """Pairs of columns of the last group."""
        return self._pairs(self.columns - (self.num_groups - 1) * self.group_columns)

    @property
    def num_pairs(self) -> int:
        """Pairs of columns of a tile."""
        return (self.num_groups - 1) * self.group_pairs + self.last_pairs

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.num_pairs * pair_bytes(self.bits)

    @property
    def column_places(self) -> npt.NDArray[np.int64]:
        """Where each column lies among the columns of a tile: int64 [K]."""
        columns = np.arange(self.columns)
        return columns // self.group_columns * (2 * self.group_pairs) + columns % self.group_columns

    def _pairs(self, columns: int) -> int:
        step = unit_columns(self.bits)
        return -(-columns // step) * step // 2


def pair_bytes(bits: int) -> int:
    """Bytes of a pair of columns of a tile."""
    return 2 * TILE_ROWS * bits // 8


def constant(number: int) -> Any:
    """A number that kernels are compiled for: Numba tells types apart, and its length is part of a tuple's type."""
    return (None,) * number
