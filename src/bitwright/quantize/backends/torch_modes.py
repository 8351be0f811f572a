"""Every rounding mode and every overflow rule with torch operations: `formats/round.py` and `formats/encode.py` again.

Nearest even of a format with an fp32 grid is `torch_rounding`; all else is found in fp64, where each step is exact.
With the step q = 2^(max(floor(log2 |x|), emin) − fraction_bits), |x| / q = n + r splits into an integer and a rest,
the mode says from r, the parity of n, the sign and the random bits whether n + 1 is taken, and n · q is the value.
Codebooks have no step: n is the neighbour nearer to zero, r how far x lies on the way to the other one.

What lies beyond the largest number is then replaced by the three numbers of `formats.overflow_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import FormatError
from bitwright.formats import (
    OVERFLOWS,
    CodebookFormat,
    FloatFormat,
    Format,
    IntFormat,
    RoundingMode,
    overflow_values,
)
from bitwright.formats.encode import find_overflow
from bitwright.formats.round import MAX_RANDOM_BITS, find_mode
from bitwright.quantize.backends.torch_philox import random_words
from bitwright.quantize.backends.torch_rounding import has_fp32_grid, holds_all_fp32, round_to_format

#: (rest r, n is odd, x is negative) → the larger magnitude is taken.
StepUp = Callable[[Tensor, Tensor, Tensor], Tensor]
_MODES: dict[str, StepUp] = {
    "nearest_even": lambda rest, odd, negative: (rest > 0.5) | ((rest == 0.5) & odd),
    "nearest_away": lambda rest, odd, negative: rest >= 0.5,
    "toward_zero": lambda rest, odd, negative: torch.zeros_like(odd),
    "up": lambda rest, odd, negative: (rest > 0) & ~negative,
    "down": lambda rest, odd, negative: (rest > 0) & negative,
}


def round_fp32(
    x: Tensor,
    number: Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
    index: Tensor | None = None,
) -> Tensor:
    """Round fp32 `x` of any shape to a format; fp32 of the same shape, never `x` itself.

    Args:
        x: fp32; not written to.
        number: any format; numbers that fp32 does not hold are rounded to it.
        rounding: a name in `formats.ROUNDINGS`.
        overflow: a name in `formats.OVERFLOWS`. NaN stays NaN where the rule has nothing to put in its place.
        seed, random_bits: of stochastic rounding.
        index: int64, the shape of `x`: which random word each element draws; its position in `x` unless given.

    Raises:
        UnknownName: no such rounding or overflow rule.
        FormatError: the seed is not in [0, 2^64), or the random bits not in 1 to 32.
    """
    find_overflow(overflow)  # for its error; not every path below asks for the rule
    step_up = partial(_step_up, find_mode(rounding), x, seed, random_bits, index)
    # an unsigned format sees magnitudes; what the sign means is a matter of the overflow rule
    seen = x.abs() if isinstance(number, FloatFormat) and not number.signed else x
    if rounding == "nearest_even" and has_fp32_grid(number):
        rounded = _saturated(seen, number)
        overflows = _is_beyond(seen, number) if overflow_values(number, overflow).beyond != number.max else None
    else:
        rounded, overflows = _round_fp64(x, number, step_up())
    return _replace_specials(x, rounded, overflows, number, overflow) if isinstance(number, FloatFormat) else rounded


def _fp32(value: float) -> float:
    """The nearest number of fp32, Inf included."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _saturated(x: Tensor, number: Format) -> Tensor:
    return x.clamp(_fp32(number.min), _fp32(number.max)) if holds_all_fp32(number) else round_to_format(x, number)


