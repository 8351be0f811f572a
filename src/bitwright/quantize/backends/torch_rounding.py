"""Rounding to nearest even with torch operations on the fp32 bit pattern: the inner loop of searches and of emulation.

A number x with exponent e lies on a grid of step 2^(e − fraction_bits), and never finer than the subnormals' step
2^(emin − fraction_bits). Masking the exponent field of x gives 2^e without a logarithm; dividing by the step is exact,
`round` is half-to-even, multiplying back is exact, and a carry into the next binade lands on its first number. A
codebook is searched instead: x takes the i-th of its values in ascending order where x is at most the i-th bound and
beyond the one before.

Values: fp32 in, fp32 out, bit for bit those of the reference (`formats.round`, narrowed to fp32). Overflow, also of
±Inf, saturates. NaN stays NaN, also for formats that have none: whoever stores codes must refuse it, but whoever looks
at values shall see it. −0 stays where the format has it.

Every other rounding mode and overflow rule is in `torch_modes`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat

#: Bits of the exponent field of fp32.
_EXPONENT_MASK = 0x7F800000
_LARGEST_FP32 = (2.0 - 2.0**-23) * 2.0**127


def round_to_format(x: Tensor, number: Format) -> Tensor:
    """Round fp32 `x` to the nearest number of a format, ties to even; what lies beyond its ends goes to the end.

    Args:
        x: fp32 tensor of any shape; not written to, and returned as it is for fp32 and wider formats.
        number: a format for which `has_fp32_grid` holds; all of the catalog are.
    """
    if isinstance(number, IntFormat):
        # + 0.0 turns −0 into the integer 0
        return x.round().clamp_(float(number.min), float(number.max)).add_(0.0)
    if isinstance(number, CodebookFormat):
        bounds, values = _codebook(number, x.device)
        return torch.where(x.isnan(), x, values[torch.bucketize(x.contiguous(), bounds)])
    if holds_all_fp32(number):
        return x
    assert has_fp32_grid(number), number
    bounded = x.clamp(number.min, number.max)
    step = (bounded.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    step = step.mul_(2.0**-number.fraction_bits).clamp_(min=2.0 ** (number.emin - number.fraction_bits))
    rounded = bounded.div_(step).round_().mul_(step)
    return rounded if number.has_negative_zero else rounded.add_(0.0)


def holds_all_fp32(number: Format) -> bool:
    """Whether every finite number of fp32 is one of the format, so that rounding changes nothing."""
    return (
        isinstance(number, FloatFormat)
        and number.signed
        and number.has_negative_zero
        and number.fraction_bits >= 23
        and number.emin - number.fraction_bits <= -149
        and number.max >= _LARGEST_FP32
    )


@cache
def has_fp32_grid(number: Format) -> bool:
    """Whether `round_to_format` is exact: the format's numbers, and the steps between them, are exact in fp32."""
    if not isinstance(number, FloatFormat) or holds_all_fp32(number):
        return True
    if number.signed and not number.has_zero:
        return False
    smallest_step = number.emin - number.fraction_bits
    return number.fraction_bits <= 22 and number.emin >= -127 and smallest_step >= -149 and number.max <= _LARGEST_FP32


@cache
def _codebook(number: CodebookFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """Largest fp32 that rounds to each value but the last, and the values: ascending, fp32."""
    order = sorted(range(len(number.values)), key=number.values.__getitem__)
    values = [number.values[code] for code in order]
    bounds = []
    for i in range(len(values) - 1):
        middle = (Fraction(values[i]) + Fraction(values[i + 1])) / 2
        bound = np.float32(float(middle))
        # a tie goes to the even code: to the neighbour nearer to zero, unless its code is odd
        nearer = i + 1 if middle < 0 else i
        goes_up = (order[nearer] % 2 == 1) == (nearer == i)
        if Fraction(float(bound)) > middle or (Fraction(float(bound)) == middle and goes_up):
            bound = np.nextafter(bound, np.float32(-math.inf))
        bounds.append(float(bound))
    return torch.tensor(bounds, device=device), torch.tensor(values, device=device)
