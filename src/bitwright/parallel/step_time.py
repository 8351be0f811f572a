"""How long a training step takes under a layout, and what it spends its time on.

    a stage's micro-batch    layers · (forward + backward), the head on the last stage
    pipeline                 m · slowest stage + bubble + what passing activations on exposes
    bubble                   (all stages - slowest) / interleave, times what the schedule leaves of it (`bubble_share`)
    data parallel            FSDP: both passes of every micro-batch; ZeRO 2, whose gradients nobody has whole: behind
                             every backward pass; else, and with a pipeline, once a step, behind the last one
    optimizer                30 bytes a parameter that the GPU updates (Adam: read 4 numbers of 4 bytes, write 3 and a
                             16-bit copy)

Bubbles: Narayanan et al., arXiv:2104.04473, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241. Layers go to stages so that the slowest is as fast as can be, the head counted where it lies.
The parts of a `StepTime` add up to its seconds. Everything is *predicted*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from bitwright.parallel.gemm_time import gemm_time, move_time_s
from bitwright.parallel.job import Job
from bitwright.parallel.layer_time import PassTime, backward_time, forward_time, recomputed_time, weight_gradient_time
from bitwright.parallel.layout import Schedule
from bitwright.parallel.network import Operation
from bitwright.parallel.overlap import ddp_exposed_s, fsdp_exposed_s

#: Bytes that Adam's step moves for each parameter.
_UPDATE_BYTES = 30
#: Bytes that logits, their softmax and its gradient move per logit.
_LOGIT_BYTES = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The predicted time of a training step, and its parts."""

    seconds: float
    #: "linear", "attention", "elementwise", "quantize", "host", "head", "tp", "cp", "ep", "pp", "bubble", "dp",
    #: "optimizer"
    parts: Mapping[str, float]
    #: What of the parts is computed again.
    recomputed: PassTime
    #: One layer's passes of one micro-batch, and how many layers the slowest stage has.
    forward: PassTime
    backward: PassTime
    stage_layers: tuple[int, ...]
    num_micro_batches: int
    tokens_per_s_per_gpu: float
    #: Share of the device's 16-bit peak that the model's own operations come to: 6 per weight and token that is
    #: multiplied, and causal attention; nothing that is recomputed counts.
    mfu: float
    status: Literal["predicted"] = "predicted"

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return sum(self.parts[name] for name in ("tp", "cp", "ep", "pp", "dp"))


def step_time(job: Job) -> StepTime:
    """Return the predicted time of a training step.

    Raises:
        ParallelError: the batch is not divided by the layout.
        HardwareError: the device cannot multiply in a format.
    """
    layout, m = job.layout, job.num_micro_batches
    forward, backward = forward_time(job), backward_time(job)
    per_layer = forward + backward
    head_s = head_time_s(job)
    layers = stage_layers(job.shape.num_layers, layout.pp, head_s / per_layer.seconds)
    stages = [count * per_layer.seconds for count in layers]
    stages[-1] += head_s
    slowest = max(range(len(stages)), key=stages.__getitem__)
    left = bubble_share(layout.schedule, forward.seconds, backward.seconds, weight_gradient_time(job).seconds)
    bubble = (sum(stages) - stages[slowest]) / layout.interleave * left
    at_work = per_layer.times(m * layers[slowest])
    parts = {
        "linear": at_work.linear,
        "attention": at_work.attention,
        "elementwise": at_work.elementwise,
        "quantize": at_work.quantize,
        "host": at_work.host,
        "head": m * head_s if slowest == len(stages) - 1 else 0.0,
        "tp": at_work.tp,
        "cp": at_work.cp,
        "ep": at_work.ep,
        "pp": _pipeline_s(job, stages[slowest] / layout.interleave),
        "bubble": bubble,
        "dp": _data_parallel_s(job, forward, backward, layers[slowest]),
        "optimizer": _optimizer_s(job),
    }
    seconds = sum(parts.values())
    tokens = job.global_batch * job.sequence / layout.num_gpus
    peak = next(job.device.matmul_tflops[name] for name in ("bf16", "fp16", "fp32") if name in job.device.matmul_tflops)
    return StepTime(
        seconds=seconds,
        parts=MappingProxyType(parts),
        recomputed=recomputed_time(job).times(m * layers[slowest]),
        forward=forward,
        backward=backward,
        stage_layers=tuple(layers),
        num_micro_batches=m,
        tokens_per_s_per_gpu=tokens / seconds,
        mfu=tokens / seconds * model_flops_per_token(job) / (peak * 1e12),
    )