def _is_beyond(x: Tensor, number: Format) -> Tensor:
    """Where |x| is rounded to nearest even beyond the largest number; ±Inf too."""
    assert isinstance(number, FloatFormat)
    if holds_all_fp32(number):
        return x.isinf()
    last_step = 2.0 ** (number.emax - number.fraction_bits)
    tie = _fp32(number.max + last_step / 2)  # exact: at most 23 fraction bits
    tie_goes_up = number.max / last_step % 2 == 1  # to even, whether or not the even neighbour is a number
    return x.abs() >= tie if tie_goes_up else x.abs() > tie


def _replace_specials(
    x: Tensor, rounded: Tensor, overflows: Tensor | None, number: FloatFormat, overflow: str
) -> Tensor:
    """Put in what stands for overflow, ±Inf, NaN, and for numbers that need a sign which the format lacks."""
    stand_in = overflow_values(number, overflow)
    signs = x if number.signed else x.abs()
    if overflows is not None and stand_in.beyond != number.max:
        rounded = torch.where(overflows, _signed(stand_in.beyond, signs), rounded)
    if not _is_same(stand_in.infinite, stand_in.beyond):
        rounded = torch.where(x.isinf(), _signed(stand_in.infinite, signs), rounded)
    if stand_in.nan is not None and not math.isnan(stand_in.nan):
        rounded = rounded.masked_fill(x.isnan(), _lost_nan(number, stand_in.nan))
    below = OVERFLOWS[overflow].below
    if not number.signed and below != "magnitude":
        lost = (x < 0) & (rounded != 0) if number.has_zero else x <= 0
        special = below == "special" and number.has_nan
        rounded = rounded.masked_fill(lost, math.nan if special else _fp32(number.min))
    return rounded


def _is_same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _signed(magnitude: float, signs: Tensor) -> Tensor:
    return torch.copysign(torch.full_like(signs, _fp32(magnitude)), signs)


def _lost_nan(number: FloatFormat, value: float) -> float:
    """What NaN becomes where the format has none: the largest number, or the zero that is nearest to −0."""
    if value != 0:
        return _fp32(value)
    if not number.has_zero:
        return _fp32(number.min)
    return -0.0 if number.has_negative_zero else 0.0


# --- in fp64 ----------------------------------------------------------------------------------------------------------


def _step_up(rounding: RoundingMode, x: Tensor, seed: int, random_bits: int, index: Tensor | None) -> StepUp:
    if not rounding.needs_seed:
        return _MODES[rounding.name]
    if not 0 <= seed < 1 << 64:
        raise FormatError(f"seed {seed} is not in [0, 2**64), the keys of the random bits; choose another one")
    if not 1 <= random_bits <= MAX_RANDOM_BITS:
        raise FormatError(f"{random_bits} random bits were asked for; give 1 to {MAX_RANDOM_BITS}")
    if index is None:
        index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    drawn = random_words(seed, index) >> (MAX_RANDOM_BITS - random_bits)
    # floor(r · 2^b) + R >= 2^b, for an integer R the same as r >= 1 − R / 2^b
    return partial(_reaches, 1.0 - drawn.double() * 2.0**-random_bits)


def _reaches(threshold: Tensor, rest: Tensor, odd: Tensor, negative: Tensor) -> Tensor:
    return rest >= threshold


def _round_fp64(x: Tensor, number: Format, step_up: StepUp) -> tuple[Tensor, Tensor | None]:
    """The nearest number within the range, NaN where x is, and where a float format overflows."""
    wide, overflows = x.double(), None
    match number:
        case FloatFormat():
            rounded, overflows = _round_float(wide, number, step_up)
        case IntFormat():
            rounded = _round_integer(wide, number, step_up)
        case CodebookFormat():
            rounded = _round_codebook(wide, number, step_up)
    return torch.where(x.isnan(), x, rounded.float()), overflows


