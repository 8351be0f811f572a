"""From numbers to scales.

    amax        scale = amax / largest code value
    ocp_floor   scale = 2^(floor(log2 amax) − emax)        OCP Microscaling Formats v1.0, section 6.3; elements saturate
    minimum     scale = (max − min) / (number of codes − 1), offset = min           GGUF Q4_1
    zero_point  the range is widened to hold 0; offset = round(−min / scale)        AWQ, GPTQ, compressed-tensors
    two levels  tensor_scale = amax_tensor / (largest scale · largest code)
                block scale = amax / largest code / tensor_scale                    NVFP4: 448 · 6

A scale is rounded to the format in which it is stored *before* codes are computed against it. Rounding it to nearest
may place the largest element just outside the codes' range; it then saturates, as it does on the hardware. A group of
zeros, or one so small that its scale is stored as zero, has scale 0 (E8M0 has no zero: 2^−127) and dequantises to its
offset (zero where symmetric).

`shrink` < 1 multiplies the range before the scale is found: values outside saturate, all others are resolved finer.
`full_range_scales` uses the one code more that two's complement has below zero: the group's extreme value, whatever its
sign, takes the code −2^(b−1), by a scale of the opposite sign (GGUF's Q4_0 does so). Both serve `rounding/clip.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright import formats
from bitwright.quantize.backends.torch import round_to_format
from bitwright.quantize.scheme import Scaling


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scales:
    """Stored scales of a grouped tensor [..., group]: all have a trailing dimension of 1."""

    scale: Tensor
    offset: Tensor | None
    tensor_scale: Tensor | None

    @property
    def effective(self) -> Tensor:
        """The number that multiplies codes: block scale times tensor scale."""
        return self.scale if self.tensor_scale is None else self.scale * self.tensor_scale


def find_scales(grouped: Tensor, format_name: str, scaling: Scaling, shrink: float | Tensor = 1.0) -> Scales:
    """Scales for groups along the last dimension.

    Args:
        grouped: fp32 [..., group]; every group of the last dimension shares a scale.
        format_name: format of the codes.
        scaling: the rule.
        shrink: factor on the range, a number or a tensor broadcastable to [..., 1].

    Returns:
        Scales with shapes [..., 1]. NaN or Inf in a group gives that group a non-finite scale, and so non-finite
        values; other groups are none the worse.
    """
    if scaling.symmetry != "symmetric":
        return _asymmetric(grouped, format_name, scaling, shrink)
    number = formats.get(format_name)
    peak = grouped.abs().amax(-1, keepdim=True)
    amax = peak * shrink
    if scaling.rule == "ocp_floor":
        _, exponent = torch.frexp(amax)  # amax = m · 2^exponent with m in [½, 1), and 0 = 0 · 2^0
        exponent = torch.where(amax == 0, -127, exponent - 1 - number.emax).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(amax), exponent)
        scale = torch.where(torch.isfinite(amax), scale, amax)
        return Scales(scale=scale, offset=None, tensor_scale=None)
    ideal = amax / float(number.max)
    if not scaling.tensor_scale:
        return Scales(scale=_store(ideal, scaling.scale_format), offset=None, tensor_scale=None)
    largest_scale = float(formats.get(scaling.scale_format).max)
    finite = torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))
    tensor_peak = finite.amax() if finite.numel() else finite.new_zeros(())
    tensor_scale = tensor_peak / (largest_scale * float(number.max))
    tensor_scale = torch.where(tensor_scale > 0, tensor_scale, torch.ones_like(tensor_scale))
    return Scales(scale=_store(ideal / tensor_scale, scaling.scale_format), offset=None, tensor_scale=tensor_scale)


def full_range_scales(grouped: Tensor, format_name: str, scaling: Scaling, shrink: float) -> Scales:
    """Signed scales that map each group's extreme value, times `shrink`, to the lowest integer code.

    Args:
        grouped: fp32 [..., group].
        format_name: a signed integer format.
        scaling: symmetric, one level, scales in a format with signs.
        shrink: factor on the range.
    """
    low, high = torch.aminmax(grouped, dim=-1, keepdim=True)
    extreme = torch.where(high > -low, high, low)
    scale = _store(extreme * (shrink / float(formats.get(format_name).min)), scaling.scale_format)
    return Scales(scale=scale, offset=None, tensor_scale=None)


def _asymmetric(grouped: Tensor, format_name: str, scaling: Scaling, shrink: float | Tensor) -> Scales:
    number = formats.get(format_name)
    num_steps = float(number.max) - float(number.min)
    low, high = torch.aminmax(grouped, dim=-1, keepdim=True)
    if scaling.symmetry == "zero_point":
        low, high = low.clamp(max=0.0) * shrink, high.clamp(min=0.0) * shrink
        scale = _store((high - low) / num_steps, scaling.scale_format)
        zero_point = torch.where(scale > 0, -low / scale, torch.zeros_like(scale)).round() + float(number.min)
        return Scales(scale=scale, offset=zero_point.clamp(float(number.min), float(number.max)), tensor_scale=None)
    span = high - low
    scale = _store(span * shrink / num_steps, scaling.scale_format)
    # low itself where nothing is shrunk: a detour over the middle would lose a minimum much smaller than the maximum
    lowest = low + span * ((1 - shrink) / 2)
    minimum = _store(lowest - float(number.min) * scale, scaling.scale_format)
    return Scales(scale=scale, offset=minimum, tensor_scale=None)


def _store(scale: Tensor, scale_format: str) -> Tensor:
    """Round to the stored format. A finite scale saturates; that of a non-finite group stays, lest it be hidden."""
    return torch.where(torch.isfinite(scale), round_to_format(scale, formats.get(scale_format)), scale)
