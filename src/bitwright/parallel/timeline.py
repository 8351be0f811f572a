"""What of a step overlaps what: events on lanes, from the same figures as `step_time`.

One process of the trace is one stage of the pipeline (all its GPUs run alike), with a lane for each stream:

    compute       passes of micro-batches; of a single stage layer by layer
    tp, ep, cp    collectives that compute waits for, after what they are part of: of a pipeline those of all layers of
                  a pass as one
    pp            what a stage passes on: activations to the next one, their gradients to the one before
    dp            gathers and reductions, beside compute: prefetched layer by layer (FSDP), or in buckets
    optimizer     the update

Work beside a collective is drawn as long as it takes beside it (`overlap.both_s`). Long steps are cut: no more than
`MAX_MICRO_BATCHES` micro-batches are drawn, and the title says so. `trace_file.py` and `trace_svg.py` write them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bitwright.parallel.job import Job
from bitwright.parallel.overlap import both_s, ddp_buckets
from bitwright.parallel.pipeline_order import TimedPass, pass_times, stage_order
from bitwright.parallel.step_time import StepTime, head_time_s, shard_parameters, step_time

Category = Literal["forward", "backward", "head", "collective", "exposed", "optimizer"]
#: Micro-batches that are drawn of a long step.
MAX_MICRO_BATCHES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that runs for a while on a lane."""

    #: Stage of the pipeline, and stream of its GPUs.
    stage: int
    lane: str
    name: str
    category: Category
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The events of a step."""

    title: str
    events: tuple[Event, ...]
    #: Micro-batches that are drawn, of how many.
    drawn: int
    num_micro_batches: int

    @property
    def end_s(self) -> float:
        """When the last event is over."""
        return max((event.end_s for event in self.events), default=0.0)


def timeline(job: Job) -> Timeline:
    """Return the events of a training step.

    Raises:
        ParallelError: a schedule that is not drawn, or a batch that the layout does not divide.
    """
    whole = job.num_micro_batches
    drawn = min(whole, max(MAX_MICRO_BATCHES, job.layout.pp))
    if job.layout.interleave > 1:
        drawn = max(job.layout.pp, drawn - drawn % job.layout.pp)
    shown = replace(job, global_batch=drawn * job.layout.dp * job.layout.micro_batch)
    time = step_time(shown)
    events = _single_stage(shown, time) if job.layout.pp == 1 else _pipeline(shown, time)
    last = max(event.end_s for event in events)
    for stage in range(job.layout.pp):
        events.append(_event(stage, "optimizer", "optimizer", "optimizer", last, time.parts["optimizer"]))
    cut = f", {drawn} of {whole} micro-batches" if drawn < whole else ""
    return Timeline(
        title=f"{job.shape.name}, {job.layout}, {job.numerics.name}{cut} (predicted)",
        events=tuple(events),
        drawn=drawn,
        num_micro_batches=whole,
    )


def _event(stage: int, lane: str, name: str, category: Category, start: float, length: float) -> Event:
    return Event(stage=stage, lane=lane, name=name, category=category, start_s=start, duration_s=length)


def _single_stage(job: Job, time: StepTime) -> list[Event]:
    """Layer by layer; FSDP's gathers and scatters beside it, or buckets beside the last backward pass (ZeRO 2: all)."""
    events: list[Event] = []
    now = 0.0
    for index in range(time.num_micro_batches):
        is_last = index == time.num_micro_batches - 1
        now = _fsdp(job, time, index, now, events) if job.layout.zero == 3 else _plain(job, time, index, now, events)
        if (is_last or job.layout.zero == 2) and job.layout.zero < 3 and job.layout.dp * job.layout.cp > 1:
            now = _buckets(job, time, 0, now, events)
        if is_last and job.layout.zero == 3 and job.layout.zero_group:
            now = _across_groups(job, now, events)
    return events


