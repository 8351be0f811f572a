"""Tensors to codes and back: the verbs that everything else calls.

    q = quantize(x, scheme)            codes, scales, offsets
    x_hat = dequantize(q)
    x_hat = fake_quantize(x, scheme)   both at once: the values that hardware running `scheme` would see
    packed = pack(x, scheme)           codes as bits, scales as stored
    x_hat = unpack(packed)

Tensors are fp32, bf16 or fp16. All arithmetic is fp32 in a fixed order, and values are narrowed to the tensor's dtype
at the end: a code is round(x / scale) with the *stored* scale, by true division (x · (1/scale) flips codes that lie on
ties). Without a scaling the numbers themselves are rounded, and overflow as IEEE 754 says unless another rule is named;
codes under a scale saturate.

Legend: N rows, K columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.formats.encode import find_overflow
from bitwright.formats.round import MAX_RANDOM_BITS, find_mode
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.ops import packed_of, quantized_of, signed
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scaling import Scales
from bitwright.quantize.scheme import TensorScheme


def quantize(
    x_NK: Tensor,
    scheme: TensorScheme,
    *,
    scales: Scales | None = None,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> QTensor:
    """Quantise a matrix.

    Args:
        x_NK: fp32, bf16 or fp16 [N, K]; scales are shared along K (and N) as the scheme's granularity says.
        scheme: format and scaling.
        scales: use these stored scales instead of finding them (`Scales`, shapes [R, G, 1]).
        rounding: how codes are rounded, a name in `formats.ROUNDINGS`; scales follow their rule.
        overflow: a name in `formats.OVERFLOWS` for schemes without scaling, "ieee" unless given; codes under a scale
            saturate, and take none.
        seed: in [0, 2^64), for stochastic rounding: element i of the flattened matrix draws word i of that seed.
        random_bits: 1 to 32, for stochastic rounding: how many of its word's bits an element uses.

    Returns:
        A QTensor; its `dequantize()` is the value that hardware would use.

    Raises:
        SchemeError: no matrix, another dtype, no seed where random bits are drawn, or an argument of another kind.
        UnknownName: no such rounding or overflow rule.
    """
    rule, key = _checked(x_NK, scheme, rounding, overflow, seed, random_bits)
    _raise_if_not_a_matrix(x_NK, "quantize")
    if scheme.scaling is None:
        codes_NK = torch.ops.bitwright.round_values(x_NK.float(), scheme.format, rounding, rule, key, random_bits)
        return QTensor(scheme=scheme, codes_NK=codes_NK)
    if scales is not None:
        if not isinstance(scales, Scales):
            raise SchemeError(f"scales are {_kind(scales)}; pass Scales, such as the `scales` of a QTensor")
        return torch_backend.quantize(
            x_NK, scheme, scales=scales, rounding=rounding, seed=key % (1 << 64), random_bits=random_bits
        )
    return quantized_of(torch.ops.bitwright.quantize(x_NK, scheme.text, rounding, key, random_bits), scheme)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a quantised matrix, [N, K]: fp32 arithmetic, narrowed to `dtype` at the end."""
    return q.dequantize(dtype)


def fake_quantize(
    x: Tensor,
    scheme: TensorScheme,
    *,
    rounding: str = "nearest_even",
    overflow: str | None = None,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
    out: Tensor | None = None,
) -> Tensor:
    """Values after quantising and dequantising; leading dimensions are rows. Gradients pass straight through.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.
        scheme: format and scaling.
        rounding, overflow, seed, random_bits: as in `quantize`.
        out: written and returned if given: contiguous, with the shape, dtype and device of `x`; may be `x`, may not
            overlap it otherwise, and has no gradient.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        SchemeError: as `quantize`, or an `out` that does not fit.
        UnknownName: no such rounding or overflow rule.
    """
    rule, key = _checked(x, scheme, rounding, overflow, seed, random_bits)
    if out is not None:
        _raise_if_out_does_not_fit(x, out)
    if x.numel() == 0:
        return x.clone() if out is None else out  # an expert that no token chose
    if scheme.scaling is None:
        arguments = (x, scheme.format, rounding, rule, key, random_bits)
        if out is None:
            return torch.ops.bitwright.round_values(*arguments)
        torch.ops.bitwright.round_values_out(*arguments, out)
        return out
    if out is None:
        return torch.ops.bitwright.fake_quantize(x, scheme.text, rounding, key, random_bits)
    torch.ops.bitwright.fake_quantize_out(x, scheme.text, rounding, key, random_bits, out)
    return out


