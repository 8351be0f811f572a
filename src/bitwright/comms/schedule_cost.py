"""How long a schedule takes on a topology, message by message: for algorithms that no library has a curve of.

Each rank has a clock. Between two ranks that are there at the same time a message takes

    α + max over the links that it passes of  V/B · (1 + √(H/V))

with V the bytes that the step puts on that link in that direction: a rank's own link, and at each level that a message
crosses the links of the unit it leaves and of the one it enters. α, B and H are those of a message at the outermost
level that the step crosses (the curve of `send_recv` there, which `comm fit` finds; an α that nobody measured is that
of the library's messages). Half of α tells the sender that there is room, and half is the way of the data: who has
waited for a message for longer than that has told already, and who has sent it does not wait for it to arrive. Ranks
wait only for their partners, so that steps of a pipeline overlap where the schedule lets them. A step in which all
ranks do alike has a closed form, `step_cost`.

What it does not know: two steps of different ranks that happen to share a link at one time; links that run dry while
others still have a queue, where several ranks each send to several at once (a tenth to a fifth, in benchmarks/network);
and the work of the processor that adds and copies. Sources: Hockney 1994 (α + S/B); Culler et al. 1993, LogP (clocks by
process); the clear-to-send messages of NCCL's network transports and of Gloo's buffers.
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
class _Tier:
    """A level as messages see it: units of `size` ranks are joined, each through links of so many bytes a second."""

    kind: str
    #: Ranks below each unit that the level joins.
    size: int
    curve: Curve
    latency_s: float
    #: What the links of one unit carry for one of its ranks, and for all of them.
    rank_rate: float
    unit_rate: float

    def seconds(self, load: float, is_of_rank: bool) -> float:
        """How long a link of a unit, or one rank's share of it, takes for so many bytes."""
        if load <= 0:
            return 0.0
        rate = self.rank_rate if is_of_rank else self.unit_rate
        return load / rate * (1 + math.sqrt(self.curve.half_size_bytes / load))


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
    links = [tier.seconds(num_bytes, True) for tier in tiers[: index + 1]]
    links += [tier.seconds(num_bytes * tier.size, False) for tier in tiers[1 : index + 1]]
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
    for item, keys in sent:
        for key in keys:
            loads[key] = loads.get(key, 0.0) + (item.stop - item.first) * chunk
    starts = list(clocks)
    for item, keys in sent:
        seconds, kind = max((tiers[key[0]].seconds(loads[key], key[3]), tiers[key[0]].kind) for key in keys)
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
    for level, _, below in topology.spanned:
        curve = level.curve("send_recv", "direct") or level.curve("all_reduce", "ring")
        if curve is None:
            ceiling = 0.83 * level.one_way_gb_per_s
            curve = Curve(algorithm="direct", ceiling_gb_per_s=ceiling, half_size_bytes=0.0)
        rate = 1e9 * curve.ceiling_gb_per_s
        found.append(
            _Tier(
                kind=level.kind,
                size=below,
                curve=curve,
                latency_s=message_seconds(level, topology) if curve.latency_s is None else curve.latency_s,
                rank_rate=rate * (below if level.is_shared else 1),
                unit_rate=rate * below,
            )
        )
    return found