def _plain(job: Job, time: StepTime, index: int, now: float, events: list[Event]) -> float:
    layers = job.shape.num_layers
    for layer in range(layers):
        now = _layer(time, 0, f"layer {layer} forward {index}", now, 0.0, events, is_backward=False)
    now = _head(job, index, now, events)
    for layer in reversed(range(layers)):
        now = _layer(time, 0, f"layer {layer} backward {index}", now, 0.0, events, is_backward=True)
    return now


def _fsdp(job: Job, time: StepTime, index: int, now: float, events: list[Event]) -> float:
    layers = job.shape.num_layers
    gather, scatter = _layer_collectives(job, layers)
    contention = job.efficiency.contention
    events.append(_event(0, "dp", f"gather layer 0 ({index})", "exposed", now, gather))
    now += gather
    for layer in range(layers):
        beside = gather if layer < layers - 1 else 0.0
        if beside:
            events.append(_event(0, "dp", f"gather layer {layer + 1} ({index})", "collective", now, beside))
        stretched = both_s(time.forward.seconds, beside, contention) - time.forward.seconds
        now = _layer(time, 0, f"layer {layer} forward {index}", now, stretched, events, is_backward=False)
    now = _head(job, index, now, events)
    for layer in reversed(range(layers)):
        at = now
        if layer > 0:
            events.append(_event(0, "dp", f"gather layer {layer - 1} ({index})", "collective", at, gather))
            at += gather
        if layer < layers - 1:
            events.append(_event(0, "dp", f"reduce-scatter layer {layer + 1} ({index})", "collective", at, scatter))
            at += scatter
        stretched = both_s(time.backward.seconds, at - now, contention) - time.backward.seconds
        now = _layer(time, 0, f"layer {layer} backward {index}", now, stretched, events, is_backward=True)
    events.append(_event(0, "dp", f"reduce-scatter layer 0 ({index})", "exposed", now, scatter))
    return now + scatter


def _across_groups(job: Job, now: float, events: list[Event]) -> float:
    """Copies of a divided model sum their gradients."""
    layout = job.layout
    group = layout.zero_group
    num_bytes = sum(shard_parameters(job)) * job.numerics.gradient_bits / 8 / group
    copies, apart = layout.dp * layout.cp // group, layout.tp * group
    length = job.tuned_network.seconds("all_reduce", num_bytes, ranks=copies, stride=apart)
    events.append(_event(0, "dp", "all-reduce across groups", "exposed", now, length))
    return now + length


def _layer(
    time: StepTime, stage: int, name: str, now: float, stretched: float, events: list[Event], *, is_backward: bool
) -> float:
    """A pass over a layer: its work, stretched by what runs beside it, then the collectives that it waits for."""
    done = time.backward if is_backward else time.forward
    length = done.compute + stretched
    events.append(_event(stage, "compute", name, "backward" if is_backward else "forward", now, length))
    now += length
    for lane, seconds in (("tp", done.tp), ("ep", done.ep), ("cp", done.cp)):
        if seconds:
            events.append(_event(stage, lane, f"{lane} of {name}", "exposed", now, seconds))
            now += seconds
    return now


def _head(job: Job, index: int, now: float, events: list[Event]) -> float:
    length = head_time_s(job)
    events.append(_event(0, "compute", f"head and loss {index}", "head", now, length))
    return now + length