def pack(
    x_NK: Tensor,
    scheme: TensorScheme,
    *,
    rounding: str = "nearest_even",
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> PackedTensor:
    """Quantise a matrix and store its codes as bits, its scales in their own format.

    ``unpack(pack(x, scheme), x.dtype)`` is ``fake_quantize(x, scheme)``, bit for bit. Arguments as in `quantize`.

    Raises:
        SchemeError: as `quantize`; or NaN, or a group that is not finite, where the format of codes or of scales has no
            NaN to store it; codes of more than 16 bits that are no floats of torch.
        UnknownName: no such rounding.
    """
    _, key = _checked(x_NK, scheme, rounding, None, seed, random_bits)
    _raise_if_not_a_matrix(x_NK, "pack")
    rows, columns = x_NK.shape
    parts = torch.ops.bitwright.pack(x_NK, scheme.text, rounding, key, random_bits)
    return packed_of(parts, scheme, rows, columns)


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Values of a packed matrix, [N, K]: fp32 arithmetic, narrowed to `dtype` at the end.

    Args:
        packed: what `pack` gave.
        dtype: fp32, bf16 or fp16.
        out: written and returned if given: contiguous, [N, K], of that dtype, on the device of the codes.

    Raises:
        SchemeError: another dtype, or an `out` that does not fit.
    """
    if dtype not in torch_backend.DTYPES:
        raise SchemeError(f"values are unpacked to fp32, bf16 or fp16, not {dtype}; convert them afterwards")
    parts = (packed.scales, packed.offsets, packed.tensor_scale)
    tensors = (packed.codes.new_empty(0, dtype=torch.float32) if part is None else part for part in parts)
    arguments = (packed.codes, *tensors, packed.scheme.text, *packed.shape, dtype)
    if out is None:
        return torch.ops.bitwright.unpack(*arguments)
    _raise_if_out_does_not_fit(torch.empty(packed.shape, dtype=dtype, device="meta"), out, packed.codes.device)
    torch.ops.bitwright.unpack_out(*arguments, out)
    return out


def _raise_if_not_a_matrix(x: Tensor, verb: str) -> None:
    if x.dim() != 2:
        raise SchemeError(
            f"{verb} takes a matrix [rows, columns], got shape {tuple(x.shape)}; view leading dimensions as rows"
        )


def _kind(thing: Any) -> str:
    return f"of type {type(thing).__name__}"


def _checked(
    x: Tensor, scheme: TensorScheme, rounding: str, overflow: str | None, seed: int | None, random_bits: int
) -> tuple[str, int]:
    """The overflow rule, and the seed as operators take it; 0 where nothing is drawn."""
    if not isinstance(x, Tensor):
        raise SchemeError(f"x is {_kind(x)}, no tensor; convert it with torch.from_numpy or torch.tensor")
    if not isinstance(scheme, TensorScheme):
        raise SchemeError(
            f"the scheme is {_kind(scheme)}; pass a TensorScheme, such as SCHEMES['mxfp4'].weights or .activations"
        )
    if x.dtype not in torch_backend.DTYPES:
        raise SchemeError(f"only fp32, bf16 and fp16 tensors are quantised, got {x.dtype}; convert it with .float()")
    mode = find_mode(rounding)
    if overflow is not None:
        find_overflow(overflow)
        if scheme.scaling is not None:
            raise SchemeError(f"overflow is {overflow!r}, but codes under a scale always saturate; leave it out")
    if seed is None:
        if mode.needs_seed:
            raise SchemeError(
                f"rounding '{rounding}' draws random bits and was given no seed, so that no run could be repeated; "
                "pass seed=0, and another seed for every further draw"
            )
        seed = 0
    if not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise SchemeError(f"seed is {seed!r}; give a whole number in [0, 2**64)")
    if not isinstance(random_bits, int) or not 1 <= random_bits <= MAX_RANDOM_BITS:
        raise SchemeError(f"random_bits is {random_bits!r}; give a whole number from 1 to {MAX_RANDOM_BITS}")
    return overflow or "ieee", signed(seed)


def _raise_if_out_does_not_fit(x: Tensor, out: Tensor, device: torch.device | None = None) -> None:
    """`device`: where `out` has to be, if not where `x` is, which then only stands for what will be unpacked."""
    model = "x" if device is None else "what is unpacked"
    device = x.device if device is None else device
    if not isinstance(out, Tensor):
        raise SchemeError(f"out is {_kind(out)}, no tensor")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise SchemeError(
            "x or out requires a gradient, which out= would lose; leave out= out, or call it under torch.no_grad()"
        )
    if out.shape != x.shape or out.dtype != x.dtype or out.device != device or not out.is_contiguous():
        contiguous = "contiguous" if out.is_contiguous() else "not contiguous"
        raise SchemeError(
            f"out is {tuple(out.shape)}, {out.dtype}, on {out.device}, {contiguous}; it has to be contiguous with the "
            f"shape, dtype and device of {model}: {tuple(x.shape)}, {x.dtype}, {device}"
        )
