"""How long a schedule takes on a topology, message by message: for algorithms that no library has a curve of.

Each rank has a clock. Between two ranks that are there at the same time a message takes

    α + max over the links that it passes of  V/B · (1 + √(H/V))

with V the bytes that the step puts on that link in that direction: a rank's own link, and at each level that a message
crosses the links of the unit it leaves and of the one it enters. α, B and H are those of a message at the outermost
level that the step crosses (the curve of `send_recv` there, which `comm fit` finds; an α that nobody measured is that
of the library's messages). Half of α tells the sender that there is room, and half is the way of the data: who has
waited for a message for longer than that has told already, and who has sent it does not wait for it to arrive. Where
several ranks each send to several at once, some links run dry while others have a queue: there B and H are of the
level's all-to-all, if somebody measured it. Ranks wait only for their partners, so that steps of a pipeline overlap
where the schedule lets them. A step in which all ranks do alike has a closed form, `step_cost`.

What it does not know: two steps of different ranks that happen to share a link at one time, and the work of the
processor that adds and copies. Sources: Hockney 1994 (α + S/B); Culler et al. 1993, LogP (clocks by process);
the clear-to-send messages of NCCL's network transports and of Gloo's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bitwright.comms.nccl_tuner import message_seconds
from bitwright.comms.schedule import Schedule, Transfer
from bitwright.comms.topology import Curve, Topology
from bitwright.errors import CommsError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rate:
    """How fast bytes pass the links of a unit."""

    #: Bytes a second that they carry for one of its ranks, and for all of them.
    of_rank: float
    of_unit: float
    #: Bytes on a link of which half as many pass in a second.
    half_size: float

    def seconds(self, load: float, is_of_rank: bool) -> float:
        if load <= 0:
            return 0.0
        return load / (self.of_rank if is_of_rank else self.of_unit) * (1 + math.sqrt(self.half_size / load))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tier:
    """A level as messages see it: units of `size` ranks are joined, each through links of so many bytes a second."""

    kind: str
    #: Ranks below each unit that the level joins.
    size: int
    curve: Curve
    latency_s: float
    #: Of messages one at a time, and of an exchange among several.
    alone: _Rate
    crowded: _Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCost:
    """What a schedule is predicted to take."""

    time_s: float
    #: When each rank is through.
    ends_s: tuple[float, ...]
    #: Level → share of all steps' times in which it was the slowest link, by seconds.
    bounds: dict[str, float]


def schedule_time(schedule: Schedule, num_bytes: float, topology: Topology) -> ScheduleCost:
    """Return the predicted time of a schedule over all ranks of a topology.

    Args:
        schedule: over as many ranks as the topology has.
        num_bytes: S, of the whole buffer.
        topology: each spanned level with a curve of `direct` messages (or of rings, which are its next of kin).

    Raises:
        CommsError: another number of ranks.
    """
    if schedule.num_ranks != topology.num_ranks:
        raise CommsError(
            f"a schedule of {schedule.num_ranks} ranks on {topology.num_ranks} ranks of {topology.spelled}; make them "
            "as many"
        )
    tiers = _tiers(topology)
    halves = 2 if schedule.op == "all_to_all" else 1
    chunk = num_bytes * halves / schedule.num_chunks
    clocks = [0.0] * schedule.num_ranks
    bounds = {tier.kind: 0.0 for tier in tiers}
    for step in schedule.steps():
        _take(step, chunk, tiers, clocks, bounds)
    return ScheduleCost(time_s=max(clocks, default=0.0), ends_s=tuple(clocks), bounds=bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What one step takes in which all ranks do alike."""

    seconds: float
    latency_s: float
    #: Whether somebody measured messages of the level, or rings, their next of kin.
    is_measured: bool