def bubble_share(schedule: Schedule, forward_s: float, backward_s: float, weights_s: float) -> float:
    """Return the share of 1F1B's bubble, (p - 1)·(forward + backward), that a schedule leaves.

    ZB-H1 moves gradients of weights, which nobody waits for, into the bubble: (p - 1)·(F + B - W) is left, B without W.
    A zero-bubble V leaves half of that. With F = B = W these are a third and a sixth.

    Args:
        schedule: of the pipeline.
        forward_s, backward_s: of a layer; backward with what is computed again and the gradients of weights.
        weights_s: of the gradients of weights, of `backward_s`.
    """
    if not schedule.startswith("zero-bubble"):
        return 1.0
    left = max(0.0, forward_s + backward_s - 2 * weights_s) / (forward_s + backward_s)
    return left / 2 if schedule == "zero-bubble-v" else left


def model_flops_per_token(job: Job) -> float:
    """Return 6 operations for each weight that a token is multiplied by, and causal attention: 6·L·q·s."""
    shape = job.shape
    weights = active_linear_weights(job) + shape.hidden_size * shape.vocab_size
    return 6 * weights + 6 * shape.num_layers * shape.num_heads * shape.head_dim * job.sequence


def active_linear_weights(job: Job) -> float:
    """Return the weights of the decoder's linear layers that one token is multiplied by."""
    shape = job.shape
    if shape.num_experts == 1:
        return shape.linear_weights
    expert = (2 + shape.is_gated) * shape.hidden_size * shape.intermediate_size
    idle = shape.num_experts - shape.experts_per_token
    return shape.linear_weights - shape.num_layers * idle * expert


def head_time_s(job: Job) -> float:
    """Return the seconds of the head and the loss, both passes of one micro-batch."""
    vocabulary = math.ceil(job.shape.vocab_size / job.layout.tp)
    sizes = (job.tokens, vocabulary, job.shape.hidden_size)
    seconds = 0.0
    for m, n, k in (sizes, (sizes[0], sizes[2], sizes[1]), (sizes[1], sizes[2], sizes[0])):
        seconds += gemm_time(job.device, job.efficiency, m=m, n=n, k=k, format=job.numerics.compute).seconds
    seconds += move_time_s(job.device, job.efficiency, _LOGIT_BYTES * job.tokens * vocabulary, launches=6)
    return job.tuning.compute / job.efficiency.sustained_share * seconds


