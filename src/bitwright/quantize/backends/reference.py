"""The definition of every backend, in NumPy and group by group: slow, and meant to be read.

It knows number formats from `bitwright.formats` and nothing of `scaling.py` or of torch's arithmetic: scales, codes,
values and bits are written down once more from the formulas, so that agreement of the two says something. All of it is
fp32, one operation after the other; NumPy's fp32 operations are those of IEEE 754.

    amax          amax / top                              top = largest code · 2^element_exponent
    percentile    q / top, q between two of the sorted |x|, linearly
    mse           the amax · ratio / top, ratio 1.00, 0.98, … 0.10, of the least Σ ((x̂ − x) / amax)², the first of them
    ocp_floor     2^(floor(log2 amax) − floor(log2 top))
    round_up      the smallest power of two from amax / top on
    power_of_two  1 / (the largest power of two up to top / amax), times 2^margin

    zero_point    scale = (max(x, 0) − min(x, 0)) / (number of codes − 1), zero point = round(−min / scale)
    minimum       scale = (max x − min x) / (number of codes − 1), minimum = min x

Tensors go in and come out, as in every backend; what happens between is NumPy's.

Legend: N rows, K columns, R × G scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format, IntFormat
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values, overflow_values
from bitwright.formats.round import MAX_RANDOM_BITS
from bitwright.quantize.backends.torch import why_not_packed, why_not_round, why_not_scaled
from bitwright.quantize.granularity import Granularity
from bitwright.quantize.pack import PackedTensor, stored_dtype
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scaling, TensorScheme

__all__ = [
    "fake_quantize",
    "pack",
    "quantize",
    "round_values",
    "unpack",
    "why_not_packed",
    "why_not_round",
    "why_not_scaled",
]

F32 = np.float32
Array = npt.NDArray[np.float32]
_LARGEST = np.finfo(np.float32).max


def round_values(
    x: Tensor,
    number: Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
    out: Tensor | None = None,
) -> Tensor:
    """Round to a format, by `formats.encode` and `formats.decode`."""
    rounded = _round(_array(x), number, rounding, overflow, seed, random_bits)
    return _finished(rounded, x, out)


def fake_quantize(x_NK: Tensor, scheme: TensorScheme, *, out: Tensor | None = None) -> Tensor:
    """Values of a matrix after quantising and dequantising, in its dtype."""
    return _finished(_values(_quantize(_array(x_NK), scheme), scheme), x_NK, out)


def quantize(x_NK: Tensor, scheme: TensorScheme) -> QTensor:
    """Codes and scales of a matrix."""
    q = _quantize(_array(x_NK), scheme)
    return QTensor(
        scheme=scheme,
        codes_NK=torch.from_numpy(q.codes_NK),
        scales_NG=torch.from_numpy(q.scales_RG),
        offsets_NG=None if q.offsets_RG is None else torch.from_numpy(q.offsets_RG),
        tensor_scale=None if q.tensor_scale is None else torch.tensor(q.tensor_scale),
    )


def pack(x_NK: Tensor, scheme: TensorScheme) -> PackedTensor:
    """Codes as bits and scales as stored of a matrix."""
    assert scheme.scaling is not None
    q = _quantize(_array(x_NK), scheme)
    number, scale_number = formats.get(scheme.format), formats.get(scheme.scaling.scale_format)
    offsets = None
    if q.offsets_RG is not None:
        is_integer = scheme.scaling.symmetry == "zero_point"
        offsets = _row_of_bits(q.offsets_RG, number) if is_integer else _stored(q.offsets_RG, scale_number)
    return PackedTensor(
        scheme=scheme,
        shape=(x_NK.shape[0], x_NK.shape[1]),
        codes=torch.from_numpy(_bits(np.where(np.isnan(q.codes_NK), 0, _codes(q.codes_NK, number)), number.bits)),
        scales=_stored(q.scales_RG / F32(2.0**scheme.scaling.element_exponent), scale_number),
        offsets=offsets,
        tensor_scale=None if q.tensor_scale is None else torch.tensor(q.tensor_scale),
    )


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a packed matrix."""
    scheme, (rows, columns) = packed.scheme, packed.shape
    assert scheme.scaling is not None and packed.scales is not None
    number, scale_number = formats.get(scheme.format), formats.get(scheme.scaling.scale_format)
    shape = scheme.scaling.granularity.scale_shape(rows, columns)
    offsets_RG = None
    if packed.offsets is not None:
        offset_number = number if scheme.scaling.symmetry == "zero_point" else scale_number
        offsets_RG = _loaded(packed.offsets, offset_number, shape)
    q = _Quantized(
        codes_NK=decode_codes(number, _codes_of_bits(packed.codes.cpu().numpy(), number.bits, columns)).astype(F32),
        scales_RG=_loaded(packed.scales, scale_number, shape) * F32(2.0**scheme.scaling.element_exponent),
        offsets_RG=offsets_RG,
        tensor_scale=None if packed.tensor_scale is None else F32(packed.tensor_scale.item()),
    )
    return torch.from_numpy(_values(q, scheme)).to(dtype)


