"""Direct: every rank sends to every other at once, with nobody in between.

    one-shot all-reduce    all send everything to all: one step, (n − 1)·S sent; each adds all by itself
    two-shot all-reduce    shard d goes to rank d, which adds; the sums go to all: two steps, 2(n − 1)/n · S sent
    all-gather, reduce-scatter of the second kind by themselves; broadcast from rank 0
    pairwise all-to-all    at step t rank r sends to r + t what is meant for it: n − 1 steps, (n − 1)/n · S sent
    send and receive       rank 0 to the last one

Where all ranks reach each other at full rate (an NVSwitch), one step beats many. The two-shot all-reduce also rounds
least: contributions travel once, are added in one place in as wide a format as one likes, and the sum travels once.
Source: the kernels of vllm-project/vllm and NVIDIA/TensorRT-LLM of these names; Thakur, Rabenseifner and Gropp 2005
(pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.comms.schedule import Algorithm, Layout, Recipe, Transfer


def one_shot_all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Everything to everybody."""
    for rank in range(n):
        for other in range(n):
            if other != rank:
                yield Transfer(0, rank, other, 0, 1, 0, True)


def reduce_scatter(n: int, layout: Layout) -> Iterator[Transfer]:
    """Shard d of every rank to rank d."""
    for rank in range(n):
        for other in range(n):
            if other != rank:
                yield Transfer(0, rank, other, other, other + 1, other, True)


def all_gather(n: int, layout: Layout) -> Iterator[Transfer]:
    """The shard of every rank to all."""
    for rank in range(n):
        for other in range(n):
            if other != rank:
                yield Transfer(0, rank, other, rank, rank + 1, rank, False)


def two_shot_all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(n, layout)
    for transfer in all_gather(n, layout):
        yield transfer._replace(step=1)


def broadcast(n: int, layout: Layout) -> Iterator[Transfer]:
    """From rank 0 to each of the others."""
    for rank in range(1, n):
        yield Transfer(0, 0, rank, 0, 1, 0, False)


def all_to_all(n: int, layout: Layout) -> Iterator[Transfer]:
    """The buffer has two halves of n shards: what is sent, and what is received."""
    for rank in range(n):
        yield Transfer(0, rank, rank, rank, rank + 1, n + rank, False)
    for step in range(1, n):
        for rank in range(n):
            other = (rank + step) % n
            yield Transfer(step - 1, rank, other, other, other + 1, n + rank, False)


def send_recv(n: int, layout: Layout) -> Iterator[Transfer]:
    """From rank 0 to the last one."""
    yield Transfer(0, 0, n - 1, 0, 1, 0, False)


def _by_rank(n: int, layout: Layout) -> int:
    return n


def _whole(n: int, layout: Layout) -> int:
    return 1


ALGORITHMS = (
    Algorithm(
        name="one_shot",
        description="from everybody who has something to everybody who wants it, at once; nobody passes anything on",
        source="vllm-project/vllm csrc/custom_all_reduce.cuh",
        recipes={
            "all_reduce": Recipe(generate=one_shot_all_reduce, num_chunks=_whole),
            "all_gather": Recipe(generate=all_gather, num_chunks=_by_rank),
            "broadcast": Recipe(generate=broadcast, num_chunks=_whole),
        },
    ),
    Algorithm(
        name="two_shot",
        description="shards to their owners, who add, and in an all-reduce sums to all; a ring's bytes",
        source="vllm-project/vllm csrc/custom_all_reduce.cuh",
        recipes={
            "all_reduce": Recipe(generate=two_shot_all_reduce, num_chunks=_by_rank),
            "reduce_scatter": Recipe(generate=reduce_scatter, num_chunks=_by_rank),
        },
    ),
    Algorithm(
        name="pairwise",
        description="one partner at a time, each once",
        source="Thakur, Rabenseifner and Gropp 2005",
        recipes={"all_to_all": Recipe(generate=all_to_all, num_chunks=lambda n, layout: 2 * n)},
    ),
    Algorithm(
        name="direct",
        description="from one rank to another",
        source="the definition",
        recipes={"send_recv": Recipe(generate=send_recv, num_chunks=_whole)},
    ),
)