def _round_float(x: Tensor, number: FloatFormat, step_up: StepUp) -> tuple[Tensor, Tensor]:
    negative, is_finite = torch.signbit(x), torch.isfinite(x)
    magnitude = torch.where(is_finite, x.abs(), 0.0)
    # fp32 reaches down to 2^−149; the exponent of 0 does not matter
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=max(number.emin, -149))
    significand = _round_steps(magnitude * _power_of_two(number.fraction_bits - exponent), negative, step_up)
    rounded = significand * _power_of_two(exponent - number.fraction_bits)
    if not number.has_zero:
        rounded = rounded.clamp(min=number.min_normal)
    # IEEE 754 §7.4: the mode that would step up from any rest, however close to the next value, leaves the range
    overflows = (rounded > number.max) & step_up(torch.ones_like(x), torch.ones_like(negative), negative) | x.isinf()
    rounded = torch.where(is_finite, rounded.clamp(max=number.max), number.max)
    if number.signed:
        rounded = torch.copysign(rounded, x)
    return rounded if number.has_negative_zero else rounded + 0.0, overflows


def _round_integer(x: Tensor, number: IntFormat, step_up: StepUp) -> Tensor:
    negative = torch.signbit(x)
    rounded = _round_steps(x.abs().clamp(max=float(1 << number.bits)), negative, step_up)
    return torch.where(negative, -rounded, rounded).clamp(number.min, number.max) + 0.0


def _round_steps(steps: Tensor, negative: Tensor, step_up: StepUp) -> Tensor:
    whole = steps.floor()
    return whole + step_up(steps - whole, whole.remainder(2.0) == 1, negative)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, exactly, for int32 exponents within those of normal numbers."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


_BELOW_HALF, _ABOVE_HALF = math.nextafter(0.5, 0), math.nextafter(0.5, 1)
_BELOW_ONE, _TINY = math.nextafter(1.0, 0), 2.0**-1074


def _round_codebook(x: Tensor, number: CodebookFormat, step_up: StepUp) -> Tensor:
    listed, is_odd, middle, middle_is_exact = _codebook(number, x.device)
    x = torch.where(x.isnan(), 0.0, x).clamp(number.min, number.max).contiguous()
    negative = x < 0
    near = torch.where(negative, torch.searchsorted(listed, x), torch.searchsorted(listed, x, right=True) - 1)
    far = (near + torch.where(negative, -1, 1)).clamp(0, listed.numel() - 1)
    distance = (x - listed[near]).abs()
    rest = torch.where(distance > 0, distance / (listed[far] - listed[near]).abs(), 0.0)
    between = torch.minimum(near, far).clamp(max=middle.numel() - 1)
    side = torch.sign(x - middle[between])
    side = torch.where((side == 0) & ~middle_is_exact[between], -1.0, side)
    beyond_middle = torch.where(negative, -side, side)
    # ties and exact values are compared without the quotient, which may be off in its last place
    rest = torch.where(beyond_middle > 0, rest.clamp(_ABOVE_HALF, _BELOW_ONE), rest.clamp(max=_BELOW_HALF))
    rest = torch.where(beyond_middle == 0, 0.5, rest)
    rest = torch.where(distance > 0, rest.clamp(min=_TINY), 0.0)
    return torch.where(step_up(rest, is_odd[near], negative), listed[far], listed[near])


@cache
def _codebook(number: CodebookFormat, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values in ascending order, whether their codes are odd, the fp64 at or below each middle, and whether at."""
    order = sorted(range(len(number.values)), key=number.values.__getitem__)
    listed = [number.values[code] for code in order]
    exact = [(Fraction(a) + Fraction(b)) / 2 for a, b in pairwise(listed)]
    below = [
        f if Fraction(f) <= m else math.nextafter(f, -math.inf) for f, m in zip(map(float, exact), exact, strict=True)
    ]
    is_exact = [Fraction(f) == m for f, m in zip(below, exact, strict=True)]
    return (
        torch.tensor(listed, dtype=torch.float64, device=device),
        torch.tensor([code % 2 == 1 for code in order], device=device),
        torch.tensor(below, dtype=torch.float64, device=device),
        torch.tensor(is_exact, device=device),
    )
