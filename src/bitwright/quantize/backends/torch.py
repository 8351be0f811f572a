"""Rounding to a number format with torch operations on the fp32 bit pattern.

A number x with exponent e lies on a grid of step 2^(e − fraction_bits), and never finer than the subnormals' step
2^(emin − fraction_bits). Masking the exponent field of x gives 2^e without a logarithm; dividing by the step is exact,
`round` is half-to-even, multiplying back is exact, and a carry into the next binade lands on its first number.

Values: fp32 in, fp32 out. Overflow saturates to ±max or, with "ieee", becomes ±Inf from max + ½ ulp on. NaN stays NaN;
±Inf saturates or stays. Signed zeros keep their sign in floating formats.
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
        x: fp32 tensor of any shape.
        number: an integer or floating format whose numbers fit in fp32.
        overflow: "saturate" clamps to the largest number; "ieee" gives ±Inf where the format has it.
    """
    if isinstance(number, IntFormat):
        return x.round().clamp_(float(number.min), float(number.max))
    assert isinstance(number, FloatFormat), number
    if number.fraction_bits >= 23 and number.exponent_bits >= 8:
        return x
    limit = float(number.max)
    lowest = float(number.min)
    bounded = x.clamp(lowest, limit)
    step = (bounded.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    step = step.mul_(2.0**-number.fraction_bits).clamp_(min=2.0 ** (number.emin - number.fraction_bits))
    rounded = bounded.div_(step).round_().mul_(step)
    if overflow == "ieee" and number.has_inf:
        first_inf = limit + 2.0 ** (number.emax - number.fraction_bits - 1)
        rounded = torch.where(x.abs() >= first_inf, torch.copysign(torch.full_like(x, torch.inf), x), rounded)
    return rounded