def _buckets(job: Job, time: StepTime, stage: int, end: float, events: list[Event]) -> float:
    """Buckets of gradients beside the backward pass that has just ended; the pass was drawn as if alone."""
    dense, experts = shard_parameters(job)
    num_bytes = (dense + experts) * job.numerics.gradient_bits / 8
    layout = job.layout
    operation: Literal["all_reduce", "reduce_scatter"] = "all_reduce" if layout.zero == 0 else "reduce_scatter"
    length = time.stage_layers[stage] * time.backward.seconds
    backward = length if job.software.overlaps_gradients else 0.0
    found = ddp_buckets(
        max(backward, 1e-9),
        num_bytes,
        max(job.software.bucket_bytes, num_bytes / 64),
        lambda size: job.tuned_network.seconds(
            operation, size, ranks=layout.dp * layout.cp, stride=layout.stride("cp")
        ),
        job.efficiency.contention,
    )
    began = end - backward
    for number, bucket in enumerate(found):
        start, took = began + bucket.start_s, bucket.end_s - bucket.start_s
        category: Category = "collective" if start < end else "exposed"
        events.append(_event(stage, "dp", f"{operation} bucket {number}", category, start, took))
    return max(end, began + found[-1].end_s) if found else end


def _layer_collectives(job: Job, layers: int) -> tuple[float, float]:
    dense, experts = shard_parameters(job)
    layout, numerics = job.layout, job.numerics
    ranks = layout.zero_group or layout.dp * layout.cp
    each = (dense + experts) / layers / 8
    network = job.tuned_network
    stride = layout.tp
    return (
        network.seconds("all_gather", each * numerics.parameter_bits, ranks=ranks, stride=stride),
        network.seconds("reduce_scatter", each * numerics.gradient_bits, ranks=ranks, stride=stride),
    )


def _pipeline(job: Job, time: StepTime) -> list[Event]:
    """Passes of micro-batches through the stages; gradients of each stage beside its last backward pass."""
    layout = job.layout
    parts = layout.pp * layout.interleave
    head = head_time_s(job)
    per_part = [time.stage_layers[part % layout.pp] / layout.interleave for part in range(parts)]
    forward = [count * time.forward.seconds for count in per_part]
    backward = [count * time.backward.seconds for count in per_part]
    forward[-1] += head / 3
    backward[-1] += 2 * head / 3
    num_bytes = job.tokens * job.shape.hidden_size * job.numerics.activation_bits / 8
    num_bytes /= layout.tp if layout.is_sequence_parallel else 1
    hop = job.tuned_network.seconds("send_recv", num_bytes, ranks=2, stride=layout.stride("pp"))
    orders = [
        stage_order(
            layout.schedule,
            stage=stage,
            stages=layout.pp,
            interleave=layout.interleave,
            micro_batches=time.num_micro_batches,
        )
        for stage in range(layout.pp)
    ]
    events: list[Event] = []
    ends = [0.0] * layout.pp
    for entry in pass_times(orders, forward, backward, hop):
        word: Category = "backward" if entry.done.is_backward else "forward"
        chunk = f" chunk {entry.done.part // layout.pp}" if layout.interleave > 1 else ""
        name = f"{word} {entry.done.micro_batch}{chunk}"
        events += _pass(time, entry, name, word, per_part[entry.done.part])
        if entry.done.part != (0 if entry.done.is_backward else parts - 1):
            events.append(_event(entry.stage, "pp", f"send {name}", "collective", entry.end_s, hop))
        ends[entry.stage] = max(ends[entry.stage], entry.end_s)
    if layout.dp * layout.cp > 1:
        for stage in range(layout.pp):
            _buckets(job, time, stage, ends[stage], events)
    return events


def _pass(time: StepTime, entry: TimedPass, name: str, word: Category, layers: float) -> list[Event]:
    """A pass of one micro-batch over the layers of a part: its work, then the collectives that it waits for."""
    done = time.backward if entry.done.is_backward else time.forward
    waits = [
        (lane, layers * seconds) for lane, seconds in (("tp", done.tp), ("ep", done.ep), ("cp", done.cp)) if seconds
    ]
    now = entry.end_s - sum(seconds for _, seconds in waits)
    events = [_event(entry.stage, "compute", name, word, entry.start_s, now - entry.start_s)]
    for lane, seconds in waits:
        events.append(_event(entry.stage, lane, f"{lane} of {name}", "exposed", now, seconds))
        now += seconds
    return events
