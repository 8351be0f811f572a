"""Halving and doubling: a reduce-scatter that halves what is left at each step, then an all-gather that doubles it.

It is the all-gather of recursive doubling run backwards, sums in place of copies: where rank r once sent shards to rank
r − 2^k, that one now sends its partial sums of the same shards to r. So it works for any n: ⌈log2 n⌉ steps and
(n − 1)/n · S for the reduce-scatter, twice of both for the all-reduce. As few bytes as a ring in far fewer steps; but
partners are up to n/2 ranks apart, which a network with a thin middle feels.
Source: Rabenseifner 2004 (all-reduce of 2^m ranks); Bruck and Ho 1993, Efficient global combine operations (any n).
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.comms.algorithms.recursive_doubling import all_gather
from bitwright.comms.schedule import Algorithm, Layout, Recipe, Transfer


def reduce_scatter(n: int, layout: Layout) -> Iterator[Transfer]:
    """The all-gather backwards: shard r is whole at rank r in the end."""
    forwards = list(all_gather(n, layout))
    last = forwards[-1].step
    for transfer in sorted(forwards, key=lambda item: -item.step):
        yield transfer._replace(
            step=last - transfer.step, source=transfer.destination, destination=transfer.source, reduces=True
        )


def all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Reduce-scatter, then all-gather."""
    last = 0
    for transfer in reduce_scatter(n, layout):
        last = transfer.step
        yield transfer
    for transfer in all_gather(n, layout):
        yield transfer._replace(step=transfer.step + last + 1)


ALGORITHMS = (
    Algorithm(
        name="halving_doubling",
        description="half of what is left at each step, in an all-reduce then back; a ring's bytes",
        source="Rabenseifner 2004; Bruck and Ho 1993",
        recipes={
            "all_reduce": Recipe(generate=all_reduce, num_chunks=lambda n, layout: n),
            "reduce_scatter": Recipe(generate=reduce_scatter, num_chunks=lambda n, layout: n),
        },
    ),
)
