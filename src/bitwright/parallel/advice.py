"""Why a layout is good, what holds it back, and what changing one thing would do: each change predicted, not guessed.

A reason is made of the step's own parts. A change is the same step with one thing different (twice the batch, bf16
gradients, links twice as fast, tensor parallelism across nodes, …), timed again; the gain is in tokens per second, so
that a larger batch counts as what it is. Changes that the cluster, the batch or the memory do not allow are not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bitwright.comms.wire import safe_ranks
from bitwright.errors import CommsError, HardwareError, ParallelError
from bitwright.parallel.job import Job
from bitwright.parallel.layout import Axis, why_not
from bitwright.parallel.network import SlowerNetwork
from bitwright.parallel.numerics import Numerics
from bitwright.parallel.step_time import StepTime, step_time
from bitwright.parallel.traffic import sent_bytes

#: What takes time → the part that it is, and what makes it less.
_KINDS = {
    "products": ("linear", "fewer bits make them faster (--policy), more GPUs share them"),
    "attention": ("attention", "shorter sequences make it less (--seq)"),
    "elementwise work": ("elementwise", "fused kernels make it less, and tensor parallelism shares it (--fix tp=)"),
    "turning operands into codes": ("quantize", "recipes without a pass for scales make it less (--policy)"),
    "waiting for the host": ("host", "captured graphs or larger micro-batches make it less (--fix micro_batch=)"),
    "head and loss": ("head", "tensor parallelism shares it (--fix tp=)"),
    "pipeline bubble": ("bubble", "more micro-batches or another schedule fill it (--global-batch, --fix schedule=)"),
    "optimizer": ("optimizer", "ZeRO shares it (--fix zero=1)"),
}
_RECOMPUTATION = "recomputation"
_REMEDIES = {name: remedy for name, (_, remedy) in _KINDS.items()} | {
    _RECOMPUTATION: "more memory saves it: more GPUs, smaller micro-batches (--fix micro_batch=1), more ZeRO",
    "exposed communication": "faster links, fewer bits on the wire or larger batches hide more of it (--global-batch)",
}
#: What the model itself asks for, however it is divided.
_OWN = ("products", "attention", "head and loss")
#: Recomputation → what it computes again.
_RECOMPUTED = {"selective": "scores of attention", "operations": "every other product", "full": "whole layers"}
#: Shares of a step below this are not worth a word.
_LEAST_SHARE = 0.005
#: Gains below this are not worth a line.
_LEAST_GAIN = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that a user could do, and what it would do."""

    what: str
    #: Of tokens per second; negative where it would be slower.
    gain: float
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedPart:
    """Something that takes time."""

    what: str
    seconds: float
    #: Of the step.
    share: float


def reason_of(job: Job, time: StepTime) -> str:
    """Return why a layout is where it is: how many bytes of a GPU lie on the critical path, and what hides the others.

    Shares are of the step. What hides is found by timing the step again with nothing hidden.
    """
    layout, sent = job.layout, sent_bytes(job)
    parts = []
    on_the_path: tuple[tuple[Axis, str], ...] = (("tp", "tp"), ("ep", "experts"))
    for axis, title in on_the_path:
        if axis in sent:
            told = f"{_spell(sent[axis])} on the critical path, {_share(time, axis)}"
            parts.append(f"{title} {_place(job, axis)}: {told}")
    if "cp" in sent:
        parts.append(f"cp {_place(job, 'cp')}: {_spell(sent['cp'])} behind attention, {_share(time, 'cp')} exposed")
    if "pp" in sent:
        told = (
            f"{_spell(sent['pp'])} behind other chunks, {_share(time, 'pp')} exposed; bubble {_share(time, 'bubble')}"
        )
        parts.append(f"pp {_place(job, 'pp')}: {told}")
    if "dp" in sent:
        what = "parameters and gradients" if layout.zero == 3 else "gradients"
        parts.append(f"{what} {_place(job, 'dp')}: {_spell(sent['dp'])}, {_hidden(job, time)}")
    if layout.recompute != "none":
        parts.append(f"recomputes {_RECOMPUTED[layout.recompute]}")
    return "; ".join(parts) or "one GPU: nothing is exchanged"


def _hidden(job: Job, time: StepTime) -> str:
    """How much of what data parallelism takes lies behind passes."""
    software = replace(job.software, overlaps_gradients=False, overlaps_parameters=False)
    bare = step_time(replace(job, software=software)).parts["dp"]
    exposed = time.parts["dp"]
    hidden = max(0.0, 1 - exposed / bare) if bare else 0.0
    behind = "both passes" if job.layout.zero == 3 and job.layout.pp == 1 else "the backward pass"
    return f"{hidden:.0%} of its time behind {behind}, {_share(time, 'dp')} exposed"


def _share(time: StepTime, part: str) -> str:
    return f"{time.parts[part] / time.seconds:.0%}"


