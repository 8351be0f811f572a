"""Laws of every schedule: the right result, bytes and steps as the closed form says, nobody waits for ever, and each
byte is sent once. Over all collectives, algorithms and 2 to 17 ranks; sizes that chunks divide and ragged ones."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from bitwright.comms.closed_forms import CLOSED_FORMS
from bitwright.comms.collectives import ALGORITHMS, COLLECTIVES, algorithms_of, schedule
from bitwright.comms.count import across, count
from bitwright.comms.schedule import Schedule
from bitwright.comms.simulate import simulate
from bitwright.errors import CommsError, UnknownName

RANKS = range(2, 18)
PAIRS = [(op, algorithm) for op in COLLECTIVES for algorithm in algorithms_of(op)]
CASES = [
    (op, algorithm, n, g)
    for op, algorithm in PAIRS
    for n in RANKS
    for g in ([g for g in range(1, n + 1) if n % g == 0] if ALGORITHMS[algorithm].needs_nodes else [None])
]


def expected(op: str, made: Schedule, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what ranks hold by the definition of the collective, where it says something)."""
    n, length = given.shape
    total = np.broadcast_to(given.sum(axis=0), given.shape)
    everywhere = np.ones(given.shape, dtype=bool)
    own = np.zeros(given.shape, dtype=bool)
    for rank in range(n):
        start, stop = made.shard(rank, length)
        own[rank, start:stop] = True
    match op:
        case "all_reduce":
            return total, everywhere
        case "reduce_scatter":
            return total, own
        case "all_gather":
            return np.broadcast_to((given * own).sum(axis=0), given.shape), everywhere
        case "broadcast":
            return np.broadcast_to(given[0], given.shape), everywhere
        case "all_to_all":
            return given.reshape(n, n, -1).transpose(1, 0, 2).reshape(n, length), everywhere
        case _:
            last = np.zeros(given.shape, dtype=bool)
            last[-1] = True
            return np.broadcast_to(given[0], given.shape), last


@pytest.mark.parametrize(("op", "algorithm", "n", "g"), CASES)
def test_the_result_is_right_at_any_size(op: str, algorithm: str, n: int, g: int | None) -> None:
    made = schedule(op, algorithm, n, ranks_per_node=g, num_segments=3)
    # Ragged: fewer elements than chunks, a prime number of them, and none.
    for length in (0, 1, n - 1, 37, made.num_chunks * 2) if op != "all_to_all" else (0, n, 3 * n):
        given = np.random.default_rng(length).integers(-1000, 1000, size=(n, length)).astype(np.float64)
        wanted, where = expected(op, made, given)
        assert np.array_equal(simulate(made, given)[where], wanted[where])


@pytest.mark.parametrize(("op", "algorithm", "n", "g"), CASES)
def test_bytes_and_steps_are_those_of_the_closed_form(op: str, algorithm: str, n: int, g: int | None) -> None:
    made = schedule(op, algorithm, n, ranks_per_node=g, num_segments=3)
    form = CLOSED_FORMS[op, algorithm]
    length = made.num_chunks * 5
    counts = count(made, length)
    assert counts.num_steps == form.num_steps(n, made.layout)
    assert counts.total == form.total(n, made.layout) * length
    assert counts.busiest == form.busiest(n, made.layout) * length
    assert sum(counts.received) == counts.total


@pytest.mark.parametrize(("op", "algorithm", "n", "g"), CASES)
def test_every_byte_is_sent_once(op: str, algorithm: str, n: int, g: int | None) -> None:
    """No rank gets the same chunk from the same rank twice by copy, and no contribution is added twice."""
    made = schedule(op, algorithm, n, ranks_per_node=g, num_segments=3)
    copies: dict[tuple[int, int], int] = defaultdict(int)
    # Whose contributions a chunk of a rank holds: a sum adds disjoint sets, or someone would count twice.
    holds = {(rank, chunk): {(rank, chunk)} for rank in range(n) for chunk in range(made.num_chunks)}
    for step in made.steps():
        before = {key: set(value) for key, value in holds.items()}
        for item in step:
            for offset in range(item.stop - item.first):
                arriving = {(rank, item.at + offset) for rank, _ in before[item.source, item.first + offset]}
                place = (item.destination, item.at + offset)
                if item.reduces:
                    assert not holds[place] & arriving
                    holds[place] |= arriving
                else:
                    copies[place] += 1
                    holds[place] = arriving
    assert max(copies.values(), default=1) == 1


