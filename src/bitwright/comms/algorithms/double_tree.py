"""Double binary tree: half of the data goes up and down one binary tree, half another whose leaves are its inner ranks.

One tree alone keeps its inner ranks busy (up S, down 2S) and its leaves idle (up S). With two, every rank is a leaf of
one and inner in the other: 1.5 S + 0.5 S = 2 S at most, 2(n − 1)/n · S on average. Each half is cut into m segments
that follow one another, up and down at once: 2⌈log2 n⌉ + m − 1 steps.

Tree one: rank 0 is the root; of any other rank let b be its lowest bit that is set; its parent is (r − b) | 2b, or
r − b where that lies beyond the last rank. Odd ranks are leaves. Tree two is its mirror (n even) or moved on by one
(n odd). For a broadcast the trees join the ranks but 0, which feeds both roots.
Source: Sanders, Speck and Träff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan; this is the
"Tree" of NVIDIA/nccl (src/graph/trees.cc).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from bitwright.comms.schedule import Algorithm, Layout, Recipe, Transfer


@dataclass(frozen=True)
class Tree:
    """Rank → its parent; None for the root."""

    parents: dict[int, int | None]

    @cached_property
    def heights(self) -> dict[int, int]:
        """Rank → edges down to its deepest leaf."""
        found = dict.fromkeys(self.parents, 0)
        for rank in sorted(self.parents, key=lambda rank: self.depths[rank], reverse=True):
            parent = self.parents[rank]
            if parent is not None:
                found[parent] = max(found[parent], found[rank] + 1)
        return found

    @cached_property
    def depths(self) -> dict[int, int]:
        """Rank → edges up to the root."""
        found: dict[int, int] = {}
        for rank in self.parents:
            depth, above = 0, self.parents[rank]
            while above is not None:
                depth, above = depth + 1, self.parents[above]
            found[rank] = depth
        return found

    @property
    def root(self) -> int:
        """The rank without a parent."""
        return next(rank for rank, parent in self.parents.items() if parent is None)


def two_trees(n: int) -> tuple[Tree, Tree]:
    """Both trees over ranks 0 to n − 1."""
    first: dict[int, int | None] = {0: None}
    for rank in range(1, n):
        lowest = rank & -rank
        above = (rank - lowest) | (lowest << 1)
        first[rank] = above if above < n else rank - lowest
    # Mirrored, or moved on by one.
    other = [n - 1 - rank if n % 2 == 0 else (rank + 1) % n for rank in range(n)]
    second = {other[rank]: None if above is None else other[above] for rank, above in first.items()}
    return Tree(first), Tree(second)


def all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Segment s of a rank of height h goes up at step h + s; it comes down as soon as the root has it."""
    segments = layout.num_segments
    found = []
    for half, tree in enumerate(two_trees(n)):
        top = tree.heights[tree.root]
        for rank, parent in tree.parents.items():
            if parent is None:
                continue
            for segment in range(segments):
                chunk = half * segments + segment
                up, down = tree.heights[rank] + segment, top + segment + tree.depths[rank] - 1
                found.append(Transfer(up, rank, parent, chunk, chunk + 1, chunk, True))
                found.append(Transfer(down, parent, rank, chunk, chunk + 1, chunk, False))
    yield from sorted(found)


def broadcast(n: int, layout: Layout) -> Iterator[Transfer]:
    """Rank 0 sends one half to each root of two trees over the others."""
    segments = layout.num_segments
    found = []
    for half, tree in enumerate(two_trees(n - 1)):
        for rank, parent in tree.parents.items():
            source = 0 if parent is None else parent + 1
            for segment in range(segments):
                chunk = half * segments + segment
                step = segment + tree.depths[rank]
                found.append(Transfer(step, source, rank + 1, chunk, chunk + 1, chunk, False))
    yield from sorted(found)


ALGORITHMS = (
    Algorithm(
        name="tree",
        description="two binary trees, half of the data each, and a pipeline",
        source="Sanders, Speck and Träff 2009",
        recipes={
            "all_reduce": Recipe(generate=all_reduce, num_chunks=lambda n, layout: 2 * layout.num_segments),
            "broadcast": Recipe(generate=broadcast, num_chunks=lambda n, layout: 2 * layout.num_segments),
        },
    ),
)
