"""How long a decoder takes for a step, by roofline: attention, elementwise work, whole steps, and the least of all.

A step runs `query_tokens` new tokens of each of `batch` sequences: the prompt in *prefill*, one token in *decode*. Its
time is the sum over its operations, each bound by computing or by moving (`roofline.py`):

    linear      2 · tokens · weights operations; the weights are read once for the whole batch
    attention   q·k and p·v: 2 · batch · heads · head_dim · pairs operations each, over the (query, key) pairs that the
                causal mask leaves; keys and values are read once, q read, the output written. Scores stay on the chip,
                as in fused kernels (Dao et al., FlashAttention, arXiv:2205.14135)
    elementwise every operation reads its inputs and writes its output once: two norms, two residual additions, the
                gate, the rotation of q and k make 10 · hidden + 3 · intermediate + 2 · (heads + kv_heads) · head_dim
                values per token and layer
    head        a linear for the last token of each sequence

The formulas follow Pope et al., "Efficiently Scaling Transformer Inference", arXiv:2211.05102, §2 and §3.1. A kernel
that fuses an addition with a norm moves less, an unfused one with casts more.

`latency_floor` is less than any such sum: all operations at the fastest rate of the device, or all bytes at its full
bandwidth, whichever is slower. No choice of formats goes below it.

Everything is *predicted*. Peak rates leave out what kernels lose; ``rates="achieved"`` takes measured figures where
the device file has them, and then one launch per operation too, where that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bitwright.hardware.decoder_shape import DecoderShape
from bitwright.hardware.device import Device
from bitwright.hardware.roofline import (
    OperationTime,
    Rates,
    matmul_time,
    operation_time,
    raise_if_not_positive,
)

#: Seven linears, attention, rotation, two norms, two additions, the gate.
OPERATIONS_PER_LAYER = 14


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The predicted time of one step, and its parts."""

    seconds: float
    #: "linear", "attention", "elementwise", "head" → time of all operations of that kind.
    parts: Mapping[str, OperationTime]
    #: Seconds of launching; 0 with peak rates, or where nobody measured it.
    launch_s: float
    rates: Rates
    status: Literal["predicted"] = "predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The least time of a step on a device, whatever formats are chosen."""

    seconds: float
    bound: Literal["compute", "memory"]
    #: One sentence: which figures of the device make it so.
    why: str
    status: Literal["predicted"] = "predicted"


def visible_pairs(query_tokens: int, context: int, *, causal: bool = True) -> float:
    """Return the (query, key) pairs of one sequence: every query sees the keys up to its own.

    Args:
        query_tokens: new tokens; they are the last of the context.
        context: keys that the last query sees, itself included.
        causal: False for an encoder, where every query sees every key.

    Raises:
        HardwareError: a size is not positive, or the context is shorter than the queries.
    """
    raise_if_not_positive(query_tokens=query_tokens, context=context)
    raise_if_not_positive(context_beyond_the_queries=context - query_tokens + 1)
    return query_tokens * (context - (query_tokens - 1) / 2) if causal else query_tokens * context


def attention_time(
    device: Device,
    *,
    batch: int,
    query_tokens: int,
    context: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_bits: float = 16.0,
    score_format: str = "bf16",
    value_format: str = "bf16",
    activation_bits: float = 16.0,
    causal: bool = True,
    rates: Rates = "peak",
) -> OperationTime:
    """Return the predicted time of one layer's attention between its projections.

    Args:
        device: whose rates and bandwidth count.
        batch: sequences.
        query_tokens: new tokens of each: 1 in decode, the prompt's length in prefill.
        context: keys that the last of them sees, itself included.
        num_heads, num_kv_heads, head_dim: of the layer.
        kv_bits: stored bits of one cached value, scales included; where keys and values differ, their mean.
        score_format, value_format: what q·k and p·v are multiplied in.
        activation_bits: stored bits of q and of the output.
        causal: False for an encoder.
        rates: peaks, or achieved rates where the device file has them.

    Raises:
        HardwareError: no rate for a format, or a size is not positive.
    """
    raise_if_not_positive(
        batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_bits=kv_bits
    )
    product_flops = 2.0 * batch * num_heads * head_dim * visible_pairs(query_tokens, context, causal=causal)
    flops = {score_format: product_flops}
    flops[value_format] = flops.get(value_format, 0.0) + product_flops
    cache_bytes = 2 * batch * context * num_kv_heads * head_dim * kv_bits / 8
    in_and_out_bytes = 2 * batch * query_tokens * num_heads * head_dim * activation_bits / 8
    return operation_time(device, flops=flops, moved_bytes=cache_bytes + in_and_out_bytes, rates=rates)


def elementwise_time(
    device: Device, *, tokens: int, values_per_token: float, bits: float = 16.0, rates: Rates = "peak"
) -> OperationTime:
    """Return the predicted time of work that is all moving: norms, additions, gates, casts.

    Args:
        device: whose bandwidth counts.
        tokens: of all sequences together.
        values_per_token: values read plus values written for each token; `DecoderShape.elementwise_values` for a layer.
        bits: of one value.
        rates: peak bandwidth, or the achieved one where the device file has it.

    Raises:
        HardwareError: a size is not positive.
    """
    raise_if_not_positive(tokens=tokens, values_per_token=values_per_token, bits=bits)
    return operation_time(device, flops={}, moved_bytes=tokens * values_per_token * bits / 8, rates=rates)


