"""Hierarchical: inside each node first, then between nodes, then inside again.

    reduce-scatter inside (g − 1 steps), all-reduce of each shard between nodes (2(k − 1)), all-gather inside (g − 1)

with g ranks on each of k nodes, by rings. All ranks of a node have a shard to send between nodes at once, so that
all its network cards work: 2(k − 1)/k · S/g each, and 2(g − 1)/g · S inside. A flat ring sends nearly 2 S through one
link of each node instead, in 2(n − 1) steps.
Source: NVIDIA/nccl issue 256 and Horovod's hierarchical all-reduce describe it; the three rings are those of `ring`.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.comms.algorithms import ring
from bitwright.comms.schedule import Algorithm, Layout, Recipe, Transfer


def all_reduce(n: int, layout: Layout) -> Iterator[Transfer]:
    """Shard i of g belongs to local rank i, and is cut into k chunks for the ring between nodes."""
    g = layout.ranks_per_node
    k = n // g
    inside = Layout(ranks_per_node=g, num_segments=1)
    yield from _inside(ring.reduce_scatter(g, inside), 0, g, k)
    start = g - 1
    for step in ring.all_reduce(k, inside):
        for local in range(g):
            chunk = local * k + step.first
            yield Transfer(
                start + step.step,
                step.source * g + local,
                step.destination * g + local,
                chunk,
                chunk + 1,
                chunk,
                step.reduces,
            )
    yield from _inside(ring.all_gather(g, inside), start + 2 * (k - 1), g, k)


def _inside(transfers: Iterator[Transfer], start: int, g: int, k: int) -> Iterator[Transfer]:
    """The same in every node, chunks being k times finer."""
    for item in transfers:
        for node in range(k):
            yield Transfer(
                start + item.step,
                node * g + item.source,
                node * g + item.destination,
                item.first * k,
                item.stop * k,
                item.at * k,
                item.reduces,
            )


ALGORITHMS = (
    Algorithm(
        name="hierarchical",
        description="rings inside nodes around rings between them; every network card works",
        source="NVIDIA/nccl issue 256",
        recipes={"all_reduce": Recipe(generate=all_reduce, num_chunks=lambda n, layout: n)},
        needs_nodes=True,
    ),
)
