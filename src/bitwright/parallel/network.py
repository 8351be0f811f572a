"""What a step asks of a cluster: how long a group of GPUs takes for a collective.

A group takes every `stride`-th GPU; `comms.topology` says which links it has, `comms.cost_model` how long it takes:
NCCL's choice of algorithm at measured rates. Collectives between kernels of a step are started from a queue that is
already full, so they cost no launch of the host's. Times are kept, since layouts ask for the same ones again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from bitwright.comms.cost_model import collective_time
from bitwright.comms.topology import Topology

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]


class Network(Protocol):
    """What a step time asks of a network."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the fast links join."""
        ...

    def seconds(self, operation: Operation, num_bytes: float, *, ranks: int, stride: int = 1) -> float:
        """Return the time of a collective over every `stride`-th GPU; `num_bytes` of the whole buffer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNetwork:
    """The network of a topology."""

    topology: Topology

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the fast links join."""
        return self.topology.counts[0]

    def seconds(self, operation: Operation, num_bytes: float, *, ranks: int, stride: int = 1) -> float:
        """Return the predicted time of a collective; 0 for one rank, or nothing to send.

        Raises:
            CommsError: the cluster has no such group, or fills its nodes unevenly.
        """
        if ranks < 2 or num_bytes <= 0:
            return 0.0
        return _seconds(self.topology, operation, float(num_bytes), ranks, stride)


@lru_cache(maxsize=200_000)
def _seconds(topology: Topology, operation: Operation, num_bytes: float, ranks: int, stride: int) -> float:
    return collective_time(operation, num_bytes, _group(topology, ranks, stride)).time_s


@lru_cache(maxsize=20_000)
def _group(topology: Topology, ranks: int, stride: int) -> Topology:
    return topology.group(ranks, stride=stride)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowerNetwork:
    """A network whose times are multiplied, those of groups within a node and across nodes apart."""

    network: Network
    within: float
    across: float

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the fast links join."""
        return self.network.gpus_per_node

    def seconds(self, operation: Operation, num_bytes: float, *, ranks: int, stride: int = 1) -> float:
        """Return the network's time, multiplied."""
        times = self.within if ranks * stride <= self.gpus_per_node else self.across
        return times * self.network.seconds(operation, num_bytes, ranks=ranks, stride=stride)
