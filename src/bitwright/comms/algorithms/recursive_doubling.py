"""Recursive doubling: what a rank knows doubles with every step.

    all-reduce   ranks whose numbers differ in one bit exchange all that they have: log2 n steps, log2 n · S sent.
                 Where n is no power of two, the ranks beyond add theirs to a rank below first, and get the result last
    all-gather   at step k rank r sends the shards [r, r + 2^k) that it has to rank r − 2^k: ⌈log2 n⌉ steps for any n,
                 (n − 1)/n · S sent

The all-reduce has the fewest steps that there can be, and the most bytes: for small messages.
Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH; the
all-gather for any n is Bruck et al. 1997 (there with the shards rotated).
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.comms.schedule import Algorithm, Layout, Recipe, Transfer


def all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Whole buffers are exchanged."""
    inside = 1 << (n.bit_length() - 1)
    step = 0
    if n > inside:
        for rank in range(inside, n):
            yield Transfer(step, rank, rank - inside, 0, 1, 0, True)
        step += 1
    distance = 1
    while distance < inside:
        for rank in range(inside):
            yield Transfer(step, rank, rank ^ distance, 0, 1, 0, True)
        distance, step = 2 * distance, step + 1
    for rank in range(inside, n):
        yield Transfer(step, rank - inside, rank, 0, 1, 0, False)


def all_gather(n: int, layout: Layout) -> Iterator[Transfer]:
    """Shards [r, r + 2^k) go 2^k ranks back."""
    distance, step = 1, 0
    while distance < n:
        count = min(distance, n - distance)
        for rank in range(n):
            for first, stop in _wrapped(rank, count, n):
                yield Transfer(step, rank, (rank - distance) % n, first, stop, first, False)
        distance, step = 2 * distance, step + 1


def _wrapped(first: int, count: int, n: int) -> list[tuple[int, int]]:
    """The range [first, first + count) modulo n, as one or two slices."""
    if first + count <= n:
        return [(first, first + count)]
    return [(first, n), (0, first + count - n)]


ALGORITHMS = (
    Algorithm(
        name="recursive_doubling",
        description="partners twice as far at each step; fewest steps, log2 n times the bytes in an all-reduce",
        source="Thakur, Rabenseifner and Gropp 2005; Bruck et al. 1997",
        recipes={
            "all_reduce": Recipe(generate=all_reduce, num_chunks=lambda n, layout: 1),
            "all_gather": Recipe(generate=all_gather, num_chunks=lambda n, layout: n),
        },
    ),
)
