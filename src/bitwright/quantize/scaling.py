"""From numbers to scales.

Symmetric groups: `RULES` holds one function per `Scaling.rule`. With amax = max |x|, and max and emax the largest code
value and its exponent:

    amax          amax / max                                                      compressed-tensors, AWQ, GPTQ, QLoRA
    percentile    q / max, q the percentile of |x|, interpolated linearly         observers of PTQ; 100 gives amax
    mse           the amax · ratio / max whose squared error is least              ratios of MSE_RATIOS, the first of
                                                                                  equals; a group is never worse than
                                                                                  under amax
    ocp_floor     2^(floor(log2 amax) − emax)                                     OCP Microscaling Formats v1.0, 6.3
    round_up      2^ceil(log2(amax / max))                                        NVIDIA MXFP8; torchao calls it RCEIL
    power_of_two  1 / 2^(floor(log2(max / amax)) − margin)                        MS-AMP; Transformer Engine's block
                                                                                  scaling is margin 0

Under ocp_floor a group saturates when amax lies in (max, 2^(emax+1)) · 2^k, which is 448 to 512 for E4M3. round_up and
power_of_two with margin 0 are one and the same number, the smallest power of two under which amax does not saturate
(wherever amax / max is a normal fp32 number); ocp_floor is half of it where it saturates, and equal everywhere else.
Powers of two are exact in fp32 and in E8M0, which clamps them to 2^−127 … 2^127. A stored scale s multiplies codes by
s · 2^element_exponent; max and emax above are then those of code · 2^element_exponent.

Two levels (NVFP4, as in Transformer Engine; 448 · 6 = 2688) measure each group in units of a tensor scale, in this
order of fp32 operations, which is that of `formats/blocks.py`:

    inverse tensor scale = 2688 / amax_tensor         0 → 1, at most the largest fp32 number
    block scale          = E4M3((amax_block / 6) · inverse tensor scale)
    tensor scale         = amax_tensor / 2688         0 → 1, at least 2^−128, where the inverse is capped
    code                 = E2M1(x / (block scale · tensor scale))

A tensor scale that is known beforehand (from calibration, or shared by several matrices) has 1 / itself for an inverse;
block scales beyond E4M3 saturate then.

With offsets:

    minimum     scale = (max x − min x) / (number of codes − 1), offset = min x            GGUF Q4_1
    zero_point  the range is widened to hold 0; offset = round(−min x / scale)     AWQ, GPTQ, compressed-tensors

A scale is rounded to the format in which it is stored *before* codes are computed against it. Rounding it to nearest
may place the largest element just outside the codes' range; it then saturates, as it does on the hardware. A group of
zeros, or one so small that its scale is stored as zero, has scale 0 (E8M0 has no zero: 2^−127) and dequantises to its
offset (zero where symmetric); libraries that store the scale 1 there restore the same zeros.

`shrink` < 1 multiplies the range before the scale is found: values outside saturate, all others are resolved finer.
`full_range_scales` uses the one code more that two's complement has below zero: the group's extreme value, whatever its
sign, takes the code −2^(b−1), by a scale of the opposite sign (GGUF's Q4_0 does so). Both serve `rounding/clip.py`.

Scales that depend on what came before (delayed scaling) are a state machine: `delayed_scaling.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format
from bitwright.quantize.backends.torch_rounding import round_to_format
from bitwright.quantize.scheme import ScaleRule, Scaling

#: Shares of amax that "mse" tries, the plain amax first. Gaussian numbers are best off with 0.83 on average for int4 in
#: groups of 128, with 0.47 where 2^20 of them share a scale, and with 0.22 for int2 there.
MSE_RATIOS = tuple(1 - i / 50 for i in range(46))
_LARGEST_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scales:
    """Stored scales of a grouped tensor [..., group]: all have a trailing dimension of 1."""

    #: What multiplies codes: the stored number times 2^element_exponent.
    scale: Tensor
    offset: Tensor | None
    tensor_scale: Tensor | None

    @property
    def effective(self) -> Tensor:
        """The number that multiplies codes: block scale times tensor scale."""
        return self.scale if self.tensor_scale is None else self.scale * self.tensor_scale


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """What a rule looks at: the numbers of each group, and what they are to be stored as."""

    #: fp32 [..., g].
    values: Tensor
    #: max |x| of each group times `shrink`, fp32 [..., 1]; NaN or Inf where the group holds one.
    amax: Tensor
    #: Format of the codes.
    number: Format
    scaling: Scaling
    #: Factor on the range.
    shrink: float | Tensor
    #: True for elements of `values` that merely fill up a short group; None where there are none.
    filling: Tensor | None
    #: Two levels: the tensor scale and its inverse, 0-d; 1 with one level.
    tensor_scale: Tensor | float = 1.0
    inv_tensor_scale: Tensor | float = 1.0

    @property
    def largest(self) -> float:
        """What the largest code stands for under a stored scale of 1."""
        return math.ldexp(self.number.max, self.scaling.element_exponent)

    def stored(self, ideal: Tensor) -> Tensor:
        """What multiplies codes once the ideal scale is stored, in units of the tensor scale."""
        stored = round_stored(ideal * self.inv_tensor_scale, self.scaling.scale_format)
        return stored * 2.0**self.scaling.element_exponent


def _amax(groups: Groups) -> Tensor:
    return divided(groups.amax, groups.largest)


def _percentile(groups: Groups) -> Tensor:
    share = groups.scaling.percentile / 100
    return divided(groups.shrink * _quantile(groups.values.abs(), share, groups.filling), groups.largest)


def _mse(groups: Groups) -> Tensor:
    best = _amax(groups)
    least = _relative_squared_error(groups, groups.stored(best))
    for ratio in MSE_RATIOS[1:]:
        tried = divided(groups.amax * ratio, groups.largest)
        error = _relative_squared_error(groups, groups.stored(tried))
        better = error < least  # never where the group is not finite
        least = torch.where(better, error, least)
        best = torch.where(better, tried, best)
    return best


def _ocp_floor(groups: Groups) -> Tensor:
    emax = groups.number.emax + groups.scaling.element_exponent
    return _zero_where(groups.amax == 0, exact_power_of_two(floor_log2(groups.amax) - emax))


def _round_up(groups: Groups) -> Tensor:
    ratio = divided(groups.amax, groups.largest)
    floor = floor_log2(ratio)
    has_rest = exact_power_of_two(floor) < ratio
    return _zero_where(ratio == 0, exact_power_of_two(floor + has_rest.int()))


def _power_of_two(groups: Groups) -> Tensor:
    inverse = quotient(groups.largest, groups.amax).clamp(max=_LARGEST_FP32)
    return _zero_where(groups.amax == 0, exact_power_of_two(groups.scaling.margin - floor_log2(inverse)))


#: Every scale rule: groups → ideal scales fp32 [..., 1], before they are rounded to their stored format. What a rule
#: answers for a group that is not finite does not matter.
RULES: Mapping[ScaleRule, Callable[[Groups], Tensor]] = MappingProxyType(
    {
        "amax": _amax,
        "percentile": _percentile,
        "mse": _mse,
        "ocp_floor": _ocp_floor,
        "round_up": _round_up,
        "power_of_two": _power_of_two,
    }
)


def find_scales(
    grouped: Tensor,
    format_name: str,
    scaling: Scaling,
    shrink: float | Tensor = 1.0,
    *,
    filling: Tensor | None = None,
    tensor_scale: Tensor | None = None,
) -> Scales:
    """Scales for groups along the last dimension.

    Args:
        grouped: fp32 [..., group]; every group of the last dimension shares a scale.
        format_name: format of the codes.
        scaling: the rule.
        shrink: factor on the range, a number or a tensor broadcastable to [..., 1].
        filling: which elements only fill up a short group (`granularity.is_filling`), so that percentile and mse leave
            them out; None where there are none, or where the rule looks at amax alone.
        tensor_scale: fp32 0-d: the second level, known beforehand; None: found, where the scaling has one.

    Returns:
        Scales with shapes [..., 1]. NaN or Inf in a group gives that group the scale NaN (without symmetry, a scale
        that is not finite), and so values that are not finite; other groups are none the worse.
    """
    if scaling.symmetry != "symmetric":
        return _asymmetric(grouped, format_name, scaling, shrink)
    if grouped.shape[-1] == 0:
        grouped = grouped.new_zeros(*grouped.shape[:-1], 1)  # one scale per tensor, of a tensor without elements
    number = formats.FORMATS[format_name]
    peak = grouped.abs().amax(-1, keepdim=True)
    groups = Groups(values=grouped, amax=peak * shrink, shrink=shrink, number=number, scaling=scaling, filling=filling)
    if scaling.tensor_scale:
        if tensor_scale is None:
            tensor_scale, inv_tensor_scale = _tensor_scales(peak, groups)
        else:
            inv_tensor_scale = quotient(1.0, tensor_scale).clamp(max=_LARGEST_FP32)
        groups = replace(groups, tensor_scale=tensor_scale, inv_tensor_scale=inv_tensor_scale)
    scale = groups.stored(RULES[scaling.rule](groups))
    scale = torch.where(torch.isfinite(peak), scale, torch.nan)
    return Scales(scale=scale, offset=None, tensor_scale=tensor_scale)


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
    scale = round_stored(extreme * (shrink / float(formats.FORMATS[format_name].min)), scaling.scale_format)
    return Scales(scale=scale, offset=None, tensor_scale=None)


def quotient(numerator: float, x: Tensor) -> Tensor:
    """numerator / x, divided once: torch takes `number / tensor` for a reciprocal and a product, rounding twice."""
    return torch.full_like(x, numerator) / x


def divided(x: Tensor, denominator: float) -> Tensor:
    """x / denominator, divided once: on GPUs torch takes `tensor / number` for a product with the reciprocal."""
    return x / torch.full_like(x, denominator)


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2 x) of positive finite fp32 numbers, exactly, subnormals too: int32, the shape of `x`."""
    return torch.frexp(x).exponent - 1  # x = m · 2^exponent with m in [½, 1)


