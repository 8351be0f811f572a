"""How long one collective takes on one topology: what NCCL would choose, at the rate that was measured of it.

    t = launch + t0 + max over levels of  V/B · (1 + √(H/S))

`wire_bytes` says V, the bytes of the busiest rank on a level's links; the topology file says B and H, each with its
source; t0 is hops times the latency of a hop. Levels are pipelined, so the slowest one counts and not the sum: 4 GiB
over 4 nodes of 8 B200 take 22 ms, where the sum of the levels is 26 ms and the slowest alone 16 ms. What no library
pipelines (hierarchical, as messages of ours) takes the sum, step by step (`schedule_cost`).

The constant of a hop is that of a library of kernels, and Gloo between processes takes a hundred times that. So an
algorithm that nobody measured at a level where others were begins as they do: by messages one after the other, each at
the latency of a measured one, or else no sooner than what began soonest there.

    from bitwright.comms import collective_time, topology

    tp = topology("h100x8x16").group(8)                 # the 8 GPUs of one node
    dp = topology("h100x8x16").group(16, stride=8)      # one GPU of each node, the others beside it alike
    collective_time("all_reduce", 64 << 20, tp)         # CollectiveCost(time_s=3.3e-4, algorithm="nvls", …)

Rejected: NCCL's own estimates as times (19 to 65 % too short from 1 to 64 MiB); α + S/B with one rate for all sizes
(twice too short at 1 MiB); one table of measured times a topology (says nothing of other group sizes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwright.catalog import nearest_name_hint
from bitwright.comms.nccl_tuner import hop_latencies_s, num_hops, predicted_times
from bitwright.comms.schedule_cost import step_cost
from bitwright.comms.topology import Curve, Level, Topology
from bitwright.comms.wire_bytes import BUS_FACTORS, WIRE_FORMS, Place, WireForm
from bitwright.errors import CommsError, UnknownName

#: How a collective is started → seconds that it adds. Kernels in a graph start at once; eager calls pass through the
#: framework (about 25 µs between NCCL's own times and torch's at ≤ 1 MiB); one process that drives all GPUs starts
#: them one after the other.
LAUNCHES = {"graph": 0.0, "eager": 25e-6, "one_process": 30e-6}
#: What part of a link's rate a level without a measured curve is taken to reach (P2P over NVLink 3, 4 and 5 reached
#: 0.91, 0.83 and 0.83), and its half size.
_UNMEASURED_SHARE = 0.83
_UNMEASURED_HALF_SIZE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCost:
    """What one collective is predicted to take."""

    op: str
    num_bytes: int
    num_ranks: int
    time_s: float
    #: Of `time_s`: until the first byte arrives, launch included.
    latency_s: float
    algorithm: str
    #: "LL", "LL128" or "Simple" of NCCL; "" where another library or kernel is meant.
    protocol: str
    #: Why this algorithm and protocol.
    reason: str
    #: Kind of the level that takes longest; "" for one rank.
    bound: str
    #: Bytes that the busiest rank sends over that level's links.
    wire_bytes: float
    #: Whether somebody measured the curve of that level, for this algorithm or its next of kin.
    is_measured: bool

    @property
    def algbw_gb_per_s(self) -> float:
        """S/t, as nccl-tests prints it; 0 where nothing is sent."""
        return self.num_bytes / self.time_s / 1e9 if self.time_s > 0 else 0.0

    @property
    def busbw_gb_per_s(self) -> float:
        """Algorithm bandwidth times the factor of the collective, as nccl-tests prints it."""
        return self.algbw_gb_per_s * BUS_FACTORS[self.op](self.num_ranks)


def collective_time(
    op: str,
    num_bytes: float,
    topology: Topology,
    algorithm: str | None = None,
    *,
    launch: str = "graph",
) -> CollectiveCost:
    """Return the predicted time of one collective over all ranks of a topology.

    Args:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send_recv".
        num_bytes: S, the whole buffer as nccl-tests counts it: the vector of an all-reduce, the gathered output, the
            full input of a reduce-scatter or all-to-all, the message.
        topology: of the ranks that take part (`Topology.group`); send_recv is to the farthest of them.
        algorithm: one of `algorithms(op, topology)`; chosen as NCCL does unless given.
        launch: a name in `LAUNCHES`.

    Raises:
        CommsError: a negative size, or an algorithm that the topology has no links for.
        UnknownName: no such collective, algorithm or launch.
    """
    _raise_if_unknown("collective", op, tuple(BUS_FACTORS))
    _raise_if_unknown("launch", launch, tuple(LAUNCHES))
    if not num_bytes >= 0:
        raise CommsError(f"a collective of {num_bytes} bytes; give 0 or more")
    size = float(num_bytes)
    if topology.num_ranks == 1 or size == 0:
        reason = "one rank has nothing to send" if topology.num_ranks == 1 else "there is nothing to send"
        return CollectiveCost(
            op=op, num_bytes=int(size), num_ranks=topology.num_ranks, time_s=0.0, latency_s=0.0, algorithm="none",
            protocol="", reason=reason, bound="", wire_bytes=0.0, is_measured=True,
        )  # fmt: skip
    form, protocol, reason = _choose(op, size, topology, algorithm)
    return _timed(form, size, topology, protocol, reason, LAUNCHES[launch])


def algorithms(op: str, topology: Topology) -> tuple[str, ...]:
    """Return the algorithms that a collective can use on a topology.

    Raises:
        UnknownName: no such collective.
    """
    _raise_if_unknown("collective", op, tuple(BUS_FACTORS))
    return tuple(form.algorithm for form in WIRE_FORMS if form.op == op and _why_not(form, topology) is None)


def refusals(op: str, topology: Topology) -> dict[str, str]:
    """Return the algorithms that a collective cannot use on a topology, each with its reason.

    Raises:
        UnknownName: no such collective.
    """
    _raise_if_unknown("collective", op, tuple(BUS_FACTORS))
    reasons = {form.algorithm: _why_not(form, topology) for form in WIRE_FORMS if form.op == op}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _choose(op: str, size: float, topology: Topology, algorithm: str | None) -> tuple[WireForm, str, str]:
    forms = {form.algorithm: form for form in WIRE_FORMS if form.op == op}
    ranked = predicted_times(op, size, topology)
    if algorithm is not None:
        _raise_if_unknown(f"algorithm of {op}", algorithm, tuple(forms))
        why_not = _why_not(forms[algorithm], topology)
        if why_not is not None:
            names = ", ".join(algorithms(op, topology))
            raise CommsError(f"algorithm '{algorithm}' {why_not} on {topology.spelled}; use one of {names}")
        protocol = next((item.protocol for item in ranked if item.algorithm == algorithm), "")
        return forms[algorithm], protocol, f"{algorithm} was asked for"
    for first in ranked:
        if _why_not(forms[first.algorithm], topology) is None:
            others = [item for item in ranked if item.algorithm != first.algorithm]
            beside = f", {others[0].algorithm} {1e6 * others[0].time_s:.0f} µs" if others else ""
            reason = f"NCCL's model takes the least: {first.algorithm}/{first.protocol} {1e6 * first.time_s:.0f} µs"
            return forms[first.algorithm], first.protocol, reason + beside
    able = [form for form in forms.values() if _why_not(form, topology) is None]
    usable = [form for form in able if form.is_chosen]
    # Where somebody measured some, the others are not there, as far as one knows.
    all_measured = [form for form in able if all(level.curve(op, form.algorithm) for level, _, _ in topology.spanned)]
    measured = [form for form in all_measured if form.is_chosen]
    candidates = measured or usable
    times = {form.algorithm: _timed(form, size, topology, "", "", 0.0).time_s for form in candidates}
    best = min(candidates, key=lambda form: times[form.algorithm])
    if len(candidates) == 1:
        told = ["that is measured here"] if measured and len(able) > 1 else []
        told += ["that a library chooses by itself"] if len(all_measured if measured else able) > 1 else []
        return best, "", " ".join((f"the only algorithm of {op}", " and ".join(told))).rstrip()
    return best, "", "the least predicted time of " + ", ".join(f"{n} {1e6 * t:.0f} µs" for n, t in times.items())


def _why_not(form: WireForm, topology: Topology) -> str | None:
    spanned = topology.spanned
    if form.one_level and len(spanned) > 1:
        return f"reaches across one level only, not {' and '.join(level.kind for level, _, _ in spanned)}"
    for level, _, _ in {"innermost": spanned[:1], "all": spanned}.get(form.switch, ()):
        if not level.switch_reduces:
            return f"needs a switch that adds, which {level.kind} is not"
    if form.several_levels and len(spanned) < 2:
        return "is for several nodes"
    if form.sequential_steps is not None and len(spanned) > 2:
        return f"goes over two levels, not {len(spanned)}"
    return None


def _timed(
    form: WireForm, size: float, topology: Topology, protocol: str, reason: str, launch_s: float
) -> CollectiveCost:
    if form.sequential_steps is not None:
        return _timed_one_after_the_other(form, size, topology, reason, launch_s)
    spanned = list(enumerate(topology.spanned))
    if form.op == "send_recv":
        spanned = spanned[-1:]
    rounds = form.phases if form.rounds is None else form.rounds(topology.num_ranks)
    latency, hops = hop_latencies_s(topology, form.steps, rounds)
    counts = num_hops(topology, form.steps, rounds)
    slowest, bound, wire, measured = -1.0, "", 0.0, True
    for index, (level, members, below) in spanned:
        place = Place(n=topology.num_ranks, k=members, g=below, innermost=index == 0)
        curve, is_measured = _curve(form, level)
        # What was measured of a whole kernel has its start in it.
        start = latency if index == 0 else 0.0
        if curve.latency_s is not None:
            latency += curve.latency_s - start
        elif is_measured:
            latency += hops[index]
        else:
            latency += _latency_of_kin_s(level, counts[index], start + hops[index]) - start
        sent = size * form.per_byte(place)
        rate = 1e9 * curve.ceiling_gb_per_s * level.share(members)
        seconds = sent / rate * (1 + math.sqrt(curve.half_size_bytes / size))
        if seconds > slowest:
            slowest, bound, wire, measured = seconds, level.kind, sent, is_measured
    return CollectiveCost(
        op=form.op, num_bytes=int(size), num_ranks=topology.num_ranks, time_s=launch_s + latency + slowest,
        latency_s=launch_s + latency, algorithm=form.algorithm, protocol=protocol, reason=reason, bound=bound,
        wire_bytes=wire, is_measured=measured,
    )  # fmt: skip


def _timed_one_after_the_other(
    form: WireForm, size: float, topology: Topology, reason: str, launch_s: float
) -> CollectiveCost:
    """Levels whose steps follow one another, as a schedule of messages has them: their times add up."""
    assert form.sequential_steps is not None
    total, latency, slowest, bound, wire, measured = 0.0, 0.0, -1.0, "", 0.0, True
    for index, (level, members, below) in enumerate(topology.spanned):
        place = Place(n=topology.num_ranks, k=members, g=below, innermost=index == 0)
        num_steps, sent = form.sequential_steps(place), size * form.per_byte(place)
        step = step_cost(topology, index, sent / num_steps)
        begun = num_steps * step.latency_s
        if not step.is_measured:
            begun = _latency_of_kin_s(level, num_steps, begun)
        seconds = num_steps * (step.seconds - step.latency_s) + begun
        total += seconds
        latency += begun
        measured &= step.is_measured
        if seconds > slowest:
            slowest, bound, wire = seconds, level.kind, sent
    return CollectiveCost(
        op=form.op, num_bytes=int(size), num_ranks=topology.num_ranks, time_s=launch_s + total,
        latency_s=launch_s + latency, algorithm=form.algorithm, protocol="", reason=reason, bound=bound,
        wire_bytes=wire, is_measured=measured,
    )  # fmt: skip


#: algorithm → whose curve stands for its own where nobody measured that.
_STAND_INS = {"tree": "ring", "nvls_tree": "tree", "sharp": "tree", "pairwise": "ring", "direct": "ring"}


def _curve(form: WireForm, level: Level) -> tuple[Curve, bool]:
    """The curve of the algorithm, or of the nearest kin; and whether somebody measured it."""
    name: str | None = form.algorithm
    if form.switch and form.several_levels and level.medium == "nvlink":
        name = "nvls"  # inside nodes
    while name is not None:
        found = level.curve(form.op, name)
        if found is not None:
            return found, True
        name = _STAND_INS.get(name)
    ceiling = _UNMEASURED_SHARE * level.one_way_gb_per_s
    return Curve(algorithm=form.algorithm, ceiling_gb_per_s=ceiling, half_size_bytes=_UNMEASURED_HALF_SIZE_BYTES), False


def _latency_of_kin_s(level: Level, num_messages: int, by_constants: float) -> float:
    """Seconds until the first byte of an algorithm without a curve: by the messages or collectives measured there."""
    message = level.curve("send_recv", "direct")
    if message is not None and message.latency_s is not None:
        return num_messages * message.latency_s
    return max(by_constants, min((c.latency_s for c in level.curves if c.latency_s is not None), default=0.0))


def _raise_if_unknown(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UnknownName(f"unknown {kind} {name!r}{nearest_name_hint(name, list(known))} Known: {', '.join(known)}")
