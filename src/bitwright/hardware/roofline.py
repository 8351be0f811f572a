"""The least time one operation can take: the slower of computing and moving.

    seconds = max( operations / rate(compute format) , bytes moved / memory bandwidth )

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009. For one
linear layer ``y[tokens, out] = x[tokens, in] @ W[out, in]ᵀ``:

    operations = 2 · tokens · out · in
    bytes      = (out · in · weight_bits + tokens · in · activation_bits + tokens · out · output_bits) / 8

Attention and elementwise work have their formulas in `latency.py`, over the same roofline.

Every time is *predicted*, never measured here. With peak rates it is a floor: no kernel is faster. With
``rates="achieved"`` the device file's measured figures are used where it has them, which is closer to what a good
kernel reaches. A format that nobody measured is taken to reach the share of its peak that the measured ones reach:
beside them its peak would make it look faster than it is. Left out: launch overhead, caches that hold a whole matrix,
and the cost of widening weights to the compute format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bitwright import formats
from bitwright.errors import HardwareError
from bitwright.formats import FloatFormat, Format
from bitwright.hardware.device import Device

Rates = Literal["peak", "achieved"]

#: Where a format has no matrix unit, its numbers are computed in the first of these that has one and holds them all.
_WIDER: tuple[str, ...] = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTime:
    """The predicted time of one operation, and what bounds it."""

    seconds: float
    bound: Literal["compute", "memory"]
    #: Operations: a multiply and an add count as two.
    flops: float
    #: Bytes read and written.
    moved_bytes: float
    #: Formats that the multiplications run in; none where nothing is multiplied.
    compute_formats: tuple[str, ...]
    rates: Rates
    status: Literal["predicted"] = "predicted"


def operation_time(
    device: Device, *, flops: Mapping[str, float], moved_bytes: float, rates: Rates = "peak"
) -> OperationTime:
    """Return the roofline's time of an operation.

    Args:
        device: whose rates and bandwidth count.
        flops: compute format → operations in it; they follow each other.
        moved_bytes: bytes read and written, each once.
        rates: peaks (a floor) or what was achieved in measurements, where the device file has them.

    Raises:
        HardwareError: the device has no rate for a format.
    """
    compute_s = sum(amount / (matmul_tflops(device, name, rates) * 1e12) for name, amount in flops.items())
    memory_s = read_time_s(device, moved_bytes, rates)
    return OperationTime(
        seconds=max(compute_s, memory_s),
        bound="compute" if compute_s >= memory_s else "memory",
        flops=sum(flops.values()),
        moved_bytes=moved_bytes,
        compute_formats=tuple(flops),
        rates=rates,
    )


def matmul_time(
    device: Device,
    *,
    tokens: int,
    out_features: int,
    in_features: int,
    weight_bits: float,
    compute_format: str,
    activation_bits: float = 16.0,
    output_bits: float = 16.0,
    rates: Rates = "peak",
) -> OperationTime:
    """Return the predicted time of ``[tokens, in] @ [out, in]ᵀ`` on a device.

    Args:
        device: whose rates and bandwidth count.
        tokens: rows of the activation: 1 per sequence in decoding, the prompt's length in prefill.
        out_features, in_features: shape of the weight.
        weight_bits: stored bits per weight, scales included (4.25 for int4 in groups of 64 with fp16 scales).
        compute_format: format the multiplications run in; see `compute_format` for what a device offers.
        activation_bits, output_bits: stored bits per element of x and y.
        rates: peaks (a floor) or what was achieved in measurements, where the device file has them.

    Raises:
        HardwareError: the device has no rate for `compute_format`, or a size is not positive.
    """
    raise_if_not_positive(tokens=tokens, out_features=out_features, in_features=in_features, weight_bits=weight_bits)
    weight_bytes = out_features * in_features * weight_bits / 8
    return operation_time(
        device,
        flops={compute_format: 2.0 * tokens * out_features * in_features},
        moved_bytes=weight_bytes + tokens * (in_features * activation_bits + out_features * output_bits) / 8,
        rates=rates,
    )


def matmul_time_s(
    device: Device, tokens: int, out_features: int, in_features: int, weight_bits: float, compute_format: str
) -> float:
    """Return the predicted seconds of `matmul_time` at peak rates, 16-bit activations: the floor."""
    return matmul_time(
        device,
        tokens=tokens,
        out_features=out_features,
        in_features=in_features,
        weight_bits=weight_bits,
        compute_format=compute_format,
    ).seconds


def read_time_s(device: Device, num_bytes: float, rates: Rates = "peak") -> float:
    """Return the predicted seconds to read so many bytes from the device's memory (a KV cache in decoding)."""
    return num_bytes / (memory_gb_per_s(device, rates) * 1e9)