def exact_power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, exactly: int32 exponents, held within those of fp32 (−149 to 127), of any shape."""
    held = exponent.clamp(-149, 127)
    normal = (held.clamp(min=-126) + 127) << 23
    subnormal = torch.ones_like(held) << (held.clamp(max=-127) + 149)
    return torch.where(held >= -126, normal, subnormal).view(torch.float32)


def _tensor_scales(peak: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The tensor scale and its inverse, from the groups that are finite: 0-d."""
    finite = torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))
    tensor_peak = finite.amax() if finite.numel() else finite.new_zeros(())
    limit = float(formats.FORMATS[groups.scaling.scale_format].max) * groups.largest
    is_zero = tensor_peak == 0
    tensor_scale = torch.where(is_zero, 1.0, divided(tensor_peak, limit).clamp(min=2.0**-128))
    return tensor_scale, torch.where(is_zero, 1.0, quotient(limit, tensor_peak).clamp(max=_LARGEST_FP32))


def _relative_squared_error(groups: Groups, scale: Tensor) -> Tensor:
    """Sum over the group of ((x̂ − x) / amax)², fp64 [..., 1]: dividing keeps huge and tiny groups within range."""
    effective = scale * groups.tensor_scale
    restored = round_to_format(groups.values / torch.where(effective == 0, 1.0, effective), groups.number) * effective
    error = (restored - groups.values) / torch.where(groups.amax == 0, 1.0, groups.amax)
    if groups.filling is not None:
        error = error.masked_fill(groups.filling, 0.0)
    return error.square().sum(-1, keepdim=True, dtype=torch.float64)


