"""Ring: everybody sends to the next rank and receives from the one before, all the time.

    reduce-scatter   step t: rank r sends chunk r − 1 − t, the next adds it; after n − 1 steps chunk r is whole at r
    all-gather       step t: rank r sends chunk r − t on; after n − 1 steps all have all
    all-reduce       one after the other: 2(n − 1) steps, 2(n − 1)/n · S sent by every rank, which is the least possible
    broadcast        segments pass from rank to rank: n − 2 + m steps with m segments, S sent by all but the last

Each of its 2(n − 1) steps waits for a neighbour, so that time at small sizes grows with n; and a sum passes through
n − 1 additions one after the other, each rounded to what travels (`wire`).
Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.comms.schedule import Algorithm, Layout, Recipe, Transfer


def reduce_scatter(n: int, layout: Layout) -> Iterator[Transfer]:
    """Chunk r is whole at rank r in the end."""
    for step in range(n - 1):
        for rank in range(n):
            chunk = (rank - 1 - step) % n
            yield Transfer(step, rank, (rank + 1) % n, chunk, chunk + 1, chunk, True)


def all_gather(n: int, layout: Layout) -> Iterator[Transfer]:
    """Chunk r comes from rank r."""
    for step in range(n - 1):
        for rank in range(n):
            chunk = (rank - step) % n
            yield Transfer(step, rank, (rank + 1) % n, chunk, chunk + 1, chunk, False)


def all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(n, layout)
    for transfer in all_gather(n, layout):
        yield transfer._replace(step=transfer.step + n - 1)


def broadcast(n: int, layout: Layout) -> Iterator[Transfer]:
    """Rank 0 has the data; segment s leaves rank r at step r + s."""
    for step in range(n - 2 + layout.num_segments):
        for rank in range(n - 1):
            segment = step - rank
            if 0 <= segment < layout.num_segments:
                yield Transfer(step, rank, rank + 1, segment, segment + 1, segment, False)


ALGORITHMS = (
    Algorithm(
        name="ring",
        description="each rank passes to the next; fewest bytes",
        source="Patarasuk and Yuan 2009",
        recipes={
            "all_reduce": Recipe(generate=all_reduce, num_chunks=lambda n, layout: n),
            "reduce_scatter": Recipe(generate=reduce_scatter, num_chunks=lambda n, layout: n),
            "all_gather": Recipe(generate=all_gather, num_chunks=lambda n, layout: n),
            "broadcast": Recipe(generate=broadcast, num_chunks=lambda n, layout: layout.num_segments),
        },
    ),
)
