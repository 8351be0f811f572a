"""What joins the ranks of a cluster, level by level, from the innermost outwards; a name spells the counts.

    h100x8x16        16 nodes (joined by NICs) of 8 GPUs (joined by an NVSwitch)
    gb200x72x2       two racks of 72
    a100-pairsx2x2   two pairs (NVLink) across PCIe

A *level* joins units of the level below it. Each link figure is of one rank and one direction: 8 NICs of 50 GB/s in a
node of 8 are 50 GB/s a rank. What an algorithm achieves there is a *curve*, the time of S bytes being

    t = t0 + V/B · (1 + √(H/S))

with V the bytes that the busiest rank puts on the level's links (`wire_bytes`), B the ceiling that large messages reach
and H the *half size*: a message of H bytes moves at half the ceiling. (√ rather than a plain H/S: rates of collectives
rise slowly over three decades of sizes, since chunks, channels and protocols grow along.)

A *group* is the set of ranks that a collective runs over. `Topology.group(4, stride=8)` are four ranks that stand 8
apart: one of each of four nodes. Figures stay those of one rank, so a group has the share of the links that is its own
while the other groups like it communicate too. `topology_file` reads the files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from bitwright.comms.sizes import spell_count
from bitwright.errors import CommsError
from bitwright.hardware.device import Certainty

#: Which of a library's latencies hold for a level's hops.
Medium = Literal["nvlink", "pci", "network"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """How fast one algorithm moves bytes through one level."""

    #: A name of `wire_bytes.WIRE_FORMS`.
    algorithm: str
    #: 10⁹ bytes per second of one rank in one direction that large messages reach.
    ceiling_gb_per_s: float
    #: Bytes of a collective at which half the ceiling is reached; 0 where the rate is the same at all sizes.
    half_size_bytes: float
    #: Seconds that the smallest message takes; None: what hops of the library's own kernels take.
    latency_s: float | None = None
    #: Collectives that the curve is for; empty: all of them.
    ops: tuple[str, ...] = ()
    #: (bytes, the curve's time over the measured one, less 1) of the measurements that it was fitted to.
    residuals: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What joins some units, each of which is a rank or the level below."""

    #: As people call it: "NVSwitch", "NVLink bridge", "PCIe4 x16", "EFA".
    kind: str
    medium: Medium
    #: Units that it joins.
    members: int
    #: What one rank's links carry in one direction, 10⁹ bytes per second.
    one_way_gb_per_s: float
    #: Seconds of one hop of the smallest message; None: the constant of the library for this medium.
    hop_latency_s: float | None
    #: Links lead to each peer by themselves, so that a group has only those to its own members.
    full_mesh: bool
    #: The switch adds and copies: NVLS in a node, SHARP between nodes.
    switch_reduces: bool
    #: The ranks below one unit share its links, so that one of them alone may have all; otherwise each has its own.
    is_shared: bool
    curves: tuple[Curve, ...]
    source: str
    certainty: Certainty

    def curve(self, op: str, algorithm: str) -> Curve | None:
        """Return the curve of an algorithm, that of this collective before one of all; None: nobody measured it."""
        found = [curve for curve in self.curves if curve.algorithm == algorithm and (op in curve.ops or not curve.ops)]
        return max(found, key=lambda curve: len(curve.ops) > 0, default=None)

    def share(self, members: int) -> float:
        """Return what part of a rank's links leads to the members of a group."""
        return (members - 1) / (self.members - 1) if self.full_mesh and 1 < members < self.members else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Ranks and what joins them, innermost level first."""

    name: str
    aliases: tuple[str, ...]
    #: Name of the device that a rank is; None: none that the catalog has.
    device: str | None
    #: Major.minor of NVIDIA's instructions, by which NCCL chooses; None: another library runs the collectives.
    compute_capability: float | None
    levels: tuple[Level, ...]
    notes: tuple[str, ...] = ()
    #: Members of each level that take part; all of them in a whole cluster.
    counts: tuple[int, ...]
    #: What latencies that follow from the library's constants are multiplied by, as somebody fitted it.
    latency_ratio: float = 1.0

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return math.prod(self.counts)

    @property
    def spanned(self) -> tuple[tuple[Level, int, int], ...]:
        """(level, its members that take part, ranks below each member), of the levels with more than one."""
        found = []
        below = 1
        for level, count in zip(self.levels, self.counts, strict=True):
            if count > 1:
                found.append((level, count, below))
            below *= count
        return tuple(found)

    def with_counts(self, counts: tuple[int, ...]) -> Topology:
        """Return the cluster of so many members at each level; levels that are not named have one.

        The outermost level takes any count: clusters grow there, node by node, at the same rate of each rank's links.
        `grown` says where that is more than the level was described with.

        Raises:
            CommsError: more levels than there are, or more members than the innermost ones join.
        """
        if len(counts) > len(self.levels):
            raise CommsError(
                f"{'x'.join(map(str, counts))} names {len(counts)} levels, but {self.name} has "
                f"{' and '.join(level.kind for level in self.levels)}; give "
                f"{spell_count(len(self.levels), 'count')} at most"
            )
        for level, count in zip(self.levels, counts, strict=False):
            if count < 1 or (level is not self.levels[-1] and count > level.members):
                raise CommsError(f"{self.name} joins 1 to {level.members} by {level.kind}, not {count}; name fewer")
        filled = counts + (1,) * (len(self.levels) - len(counts))
        return replace(self, counts=filled)

    @property
    def grown(self) -> tuple[tuple[Level, int], ...]:
        """(level, members that take part), of the levels that have more than they were described with."""
        return tuple((x, count) for x, count in zip(self.levels, self.counts, strict=True) if count > x.members)

    def group(self, num_ranks: int, *, stride: int = 1) -> Topology:
        """Return the ranks 0, stride, 2·stride, … as a topology of their own.

        Args:
            num_ranks: members of the group.
            stride: ranks from one member to the next: 1 for the fastest axis of a layout.

        Raises:
            CommsError: the cluster is smaller, or a level is filled by a part of the group only.
        """
        if num_ranks < 1 or stride < 1 or num_ranks * stride > self.num_ranks:
            raise CommsError(
                f"a group of {spell_count(num_ranks, 'rank')} {stride} apart does not fit into the "
                f"{spell_count(self.num_ranks, 'rank')} of {self.spelled}; take a smaller group or a larger cluster"
            )
        counts = []
        left, apart = num_ranks, stride
        for level, members in zip(self.levels, self.counts, strict=True):
            if members % apart and apart % members:
                raise CommsError(
                    f"ranks {stride} apart do not divide the {members} that {level.kind} joins in {self.spelled}; "
                    "take a stride that divides it or is a multiple of it"
                )
            room = max(1, members // apart)
            inside = min(left, room)
            if left % inside:
                raise CommsError(
                    f"a group of {num_ranks} ranks fills units of {inside} by {level.kind} in {self.spelled} "
                    "unevenly; take a multiple of it"
                )
            counts.append(inside)
            left //= inside
            apart = max(1, apart // members)
        return replace(self, counts=tuple(counts))

    @property
    def spelled(self) -> str:
        """The name with its counts: h100x8x16."""
        counts = list(self.counts)
        while len(counts) > 1 and counts[-1] == 1:
            counts.pop()
        return "x".join((self.name, *map(str, counts)))

    def scaled(self, *, latency: float = 1.0, ceiling: float = 1.0, half_size: float = 1.0) -> Topology:
        """Return a topology whose latencies, ceilings and half sizes are multiples of these (`fit`)."""
        levels = tuple(
            replace(level, curves=tuple(_scaled(curve, latency, ceiling, half_size) for curve in level.curves))
            for level in self.levels
        )
        return replace(self, levels=levels, latency_ratio=self.latency_ratio * latency)


def _scaled(curve: Curve, latency: float, ceiling: float, half_size: float) -> Curve:
    return replace(
        curve,
        ceiling_gb_per_s=curve.ceiling_gb_per_s * ceiling,
        half_size_bytes=curve.half_size_bytes * half_size,
        latency_s=None if curve.latency_s is None else curve.latency_s * latency,
        residuals=(),
    )
