"""Rounding inputs: under scales found per call, or under one that calibration found; and what a cast would lose.

A static scale is found once, by the rule of the scheme (amax, percentile, mse, …: `scaling.py`), from inputs that were
seen. At run time it costs no reduction over the tensor, and what goes beyond it saturates. That is an *overflow*, and
it is counted before the cast, since the cast hides it (some saturate, some give NaN, some Inf):

    overflow    x / scale rounds beyond the largest number of the format, or below the smallest

Of two levels of scales (NVFP4) the static one is the second: scales of groups are found on every call in units of it,
and what lies beyond the largest code under the largest of them overflows.

Numbers that are stored without a scale (fp16, bf16) overflow in the same way, with scale 1. Scales found per call cover
what they meet: nothing overflows there.

Legend: T tokens, K columns.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.quantize.granularity import to_groups
from bitwright.quantize.quantize import fake_quantize, quantize
from bitwright.quantize.scaling import Scales, find_scales
from bitwright.quantize.scheme import TensorScheme

#: Numbers that rules with more than one pass look at; of more, every n-th token is.
RULE_NUMBERS = 1 << 19


def find_static_scale(x_TK: Tensor, scheme: TensorScheme) -> Tensor:
    """The scale of a whole tensor, by the scheme's rule, from inputs [T, K] that were seen: fp32, 0-d.

    Raises:
        SchemeError: the scheme has no scaling, there are no inputs, or they are not finite.
    """
    if scheme.scaling is None:
        raise SchemeError(f"{scheme} has no scale to find; use a scheme with a scaling")
    if x_TK.numel() == 0:
        raise SchemeError("a static scale needs inputs that were seen, and there are none; use a dynamic scheme here")
    if not scheme.scaling.needs_amax_alone:
        # an odd stride meets all places of sequences, whose lengths are even
        x_TK = x_TK[:: -(-x_TK.numel() // RULE_NUMBERS) | 1]
    grouped = to_groups(x_TK.float(), scheme.scaling.granularity)
    found = find_scales(grouped, scheme.format, scheme.scaling)
    if not bool(torch.isfinite(found.scale).all()):
        raise SchemeError("a static scale needs finite inputs, and some are NaN or Inf; calibrate on other text")
    return (found.scale if found.tensor_scale is None else found.tensor_scale).reshape(())


def stored_scales(x_TK: Tensor, scheme: TensorScheme, scale: Tensor) -> Scales:
    """The scales that inputs [T, K] are rounded under, given the static one (0-d)."""
    assert scheme.scaling is not None
    scale = scale.to(x_TK.device)
    if not scheme.scaling.tensor_scale:
        return Scales(scale=scale.reshape(1, 1, 1), offset=None, tensor_scale=None)
    grouped = to_groups(x_TK.float(), scheme.scaling.granularity)
    return find_scales(grouped, scheme.format, scheme.scaling, tensor_scale=scale)


def reach(scheme: TensorScheme) -> float:
    """The largest magnitude that is kept under a static scale of 1."""
    return float(formats.FORMATS[scheme.format].max) * _units_of_largest(scheme)


def _units_of_largest(scheme: TensorScheme) -> float:
    """The largest scale of a group in units of the static one."""
    scaling = scheme.scaling
    return float(formats.FORMATS[scaling.scale_format].max) if scaling is not None and scaling.tensor_scale else 1.0


def round_input(x: Tensor, scheme: TensorScheme, scale: Tensor | None = None) -> Tensor:
    """Inputs [..., K] after rounding, in their dtype: under `scale` (0-d) where given, else under scales found now."""
    if scale is None or x.numel() == 0:
        return fake_quantize(x, scheme)
    x_TK = x.reshape(-1, x.shape[-1])
    return quantize(x_TK, scheme, scales=stored_scales(x_TK, scheme, scale)).dequantize(x.dtype).reshape(x.shape)


def overflows(x: Tensor, scheme: TensorScheme, scale: Tensor | None = None) -> Tensor | None:
    """Which of the inputs overflow, bool in the shape of `x`; None where scales found per call cover them all.

    Infinite inputs overflow every format; NaN is no overflow.
    """
    if scheme.scaling is not None and scale is None:
        return None
    units = x.float() if scale is None else x.float() / (scale.to(x.device) * _units_of_largest(scheme))
    lowest, highest = _ends(formats.FORMATS[scheme.format])
    return (units < lowest) | (units > highest)


@functools.cache
def _ends(number: Format) -> tuple[float, float]:
    """The least and the greatest fp32 number that round to nearest, ties to even, keeps within the format."""
    return -_last_kept(number, -number.min), _last_kept(number, number.max)


def _last_kept(number: Format, end: float) -> float:
    match number:
        case FloatFormat():
            step = 2.0 ** (number.emax - number.fraction_bits)
        case IntFormat():
            step = 1.0
        case CodebookFormat():  # its values lie on no grid that would go on beyond the last
            return end
    tie = torch.tensor(end + step / 2, dtype=torch.float32)
    # a tie goes to the even neighbour: beyond the end, unless the end is even
    return float(tie) if end / step % 2 == 0 else float(torch.nextafter(tie, torch.tensor(0.0)))
