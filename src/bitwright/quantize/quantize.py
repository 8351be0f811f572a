"""Tensors to codes and back: the three verbs that everything else calls.

    q = quantize(x, scheme)          codes, scales, offsets
    x_hat = dequantize(q)
    x_hat = fake_quantize(x, scheme) both at once: the values that hardware running `scheme` would see

All of it is fp32 arithmetic in a fixed order: a code is round(x / scale) with the *stored* scale, by true division
(x · (1/scale) flips codes that lie on ties).

Legend: N rows, K columns, G groups of a row, g elements of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize.backends.torch import round_to_format
from bitwright.quantize.granularity import Granularity
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scaling import Scales, find_scales
from bitwright.quantize.scheme import TensorScheme


def quantize(x_NK: Tensor, scheme: TensorScheme, *, scales: Scales | None = None) -> QTensor:
    """Quantise a matrix.

    Args:
        x_NK: fp32 [N, K]; scales are shared along K as the scheme's granularity says.
        scheme: format and scaling.
        scales: use these stored scales instead of finding them (shapes [N, G, 1]).

    Returns:
        A QTensor; its `dequantize()` is the value that hardware would use.

    Raises:
        SchemeError: `x_NK` is not an fp32 matrix.
    """
    if x_NK.dim() != 2:
        raise SchemeError(
            f"quantize takes a matrix [rows, columns], got shape {tuple(x_NK.shape)}; view leading dimensions as rows"
        )
    _raise_if_not_fp32(x_NK)
    number = formats.get(scheme.format)
    if scheme.scaling is None:
        return QTensor(scheme=scheme, codes_NK=round_to_format(x_NK, number, overflow="ieee"))
    rows, columns = x_NK.shape
    grouped = to_groups(x_NK, scheme.scaling.granularity)
    found = scales if scales is not None else find_scales(grouped, scheme.format, scheme.scaling)
    codes = to_codes(grouped, found, scheme)
    return QTensor(
        scheme=scheme,
        codes_NK=from_groups(codes, rows, columns),
        scales_NG=found.scale[..., 0],
        offsets_NG=None if found.offset is None else found.offset[..., 0],
        tensor_scale=found.tensor_scale,
    )


def dequantize(q: QTensor) -> Tensor:
    """Values of a quantised matrix, fp32 [N, K]."""
    return q.dequantize()


def fake_quantize(x: Tensor, scheme: TensorScheme) -> Tensor:
    """Values after quantising and dequantising; leading dimensions are rows. fp32 in, fp32 of the same shape out.

    Raises:
        SchemeError: `x` is not fp32.
    """
    _raise_if_not_fp32(x)
    if scheme.scaling is None:
        return round_to_format(x, formats.get(scheme.format), overflow="ieee")
    if x.numel() == 0:
        return x.clone()  # an expert that no token chose
    rows_NK = x.reshape(-1, x.shape[-1])
    grouped = to_groups(rows_NK, scheme.scaling.granularity)
    scales = find_scales(grouped, scheme.format, scheme.scaling)
    values = to_values(to_codes(grouped, scales, scheme), scales, scheme)
    return from_groups(values, *rows_NK.shape).reshape(x.shape)


def _raise_if_not_fp32(x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise SchemeError(f"only fp32 tensors are quantised, got {x.dtype}; convert it with .float()")


def to_groups(x_NK: Tensor, granularity: Granularity) -> Tensor:
    """View a matrix as groups [N, G, g] ([1, 1, N·K] per tensor).

    A short last group is filled up by repeating the row's last element: minimum, maximum and amax stay what they are.
    """
    rows, columns = x_NK.shape
    if granularity.scope == "tensor":
        return x_NK.reshape(1, 1, rows * columns)
    width = granularity.group_columns(columns)
    missing = granularity.num_groups(columns) * width - columns
    if missing:
        x_NK = torch.cat([x_NK, x_NK[:, -1:].expand(rows, missing)], dim=1)
    return x_NK.reshape(rows, granularity.num_groups(columns), max(width, 1))


def from_groups(grouped: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `to_groups`: [N, G, g] → [N, K]."""
    if grouped.numel() == rows * columns:
        return grouped.reshape(rows, columns)
    return grouped.flatten(1)[:, :columns].contiguous()


def to_codes(grouped: Tensor, scales: Scales, scheme: TensorScheme) -> Tensor:
    """Code values of groups under stored scales. A group whose scale is zero has code zero."""
    assert scheme.scaling is not None
    number = formats.get(scheme.format)
    scale = scales.effective
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    if scheme.scaling.symmetry == "minimum":
        assert scales.offset is not None
        codes = round_to_format((grouped - scales.offset) / divisor, number)
    elif scheme.scaling.symmetry == "zero_point":
        assert scales.offset is not None
        codes = round_to_format((grouped / divisor).round_() + scales.offset, number)
    else:
        codes = round_to_format(grouped / divisor, number)
        return torch.where(scale == 0, torch.zeros_like(codes), codes) if bool((scale == 0).any()) else codes
    return torch.where(scale == 0, _zero_code(scales, scheme), codes) if bool((scale == 0).any()) else codes


def _zero_code(scales: Scales, scheme: TensorScheme) -> Tensor:
    assert scheme.scaling is not None and scales.offset is not None
    return scales.offset if scheme.scaling.symmetry == "zero_point" else torch.zeros_like(scales.offset)


def to_values(codes: Tensor, scales: Scales, scheme: TensorScheme) -> Tensor:
    """Values of codes, group by group; the same formula as `QTensor.dequantize`."""
    assert scheme.scaling is not None
    if scheme.scaling.symmetry == "symmetric":
        return codes * scales.effective
    assert scales.offset is not None
    if scheme.scaling.symmetry == "zero_point":
        return (codes - scales.offset) * scales.effective
    return codes * scales.effective + scales.offset