def _quantile(magnitudes: Tensor, share: float, filling: Tensor | None) -> Tensor:
    """The quantile of the last dimension, [..., 1]: linear between the order statistics around share · (n − 1).

    As `torch.quantile`, which takes no more than 2^24 numbers; the place between two numbers is found in fp64. Sorted,
    since selecting the two numbers (`kthvalue`) takes quadratic time where the order is unlucky.
    """
    if filling is not None:
        magnitudes = magnitudes.masked_fill(filling, torch.inf)
    ordered = magnitudes.sort(dim=-1).values
    last = torch.full_like(ordered[..., :1], ordered.shape[-1] - 1, dtype=torch.int64)
    if filling is not None:
        last = last - filling.expand_as(ordered).sum(-1, keepdim=True)
    places = share * last.double()
    low_index = places.floor().long()
    low, high = ordered.gather(-1, low_index), ordered.gather(-1, torch.minimum(low_index + 1, last))
    # in fp64, each step one operation: `lerp` fuses product and sum on some processors
    low, high = low.double(), high.double()
    return (low + (high - low) * (places - low_index)).float()


def _zero_where(is_zero: Tensor, scale: Tensor) -> Tensor:
    return torch.where(is_zero, torch.zeros_like(scale), scale)


def _asymmetric(grouped: Tensor, format_name: str, scaling: Scaling, shrink: float | Tensor) -> Scales:
    number = formats.FORMATS[format_name]
    num_steps = float(number.max) - float(number.min)
    low, high = torch.aminmax(grouped, dim=-1, keepdim=True)
    if scaling.symmetry == "zero_point":
        low, high = low.clamp(max=0.0) * shrink, high.clamp(min=0.0) * shrink
        scale = round_stored(divided(high - low, num_steps), scaling.scale_format)
        zero_point = torch.where(scale > 0, -low / scale, torch.zeros_like(scale)).round() + float(number.min)
        return Scales(scale=scale, offset=zero_point.clamp(float(number.min), float(number.max)), tensor_scale=None)
    span = high - low
    scale = round_stored(divided(span * shrink, num_steps), scaling.scale_format)
    # low itself where nothing is shrunk: a detour over the middle would lose a minimum much smaller than the maximum
    lowest = low + span * ((1 - shrink) / 2)
    minimum = round_stored(lowest - float(number.min) * scale, scaling.scale_format)
    return Scales(scale=scale, offset=minimum, tensor_scale=None)


def round_stored(scale: Tensor, scale_format: str) -> Tensor:
    """Round to the stored format. A finite scale saturates; that of a non-finite group stays, lest it be hidden."""
    return torch.where(torch.isfinite(scale), round_to_format(scale, formats.FORMATS[scale_format]), scale)
