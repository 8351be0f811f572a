"""Which algorithm and protocol NCCL takes: its own model, with the constants of its source.

NCCL predicts t = latency + S/bandwidth for each pair and takes the least. LL sends 4 bytes of data with each 4 of flag
(half the rate, no fence), LL128 120 of 128, Simple all of them behind a fence. Its figures are *not* how long it takes
(measured times from 1 to 64 MiB are 19 to 65 % longer): only its choice is taken from here, times from measured curves.

    latency    base + (hops inside)·intra + (hops between)·inter      hops: ring 2(n−1), of which 2(k−1) between nodes;
                                                                      tree 2(g−1) inside and 2⌊log2 k⌋ between
    bandwidth  channels × speed, × efficiency of the pair, × n/steps (ring) or ½ (tree) → bytes of the buffer

Source: NVIDIA/nccl src/graph/tuning.cc and search.cc (v2.28 to v2.30). Left out: PAT, chains with SHARP, tuner plug-ins
of cloud networks, which override this choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwright.comms.topology import Level, Topology

PROTOCOLS = ("LL", "LL128", "Simple")

#: algorithm → µs before the first hop, by protocol.
_BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0, 0, 0), "nvls_tree": (0, 0, 0)}
#: medium → algorithm → µs of a hop, by protocol.
_HOP_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25.0), "nvls_tree": (0, 0, 25.0)},
    "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls": (0, 0, 18.0), "nvls_tree": (0, 0, 20.9)},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generation:
    """Ceilings in 10⁹ bytes/s that NCCL's source has for GPUs from one compute capability on."""

    least: float
    #: Channels, and the speed of each, that its search of the graph finds on a full NVSwitch node.
    channels: int
    speed: float
    #: At one, two and more nodes: LL; a channel of a tree.
    ll: tuple[float, float, float]
    tree: tuple[float, float, float]
    #: A channel of a ring with LL128.
    ring_ll128: float
    #: Speed of an NVLS channel, of which there are eight, and its efficiency; 0 where there is none.
    nvls_speed: float = 0.0
    nvls_efficiency: float = 0.0


_GENERATIONS = (
    _Generation(
        least=10.0, channels=16, speed=45.0, ll=(282, 90, 70), tree=(70.0, 42.8, 24.0), ring_ll128=40.0,
        nvls_speed=80.0, nvls_efficiency=0.74,
    ),
    _Generation(
        least=9.0, channels=12, speed=30.0, ll=(141, 45, 35), tree=(38.7, 41.4, 36.0), ring_ll128=36.7,
        nvls_speed=40.0, nvls_efficiency=0.85,
    ),
    _Generation(least=8.0, channels=12, speed=20.0, ll=(87.7, 22.5, 19.0), tree=(24.0, 23.6, 17.8), ring_ll128=20.0),
    _Generation(least=0.0, channels=6, speed=20.0, ll=(39.0, 39.0, 20.4), tree=(26.5, 18.5, 10.0), ring_ll128=20.0),
)  # fmt: skip
_MAX_NVLS_CHANNELS = 8
#: How far trees fall short at middle sizes: one factor for each power of two from 64 bytes, by protocol.
_TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6),
        *(0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9),
    ),
}
#: How much longer the ring's first pass takes across nodes with Simple, from 64 KiB a 16 ranks on.
_RING_PLATEAU = 1.4


@dataclass(frozen=True, kw_only=True, slots=True)
class TunerTime:
    """What NCCL's model says of one pair."""

    algorithm: str
    protocol: str
    time_s: float


def hop_latencies_s(topology: Topology, steps: str, phases: int) -> tuple[float, tuple[float, ...]]:
    """Return the seconds of the smallest message with the LL protocol: before the first hop, and at each level.

    Args:
        topology: of the group; hops take what its levels say, or else the library's constant for their medium.
        steps: "ring", "tree" or "direct" (`wire_bytes.WireForm`).
        phases: rounds through the ranks.
    """
    algorithm = "tree" if steps == "tree" else "ring"
    found = (
        count * hop_seconds(level, topology, algorithm)
        for count, (level, _, _) in zip(num_hops(topology, steps, phases), topology.spanned, strict=True)
    )
    return 1e-6 * _BASE_US[algorithm][0] * topology.latency_ratio, tuple(found)


def num_hops(topology: Topology, steps: str, phases: int) -> tuple[int, ...]:
    """Return the messages one after the other at each level; arguments as of `hop_latencies_s`."""
    found = []
    for index, (level, members, below) in enumerate(topology.spanned):
        if steps == "ring":
            # All borders of a level's units are crossed once a round; those of the levels above are theirs.
            units = topology.num_ranks // below
            hops = units - units // members if index < len(topology.spanned) - 1 else units - 1
        elif steps == "tree":
            hops = math.ceil(math.log2(members)) if level.medium == "network" else members - 1
        else:
            hops = 1
        found.append(phases * hops)
    return tuple(found)


def hop_seconds(level: Level, topology: Topology, algorithm: str) -> float:
    """Return the seconds of one hop of the smallest message at a level: what it says, or the library's constant."""
    hop_s = 1e-6 * _HOP_US[level.medium][algorithm][0] if level.hop_latency_s is None else level.hop_latency_s
    return hop_s * topology.latency_ratio