# --- tensors and arrays -----------------------------------------------------------------------------------------------


def _array(x: Tensor) -> Array:
    return x.detach().cpu().float().contiguous().numpy()


def _finished(values: Array, x: Tensor, out: Tensor | None) -> Tensor:
    narrowed = torch.from_numpy(values).to(x.dtype)
    return narrowed.to(x.device) if out is None else out.copy_(narrowed)


def _round(
    x: npt.NDArray[Any],
    number: Format,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
) -> Array:
    """What is left of every number, fp32; NaN stays where the format has nothing to put in its place."""
    stays = np.isnan(x) if overflow_values(number, overflow).nan is None else np.zeros(x.shape, dtype=bool)
    known = np.where(stays, F32(0), x)
    codes = encode_values(number, known, rounding, overflow, seed=seed, random_bits=random_bits)
    with np.errstate(over="ignore"):
        rounded = decode_codes(number, codes).astype(F32)
    return np.where(stays, F32(np.nan), rounded)


# --- groups -----------------------------------------------------------------------------------------------------------


class _Quantized(NamedTuple):
    """A matrix as codes and scales, all by their values."""

    codes_NK: Array
    scales_RG: Array
    offsets_RG: Array | None
    tensor_scale: np.float32 | None


class _Group(NamedTuple):
    """One group: its place among the scales and its rectangle of the matrix."""

    place: tuple[int, int]
    rectangle: tuple[slice, slice]


