"""What joins the GPUs of a cluster, and how long a group of them takes for a collective.

Two levels: inside a node (NVLink, xGMI, PCIe), and between nodes, where each GPU has its share of the node's adapters.
A group of n ranks that takes every `stride`-th GPU has g of them in a node and k = n/g nodes:

    within a node      t = launch + steps·α₁ + f·S/B₁·(1 + √(half/S))
    across nodes       the slower of both levels, since they are pipelined, plus k-1 (or log₂ k) hops of α₂

with f = 2(n-1)/n for an all-reduce, (n-1)/n for all-gather, reduce-scatter, all-to-all, 1 for broadcast and P2P. Across
nodes a rank's own adapter carries `f(k)·S/g` bytes of a hierarchical all-reduce, all-gather and reduce-scatter, and
`(n-g)/n·S` of an all-to-all. Groups side by side share a node's adapters, which is why the bandwidth is of one GPU.

`Network` is the protocol that step times ask; `comms.cost_model` answers it for topologies (`topology_network.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from bitwright.errors import ParallelError

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
#: Operation → how many times its buffer each rank sends, as a function of the ranks.
_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "p2p": lambda n: 1.0,
}


class Network(Protocol):
    """What a step time asks of a network."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the fast links join."""
        ...

    def seconds(self, operation: Operation, num_bytes: float, *, ranks: int, stride: int = 1) -> float:
        """Return the time of a collective of a group that takes every `stride`-th GPU; `num_bytes` of the full buffer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLevelNetwork:
    """A network in closed form.

    Raises:
        ParallelError: a figure is not positive.
    """

    gpus_per_node: int = 8
    #: 10⁹ bytes per second that a large collective reaches on one GPU, one way (a bus bandwidth of nccl-tests).
    node_gb_per_s: float
    #: The same between nodes, of one GPU's share of the adapters.
    link_gb_per_s: float
    node_latency_s: float = 2e-6
    link_latency_s: float = 8e-6
    launch_s: float = 14e-6
    #: A message of so many bytes reaches half of the bandwidth.
    half_bytes: float = 8 * 2**20

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "node_gb_per_s", "link_gb_per_s", "half_bytes"):
            if not getattr(self, name) > 0:
                raise ParallelError(f"{name} of a network is {getattr(self, name)}; give a positive figure")

    def seconds(self, operation: Operation, num_bytes: float, *, ranks: int, stride: int = 1) -> float:
        """Return the time of a collective; 0 for one rank, or nothing to send."""
        if ranks < 2 or num_bytes <= 0:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        nodes = math.ceil(ranks / inside)
        ramp = 1 + math.sqrt(self.half_bytes / num_bytes) if operation != "p2p" else 1.0
        within = _FACTORS[operation](inside) * num_bytes / (self.node_gb_per_s * 1e9) * ramp if inside > 1 else 0.0
        doubled = 2 if operation == "all_reduce" else 1
        if nodes == 1:
            return self.launch_s + doubled * math.ceil(math.log2(inside)) * self.node_latency_s + within
        if operation == "all_to_all":
            sent = (ranks - inside) / ranks * num_bytes
        else:
            sent = _FACTORS[operation](nodes) * num_bytes / inside
        across = sent / (self.link_gb_per_s * 1e9) * ramp
        hops = (
            math.ceil(math.log2(nodes))
            if operation == "all_reduce"
            else min(nodes - 1, 4 * math.ceil(math.log2(nodes)))
        )
        return self.launch_s + doubled * hops * self.link_latency_s + max(within, across)


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