def message_seconds(level: Level, topology: Topology) -> float:
    """Return the seconds of the smallest message by itself, its kernel's start and a hop of the level."""
    return 1e-6 * _BASE_US["ring"][0] * topology.latency_ratio + hop_seconds(level, topology, "ring")


def predicted_times(op: str, num_bytes: float, topology: Topology) -> tuple[TunerTime, ...]:
    """Return what NCCL's model says of each pair that it would consider, least first; empty where it is not NCCL's.

    Args:
        op: a collective; NCCL chooses between algorithms for all-reduce only, between protocols for all.
        num_bytes: S.
        topology: of the group; its innermost level is the node.
    """
    if topology.compute_capability is None or not topology.spanned or op in ("all_to_all", "send_recv"):
        return ()
    found = []
    for algorithm in ("ring", "tree", "nvls", "nvls_tree") if op == "all_reduce" else ("ring",):
        for index, protocol in enumerate(PROTOCOLS):
            bandwidth = _bandwidth(op, algorithm, index, topology)
            if bandwidth <= 0:
                continue
            if algorithm == "tree":
                table = _TREE_CORRECTION[protocol]
                step = max(0, int(math.log2(max(num_bytes, 64) / 64)))
                bandwidth *= table[step] if step < len(table) else 1.0
            latency = _latency_us(op, algorithm, index, topology, num_bytes)
            found.append(
                TunerTime(algorithm=algorithm, protocol=protocol, time_s=1e-6 * latency + num_bytes / (1e9 * bandwidth))
            )
    return tuple(sorted(found, key=lambda item: item.time_s))


def _shape(topology: Topology) -> tuple[int, int]:
    """(ranks of a node, nodes)."""
    nodes = math.prod(members for level, members, _ in topology.spanned if level.medium == "network")
    return topology.num_ranks // nodes, nodes


def _generation(topology: Topology) -> _Generation:
    capability = topology.compute_capability
    assert capability is not None
    return next(generation for generation in _GENERATIONS if capability >= generation.least)


def _graph_gb_per_s(topology: Topology, generation: _Generation) -> float:
    """Channels × speed of a ring: the node's, or what its NICs carry where that is less."""
    inner = topology.levels[0]
    total = generation.channels * generation.speed if inner.medium == "nvlink" else 0.8 * inner.one_way_gb_per_s
    return min([total, *(level.one_way_gb_per_s * below for level, _, below in topology.spanned if level is not inner)])


def _bandwidth(op: str, algorithm: str, protocol: int, topology: Topology) -> float:
    """10⁹ bytes of the buffer per second; 0 where NCCL does not use the pair."""
    per_node, nodes = _shape(topology)
    generation = _generation(topology)
    bucket = 0 if nodes == 1 else 1 if nodes == 2 else 2
    bus = _graph_gb_per_s(topology, generation)
    # Two nodes exchange S each way where a ring carries nearly 2S across.
    of_tree = 2 * bus if nodes == 2 else bus
    n = topology.num_ranks
    if algorithm in ("nvls", "nvls_tree"):
        is_usable = topology.levels[0].switch_reduces and per_node > 2 and (algorithm == "nvls") == (nodes == 1)
        if protocol != 2 or not is_usable:
            return 0.0
        # Each GPU of the node is the head of one channel, so that few of them leave the switch idle.
        heads = min(_MAX_NVLS_CHANNELS, per_node)
        inside = heads * generation.nvls_speed * generation.nvls_efficiency * per_node / (per_node - 1)
        return min(inside, of_tree / 2) if nodes > 1 else inside
    if algorithm == "tree":
        if n < 3 and nodes == 1:
            return 0.0
        if topology.levels[0].medium == "nvlink":
            of_tree = min(of_tree, generation.channels * generation.speed)
        of_tree = min(of_tree * 0.92, generation.tree[bucket] * generation.channels)
        return of_tree * (1 / 3.8, 7 / 9 if nodes == 1 else 120 / 128, 1.0)[protocol] / 2
    if protocol == 0:
        bus = min(generation.ll[bucket], bus / 2)
    elif protocol == 1:
        bus = min(bus * 0.92, generation.ring_ll128 * generation.channels)
    return bus * n / {"all_reduce": 2 * (n - 1), "broadcast": n}.get(op, n - 1)


def _latency_us(op: str, algorithm: str, protocol: int, topology: Topology, num_bytes: float) -> float:
    ranks_per_node, nodes = _shape(topology)
    inner = topology.levels[0].medium
    intra = _HOP_US[inner].get(algorithm, (0, 0, 0))[protocol]
    inter = _HOP_US["network"][algorithm][protocol]
    base = _BASE_US[algorithm][protocol]
    n = topology.num_ranks
    if algorithm == "ring":
        steps, between = (2 * (n - 1), 2 * (nodes - 1)) if op == "all_reduce" else (n - 1, nodes - 1)
        overhead = (3.0 if protocol == 2 else 1.0) if nodes > 1 else 0.0
        latency = base + (steps - between) * max(intra, overhead) + between * inter
        plateau = protocol == 2 and nodes > 1 and op == "all_reduce" and num_bytes >= n / 16 * 65536
        return latency * (_RING_PLATEAU if plateau else 1.0)
    if algorithm == "tree":
        return base + 2 * ((ranks_per_node - 1) * intra + int(math.log2(nodes)) * inter)
    return intra if nodes == 1 else intra + 2 * int(math.log2(nodes)) * inter
