"""Times of collectives: the limits that links set, what NCCL was seen to choose, and published times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright.comms import algorithms, collective_time, topology
from bitwright.comms.fit import Timed, calibrate, fit_curves
from bitwright.comms.topology import Curve, Level, Topology
from bitwright.comms.wire_bytes import BUS_FACTORS
from bitwright.errors import CommsError, UnknownName

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("op", [op for op in BUS_FACTORS if op != "send_recv"])
@pytest.mark.parametrize("cluster", ["h100x8", "h100x8x4", "a100x8x2", "mi300xx4", "a100-pairsx2x2", "gb200x72x2"])
def test_more_bytes_take_longer_and_large_ones_no_less_than_the_links_allow(op: str, cluster: str) -> None:
    ranks = topology(cluster)
    times = [collective_time(op, size, ranks, launch="graph").time_s for size in (1024, MIB, 64 * MIB, 8 * GIB)]
    assert times == sorted(times)
    level, _, below = ranks.spanned[-1]
    # A ring's bytes cross the outermost links; half of them with a tree of two or a switch that adds.
    least = 8 * GIB * BUS_FACTORS[op](ranks.num_ranks) / below / (1e9 * level.one_way_gb_per_s)
    assert times[-1] > 0.45 * least


@pytest.mark.parametrize(
    ("cluster", "num_bytes", "algorithm"),
    [
        # NCCL 2.27 on 8 H200, as its log said: ring with LL up to 1 MiB, NVLS from 2 MiB on.
        ("h200x8", 64 << 10, "ring"),
        ("h200x8", MIB, "ring"),
        ("h200x8", 2 * MIB, "nvls"),
        ("h200x8", 8 * GIB, "nvls"),
        # nccl-tests by number of GPUs, 8 GiB.
        ("h200x4", 8 * GIB, "ring"),
        ("h200x6", 8 * GIB, "nvls"),
        ("h200x7", 8 * GIB, "nvls"),
        ("b200x4", 8 * GIB, "ring"),
        ("b200x5", 8 * GIB, "ring"),
        ("b200x7", 8 * GIB, "nvls"),
    ],
)
def test_the_choice_is_what_nccl_was_seen_to_choose(cluster: str, num_bytes: int, algorithm: str) -> None:
    cost = collective_time("all_reduce", num_bytes, topology(cluster))
    assert cost.algorithm == algorithm
    assert "NCCL" in cost.reason


def test_two_levels_are_pipelined_rather_than_added() -> None:
    # 4 GiB over 4 nodes of 8 B200 took 22.05 ms, between 16.1 ms (the slower level) and 26.3 ms (the sum).
    assert 16.1e-3 < collective_time("all_reduce", 4 * GIB, topology("b200x8x4")).time_s < 26.3e-3


def test_a_hundred_groups_beside_each_other_have_their_own_links() -> None:
    cluster = topology("h100x8x16")
    one_each = collective_time("all_reduce", 64 * MIB, cluster.group(16, stride=8))
    whole = collective_time("all_reduce", 64 * MIB, cluster)
    assert one_each.bound == whole.bound == "NDR InfiniBand"
    assert one_each.time_s > 4 * whole.time_s  # one NIC a rank, against eight for the same bytes of a node


def test_nothing_to_send_takes_no_time() -> None:
    assert collective_time("all_reduce", GIB, topology("h100x1")).time_s == 0
    assert collective_time("all_reduce", 0, topology("h100x8")).time_s == 0


def test_more_steps_take_longer_to_begin() -> None:
    doubling, halving = (
        collective_time("all_reduce", 8, topology("h100x8"), name).latency_s
        for name in ("recursive_doubling", "halving_doubling")
    )
    # log2 8 and 2 log2 8 hops, each of 0.6 µs: NCCL's constant of NVLink.
    assert halving - doubling == pytest.approx(3 * 0.6e-6)


def test_switches_between_nodes_halve_what_network_cards_send() -> None:
    cluster = topology("h100-sharpx8x8")
    sharp, tree = (collective_time("all_reduce", 8 * GIB, cluster, name) for name in ("sharp", "nvls_tree"))
    assert tree.bound == "NDR InfiniBand with SHARP"
    # Half of the tree's bytes there, so that the switch inside nodes decides.
    assert sharp.bound == "NVSwitch"
    assert sharp.time_s < 0.8 * tree.time_s
    with pytest.raises(CommsError, match="needs a switch that adds, which NDR InfiniBand is not"):
        collective_time("all_reduce", GIB, topology("h100x8x8"), "sharp")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnknownName, match="all_reduce"):
        collective_time("allreduce", MIB, topology("h100"))
    with pytest.raises(CommsError, match=r"needs a switch that adds.*use one of ring, tree"):
        collective_time("all_reduce", MIB, topology("a100"), "nvls")
    with pytest.raises(CommsError, match="one level only"):
        collective_time("all_reduce", MIB, topology("h100x8x2"), "one_shot")
    with pytest.raises(CommsError, match="-1"):
        collective_time("all_reduce", -1, topology("h100"))
    assert algorithms("all_reduce", topology("h100x8x2")) == ("ring", "tree", "nvls_tree", "hierarchical")


def ring(num_bytes: int, time_s: float) -> Timed:
    return Timed(op="all_reduce", num_bytes=num_bytes, time_s=time_s, algorithm="ring")


def test_calibration_finds_factors_that_made_the_times() -> None:
    truth = topology("a100x8").scaled(latency=2.0, ceiling=0.7, half_size=1.5)
    rows = [
        ring(size, collective_time("all_reduce", size, truth, "ring").time_s)
        for size in (1024, 64 << 10, MIB, 16 * MIB, GIB)
    ]
    found = calibrate(topology("a100x8"), rows)
    assert found.mean_absolute_error < 0.05


def fitted(*measured: tuple[str, str, float], ranks: int = 4) -> Topology:
    """What `comm fit` makes of (collective, algorithm, latency): one slow network that no catalogue describes."""
    curves = tuple(
        Curve(algorithm=name, ceiling_gb_per_s=1.0, half_size_bytes=0.0, latency_s=latency_s, ops=(op,))
        for op, name, latency_s in measured
    )
    level = Level(
        kind="gloo", medium="network", members=ranks, one_way_gb_per_s=1.0, hop_latency_s=None, full_mesh=False,
        switch_reduces=False, is_shared=False, curves=curves, source="a test", certainty="measured",
    )  # fmt: skip
    return Topology(
        name="here", aliases=(), device=None, compute_capability=None, levels=(level,), counts=(ranks,)
    )  # fmt: skip


@pytest.mark.parametrize("op", [op for op in BUS_FACTORS if op != "send_recv"])
def test_what_nobody_measured_begins_no_sooner_than_what_was_measured_there(op: str) -> None:
    here = fitted(("all_reduce", "ring", 758e-6), ("all_gather", "ring", 500e-6))
    for name in algorithms(op, here):
        assert collective_time(op, 8, here, name).latency_s >= 500e-6
    assert collective_time("all_reduce", 8, here, "ring").latency_s == pytest.approx(758e-6)


def test_messages_that_were_measured_are_counted_where_an_algorithm_was_not() -> None:
    here = fitted(("all_reduce", "ring", 6e-3), ("send_recv", "direct", 1e-3))
    found = {
        name: collective_time("all_reduce", 8, here, name).latency_s
        for name in ("one_shot", "two_shot", "recursive_doubling", "halving_doubling")
    }
    # One, two, log2 4 and 2 log2 4 messages one after the other.
    assert found == {
        "one_shot": pytest.approx(1e-3),
        "two_shot": pytest.approx(2e-3),
        "recursive_doubling": pytest.approx(2e-3),
        "halving_doubling": pytest.approx(4e-3),
    }
    assert collective_time("all_gather", 8, here, "ring").latency_s == pytest.approx(3e-3)


def test_the_reason_says_why_there_is_no_choice() -> None:
    here = fitted(("all_reduce", "ring", 758e-6))
    assert collective_time("all_reduce", MIB, here).reason == "the only algorithm of all_reduce that is measured here"
    two = fitted(("all_reduce", "ring", 758e-6), ("all_reduce", "one_shot", 400e-6))
    reason = collective_time("all_reduce", MIB, two).reason
    assert "that is measured here and that a library chooses by itself" in reason
    assert "a library chooses by itself" in collective_time("all_gather", MIB, here).reason
    assert collective_time("send_recv", MIB, here).reason == "the only algorithm of send_recv"


def test_curves_of_an_unknown_machine_are_found_from_times_alone() -> None:
    sizes = [1 << power for power in range(10, 28, 2)]
    # 20 µs, 2.5 GB/s, half of it at 64 KiB.
    rows = [ring(size, 20e-6 + 1.5 * size / 2.5e9 * (1 + (65536 / size) ** 0.5)) for size in sizes]
    found = fit_curves(topology("a100x4"), rows)
    curve = found.topology.levels[0].curves[0]
    assert found.mean_absolute_error < 0.02
    assert curve.ceiling_gb_per_s == pytest.approx(2.5, rel=0.05)
    # What was measured is what runs there, where no library's own choice is known.
    bare = replace(found.topology, compute_capability=None)
    assert collective_time("all_reduce", MIB, bare).algorithm == "ring"
    with pytest.raises(CommsError, match="2 sizes"):
        fit_curves(topology("a100x4"), rows[:2])
    with pytest.raises(CommsError, match="no measured time"):
        calibrate(topology("a100x4"), [])
