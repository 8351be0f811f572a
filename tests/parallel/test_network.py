"""What a step asks of a cluster is what `comms` says of its groups."""

from __future__ import annotations

import pytest

from bitwright import comms
from bitwright.errors import CommsError
from bitwright.parallel.network import ClusterNetwork, SlowerNetwork

CLUSTER = comms.topology("h100x8x4")
NETWORK = ClusterNetwork(topology=CLUSTER)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"])
@pytest.mark.parametrize(("ranks", "stride"), [(2, 1), (8, 1), (4, 8), (32, 1)])
def test_times_are_those_of_the_group(operation: str, ranks: int, stride: int) -> None:
    expected = comms.collective_time(operation, 1 << 26, CLUSTER.group(ranks, stride=stride)).time_s
    assert NETWORK.seconds(operation, 1 << 26, ranks=ranks, stride=stride) == expected  # type: ignore[arg-type]


def test_one_rank_has_nothing_to_send() -> None:
    assert NETWORK.seconds("all_reduce", 1 << 20, ranks=1) == 0
    assert NETWORK.seconds("all_reduce", 0, ranks=8) == 0


def test_a_group_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(CommsError, match="does not fit into the 32 ranks of h100x8x4"):
        NETWORK.seconds("all_reduce", 1 << 20, ranks=64)


def test_the_two_levels_are_slowed_apart() -> None:
    slower = SlowerNetwork(network=NETWORK, within=2.0, across=3.0)
    for ranks, stride, times in ((8, 1, 2.0), (4, 8, 3.0), (32, 1, 3.0)):
        alone = NETWORK.seconds("all_gather", 1e8, ranks=ranks, stride=stride)
        assert slower.seconds("all_gather", 1e8, ranks=ranks, stride=stride) == times * alone
