"""What one writes in torch to see the values of a low precision, without a library: the peer of `quantize.py`.

    a format that torch has      x.to(dtype).to(x.dtype)
    another float                quantum = 2^max(exponent of x, emin) / 2^fraction_bits; round(x / quantum) · quantum
    an integer                   round, clamp
    a codebook                   bucketize between the midpoints, look up
    groups                       reshape, amax, scale, store the scale, divide, the above, multiply

As good as it gets in eager torch: exponents by masking the bits of fp32 (one integer operation, exact) in place of
floor(log2), as few passes as the format allows. NaN, Inf, short last groups and groups of zeros are not looked after;
the benchmark's values have none. Everything comes twice: allocating, and into memory that is there already.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.quantize import Scaling, TensorScheme
from bitwright.quantize.pack import stored_dtype

_EXPONENT_BITS = 0x7F800000


# --- numbers by themselves --------------------------------------------------------------------------------------------


def round_values(number: Format) -> Callable[[Tensor], Tensor]:
    """Return what rounds a tensor to a format, allocating."""
    dtype = stored_dtype(number)
    if dtype is not None:
        return lambda x: x.to(dtype).to(x.dtype)
    by_itself = _composition(number)
    return lambda x: by_itself(x.float()).to(x.dtype)


def round_values_into(number: Format, x: Tensor, out: Tensor) -> Callable[[], object] | None:
    """Return what rounds `x` into `out` through one buffer of the format's dtype; None where torch has none."""
    dtype = stored_dtype(number)
    if dtype is None:
        return None
    between = torch.empty(x.shape, dtype=dtype)

    def work() -> None:
        between.copy_(x)
        out.copy_(between)

    return work


def _composition(number: Format) -> Callable[[Tensor], Tensor]:
    """fp32 → fp32 for formats that torch lacks, and for those under a scale, which saturate."""
    match number:
        case FloatFormat():
            dtype, largest = stored_dtype(number), number.max
            if dtype is not None:
                return lambda x: x.clamp(-largest, largest).to(dtype).to(torch.float32)
            smallest, per_quantum = 2.0**number.emin, 2.0**-number.fraction_bits

            def on_grid(x: Tensor) -> Tensor:
                quantum = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp(min=smallest) * per_quantum
                return ((x / quantum).round() * quantum).clamp(-largest, largest)

            return on_grid
        case IntFormat():
            low, high = float(number.min), float(number.max)
            return lambda x: x.round().clamp(low, high)
        case CodebookFormat():
            values = torch.tensor(sorted(number.values), dtype=torch.float32)
            midpoints = (values[1:] + values[:-1]) / 2
            return lambda x: values[torch.bucketize(x, midpoints)]


def _composition_into(number: Format, x: Tensor) -> Callable[[], object] | None:
    """Round fp32 `x` in place, with buffers that are made here; None where it takes a look-up, which allocates."""
    match number:
        case FloatFormat():
            dtype, largest = stored_dtype(number), number.max
            if dtype is not None:
                between = torch.empty(x.shape, dtype=dtype)
                return lambda: x.copy_(between.copy_(x.clamp_(-largest, largest)))
            smallest, per_quantum = 2.0**number.emin, 2.0**-number.fraction_bits
            quantum = torch.empty_like(x)

            def on_grid() -> None:
                torch.bitwise_and(x.view(torch.int32), _EXPONENT_BITS, out=quantum.view(torch.int32))
                quantum.clamp_(min=smallest).mul_(per_quantum)
                x.div_(quantum).round_().mul_(quantum).clamp_(-largest, largest)

            return on_grid
        case IntFormat():
            low, high = float(number.min), float(number.max)
            return lambda: x.round_().clamp_(low, high)
        case CodebookFormat():
            return None


# --- groups under a scale ---------------------------------------------------------------------------------------------


def fake_quantize(scheme: TensorScheme) -> Callable[[Tensor], Tensor]:
    """Return what quantises and dequantises a matrix whose groups are all full, allocating."""
    scaling = scheme.scaling
    assert scaling is not None
    number = formats.get(scheme.format)
    composition = _composition(number)

    def work(x: Tensor) -> Tensor:
        grouped, dims = _grouped(x.float(), scaling)
        unit = _unit(grouped.abs().amax(dims, keepdim=True), number, scaling)
        return (composition(grouped / unit) * unit).reshape(x.shape).to(x.dtype)

    return work


def fake_quantize_into(scheme: TensorScheme, x: Tensor, out: Tensor) -> Callable[[], object] | None:
    """The same into `out`, through fp32 buffers that are made here; None for codebooks."""
    scaling = scheme.scaling
    assert scaling is not None
    number = formats.get(scheme.format)
    codes = torch.empty(x.shape, dtype=torch.float32)
    on_codes = _composition_into(number, codes)
    if on_codes is None:
        return None
    grouped_codes, dims = _grouped(codes, scaling)

    def work() -> None:
        grouped, _ = _grouped(x, scaling)
        torch.abs(grouped, out=grouped_codes) if x.dtype == torch.float32 else grouped_codes.copy_(grouped).abs_()
        unit = _unit(grouped_codes.amax(dims, keepdim=True), number, scaling)
        torch.div(grouped, unit, out=grouped_codes)
        on_codes()
        if x.dtype == torch.float32:
            torch.mul(grouped_codes, unit, out=_grouped(out, scaling)[0])
        else:
            grouped_codes.mul_(unit)
            out.copy_(codes)

    return work


def _grouped(x: Tensor, scaling: Scaling) -> tuple[Tensor, tuple[int, ...]]:
    """A view in which groups have dimensions of their own, and those dimensions."""
    rows, columns = x.shape
    width, height = scaling.granularity.group_columns(columns), scaling.granularity.group_rows(rows)
    if height > 1:
        return x.view(rows // height, height, columns // width, width), (1, 3)
    return x.view(rows, columns // width, width), (2,)


def _unit(amax: Tensor, number: Format, scaling: Scaling) -> Tensor:
    """What codes are multiplied by, from the largest magnitude of each group: small tensors, so written plainly."""
    largest = number.max * 2.0**scaling.element_exponent
    scale_number = formats.get(scaling.scale_format)
    match scaling.rule:
        case "ocp_floor":
            emax = number.emax + scaling.element_exponent
            scale = torch.exp2(torch.frexp(amax).exponent.float() - 1 - emax)
        case "round_up":
            mantissa, exponent = torch.frexp(amax / largest)
            scale = torch.exp2((exponent - (mantissa == 0.5).int()).float())
        case "power_of_two":
            scale = torch.exp2(1 - torch.frexp(amax.new_tensor(largest) / amax).exponent.float() + scaling.margin)
        case _:
            scale = amax / largest
    tensor_scale: Tensor | float = 1.0
    if scaling.tensor_scale:
        limit = scale_number.max * largest
        tensor_scale = amax.amax() / limit
        scale = scale * (amax.new_tensor(limit) / amax.amax())  # number / tensor would round twice
    stored = scale if scaling.scale_format == "fp32" else _composition(scale_number)(scale)
    return stored * 2.0**scaling.element_exponent * tensor_scale
