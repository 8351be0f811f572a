"""Rows of numbers that arrive batch by batch, one row a token: kept in memory, or on disk (`models/spool.py`)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bitwright.models.spool import Kept, Spool


class Rows(Protocol):
    """Rows that arrive batch by batch."""

    def reserve(self, num_rows: int, width: int) -> slice:
        """Room for so many rows of `width` numbers; they are zero until they are written."""

    def write(self, rows: slice, values: Tensor) -> None:
        """Fill rows that were reserved together."""

    def read(self, rows: slice) -> Tensor:
        """Rows that were reserved together."""

    @property
    def tensor(self) -> Tensor:
        """All rows so far."""


class HeldRows:
    """Rows in one tensor of the final size.

    Pages of the tensor that no row reaches cost no memory. Keeping the batches and joining them at the end took twice
    the memory and left the heap in pieces.
    """

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        self._capacity = capacity
        self._dtype = dtype
        self._held = torch.empty(0)
        self._used = 0

    def reserve(self, num_rows: int, width: int) -> slice:
        """See `Rows`."""
        if self._used + num_rows > self._capacity or self._held.numel() == 0:
            self._capacity = max(self._capacity, 2 * (self._used + num_rows) if self._used else num_rows)
            larger = torch.empty(self._capacity, width, dtype=self._dtype)
            if self._used:
                larger[: self._used] = self._held[: self._used]
            self._held = larger
        rows = slice(self._used, self._used + num_rows)
        self._held[rows].zero_()
        self._used += num_rows
        return rows

    def write(self, rows: slice, values: Tensor) -> None:
        """See `Rows`."""
        self._held[rows] = values

    def read(self, rows: slice) -> Tensor:
        """See `Rows`."""
        return self._held[rows]

    @property
    def tensor(self) -> Tensor:
        """See `Rows`."""
        return self._held[: self._used]


class SpooledRows:
    """Rows on disk: every reservation is a piece of its own."""

    def __init__(self, spool: Spool, dtype: torch.dtype) -> None:
        self._spool = spool
        self._dtype = dtype
        self._pieces: dict[int, Kept] = {}
        self._used = 0

    def reserve(self, num_rows: int, width: int) -> slice:
        """See `Rows`."""
        rows = slice(self._used, self._used + num_rows)
        if num_rows:
            self._pieces[rows.start] = self._spool.reserve((num_rows, width), self._dtype)
        self._used += num_rows
        return rows

    def write(self, rows: slice, values: Tensor) -> None:
        """See `Rows`."""
        if rows.start in self._pieces:
            self._spool.write(self._pieces[rows.start], values)

    def read(self, rows: slice) -> Tensor:
        """See `Rows`."""
        return self._spool.read(self._pieces[rows.start]) if rows.start in self._pieces else torch.empty(0)

    @property
    def tensor(self) -> Tensor:
        """See `Rows`."""
        pieces = list(self._pieces.items())
        width = pieces[0][1].shape[1] if pieces else 0
        joined = torch.zeros(self._used, width, dtype=self._dtype)
        for start, kept in pieces:
            self._spool.read_into(kept, joined[start : start + kept.shape[0]])
        return joined


def append(kept: Rows, values: Tensor) -> slice:
    """Add rows [n, width]; returns where they lie."""
    rows = kept.reserve(*values.shape)
    kept.write(rows, values)
    return rows