def step_time(
    device: Device,
    shape: DecoderShape,
    *,
    batch: int = 1,
    query_tokens: int,
    context: int,
    compute_format: str,
    weight_bits: float = 16.0,
    head_bits: float = 16.0,
    kv_bits: float = 16.0,
    rates: Rates = "peak",
) -> StepTime:
    """Return the predicted time of one step of a whole decoder whose sites all make the same choice.

    A plan sums `matmul_time`, `attention_time` and `elementwise_time` over its own sites instead; this is the same sum
    where every site has `weight_bits` and every product runs in `compute_format`.

    Raises:
        HardwareError: no rate for the format, or a size is not positive.
    """
    tokens = batch * query_tokens
    linear = operation_time(
        device,
        flops={compute_format: 2.0 * tokens * shape.active_weights},
        moved_bytes=shape.active_weights * weight_bits / 8,
        rates=rates,
    )
    attention = attention_time(
        device,
        batch=batch,
        query_tokens=query_tokens,
        context=context,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_bits=kv_bits,
        score_format=compute_format,
        value_format=compute_format,
        rates=rates,
    )
    elementwise = elementwise_time(device, tokens=tokens, values_per_token=shape.elementwise_values, rates=rates)
    head = matmul_time(
        device,
        tokens=batch,
        out_features=shape.vocab_size,
        in_features=shape.hidden_size,
        weight_bits=head_bits,
        compute_format=compute_format,
        rates=rates,
    )
    parts = {
        "linear": linear,
        "attention": _times(attention, shape.num_layers),
        "elementwise": _times(elementwise, shape.num_layers),
        "head": head,
    }
    launch_s = launch_time_s(device, OPERATIONS_PER_LAYER * shape.num_layers + 1, rates)
    return StepTime(
        seconds=sum(part.seconds for part in parts.values()) + launch_s, parts=parts, launch_s=launch_s, rates=rates
    )


def launch_time_s(device: Device, num_operations: int, rates: Rates = "peak") -> float:
    """Return the seconds that launching so many operations takes: 0 with peak rates, or where nobody measured it."""
    return num_operations * device.launch_s if rates == "achieved" and device.launch_s is not None else 0.0


def latency_floor(
    device: Device,
    shape: DecoderShape,
    *,
    batch: int = 1,
    query_tokens: int,
    context: int,
    least_weight_bits: float,
    least_head_bits: float = 16.0,
    least_kv_bits: float = 16.0,
) -> Floor:
    """Return the least time of a step: no choice of formats, and no kernel, goes below it.

    All multiplications at the fastest rate that the device has for any format, all weights and caches at the fewest
    bits, each byte moved once at peak bandwidth, and computing and moving perfectly overlapped.

    Args:
        device, shape, batch, query_tokens, context: as in `step_time`.
        least_weight_bits, least_head_bits, least_kv_bits: the fewest stored bits on offer, scales included.

    Raises:
        HardwareError: a size is not positive.
    """
    raise_if_not_positive(batch=batch, least_weight_bits=least_weight_bits, least_kv_bits=least_kv_bits)
    raise_if_not_positive(least_head_bits=least_head_bits)
    tokens = batch * query_tokens
    head_weights = shape.hidden_size * shape.vocab_size
    pairs = visible_pairs(query_tokens, context)
    flops = 2.0 * (tokens * shape.active_weights + batch * head_weights)
    flops += 4.0 * batch * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    kept_values = 2 * batch * shape.num_layers * context * shape.num_kv_heads * shape.head_dim
    moved_bytes = shape.active_weights * least_weight_bits / 8 + head_weights * least_head_bits / 8
    moved_bytes += kept_values * least_kv_bits / 8
    return work_floor(device, flops=flops, moved_bytes=moved_bytes)


def work_floor(device: Device, *, flops: float, moved_bytes: float) -> Floor:
    """Return the least time of so much work: at the fastest rate of any format, or at peak bandwidth.

    Args:
        device: whose peaks count.
        flops: operations of all multiplications.
        moved_bytes: bytes of weights and caches, each once.
    """
    fastest = max(device.matmul_tflops, key=lambda name: device.matmul_tflops[name])
    time = operation_time(device, flops={fastest: flops}, moved_bytes=moved_bytes)
    why = (
        f"{flops / 1e9:.4g} GFLOP at {device.matmul_tflops[fastest]:g} TFLOP/s, the device's fastest rate ({fastest})"
        if time.bound == "compute"
        else f"{moved_bytes / 1e9:.4g} GB of weights and cache at {device.memory_gb_per_s:g} GB/s"
    )
    return Floor(seconds=time.seconds, bound=time.bound, why=f"{device.name}: {why}")


def _times(time: OperationTime, count: int) -> OperationTime:
    return OperationTime(
        seconds=count * time.seconds,
        bound=time.bound,
        flops=count * time.flops,
        moved_bytes=count * time.moved_bytes,
        compute_formats=time.compute_formats,
        rates=time.rates,
    )