def matmul_tflops(device: Device, compute_format: str, rates: Rates = "peak") -> float:
    """Return 10¹² operations per second in a format: the peak, or where asked for what is achieved.

    A format without a measured rate is taken to reach the mean share of the peak that others reach.

    Raises:
        HardwareError: the device file has no rate for that format.
    """
    if compute_format not in device.matmul_tflops:
        offered = ", ".join(device.matmul_tflops)
        raise HardwareError(
            f"device '{device.name}' has no matrix rate for {compute_format}; it has: {offered}. "
            "Compute in one of these, or give a device file with that rate"
        )
    peak = device.matmul_tflops[compute_format]
    known = device.achieved_matmul_tflops
    if rates == "peak" or not known:
        return peak
    shares = [rate / device.matmul_tflops[name] for name, rate in known.items() if name in device.matmul_tflops]
    return known.get(compute_format, peak * sum(shares) / len(shares) if shares else peak)


def has_achieved_rates(device: Device) -> bool:
    """Return whether the device file has any measured rate."""
    return bool(device.achieved_matmul_tflops) or device.achieved_memory_gb_per_s is not None


def memory_gb_per_s(device: Device, rates: Rates = "peak") -> float:
    """Return 10⁹ bytes per second of memory bandwidth: the achieved one where asked for and known, else the peak."""
    achieved = device.achieved_memory_gb_per_s
    return achieved if rates == "achieved" and achieved is not None else device.memory_gb_per_s


def compute_format(device: Device, wanted: str) -> tuple[str, str]:
    """Return the format a device multiplies in when asked for `wanted`, and the reason.

    The wanted one where there is a rate for it; else the first of bf16, fp16, tf32, fp32 that the device has and that
    holds every value of the wanted one (bf16 becomes fp32 on a V100: fp16 has not its range).

    Raises:
        HardwareError: the device has none of them.
        UnknownName: no format is named `wanted`.
    """
    formats.get(wanted)
    if wanted in device.matmul_tflops:
        return wanted, f"{device.name} has a matrix unit for {wanted}"
    for wider in wider_formats(device, wanted):
        return wider, f"{device.name} has no matrix unit for {wanted}: values are widened to {wider}"
    raise HardwareError(
        f"device '{device.name}' can neither multiply in {wanted} nor in any of {', '.join(_WIDER)}; "
        "give a device file with one of these rates"
    )


def wider_formats(device: Device, wanted: str) -> tuple[str, ...]:
    """Return the device's formats among bf16, fp16, tf32, fp32 that hold every value of `wanted`, in that order.

    Raises:
        UnknownName: no format is named `wanted`.
    """
    narrow = formats.get(wanted)
    return tuple(name for name in _WIDER if name in device.matmul_tflops and _holds(formats.get(name), narrow))


def raise_if_not_positive(**sizes: float) -> None:
    """Refuse sizes of an operation that are not positive, by their names."""
    for name, value in sizes.items():
        if not value > 0:
            raise HardwareError(f"{name} is {value}, but an operation takes time only for positive sizes; correct it")


def _holds(wider: Format, narrow: Format) -> bool:
    """Say whether every finite value of `narrow` is a value of the floating-point format `wider`."""
    assert isinstance(wider, FloatFormat)
    if not isinstance(narrow, FloatFormat):
        return max(narrow.max, -narrow.min) <= 2 ** (wider.fraction_bits + 1)
    return (
        wider.fraction_bits >= narrow.fraction_bits
        and wider.max >= narrow.max
        and (wider.min_subnormal or wider.min_normal) <= (narrow.min_subnormal or narrow.min_normal)
    )
