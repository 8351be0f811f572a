"""Tensors to codes and back: the verbs that everything else calls.

    q = quantize(x, scheme)            codes, scales, offsets
    x_hat = dequantize(q)
    x_hat = fake_quantize(x, scheme)   both at once: the values that hardware running `scheme` would see
    packed = pack(x, scheme)           codes as bits, scales as stored
    x_hat = unpack(packed)

Tensors are fp32, bf16 or fp16. All arithmetic is fp32 in a fixed order, and values are narrowed to the tensor's dtype
at the end: a code is round(x / scale) with the *stored* scale, by true division (x · (1/scale) flips codes that lie on
ties). Without a scaling the numbers themselves are rounded, and overflow as IEEE 754 says.

Legend: N rows, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.formats import ROUNDINGS
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.ops import packed_of, quantized_of, signed, spell_scheme
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
    seed: int | None = None,
) -> QTensor:
    """Quantise a matrix.

    Args:
        x_NK: fp32, bf16 or fp16 [N, K]; scales are shared along K (and N) as the scheme's granularity says.
        scheme: format and scaling.
        scales: use these stored scales instead of finding them (shapes [R, G, 1]).
        rounding: how codes are rounded, a name in `formats.ROUNDINGS`; scales follow their rule.
        seed: in [0, 2^64), for stochastic rounding: element i of the flattened matrix draws word i of that seed.

    Returns:
        A QTensor; its `dequantize()` is the value that hardware would use.

    Raises:
        SchemeError: no matrix, another dtype, or no seed where random bits are drawn.
        UnknownName: no such rounding.
    """
    _raise_if_not_a_matrix(x_NK, "quantize")
    key = _checked_seed(x_NK, rounding, seed)
    if scheme.scaling is None:
        codes_NK = torch.ops.bitwright.round_values(x_NK.float(), scheme.format, rounding, "ieee", key, 32)
        return QTensor(scheme=scheme, codes_NK=codes_NK)
    if scales is not None:
        return torch_backend.quantize(x_NK, scheme, scales=scales, rounding=rounding, seed=key)
    return quantized_of(torch.ops.bitwright.quantize(x_NK, spell_scheme(scheme), rounding, key), scheme)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a quantised matrix, [N, K]: fp32 arithmetic, narrowed to `dtype` at the end."""
    return q.dequantize(dtype)


def fake_quantize(
    x: Tensor,
    scheme: TensorScheme,
    *,
    rounding: str = "nearest_even",
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Values after quantising and dequantising; leading dimensions are rows.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.
        scheme: format and scaling.
        rounding, seed: as in `quantize`.
        out: written and returned if given: contiguous, with the shape, dtype and device of `x`; may be `x`.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        SchemeError: another dtype, no seed where random bits are drawn, or an `out` that does not fit.
        UnknownName: no such rounding.
    """
    key = _checked_seed(x, rounding, seed)
    if out is not None:
        _raise_if_out_does_not_fit(x, out)
    if x.numel() == 0:
        return x.clone() if out is None else out  # an expert that no token chose
    if scheme.scaling is None:
        arguments = (x, scheme.format, rounding, "ieee", key, 32)
        if out is None:
            return torch.ops.bitwright.round_values(*arguments)
        torch.ops.bitwright.round_values_out(*arguments, out)
        return out
    text = spell_scheme(scheme)
    if out is None:
        return torch.ops.bitwright.fake_quantize(x, text, rounding, key)
    torch.ops.bitwright.fake_quantize_out(x, text, rounding, key, out)
    return out


def pack(
    x_NK: Tensor, scheme: TensorScheme, *, rounding: str = "nearest_even", seed: int | None = None
) -> PackedTensor:
    """Quantise a matrix and store its codes as bits, its scales in their own format.

    ``unpack(pack(x, scheme), x.dtype)`` is ``fake_quantize(x, scheme)``, bit for bit. Arguments as in `quantize`.

    Raises:
        SchemeError: as `quantize`; or NaN, or a group that is not finite, where the format of codes or of scales has no
            NaN to store it; codes of more than 16 bits that are no floats of torch.
        UnknownName: no such rounding.
    """
    _raise_if_not_a_matrix(x_NK, "pack")
    key = _checked_seed(x_NK, rounding, seed)
    rows, columns = x_NK.shape
    return packed_of(torch.ops.bitwright.pack(x_NK, spell_scheme(scheme), rounding, key), scheme, rows, columns)


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a packed matrix, [N, K]: fp32 arithmetic, narrowed to `dtype` at the end."""
    parts = (packed.scales, packed.offsets, packed.tensor_scale)
    tensors = (packed.codes.new_empty(0, dtype=torch.float32) if part is None else part for part in parts)
    return torch.ops.bitwright.unpack(packed.codes, *tensors, spell_scheme(packed.scheme), *packed.shape, dtype)


def _raise_if_not_a_matrix(x: Tensor, verb: str) -> None:
    if x.dim() != 2:
        raise SchemeError(
            f"{verb} takes a matrix [rows, columns], got shape {tuple(x.shape)}; view leading dimensions as rows"
        )


def _checked_seed(x: Tensor, rounding: str, seed: int | None) -> int:
    """The seed to draw from; 0 where nothing is drawn."""
    if x.dtype not in torch_backend.DTYPES:
        raise SchemeError(f"only fp32, bf16 and fp16 tensors are quantised, got {x.dtype}; convert it with .float()")
    if seed is None and rounding in ROUNDINGS and ROUNDINGS[rounding].needs_seed:
        raise SchemeError(
            f"rounding '{rounding}' draws random bits and was given no seed, so that no run could be repeated; "
            "pass seed=0, and another seed for every further draw"
        )
    return signed(seed or 0)


def _raise_if_out_does_not_fit(x: Tensor, out: Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        contiguous = "contiguous" if out.is_contiguous() else "not contiguous"
        raise SchemeError(
            f"out is {tuple(out.shape)}, {out.dtype}, on {out.device}, {contiguous}; it has to be contiguous with the "
            f"shape, dtype and device of x: {tuple(x.shape)}, {x.dtype}, {x.device}"
        )
