"""Times of schedules: the α–β forms where they are known, and which algorithm wins where."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bitwright.comms import Topology, algorithms, collective_time, topology
from bitwright.comms.collectives import schedule
from bitwright.comms.schedule_cost import schedule_time
from bitwright.errors import CommsError

ALPHA, RATE = 10e-6, 1e9
LEVEL = """
[[levels]]
kind = "{kind}"
medium = "network"
members = {members}
one_way_gb_per_s = {rate}
{more}source = "a test"
certainty = "derived"
[[levels.curves]]
algorithm = "direct"
ceiling_gb_per_s = {rate}
latency_s = {alpha}
"""


def cluster(folder: Path, *levels: tuple[int, float, float], shared: bool = False) -> Topology:
    """Levels of (members, bytes/s of a rank, α), innermost first."""
    text = 'name = "test"\n'
    for index, (members, rate, alpha) in enumerate(levels):
        more = "is_shared = true\n" if shared and index else ""
        text += LEVEL.format(kind=f"level {index}", members=members, rate=rate / 1e9, alpha=alpha, more=more)
    path = folder / "test.toml"
    path.write_text(text, encoding="utf-8")
    return topology(str(path))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [0, 1 << 20])
def test_one_level_is_alpha_and_beta(n: int, size: int, tmp_path: Path) -> None:
    """Thakur, Rabenseifner and Gropp 2005, without the additions."""
    flat = cluster(tmp_path, (n, RATE, ALPHA))
    log = int(math.log2(n))
    wanted = {
        "ring": 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * size / RATE,
        "recursive_doubling": log * (ALPHA + size / RATE),
        "halving_doubling": 2 * log * ALPHA + 2 * (n - 1) / n * size / RATE,
        "one_shot": ALPHA + (n - 1) * size / RATE,
        "two_shot": 2 * ALPHA + 2 * (n - 1) / n * size / RATE,
    }
    for algorithm, seconds in wanted.items():
        found = schedule_time(schedule("all_reduce", algorithm, n), size, flat).time_s
        assert found == pytest.approx(seconds, rel=1e-9), algorithm


def test_a_long_pipeline_through_two_trees_takes_two_passes(tmp_path: Path) -> None:
    n, size = 16, 1 << 30
    flat = cluster(tmp_path, (n, RATE, 0.0 or 1e-12))
    found = schedule_time(schedule("all_reduce", "tree", n, num_segments=128), size, flat).time_s
    assert found == pytest.approx(2 * size / RATE, rel=0.1)


def test_nodes_are_left_through_their_own_links(tmp_path: Path) -> None:
    size = 1 << 26
    own = cluster(tmp_path, (4, 100 * RATE, 1e-9), (4, RATE, 1e-9))
    flat = schedule_time(schedule("all_reduce", "ring", 16), size, own).time_s
    nodes = schedule_time(schedule("all_reduce", "hierarchical", 16, ranks_per_node=4), size, own).time_s
    # One rank of a node sends for all through one link of four; or each its share through its own.
    assert flat == pytest.approx(2 * 15 / 16 * size / RATE, rel=0.1)
    assert nodes == pytest.approx(2 * 3 / 4 * size / 4 / RATE, rel=0.15)
    shared = cluster(tmp_path, (4, 100 * RATE, 1e-9), (4, RATE, 1e-9), shared=True)
    assert schedule_time(schedule("all_reduce", "ring", 16), size, shared).time_s == pytest.approx(flat / 4, rel=0.1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1 << 10, 1 << 20, 1 << 28])
@pytest.mark.parametrize(("g", "k"), [(2, 2), (4, 3), (3, 5)])
def test_hierarchical_costs_what_its_messages_cost(g: int, k: int, size: int, shared: bool, tmp_path: Path) -> None:
    nodes = cluster(tmp_path, (g, 100 * RATE, 1e-6), (k, RATE, ALPHA), shared=shared)
    # Reduce-scatter and all-gather inside, a ring of S/g between; g ranks share a node's links, or each has its own.
    inside = 2 * (g - 1) * (1e-6 + size / g / (100 * RATE))
    between = 2 * (k - 1) * (ALPHA + size / g / k / RATE)
    found = collective_time("all_reduce", size, nodes, "hierarchical")
    assert found.time_s == pytest.approx(inside + between, rel=1e-9)
    assert found.latency_s == pytest.approx(2 * (g - 1) * 1e-6 + 2 * (k - 1) * ALPHA)
    by_messages = schedule_time(schedule("all_reduce", "hierarchical", g * k, ranks_per_node=g), size, nodes)
    assert found.time_s == pytest.approx(by_messages.time_s, rel=1e-9)
    assert found.bound == max(by_messages.bounds, key=lambda kind: by_messages.bounds[kind])


@pytest.mark.parametrize("name", ["h100x8x4", "b200x8x2", "gb200x72x2", "a100x8x3"])
@pytest.mark.parametrize("size", [8, 1 << 20, 1 << 30])
def test_hierarchical_on_known_clusters_is_its_schedule(name: str, size: int) -> None:
    found = topology(name)
    made = schedule("all_reduce", "hierarchical", found.num_ranks, ranks_per_node=found.counts[0])
    cost = collective_time("all_reduce", size, found, "hierarchical")
    assert cost.time_s == pytest.approx(schedule_time(made, size, found).time_s, rel=1e-9)
    assert cost.latency_s > 2 * (found.counts[1] - 1) * 1e-6  # hops take time where nobody measured how much
    assert "hierarchical" in algorithms("all_reduce", found)


def test_hierarchical_is_for_two_levels(tmp_path: Path) -> None:
    assert "hierarchical" not in algorithms("all_reduce", topology("h100x8"))
    with pytest.raises(CommsError, match="is for several nodes"):
        collective_time("all_reduce", 1 << 20, topology("h100x8"), "hierarchical")
    three = cluster(tmp_path, *3 * [(2, RATE, ALPHA)])
    with pytest.raises(CommsError, match="goes over two levels, not 3"):
        collective_time("all_reduce", 1 << 20, three, "hierarchical")


def test_trees_win_small_and_rings_large(tmp_path: Path) -> None:
    slow = cluster(tmp_path, (16, RATE, 1e-3))
    small, large = (
        {a: schedule_time(schedule("all_reduce", a, 16), size, slow).time_s for a in ("ring", "tree")}
        for size in (1 << 10, 1 << 28)
    )
    assert small["tree"] < small["ring"]
    assert large["ring"] < large["tree"]


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommsError, match="4 ranks on 8 ranks"):
        schedule_time(schedule("all_reduce", "ring", 4), 8, cluster(tmp_path, (8, RATE, ALPHA)))


def test_who_has_waited_has_told_that_there_is_room(tmp_path: Path) -> None:
    """A broadcast through a chain: the second hop's receiver has waited since the start, so that half of α is left."""
    flat = cluster(tmp_path, (3, RATE, 1.0))
    hops = schedule("broadcast", "ring", 3, num_segments=1)
    found = schedule_time(hops, RATE, flat)
    assert found.time_s == pytest.approx((0.5 + 1 + 0.5) + (1 + 0.5))
    # The root does not wait until its message has arrived.
    assert found.ends_s[0] == pytest.approx(0.5 + 1)
