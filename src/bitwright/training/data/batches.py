"""Rows → batches, shuffled by seed and epoch; where a run stands in its data is one number.

The rows form an endless stream: epoch after epoch, each in an order of its own.

    row k of the stream = order(seed, epoch)[k mod rows],   epoch = ⌊k / rows⌋
    order(seed, epoch)  = rows sorted by 64 random bits of (seed, epoch, row): `formats/philox.py`

A batch is the next rows of the stream, so none is short and none is dropped; one may begin in one epoch and end in the
next. With many ranks the next `batch · world_size` rows belong together and each rank takes its part of them: two ranks
with batches of 4 read what one process with batches of 8 reads, row for row. The position, rows taken by all ranks
together, therefore holds for any number of ranks.

Rejected: torch's samplers, whose order is a state of a generator that has to be replayed; NumPy's `permutation`, whose
order may change between releases.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.errors import DataError
from bitwright.formats.philox import philox4x32
from bitwright.training.data.token_rows import TokenRows


def order_of_epoch(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the order in which an epoch reads rows 0 … num_rows − 1."""
    index = np.arange(num_rows, dtype=np.uint64)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    low, high, _, _ = philox4x32(
        (index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), np.uint64(epoch), np.uint64(1)),  # type: ignore[arg-type]
        key,
    )
    return np.argsort(low | (high << np.uint64(32)), kind="stable")


class Batches:
    """An endless iterator of one rank's batches; each is what a model is called with.

    Args:
        rows: what to read.
        batch: rows of a batch of this rank.
        seed: of the order.
        rank, world_size: which part of the rows is this process's.

    Raises:
        DataError: there is no row, or a number is none that a batch, a process or a seed can have.
    """

    def __init__(self, rows: TokenRows, *, batch: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        if rows.num_rows == 0:
            raise DataError(f"'{rows.source}' has no row to train on; give more text")
        if not _is_whole(batch) or batch < 1:
            raise DataError(f"batch is {batch!r}, but a batch has a whole number of rows, at least one; give 1 or more")
        if not _is_whole(seed):
            raise DataError(f"seed is {seed!r}; give a whole number")
        if not _is_whole(world_size) or world_size < 1:
            raise DataError(f"world_size is {world_size!r}, but there is at least one process; give how many there are")
        if not _is_whole(rank) or not 0 <= rank < world_size:
            raise DataError(
                f"rank is {rank!r}, but the ranks of {world_size} processes are 0 to {world_size - 1}; give this "
                "process's"
            )
        self.rows = rows
        self.batch = int(batch)
        self.seed = int(seed)
        self.rank = int(rank)
        self.world_size = int(world_size)
        #: Rows of the stream that all ranks together have taken.
        self.num_taken = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> float:
        """How often the rows were read: 1.5 is in the middle of the second time."""
        return self.num_taken / self.rows.num_rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return int64 `input_ids` and `labels` [batch, sequence_length]; `attention_mask` where rows are filled up."""
        first = self.num_taken + self.rank * self.batch
        chosen = torch.tensor([self._row_at(place) for place in range(first, first + self.batch)])
        self.num_taken += self.batch * self.world_size
        return as_batch(self.rows, chosen)

    def _row_at(self, place: int) -> int:
        epoch, position = divmod(place, self.rows.num_rows)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, order_of_epoch(self.seed, epoch, self.rows.num_rows)
        return int(self._order[1][position])

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and whose it is."""
        return {
            "source": self.rows.source,
            "rows_hash": self.rows.hash,
            "num_rows": self.rows.num_rows,
            "sequence_length": self.rows.sequence_length,
            "seed": self.seed,
            "batch": self.batch,
            "num_taken": self.num_taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Go on where a `state_dict` left off, with any number of ranks and any batch.

        Raises:
            DataError: it belongs to other rows, or to another seed; says what differs.
        """
        here = self.state_dict()
        differing = [
            f"{name} is {here[name]!r}, not {state.get(name)!r}"
            for name in here
            if name not in ("num_taken", "source", "batch") and here[name] != state.get(name)
        ]
        if differing:
            raise DataError(
                f"the position was saved for other data: {'; '.join(differing)}; give the text, tokenizer, "
                "sequence_length and seed that the run began with"
            )
        self.num_taken = int(state["num_taken"])
        return self


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_batch(rows: TokenRows, chosen: Tensor | slice) -> dict[str, Tensor]:
    """Return rows as what a model is called with."""
    batch = {"input_ids": rows.input_ids[chosen].long(), "labels": rows.labels[chosen].long()}
    if rows.padding is not None:
        batch["attention_mask"] = (~rows.padding[chosen]).long()
    return batch