def _groups(shape: tuple[int, ...], granularity: Granularity) -> Iterator[_Group]:
    """Every group of a matrix; those at its edges are smaller."""
    rows, columns = shape
    if granularity.scope == "tensor":
        yield _Group((0, 0), (slice(None), slice(None)))
        return
    height = granularity.block_rows or 1
    width = granularity.group_size or max(columns, 1)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield _Group((top // height, left // width), (slice(top, top + height), slice(left, left + width)))


def _quantize(x_NK: Array, scheme: TensorScheme) -> _Quantized:
    scaling, number = scheme.scaling, formats.get(scheme.format)
    assert scaling is not None
    rows, columns = x_NK.shape
    groups = list(_groups((rows, columns), scaling.granularity))
    codes_NK = np.zeros((rows, columns), dtype=F32)
    scales_RG = np.full(scaling.granularity.scale_shape(rows, columns), np.nan, dtype=F32)
    offsets_RG = None if scaling.symmetry == "symmetric" else np.full_like(scales_RG, np.nan)
    tensor_scale, inverse = _tensor_scales([x_NK[group.rectangle] for group in groups], number, scaling)
    with np.errstate(all="ignore"):
        for group in groups:
            values = x_NK[group.rectangle]
            if not np.isfinite(values).all():
                codes_NK[group.rectangle] = np.nan
            elif offsets_RG is None:
                scale = _stored_scale(_ideal_scale(values, number, scaling, inverse, tensor_scale), inverse, scaling)
                codes_NK[group.rectangle] = _symmetric_codes(values, scale * tensor_scale, number)
                scales_RG[group.place] = scale
            else:
                find = _ASYMMETRIC[scaling.symmetry]
                codes_NK[group.rectangle], scales_RG[group.place], offsets_RG[group.place] = find(
                    values, number, scaling
                )
    return _Quantized(codes_NK, scales_RG, offsets_RG, tensor_scale if scaling.tensor_scale else None)


def _values(q: _Quantized, scheme: TensorScheme) -> Array:
    assert scheme.scaling is not None
    values_NK = np.empty_like(q.codes_NK)
    with np.errstate(all="ignore"):
        for place, rectangle in _groups(q.codes_NK.shape, scheme.scaling.granularity):
            unit = q.scales_RG[place] * (F32(1) if q.tensor_scale is None else q.tensor_scale)
            codes = q.codes_NK[rectangle]
            if q.offsets_RG is None:
                values_NK[rectangle] = codes * unit
            elif scheme.scaling.symmetry == "zero_point":
                values_NK[rectangle] = (codes - q.offsets_RG[place]) * unit
            else:
                values_NK[rectangle] = codes * unit + q.offsets_RG[place]
    return values_NK


# --- symmetric scales -------------------------------------------------------------------------------------------------


def _top(number: Format, scaling: Scaling) -> np.float32:
    """What the largest code stands for under a scale of 1."""
    return F32(math.ldexp(number.max, scaling.element_exponent))


def _tensor_scales(groups: list[Array], number: Format, scaling: Scaling) -> tuple[np.float32, np.float32]:
    """Tensor scale and its inverse, 1 with one level; groups that are not finite do not count."""
    finite = [np.abs(values).max(initial=F32(0)) for values in groups if np.isfinite(values).all()]
    amax = max(finite, default=F32(0))
    if not scaling.tensor_scale or amax == 0:
        return F32(1), F32(1)
    reach = F32(formats.get(scaling.scale_format).max * float(_top(number, scaling)))
    with np.errstate(over="ignore", under="ignore"):
        return max(amax / reach, F32(2.0**-128)), min(reach / amax, _LARGEST)


def _stored_scale(ideal: np.float32, inverse: np.float32, scaling: Scaling) -> np.float32:
    """What multiplies codes, in units of the tensor scale."""
    stored = _round(np.asarray(ideal * inverse), formats.get(scaling.scale_format))
    return F32(stored[()] * F32(2.0**scaling.element_exponent))


def _symmetric_codes(values: Array, unit: np.float32, number: Format) -> Array:
    return _round(values / (unit if unit != 0 else F32(np.inf)), number)


def _ideal_scale(
    values: Array, number: Format, scaling: Scaling, inverse: np.float32, tensor_scale: np.float32
) -> np.float32:
    """The scale of a finite group, before it is stored."""
    magnitudes = np.abs(values).ravel()
    amax, top = magnitudes.max(initial=F32(0)), _top(number, scaling)
    match scaling.rule:
        case "amax":
            return F32(amax / top)
        case "percentile":
            return F32(_percentile(magnitudes, scaling.percentile / 100) / top)
        case "mse":
            tried = [F32(F32(amax * F32(1 - i / 50)) / top) for i in range(46)]
            errors = [_error(values, ideal, amax, number, scaling, inverse, tensor_scale) for ideal in tried]
            return tried[errors.index(min(errors))]
        case "ocp_floor":
            return _power_of_two(_floor_log2(amax) - _floor_log2(top)) if amax > 0 else F32(0)
        case "round_up":
            quotient = F32(amax / top)
            if quotient == 0:
                return F32(0)
            floor = _floor_log2(quotient)
            return _power_of_two(floor if math.ldexp(1.0, floor) == quotient else floor + 1)
        case "power_of_two":
            if amax == 0:
                return F32(0)
            return _power_of_two(scaling.margin - _floor_log2(min(F32(top / amax), _LARGEST)))


def _percentile(magnitudes: Array, share: float) -> np.float32:
    """Between the two of the sorted numbers that lie around place share · (n − 1), in fp64, then fp32."""
    ordered = np.sort(magnitudes).astype(np.float64) if magnitudes.size else np.zeros(1)
    place = share * (ordered.size - 1)
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, ordered.size - 1)]
    return F32(low + (high - low) * (place - below))


def _error(
    values: Array,
    ideal: np.float32,
    amax: np.float32,
    number: Format,
    scaling: Scaling,
    inverse: np.float32,
    tensor_scale: np.float32,
) -> float:
    """Sum over the group of ((x̂ − x) / amax)²: squares in fp32, their sum exact."""
    unit = _stored_scale(ideal, inverse, scaling) * tensor_scale
    restored = _symmetric_codes(values, unit, number) * unit
    relative = (restored - values) / (amax if amax != 0 else F32(1))
    return math.fsum((relative * relative).ravel().tolist())