def stage_layers(num_layers: int, stages: int, head_layers: float) -> list[int]:
    """Return how many layers each stage has; where they do not divide evenly, the last stage has fewer, for its head.

    Args:
        num_layers, stages: of the model and of the pipeline.
        head_layers: layers that the head takes as long as.
    """
    if num_layers % stages == 0:
        return [num_layers // stages] * stages
    best: list[int] = []
    for last in range(1, num_layers // stages + 2):
        rest = num_layers - last
        found = [rest // (stages - 1) + (index < rest % (stages - 1)) for index in range(stages - 1)] + [last]
        if not best or max(*found[:-1], last + head_layers) < max(*best[:-1], best[-1] + head_layers):
            best = found
    return best


def shard_parameters(job: Job) -> tuple[float, float]:
    """Return the parameters of one GPU's shard of the slowest stage: those beside experts, and those of its experts."""
    shape, layout = job.shape, job.layout
    ends = (shape.embedding_weights + shape.head_weights) / min(2, layout.pp)
    experts = 0.0
    if shape.num_experts > 1:
        experts = (
            shape.num_layers * shape.num_experts * (2 + shape.is_gated) * shape.hidden_size * shape.intermediate_size
        )
    rest = (shape.linear_weights + shape.other_parameters - experts) / layout.pp + ends
    return rest / layout.tp, experts / layout.pp / layout.tp / layout.ep


def _pipeline_s(job: Job, chunk_s: float) -> float:
    """Activations and their gradients, once each a micro-batch and chunk: what the work of a chunk does not cover."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    num_bytes = job.tokens * job.shape.hidden_size * job.numerics.activation_bits / 8
    num_bytes /= layout.tp if layout.is_sequence_parallel else 1
    hop = job.tuned_network.seconds("send_recv", num_bytes, ranks=2, stride=layout.stride("pp"))
    passes = 2 * layout.interleave * job.num_micro_batches
    exposed = max(0.0, hop - chunk_s / 2) if job.software.overlaps_pipeline else hop
    return passes * exposed + 2 * (layout.pp - 1) * hop


def _data_parallel_s(job: Job, forward: PassTime, backward: PassTime, layers: int) -> float:
    """Gradients, and parameters where they are divided: what nothing hides."""
    layout = job.layout
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return 0.0
    dense, experts = shard_parameters(job)
    total = _sharded_s(job, dense, ranks, forward, backward, layers)
    if experts and ranks // layout.ep > 1:
        total += _sharded_s(job, experts, ranks // layout.ep, forward, backward, layers)
    return total


def _sharded_s(job: Job, parameters: float, ranks: int, forward: PassTime, backward: PassTime, layers: int) -> float:
    layout, numerics, software = job.layout, job.numerics, job.software
    stride = layout.tp * (layout.dp * layout.cp // ranks)
    held, summed = parameters * numerics.parameter_bits / 8, parameters * numerics.gradient_bits / 8
    group = min(ranks, layout.zero_group or ranks)

    def cost(operation: Operation, num_bytes: float, over: int = ranks, apart: int = stride) -> float:
        return job.tuned_network.seconds(operation, num_bytes, ranks=over, stride=apart)

    copies = ranks // group
    if layout.zero == 3 and layout.pp == 1:
        gather, scatter = cost("all_gather", held / layers, group), cost("reduce_scatter", summed / layers, group)
        if software.overlaps_parameters:
            each = fsdp_exposed_s(forward.seconds, backward.seconds, gather, scatter, layers, job.efficiency.contention)
        else:
            each = layers * (2 * gather + scatter)
        across = cost("all_reduce", summed / group, copies, stride * group) if copies > 1 else 0.0
        return job.num_micro_batches * each + across
    operation: Operation = "all_reduce" if layout.zero == 0 else "reduce_scatter"
    if software.overlaps_gradients:
        seconds = ddp_exposed_s(
            layers * backward.seconds,
            summed,
            max(software.bucket_bytes, summed / 64),
            lambda num_bytes: cost(operation, num_bytes),
            job.efficiency.contention,
        )
    else:
        seconds = cost(operation, summed)
    seconds *= job.num_micro_batches if layout.zero == 2 else 1
    if layout.zero:
        gather = cost("all_gather", held)
        hidden = layers * forward.seconds if software.overlaps_parameters else 0.0
        seconds += max(gather * 0.1, gather - hidden) if hidden else gather
    return seconds


def _optimizer_s(job: Job) -> float:
    dense, experts = shard_parameters(job)
    ranks = job.layout.dp * job.layout.cp if job.layout.zero else 1
    own = dense / ranks + experts / max(1, ranks // job.layout.ep)
    return job.tuning.compute * move_time_s(job.device, job.efficiency, _UPDATE_BYTES * own, launches=20)
