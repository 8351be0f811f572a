"""Bytes that one GPU sends in a step, by the axis of the layout that they are for.

With T tokens, h columns, L/p layers on a stage, S = T·h activations, m micro-batches, Ψ parameters of the GPU's shard:

    tp    4 all-reduces of S a layer, each 2(t-1)/t·S; with sequence parallelism as many bytes in all-gathers and
          reduce-scatters and 2 gathers more; whole layers that are computed again send their forward part again
    cp    3·(c-1) times keys and values of T tokens a layer
    ep    4 all-to-alls of (e-1)/e of what tokens take along
    pp    activations one way, gradients the other, once each a micro-batch and chunk
    dp    (d-1)/d of Ψ: gradients twice (all-reduce); under ZeRO once, and parameters once; under ZeRO 2 gradients once
          a micro-batch; under FSDP that and parameters twice

Sources: as in `layer_time` and `step_time`; Rajbhandari et al., arXiv:1910.02054 (ZeRO).
"""

from __future__ import annotations

from bitwright.parallel.job import Job
from bitwright.parallel.layer_time import exchanged_bytes
from bitwright.parallel.layout import Axis
from bitwright.parallel.step_time import shard_parameters


def sent_bytes(job: Job) -> dict[Axis, float]:
    """Return the bytes that a GPU sends in a step along each axis of more than one GPU."""
    layout, m = job.layout, job.num_micro_batches
    passes = m * job.shape.num_layers / layout.pp
    found: dict[Axis, float] = {}
    if layout.tp > 1:
        found["tp"] = passes * _tensor_parallel(job)
    if layout.cp > 1:
        columns = max(1, job.shape.num_kv_heads * job.shape.head_dim // layout.tp)
        found["cp"] = passes * 3 * (layout.cp - 1) * 2 * job.tokens * columns * job.numerics.activation_bits / 8
    if layout.ep > 1:
        found["ep"] = passes * 4 * (layout.ep - 1) / layout.ep * exchanged_bytes(job)
    if layout.pp > 1:
        found["pp"] = 2 * layout.interleave * m * _activations(job) / (layout.tp if layout.is_sequence_parallel else 1)
    ranks = layout.dp * layout.cp
    if ranks > 1:
        dense, experts = shard_parameters(job)
        shares = dense * (ranks - 1) / ranks + experts * (1 - layout.ep / ranks)
        found["dp"] = shares * _bits_of_parameters(job) / 8
    return found


def _activations(job: Job) -> float:
    return job.tokens * job.shape.hidden_size * job.numerics.activation_bits / 8


def _tensor_parallel(job: Job) -> float:
    """Of one layer and micro-batch, both ways."""
    layout = job.layout
    share = (layout.tp - 1) / layout.tp * _activations(job)
    forwards = 2 if layout.recompute == "full" else 1
    return share * (4 * forwards + 4 + 2 * layout.is_sequence_parallel)


def _bits_of_parameters(job: Job) -> float:
    """Bits sent for each parameter."""
    numerics, m, zero = job.numerics, job.num_micro_batches, job.layout.zero
    if zero == 3 and job.layout.pp == 1:
        return m * (2 * numerics.parameter_bits + numerics.gradient_bits)
    if zero:
        return (m if zero == 2 else 1) * numerics.gradient_bits + numerics.parameter_bits
    return 2 * numerics.gradient_bits
