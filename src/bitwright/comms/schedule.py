"""A collective as data: which rank sends which slice to whom at which step, to be added there or copied.

    Transfer(step=0, source=1, destination=2, first=3, stop=4, at=3, reduces=True)

Every rank has a buffer of `num_chunks` chunks. Steps follow one another; within one, all transfers read what buffers
held before it. A slice is a range of chunks, [first, stop) at the sender, at chunk `at` on at the receiver (elsewhere
than `first` for all-to-all only, whose received half of the buffer is apart). The length of a chunk follows from that
of the buffer, so one schedule serves all sizes, ragged ones too: chunk i of m starts at ⌊i·length/m⌋.

What arrives with `reduces` is added; several in one step are added in the order of ranks, the receiver's own numbers
among them at its place, so that ranks that add the same numbers get the same bits. A transfer of a rank to itself moves
within its memory and costs no byte on the wire.

Rejected: code that sends (it can be run but neither counted nor drawn), and a graph of dependencies (steps say as much
for these algorithms, and a reader follows them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple


class Transfer(NamedTuple):
    """One slice on its way from one rank to another."""

    step: int
    source: int
    destination: int
    #: Chunks [first, stop) of the sender.
    first: int
    stop: int
    #: Chunk of the receiver where the slice goes.
    at: int
    #: Added to what is there, rather than put in its place.
    reduces: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What an algorithm may want to know beside the number of ranks."""

    #: Consecutive ranks that share a node; ranks of several nodes are as many on each.
    ranks_per_node: int
    #: Pieces that a pipeline cuts its data into.
    num_segments: int


#: (ranks, layout) → transfers, step by step.
Generator = Callable[[int, Layout], Iterator[Transfer]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one algorithm does one collective."""

    generate: Generator
    #: (ranks, layout) → chunks of a buffer.
    num_chunks: Callable[[int, Layout], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One way of moving data, for each collective that it can do."""

    name: str
    description: str
    source: str
    recipes: Mapping[str, Recipe]
    #: It moves data along nodes, so that ranks have to fill them evenly.
    needs_nodes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One collective over so many ranks."""

    op: str
    algorithm: str
    num_ranks: int
    num_chunks: int
    layout: Layout
    transfers: tuple[Transfer, ...]

    @property
    def num_steps(self) -> int:
        """Steps one after the other."""
        return self.transfers[-1].step + 1 if self.transfers else 0

    def steps(self) -> Iterator[tuple[Transfer, ...]]:
        """The transfers of each step."""
        for _, found in groupby(self.transfers, key=lambda transfer: transfer.step):
            yield tuple(found)

    def bounds(self, length: int) -> tuple[int, ...]:
        """Where chunks start in a buffer of so many elements, and where the last one ends."""
        return tuple(index * length // self.num_chunks for index in range(self.num_chunks + 1))

    def shard(self, rank: int, length: int) -> tuple[int, int]:
        """[start, stop) of a rank's shard: what it keeps of a reduce-scatter, brings to an all-gather."""
        bounds = self.bounds(length)
        per_rank = self.num_chunks // self.num_ranks
        return bounds[rank * per_rank], bounds[(rank + 1) * per_rank]