def step_cost(topology: Topology, index: int, num_bytes: float) -> StepCost:
    """Return the time of a step in which every rank sends so many bytes to the rank at its place in the next unit.

    Args:
        topology: whose `spanned` levels the step crosses up to `index`.
        index: of the level that joins the units; 0 is the innermost.
        num_bytes: of each rank.
    """
    tiers = _tiers(topology)
    links = [tier.alone.seconds(num_bytes, True) for tier in tiers[: index + 1]]
    links += [tier.alone.seconds(num_bytes * tier.size, False) for tier in tiers[1 : index + 1]]
    tier = tiers[index]
    seconds = tier.latency_s + max(links)
    return StepCost(
        seconds=seconds, latency_s=tier.latency_s, is_measured=tier.curve in topology.spanned[index][0].curves
    )


def _take(
    step: Iterable[Transfer], chunk: float, tiers: list[_Tier], clocks: list[float], bounds: dict[str, float]
) -> None:
    sent = [(item, _links(item, tiers)) for item in step if item.source != item.destination]
    loads: dict[tuple[int, int, bool, bool], float] = {}
    to: dict[tuple[int, int], set[int]] = {}
    come: dict[tuple[int, int], set[int]] = {}
    for item, keys in sent:
        for key in keys:
            loads[key] = loads.get(key, 0.0) + (item.stop - item.first) * chunk
            to.setdefault((key[0], item.source), set()).add(item.destination)
            come.setdefault((key[0], item.destination), set()).add(item.source)
    starts = list(clocks)
    for item, keys in sent:
        times = []
        for key in keys:
            index, _, _, is_of_rank = key
            is_crowded = len(to[index, item.source]) > 1 and len(come[index, item.destination]) > 1
            tier = tiers[index]
            rate = tier.crowded if is_crowded else tier.alone
            times.append((rate.seconds(loads[key], is_of_rank), tier.kind))
        seconds, kind = max(times)
        crossed = tiers[max(key[0] for key in keys)]
        way = crossed.latency_s / 2
        sent_at = max(starts[item.source], starts[item.destination] + way) + seconds
        bounds[kind] += seconds
        clocks[item.source] = max(clocks[item.source], sent_at)
        clocks[item.destination] = max(clocks[item.destination], sent_at + way)


def _links(item: Transfer, tiers: list[_Tier]) -> list[tuple[int, int, bool, bool]]:
    """(tier, whose link, outwards, of one rank) of every link that a message passes."""
    found = []
    for index, tier in enumerate(tiers):
        source, destination = item.source // tier.size, item.destination // tier.size
        if source == destination:
            continue
        # A rank's share of a unit's links binds where it has links of its own.
        found += [(index, item.source, True, True), (index, item.destination, False, True)]
        if tier.size > 1:
            found += [(index, source, True, False), (index, destination, False, False)]
    return found


def _tiers(topology: Topology) -> list[_Tier]:
    found = []
    for level, members, below in topology.spanned:
        curve = level.curve("send_recv", "direct") or level.curve("all_reduce", "ring")
        if curve is None:
            ceiling = 0.83 * level.one_way_gb_per_s
            curve = Curve(algorithm="direct", ceiling_gb_per_s=ceiling, half_size_bytes=0.0)
        among = next((c for c in level.curves if c.algorithm == "pairwise" and "all_to_all" in c.ops), None)
        share = below if level.is_shared else 1
        alone = _rate(curve.ceiling_gb_per_s, curve.half_size_bytes, below, share)
        # A curve's half size is of the collective's bytes, of which a rank keeps its own part.
        crowded = among and _rate(among.ceiling_gb_per_s, among.half_size_bytes * (members - 1) / members, below, share)
        found.append(
            _Tier(
                kind=level.kind,
                size=below,
                curve=curve,
                latency_s=message_seconds(level, topology) if curve.latency_s is None else curve.latency_s,
                alone=alone,
                crowded=crowded or alone,
            )
        )
    return found


def _rate(ceiling_gb_per_s: float, half_size: float, below: int, share: int) -> _Rate:
    ceiling = 1e9 * ceiling_gb_per_s
    return _Rate(of_rank=ceiling * share, of_unit=ceiling * below, half_size=half_size)
