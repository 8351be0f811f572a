"""Schedules by name: a collective, an algorithm and a number of ranks → who sends what to whom, when.

    schedule("all_reduce", "ring", 4).transfers

The folder `algorithms/` is the list; `schedule.py` says what a schedule is. `simulate` runs one in NumPy,
`run_schedule` over torch.distributed, `count` counts its bytes, `closed_forms` says what they have to be.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.catalog import Catalog, nearest_name_hint
from bitwright.comms.schedule import Algorithm, Layout, Recipe, Schedule, Transfer
from bitwright.comms.sizes import spell_count
from bitwright.errors import CommsError, UnknownName

#: Every algorithm, by name.
ALGORITHMS: Catalog[Algorithm] = Catalog(
    kind="algorithm",
    package="bitwright.comms.algorithms",
    attribute="ALGORITHMS",
    record_type=Algorithm,
)

#: Collectives that schedules are made of.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
#: Pieces that pipelines cut their data into unless told otherwise.
NUM_SEGMENTS = 4


def algorithms_of(op: str) -> tuple[str, ...]:
    """Return the algorithms that do a collective.

    Raises:
        UnknownName: no such collective.
    """
    if op not in COLLECTIVES:
        raise UnknownName(
            f"unknown collective {op!r}{nearest_name_hint(op, list(COLLECTIVES))} Known: {', '.join(COLLECTIVES)}"
        )
    return tuple(name for name, algorithm in ALGORITHMS.items() if op in algorithm.recipes)


def usual_algorithm(op: str) -> str:
    """Return the algorithm that is meant where none is named: a ring, where there is one.

    Raises:
        UnknownName: no such collective.
    """
    able = algorithms_of(op)
    return "ring" if "ring" in able else able[0]


def schedule(
    op: str,
    algorithm: str,
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    num_segments: int = NUM_SEGMENTS,
) -> Schedule:
    """Return the schedule of a collective.

    Args:
        op: one of `COLLECTIVES`. Broadcast is from rank 0, send_recv from rank 0 to the last.
        algorithm: one of `algorithms_of(op)`.
        num_ranks: 1 or more; with one there is nothing to send.
        ranks_per_node: consecutive ranks of a node, for algorithms that know nodes; all ranks unless given.
        num_segments: pieces of a pipeline (tree, broadcast by a ring).

    Raises:
        CommsError: the algorithm does not do this collective, or ranks that do not fill nodes.
        UnknownName: no such collective or algorithm.
    """
    recipe, layout = _found(op, algorithm, num_ranks, ranks_per_node, num_segments)
    transfers = () if num_ranks == 1 and op != "all_to_all" else tuple(recipe.generate(num_ranks, layout))
    return Schedule(
        op=op,
        algorithm=algorithm,
        num_ranks=num_ranks,
        num_chunks=recipe.num_chunks(num_ranks, layout),
        layout=layout,
        transfers=transfers,
    )


def stream(op: str, algorithm: str, num_ranks: int, *, num_segments: int = NUM_SEGMENTS) -> Iterator[Transfer]:
    """Return the transfers of a collective one by one, for more ranks than a whole schedule is kept of."""
    recipe, layout = _found(op, algorithm, num_ranks, None, num_segments)
    return recipe.generate(num_ranks, layout)


def num_chunks(
    op: str,
    algorithm: str,
    num_ranks: int,
    *,
    ranks_per_node: int | None = None,
    num_segments: int = NUM_SEGMENTS,
) -> int:
    """Return the pieces that a collective cuts a buffer into; raises as `schedule` does."""
    recipe, layout = _found(op, algorithm, num_ranks, ranks_per_node, num_segments)
    return recipe.num_chunks(num_ranks, layout)


def _found(op: str, name: str, num_ranks: int, ranks_per_node: int | None, num_segments: int) -> tuple[Recipe, Layout]:
    able = algorithms_of(op)
    algorithm = ALGORITHMS[name]
    if op not in algorithm.recipes:
        raise CommsError(f"algorithm '{name}' does no {op}; use one of {', '.join(able)}")
    recipe = algorithm.recipes[op]
    if num_ranks < 1 or num_segments < 1:
        raise CommsError(
            f"{spell_count(num_ranks, 'rank')} and {spell_count(num_segments, 'segment')}; give 1 or more of each"
        )
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    if per_node < 1 or num_ranks % per_node:
        raise CommsError(
            f"{spell_count(num_ranks, 'rank')} do not fill nodes of {spell_count(per_node, 'rank')}; take a multiple "
            f"of {per_node}, or nodes of {', '.join(str(d) for d in range(1, num_ranks + 1) if num_ranks % d == 0)}"
        )
    return recipe, Layout(ranks_per_node=per_node, num_segments=num_segments)
