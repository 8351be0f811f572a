"""Rounding values as a `ValueScheme` says, and the static scales that some of them need.

Values are [..., heads, tokens, head_dim], or [..., tokens, width] where a scheme has no scale per head. The arithmetic
is that of `fake_quantize`: under a static scale s, value = round(x / s) · s, with codes that saturate.

Legend: H heads, T tokens, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright import formats
from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.value_scheme import OPERAND_BOUNDS, ValueScheme


def round_values(x: Tensor, scheme: ValueScheme, scale: Tensor | None = None) -> Tensor:
    """Values after rounding, in the shape and dtype of `x`.

    Args:
        x: fp32, bf16 or fp16 [..., H, T, D]; [..., T, D] where the scheme's scales are not per head.
        scheme: format, scaling and who shares a scale.
        scale: fp32 [H] or [1], for static schemes.
    """
    if x.numel() == 0:
        return x
    if scheme.static:
        assert scale is not None, f"{scheme.name} needs its static scales"
        per_head = spread(scale, x)
        number = TensorScheme(format=scheme.values.format)
        return fake_quantize(x / per_head, number, rounding=scheme.rounding, overflow="saturate") * per_head
    if scheme.axis == "channel":
        rounded: Tensor = torch.ops.bitwright.round_channels(x, scheme.values.text, scheme.rounding)
        return rounded
    return fake_quantize(x, scheme.values, rounding=scheme.rounding)


def static_scale(scheme: ValueScheme, operand: str, amax_H: Tensor) -> Tensor:
    """The static scale of an operand, fp32 [H], or [1] where the heads share it.

    Args:
        scheme: a static one.
        operand: which operand of the site ("q", "k", "p" …).
        amax_H: the largest magnitude of each head that calibration saw.
    """
    largest = float(formats.FORMATS[scheme.values.format].max)
    if operand in OPERAND_BOUNDS:
        amax_H = torch.full((1,), OPERAND_BOUNDS[operand])
    elif scheme.axis == "tensor":
        amax_H = amax_H.amax(0, keepdim=True)
    scale_H = amax_H.float() / torch.full_like(amax_H, largest, dtype=torch.float32)
    return torch.where(scale_H > 0, scale_H, 1.0)  # a head of zeros: any scale keeps them


def spread(scale: Tensor, x: Tensor) -> Tensor:
    """Scales [H] or [1] in a shape that multiplies x [..., H, T, D]."""
    return scale.to(x.device, x.dtype).view(-1, 1, 1) if scale.numel() > 1 else scale.to(x.device, x.dtype)
