"""Rounding to a number format with torch operations on the fp32 bit pattern.

A number x with exponent e lies on a grid of step 2^(e − fraction_bits), and never finer than the subnormals' step
2^(emin − fraction_bits). Masking the exponent field of x gives 2^e without a logarithm; dividing by the step is exact,
`round` is half-to-even, multiplying back is exact, and a carry into the next binade lands on its first number.

Values: fp32 in, fp32 out, bit for bit those of the reference (`formats.round`). Overflow, also of ±Inf, saturates to
±max or, with "ieee", becomes ±Inf, else NaN, where the format has them. NaN stays NaN, also for formats that have none:
whoever stores codes must refuse it, but whoever looks at values shall see it. −0 stays where the format has it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bitwright.formats import FloatFormat, Format, IntFormat

#: Bits of the exponent field of fp32.
_EXPONENT_MASK = 0x7F800000


def round_to_format(x: Tensor, number: Format, overflow: Literal["saturate", "ieee"] = "saturate") -> Tensor:
    """Round fp32 `x` to the nearest number of a format, ties to even.

    Args:
        x: fp32 tensor of any shape; not written to, and returned as it is for fp32 and wider formats.
        number: an integer or floating format whose numbers fit in fp32.
        overflow: "saturate" clamps to the largest number; "ieee" gives Inf, else NaN, where the format has one.
    """
    if isinstance(number, IntFormat):
        # + 0.0 turns −0 into the integer 0
        return x.round().clamp_(float(number.min), float(number.max)).add_(0.0)
    assert isinstance(number, FloatFormat), number
    if number.fraction_bits >= 23 and number.exponent_bits >= 8:
        return x
    bounded = x.clamp(float(number.min), float(number.max))
    step = (bounded.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    step = step.mul_(2.0**-number.fraction_bits).clamp_(min=2.0 ** (number.emin - number.fraction_bits))
    rounded = bounded.div_(step).round_().mul_(step)
    if not number.has_negative_zero:
        rounded.add_(0.0)
    return _with_specials(x, rounded, number) if overflow == "ieee" else rounded


def _with_specials(x: Tensor, rounded: Tensor, number: FloatFormat) -> Tensor:
    """Put ±Inf, else NaN, where `x` rounds beyond the largest number, or would need a sign that the format lacks."""
    if not (number.has_inf or number.has_nan):
        return rounded
    last_step = 2.0 ** (number.emax - number.fraction_bits)
    tie = float(number.max) + last_step / 2
    tie_goes_up = number.max / last_step % 2 == 1  # to even, whether or not the even neighbour is a number
    beyond = x.abs() >= tie if tie_goes_up else x.abs() > tie
    special = torch.full_like(x, torch.inf if number.has_inf else torch.nan)
    rounded = torch.where(beyond, torch.copysign(special, x), rounded)
    if number.signed:
        return rounded
    below = x < 0 if number.has_zero else x <= 0
    return torch.where(below, torch.full_like(x, torch.nan), rounded)
