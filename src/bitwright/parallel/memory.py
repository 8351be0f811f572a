"""What a layout takes on its fullest GPU: states, activations of micro-batches in flight, logits, what is around.

Bits of states and of one layer's activations come from `hardware/memory`; here they are counted for a stage:

    parameters     of a stage's layers, embedding on the first and head on the last stage, over tp (experts over ep too)
    states         each over the GPUs that its ZeRO stage divides it among
    in flight      min(m, p - i) micro-batches on stage i of 1F1B (all m under gpipe), times 1 + (p-1)/(p·v) where v
                   chunks are interleaved; a zero-bubble V keeps as many as there are stages on all of them
    recompute      selective: no scores (as fused attention); operations: inputs of layers, outputs of attention and of
                   every other product; full: inputs of layers, and one layer
    gathered       ZeRO 3: two layers' parameters and one layer's gradients are whole at a time; with a pipeline the
                   whole stage's parameters and gradients, since micro-batches follow each other
    around         context, libraries, buffers of collectives, and what the allocator holds but does not use

The fullest stage counts: the first one, or the last with its logits. Sources: Korthikanti et al., arXiv:2205.05198,
section 4; Rajbhandari et al., arXiv:1910.02054. Everything is *predicted*.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from bitwright.hardware.memory import ActivationSetup, StateBits
from bitwright.hardware.memory.training_activations import layer_bits
from bitwright.parallel.job import Job
from bitwright.parallel.layer_time import backward_time, forward_time
from bitwright.parallel.step_time import head_time_s, stage_layers

#: Bytes of the driver's context, of libraries and of the buffers of collectives, where nothing was calibrated.
AROUND_BYTES = 2.5e9
#: Share of tensors that an allocator holds in reserve beside them.
RESERVED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """How a library keeps what a step needs; the defaults are Megatron-LM's and DeepSpeed's in 16 bits."""

    states: StateBits = field(default_factory=lambda: StateBits(parameters=16, masters=32, gradients=32, moments=64))
    #: Bits of one kept activation, of masks of dropout (0: none), and of a logit.
    activation_bits: float = 16.0
    dropout_bits: float = 0.0
    logit_bits: float = 80.0
    attention: Literal["fused", "stored"] = "fused"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutMemory:
    """Bytes on the fullest GPU, by what takes them."""

    states: float
    gathered: float
    activations: float
    logits: float
    around: float
    #: The stage that is fullest.
    stage: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.gathered + self.activations + self.logits + self.around


def layout_memory(job: Job, facts: MemoryFacts | None = None, *, around_bytes: float = AROUND_BYTES) -> LayoutMemory:
    """Return what a layout takes on its fullest GPU.

    Args:
        job: the step.
        facts: how the library keeps it; None: Megatron-LM's way.
        around_bytes: of context, libraries and buffers.
    """
    facts = MemoryFacts(attention=job.software.attention) if facts is None else facts
    layers = _layers(job)
    stages = {0, len(layers) - 1}
    return max((_stage(job, facts, layers, stage, around_bytes) for stage in sorted(stages)), key=lambda m: m.total)


def _layers(job: Job) -> list[int]:
    if job.shape.num_layers % job.layout.pp == 0:
        return [job.shape.num_layers // job.layout.pp] * job.layout.pp
    per_layer = forward_time(job).seconds + backward_time(job).seconds
    return stage_layers(job.shape.num_layers, job.layout.pp, head_time_s(job) / per_layer)


def _stage(job: Job, facts: MemoryFacts, layers: list[int], stage: int, around_bytes: float) -> LayoutMemory:
    dense, experts = _parameters(job, layers[stage], is_first=stage == 0, is_last=stage == len(layers) - 1)
    states, gathered = _states(job, facts.states, dense, experts, layers[stage])
    activations = _activations(job, facts, layers[stage], stage)
    logits = 0.0
    if stage == len(layers) - 1:
        logits = job.tokens * job.shape.vocab_size / job.layout.tp * facts.logit_bits / 8
    return LayoutMemory(
        states=states,
        gathered=gathered,
        activations=activations,
        logits=logits,
        around=around_bytes + RESERVED_SHARE * (activations + logits + gathered),
        stage=stage,
    )


def _parameters(job: Job, layers: int, *, is_first: bool, is_last: bool) -> tuple[float, float]:
    """Parameters of a stage on one GPU beside experts, and of experts."""
    shape, layout = job.shape, job.layout
    share = layers / shape.num_layers
    experts = 0.0
    if shape.num_experts > 1:
        expert = (2 + shape.is_gated) * shape.hidden_size * shape.intermediate_size
        experts = share * shape.num_layers * shape.num_experts * expert
    dense = share * (shape.linear_weights + shape.other_parameters) - experts
    dense += shape.embedding_weights * is_first
    if is_last:
        dense += shape.head_weights or (0 if is_first else shape.embedding_weights)
    return dense / layout.tp, experts / layout.tp / layout.ep


def _states(job: Job, bits: StateBits, dense: float, experts: float, layers: int) -> tuple[float, float]:
    """Bytes of states, and of what ZeRO 3 gathers for a while."""
    layout = job.layout
    ranks = layout.dp * layout.cp
    group = layout.zero_group or ranks
    total = 0.0
    for parameters, sharers in ((dense, min(group, ranks)), (experts, max(1, min(group, ranks) // layout.ep))):
        for stage, kept in (
            (1, bits.masters + bits.moments + bits.compensation),
            (2, bits.gradients),
            (3, bits.parameters + bits.copies),
        ):
            total += parameters * kept / 8 / (sharers if layout.zero >= stage else 1)
    if layout.zero < 3:
        return total, 0.0
    numerics = job.numerics
    if layout.pp > 1:
        return total, (dense + experts) * (numerics.parameter_bits + numerics.gradient_bits) / 8
    layer = (dense + experts) / layers
    return total, layer * (2 * numerics.parameter_bits + numerics.gradient_bits) / 8


def _activations(job: Job, facts: MemoryFacts, layers: int, stage: int) -> float:
    layout, shape = job.layout, job.shape
    setup = ActivationSetup(
        batch=layout.micro_batch,
        sequence=job.sequence,
        stream_bits=facts.activation_bits,
        compute_bits=facts.activation_bits,
        norm_bits=facts.activation_bits,
        keeps_normed=False,
        input_bits=None,
        dropout_bits=facts.dropout_bits,
        attention="fused" if layout.recompute == "selective" else facts.attention,
    )
    if job.numerics.x is not None:
        setup = replace(setup, input_bits=job.numerics.x.bits)
    per_layer = layer_bits(shape, setup, tensor_parallel=layout.tp, is_sequence_parallel=layout.is_sequence_parallel)
    in_flight = _in_flight(job, stage)
    bytes_of = job.tokens / 8
    if layout.recompute == "operations":
        return bytes_of * _kept_by_operation(job) * facts.activation_bits * layers * in_flight
    if layout.recompute == "full":
        kept = shape.hidden_size * facts.activation_bits / (layout.tp if layout.is_sequence_parallel else 1)
        return bytes_of * (kept * layers * in_flight + per_layer)
    return bytes_of * per_layer * layers * in_flight


def _kept_by_operation(job: Job) -> float:
    """Values of one token and layer: its input, attention's output, half of what products give."""
    shape, tp = job.shape, job.layout.tp
    queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    given = queries + 2 * kv + (1 + shape.is_gated) * shape.intermediate_size * shape.experts_per_token
    whole = shape.hidden_size / (tp if job.layout.is_sequence_parallel else 1)
    return whole + queries / tp + (given / tp + 2 * whole) / 2


def _in_flight(job: Job, stage: int) -> float:
    layout, m = job.layout, job.num_micro_batches
    if layout.schedule == "gpipe":
        return m
    if layout.schedule == "zero-bubble-v":
        return min(m, layout.pp)
    at_once = min(m, layout.pp - stage)
    if layout.interleave > 1 and stage == 0:
        return at_once * (1 + (layout.pp - 1) / (layout.pp * layout.interleave))
    return at_once