@pytest.mark.parametrize(("op", "algorithm", "n", "g"), CASES)
def test_nobody_waits_for_ever(op: str, algorithm: str, n: int, g: int | None) -> None:
    """Each rank goes through its own steps in order and leaves one when all partners are there: all get through."""
    made = schedule(op, algorithm, n, ranks_per_node=g, num_segments=3)
    steps = list(made.steps())
    mine = [[index for index, step in enumerate(steps) if any(rank in (t.source, t.destination) for t in step)]
            for rank in range(n)]  # fmt: skip
    at = [0] * n
    while any(at[rank] < len(mine[rank]) for rank in range(n)):
        now = [mine[rank][at[rank]] if at[rank] < len(mine[rank]) else None for rank in range(n)]
        ready = []
        for rank in range(n):
            if now[rank] is None:
                continue
            partners = {
                r for t in steps[now[rank]] if rank in (t.source, t.destination) for r in (t.source, t.destination)
            }
            if all(now[partner] == now[rank] for partner in partners):
                ready.append(rank)
        assert ready, f"ranks wait for each other at steps {now}"
        for rank in ready:
            at[rank] += 1


@pytest.mark.parametrize(("op", "algorithm", "n", "g"), CASES)
def test_a_step_never_overwrites_what_it_sends(op: str, algorithm: str, n: int, g: int | None) -> None:
    for step in schedule(op, algorithm, n, ranks_per_node=g, num_segments=3).steps():
        assert [t.step for t in step] == [step[0].step] * len(step)
        sent = {(t.source, c) for t in step for c in range(t.first, t.stop)}
        copied = {(t.destination, t.at + c - t.first) for t in step if not t.reduces for c in range(t.first, t.stop)}
        assert not sent & copied


def test_the_textbook_example() -> None:
    """[1, 2, 3, 4] · k over four ranks: 10, 20, 30, 40 everywhere, or one of them each."""
    data = np.outer([1, 2, 3, 4], [1, 2, 3, 4])
    for algorithm in algorithms_of("all_reduce"):
        made = schedule("all_reduce", algorithm, 4, ranks_per_node=2)
        assert simulate(made, data).tolist() == [[10, 20, 30, 40]] * 4
    for algorithm in algorithms_of("reduce_scatter"):
        made = schedule("reduce_scatter", algorithm, 4)
        result = simulate(made, data)
        assert [result[rank, rank] for rank in range(4)] == [10, 20, 30, 40]


def test_what_leaves_a_node() -> None:
    # 4 nodes of 8: a flat ring and a hierarchical one both send about 2·3/4 of S from each node; a ring of neighbours
    # through one link, the other through eight.
    length = 3200
    flat = across(schedule("all_reduce", "ring", 32), length, 8)
    nodes = across(schedule("all_reduce", "hierarchical", 32, ranks_per_node=8), length, 8)
    assert flat.busiest == 2 * 31 * length // 32
    assert nodes.busiest == 2 * 3 * length // 4
    assert nodes.num_messages == (8 * 6,) * 4


def test_steps_of_the_tree_grow_with_the_logarithm() -> None:
    steps = [schedule("all_reduce", "tree", n, num_segments=1).num_steps for n in (2, 4, 8, 16, 64, 256)]
    assert [b - a for a, b in pairwise(steps)] == [2, 2, 2, 4, 4]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(CommsError, match=r"12 ranks do not fill nodes of 8 ranks.*nodes of 1, 2, 3, 4, 6, 12"):
        schedule("all_reduce", "hierarchical", 12, ranks_per_node=8)
    with pytest.raises(CommsError, match="'tree' does no all_gather; use one of"):
        schedule("all_gather", "tree", 4)
    with pytest.raises(UnknownName, match="did you mean 'ring'"):
        schedule("all_reduce", "rings", 4)
    with pytest.raises(UnknownName, match="did you mean 'all_reduce'"):
        schedule("allreduce", "ring", 4)
    with pytest.raises(CommsError, match="0 ranks"):
        schedule("all_reduce", "ring", 0)
    with pytest.raises(CommsError, match="one row for each rank"):
        simulate(schedule("all_reduce", "ring", 4), np.ones((3, 4)))
    with pytest.raises(CommsError, match="take a multiple of the ranks"):
        simulate(schedule("all_to_all", "pairwise", 4), np.ones((4, 6)))


def test_one_rank_has_nothing_to_send() -> None:
    for op, algorithm in PAIRS:
        made = schedule(op, algorithm, 1)
        assert count(made, 8).total == 0
        assert simulate(made, [[1.0, 2.0]]).tolist() == [[1.0, 2.0]]
