"""Which layouts of a training step are best on a cluster: all that can be, those that fit, the fastest of them.

What is tried is in `search_space`; of recomputation as much as it takes to fit and no more, since it costs time
whatever else there is. Layouts that do not fit are counted; where none fits, the one that misses by least is the
answer, and says by how much.

A layout's time is `step_time`, its memory `layout_memory`; both are *predicted*, and its reason names what takes time
and how little the alternatives would change. Nothing is fitted here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitwright.comms.topology import Topology
from bitwright.errors import CommsError, ParallelError
from bitwright.hardware.device import Device
from bitwright.hardware.model_shape import ModelShape
from bitwright.parallel.efficiency import Efficiency, efficiency_of
from bitwright.parallel.job import (
    DEFAULT_SOFTWARE,
    TYPICAL,
    Job,
    Software,
    Tuning,
    device_of,
    raise_if_no_device,
    raise_if_not_modelled,
    raise_if_too_long,
)
from bitwright.parallel.layout import Layout, Recompute
from bitwright.parallel.memory import LayoutMemory, MemoryFacts, layout_memory
from bitwright.parallel.network import ClusterNetwork
from bitwright.parallel.numerics import Numerics, numerics_of
from bitwright.parallel.policy_memory import memory_facts
from bitwright.parallel.search_space import dp_sizes, layouts, possible_sizes, raise_if_no_axes, recomputes
from bitwright.parallel.step_time import StepTime, step_time
from bitwright.training import choose
from bitwright.training.policy import Policy

#: Share of a device's memory that a step may fill.
USABLE_SHARE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is to be planned.

    Raises:
        ParallelError: a size is not positive, the model is not modelled (`raise_if_not_modelled`) or has fewer
            positions, an axis cannot be given so, or the cluster's device is not known.
    """

    shape: ModelShape
    sequence: int
    global_batch: int
    topology: Topology
    policies: tuple[Policy, ...]
    optimizer: str = "adamw"
    software: Software = DEFAULT_SOFTWARE
    tuning: Tuning = TYPICAL
    #: None: the one that the topology names.
    device: Device | None = None
    #: Axis → its size, or word (schedule, recompute), where it is given; the others are searched.
    fixed: tuple[tuple[str, int | str], ...] = ()

    def __post_init__(self) -> None:
        raise_if_not_modelled(self.shape)
        for name in ("sequence", "global_batch"):
            if getattr(self, name) < 1:
                raise ParallelError(f"{name} is {getattr(self, name)}; give a positive number")
        raise_if_too_long(self.shape, self.sequence)
        raise_if_no_axes(self.fixed)
        raise_if_no_device(self.topology, self.device)

    @property
    def used_device(self) -> Device:
        """The device that is planned for."""
        return device_of(self.topology, self.device)

    @property
    def searched(self) -> dict[str, Any]:
        """What every search for layouts is about, by the names that `search_space` has for it."""
        return {"sequence": self.sequence, "num_gpus": self.topology.num_ranks, "node": self.topology.counts[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with what it takes."""

    job: Job
    memory: LayoutMemory
    time: StepTime
    policy: str

    @property
    def layout(self) -> Layout:
        """Of the job."""
        return self.job.layout

    @property
    def exposed_share(self) -> float:
        """Share of the step that is communication which nothing hides."""
        return self.time.exposed_s / self.time.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class NearestMiss:
    """The layout that comes nearest to fitting."""

    job: Job
    memory: LayoutMemory
    policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """The best layouts, best first; or, where none fits, what comes nearest."""

    candidates: tuple[Candidate, ...]
    nearest_miss: NearestMiss | None
    num_fit: int
    #: Of those that fit: slower variants, in micro-batch or schedule, of one that is kept.
    num_alike: int
    num_too_large: int
    #: Why layouts cannot be → how many.
    refused: tuple[tuple[str, int], ...]
    #: Sizes of dp that the cluster has and that do not divide the batch, and the least batch that all divide.
    ruled_out_dp: tuple[int, ...]
    even_batch: int
    device: Device
    efficiency_reason: str

    @property
    def usable_bytes(self) -> float:
        """Of the device's memory."""
        return USABLE_SHARE * self.device.memory_bytes


def plan_layouts(request: PlanRequest, *, limit: int = 5) -> ParallelPlan:
    """Return the fastest layouts that fit.

    Args:
        request: what is to be planned.
        limit: how many at most.

    Raises:
        ParallelError: no layout divides the model, the batch and the cluster, and the commonest reason is named, with
            the sizes that given axes may have; or the device does not multiply as a policy asks.
    """
    device = request.used_device
    efficiency, reason = efficiency_of(device)
    refused: Counter[str] = Counter()
    fitting: list[Candidate] = []
    miss: NearestMiss | None = None
    too_large = 0
    for policy in request.policies:
        lacking = choose.why_not(policy, device)
        if lacking is not None:
            instead = choose.choose_policy(device).policy.name
            raise ParallelError(
                f"policy '{policy.name}' does not run on this cluster: {lacking}; plan with '{instead}'"
            )
        numerics = numerics_of(policy)
        facts = memory_facts(policy, optimizer=request.optimizer)
        for job in _jobs(request, device, efficiency, numerics, refused):
            fits, nearest = _least_recompute(
                job, facts, USABLE_SHARE * device.memory_bytes, recomputes(dict(request.fixed))
            )
            if fits is None:
                too_large += 1
                if miss is None or nearest[1].total < miss.memory.total:
                    miss = NearestMiss(job=nearest[0], memory=nearest[1], policy=policy.name)
                continue
            try:
                time = step_time(fits[0])
            except CommsError as error:
                refused[str(error)] += 1
                continue
            fitting.append(Candidate(job=fits[0], memory=fits[1], time=time, policy=policy.name))
    if not fitting and miss is None:
        raise ParallelError(_nothing_found(request, refused))
    fitting.sort(key=lambda found: found.time.seconds)
    distinct = _distinct(fitting)
    copies = dp_sizes(request.shape, **request.searched, fixed=dict(request.fixed))
    return ParallelPlan(
        candidates=distinct[:limit],
        nearest_miss=None if fitting else miss,
        num_fit=len(fitting),
        num_alike=len(fitting) - len(distinct),
        num_too_large=too_large,
        refused=tuple(refused.most_common()),
        ruled_out_dp=tuple(dp for dp in copies if request.global_batch % dp),
        even_batch=math.lcm(*copies),
        device=device,
        efficiency_reason=reason,
    )


def _nothing_found(request: PlanRequest, refused: Counter[str]) -> str:
    """What to say where there is no layout: the commonest reason, and which of the given axes could be otherwise."""
    fixed = dict(request.fixed)
    given = f" with {', '.join(f'{axis}={value}' for axis, value in fixed.items())}" if fixed else ""
    commonest = f"; most often: {refused.most_common(1)[0][0]}" if refused else ""
    said = (
        f"no layout divides {request.shape.name}, {request.global_batch} sequences and "
        f"{request.topology.num_ranks} GPUs{given}{commonest}"
    )

    def may_be(axis: str, others: dict[str, int | str]) -> str:
        found = possible_sizes(
            axis, request.shape, **request.searched, global_batch=request.global_batch, fixed=others
        )  # fmt: skip
        # Its own value stands there where the network is what refuses it.
        return f"{axis} may be {', '.join(map(str, found))}" if found and fixed[axis] not in found else ""

    axes = [axis for axis in fixed if axis != "recompute"]
    one = [told for axis in axes if (told := may_be(axis, fixed))]
    if one:
        return f"{said}; {'; or '.join(one)}{' (the others as given)' if len(fixed) > 1 else ''}"
    alone = [told for axis in axes if (told := may_be(axis, {}))]
    if alone:
        return f"{said}; {'; '.join(f'alone, {told}' for told in alone)}"
    return f"{said}; change the batch or the cluster"


def _distinct(fitting: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The best of each (policy, tp, pp, cp, ep, ZeRO): variations in micro-batches say little beside it."""
    kept: dict[tuple[object, ...], Candidate] = {}
    for found in fitting:
        layout = found.layout
        kept.setdefault(
            (found.policy, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, layout.zero_group), found
        )
    return tuple(kept.values())


def _jobs(
    request: PlanRequest, device: Device, efficiency: Efficiency, numerics: Numerics, refused: Counter[str]
) -> Iterator[Job]:
    network = ClusterNetwork(topology=request.topology)
    found = layouts(
        request.shape,
        **request.searched,
        global_batch=request.global_batch,
        fixed=dict(request.fixed),
        refused=refused,
    )
    for layout in found:
        yield Job(
            shape=request.shape,
            sequence=request.sequence,
            global_batch=request.global_batch,
            layout=layout,
            numerics=numerics,
            device=device,
            efficiency=efficiency,
            network=network,
            software=request.software,
            tuning=request.tuning,
        )


def _least_recompute(
    job: Job, facts: MemoryFacts, usable: float, tried_in_turn: Sequence[Recompute]
) -> tuple[tuple[Job, LayoutMemory] | None, tuple[Job, LayoutMemory]]:
    """The job with as little recomputation as fits, if any does; and the one that takes least."""
    tried = []
    for recompute in tried_in_turn:
        changed = replace(job, layout=replace(job.layout, recompute=recompute))
        memory = layout_memory(changed, facts)
        if memory.total <= usable:
            return (changed, memory), (changed, memory)
        tried.append((changed, memory))
    return None, min(tried, key=lambda found: found[1].total)