def _place(job: Job, axis: Axis) -> str:
    """Whether a group along an axis stays on the fast links."""
    layout = job.layout
    sizes = {"tp": layout.tp, "ep": layout.ep, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp * layout.cp}
    stride = layout.tp if axis == "dp" else layout.stride(axis)
    ranks = 2 if axis == "pp" else sizes[axis]
    return "within a node" if ranks * stride <= job.network.gpus_per_node else "across nodes"


def _spell(num_bytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 2**20:.3g} MiB"


def ranked_parts(time: StepTime) -> tuple[RankedPart, ...]:
    """Return everything that takes time, longest first; what is computed again is told apart from what has to be."""
    again = time.recomputed
    seconds = {"exposed communication": time.exposed_s, _RECOMPUTATION: again.compute}
    for name, (part, _) in _KINDS.items():
        seconds[name] = time.parts[part] - getattr(again, part, 0.0)
    ranked = sorted(seconds.items(), key=lambda part: -part[1])
    return tuple(RankedPart(what=name, seconds=took, share=took / time.seconds) for name, took in ranked)


def bottleneck_of(time: StepTime) -> str:
    """Return what takes longest, with its share and what makes it less."""
    first = ranked_parts(time)[0]
    return f"{first.what}: {first.share:.0%} of the step; {_REMEDIES[first.what]}"


def beside_it(time: StepTime) -> str:
    """Return what else takes time, in order, and what makes the first less that the model itself does not ask for."""
    rest = [part for part in ranked_parts(time)[1:] if part.share >= _LEAST_SHARE]
    told = [f"{part.what} {part.share:.0%}" for part in rest]
    first = next((index for index, part in enumerate(rest) if part.what not in _OWN), None)
    if first is not None:
        told[first] += f" ({_REMEDIES[rest[first].what]})"
    return "; ".join(told)


def changes(job: Job, time: StepTime, others: Sequence[Numerics] = ()) -> tuple[Change, ...]:
    """Return what changing one thing would do, largest effect first; first what helps, then what would hurt.

    Args:
        job, time: the step.
        others: further numerics to try.
    """
    base = job.global_batch / time.seconds
    found = []
    policies = [(f"policy {n.name}", "its products; weigh its loss too", replace(job, numerics=n)) for n in others]
    for what, note, other in (*policies, *_variants(job)):
        reason = why_not(
            other.layout,
            other.shape,
            sequence=other.sequence,
            num_gpus=other.layout.num_gpus,
            global_batch=other.global_batch,
        )
        if reason is not None:
            continue
        try:
            seconds = step_time(other).seconds
        except (CommsError, HardwareError, ParallelError):
            # A group that the cluster does not have, or a format that the device does not: no change to tell of.
            continue
        gain = other.global_batch / seconds / base - 1
        if abs(gain) >= _LEAST_GAIN:
            found.append(Change(what=what, gain=gain, note=note))
    return tuple(sorted(found, key=lambda change: -change.gain))


def _variants(job: Job) -> Iterator[tuple[str, str, Job]]:
    layout, numerics = job.layout, job.numerics
    yield "twice the global batch", "if it still trains as well", replace(job, global_batch=2 * job.global_batch)
    ranks = layout.dp * layout.cp
    if numerics.gradient_bits > 16 and ranks > 1:
        safe = safe_ranks("bf16")
        note = f"ring sums stay within a bf16 rounding of exact ones up to {safe} ranks; here are {ranks}"
        yield "gradients in bf16 on the wire", note, replace(job, numerics=replace(numerics, gradient_bits=16.0))
    yield (
        "links between nodes twice as fast",
        "what the network costs",
        replace(job, network=SlowerNetwork(network=job.network, within=1.0, across=0.5)),
    )
    if layout.tp > 1 and not job.software.hidden_tp_share:
        software = replace(job.software, hidden_tp_share=0.6)
        yield (
            "chunked (asynchronous) tensor parallelism",
            "gains of 4 to 16 % are published",
            replace(job, software=software),
        )
    node = job.network.gpus_per_node
    if layout.tp <= node and layout.dp % 2 == 0 and layout.tp * 2 > node:
        wider = replace(layout, tp=2 * layout.tp, dp=layout.dp // 2, is_sequence_parallel=True)
        yield f"tp {wider.tp}, across nodes", "its bytes lie on the critical path", replace(job, layout=wider)
    if layout.recompute != "none":
        yield "no recomputation", "needs more memory", replace(job, layout=replace(layout, recompute="none"))
    if layout.zero < 3 and ranks > 1 and job.software.overlaps_gradients:
        software = replace(job.software, bucket_bytes=4 * job.software.bucket_bytes)
        yield "buckets four times as large", "fewer, longer collectives", replace(job, software=software)
        yield (
            "gradients reduced after the backward pass",
            "no overlap",
            replace(job, software=replace(job.software, overlaps_gradients=False)),
        )
    if layout.pp > 1 and layout.schedule == "1f1b" and layout.interleave == 1:
        filled = replace(layout, schedule="zero-bubble")
        yield "a zero-bubble schedule", "backward passes in two parts fill the bubbles", replace(job, layout=filled)