def _floor_log2(value: np.float32) -> int:
    return math.frexp(float(value))[1] - 1


def _power_of_two(exponent: int) -> np.float32:
    """2^exponent, held within the powers of two of fp32."""
    return F32(math.ldexp(1.0, min(max(exponent, -149), 127)))


# --- scales with offsets ----------------------------------------------------------------------------------------------


def _zero_point(values: Array, number: Format, scaling: Scaling) -> tuple[Array, np.float32, np.float32]:
    low, high = min(values.min(initial=F32(0)), F32(0)), max(values.max(initial=F32(0)), F32(0))
    lowest, highest = F32(number.min), F32(number.max)
    scale = _stored_offset((high - low) / F32(number.max - number.min), scaling)
    if np.isnan(scale):
        return np.full_like(values, np.nan), scale, scale
    zero_point = np.rint(-low / scale) + lowest if scale > 0 else lowest
    zero_point = F32(np.clip(zero_point, lowest, highest)) + F32(0)
    steps = _round(values / (scale if scale != 0 else F32(np.inf)), _WHOLE)
    return np.clip(steps + zero_point, lowest, highest) + F32(0), scale, zero_point


def _minimum(values: Array, number: Format, scaling: Scaling) -> tuple[Array, np.float32, np.float32]:
    low, high = (values.min(), values.max()) if values.size else (F32(0), F32(0))
    scale = _stored_offset((high - low) / F32(number.max - number.min), scaling)
    minimum = _stored_offset(low - F32(number.min) * scale, scaling) + F32(0)
    return _round((values - minimum) / (scale if scale != 0 else F32(np.inf)), number), scale, minimum


def _stored_offset(value: np.float32, scaling: Scaling) -> np.float32:
    """A scale or minimum as stored; what fp32 could not hold spoils the group."""
    if not np.isfinite(value):
        return F32(np.nan)
    return F32(_round(np.asarray(value), formats.get(scaling.scale_format))[()])


_WHOLE = IntFormat(name="whole", bits=32, signed=True, source="two's complement")
_ASYMMETRIC: dict[str, Callable[[Array, Format, Scaling], tuple[Array, np.float32, np.float32]]] = {
    "zero_point": _zero_point,
    "minimum": _minimum,
}


# --- bits -------------------------------------------------------------------------------------------------------------


def _codes(values: Array, number: Format) -> npt.NDArray[Any]:
    """Codes of numbers of the format; 0 where NaN has none."""
    known = values if number.has_nan else np.where(np.isnan(values), F32(decode_codes(number, 0)), values)
    return encode_values(number, known)


def _bits(codes_NK: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """The bitstream of each row, bit 0 first: uint8 [N, B]."""
    single = (codes_NK[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    rows, columns = codes_NK.shape
    return np.packbits(single.astype(np.uint8).reshape(rows, columns * bits), axis=1, bitorder="little")


def _codes_of_bits(packed_NB: npt.NDArray[np.uint8], bits: int, columns: int) -> npt.NDArray[np.int64]:
    single = np.unpackbits(packed_NB, axis=1, bitorder="little", count=columns * bits)
    return single.reshape(len(packed_NB), columns, bits).astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64))


def _row_of_bits(values_RG: Array, number: Format) -> Tensor:
    return torch.from_numpy(_bits(_codes(values_RG, number).reshape(1, -1), number.bits)[0])


def _stored(values_RG: Array, number: Format) -> Tensor:
    """Scales in torch's dtype of their format, or as bits where it has none."""
    dtype = stored_dtype(number)
    if dtype is None:
        return _row_of_bits(values_RG, number)
    return torch.from_numpy(_bits(_codes(values_RG, number), number.bits).ravel()).view(dtype).reshape(values_RG.shape)


def _loaded(stored: Tensor, number: Format, shape: tuple[int, int]) -> Array:
    packed = stored.cpu().contiguous().view(torch.uint8).numpy()
    rows, columns = (1, shape[0] * shape[1]) if stored.dtype == torch.uint8 else shape
    codes = _codes_of_bits(packed.reshape(rows, packed.size // max(rows, 1)), number.bits, columns)
    return decode_codes(number, codes).astype(F32).reshape(shape)
