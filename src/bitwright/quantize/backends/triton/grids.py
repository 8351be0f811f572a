"""What a kernel knows of a format: a few integers, settled when the kernel is compiled.

An fp32 magnitude is the number sig · 2^q0 with an integer sig < 2^24. A format of exponents from emin on, with
fraction_bits, keeps multiples of 2^q, q = max(floor(log2 |x|), emin) − fraction_bits; an integer is the format with
emin = fraction_bits = 23, whose q is 0 as long as fp32 has a fraction at all. One kernel thus serves both. A codebook
is a table: its values in ascending order, what lies between them, and their codes.

Everything is the word of an fp32 number (its bits as an integer) or a small integer: NaN in a compiled kernel's key
would never be found again.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.formats.encode import find_overflow, overflow_values
from bitwright.quantize.scheme import Scaling

NAN_BITS = 0x7FC00000
_FP32_MAX = (2.0 - 2.0**-23) * 2.0**127


class Grid(NamedTuple):
    """The numbers of a format. Words are those of fp32 magnitudes."""

    #: Width of a code; of a codebook, the logarithm of its length.
    bits: int
    #: All numbers stand in a table.
    is_codebook: bool
    is_integer: bool
    fraction_bits: int
    emin: int
    #: Largest magnitude of positive and of negative numbers.
    largest: int
    largest_negative: int
    #: Smallest magnitude: 0 in all formats that have a zero.
    smallest: int
    signed: bool
    has_negative_zero: bool
    #: c + M − M rounds to nearest (see `rounding`): all numbers, steps and Ms are normal fp32 numbers.
    is_short: bool
    #: A magnitude beyond every number of the format, at which c is cut.
    cut: int
    #: Every number is a bf16.
    fits_bf16: bool


class Overflow(NamedTuple):
    """What stands for a value that the format cannot hold: words, of positive inputs."""

    beyond: int
    infinite: int
    #: NAN_BITS also where the rule refuses NaN, which tensors keep.
    nan: int
    #: Negative numbers in an unsigned float format become |x|.
    drops_sign: bool
    #: They become this word instead, as zero does where the format has none.
    below: int


class Rule(NamedTuple):
    """How the largest magnitude of a group becomes its scale."""

    kind: str
    #: What the largest code stands for under a stored scale of 1, and its exponent.
    largest: float
    emax: int
    margin: int
    element_exponent: int
    #: Largest block scale times `largest` with two levels, 0 with one.
    tensor_limit: float
    #: Every scale is a power of two, and so is its reciprocal: a product is the quotient. With an exponent of the
    #: elements there are two products, which agree where codes are no tiny numbers: integers.
    divides_by_product: bool


def bits_of(value: float) -> int:
    """Return the fp32 word of a number, rounded to nearest, as a signed integer."""
    return int(torch.tensor(value, dtype=torch.float64).float().view(torch.int32))


@cache
def grid_of(number: Format) -> Grid:
    """Return the grid of a format that `why_not_grid` does not refuse."""
    if isinstance(number, FloatFormat):
        # of a format that holds every fp32 number, fp32 is what can be seen
        fraction_bits, emin = (23, -126) if _holds_all_fp32(number) else (number.fraction_bits, number.emin)
        smallest = 0.0 if number.has_zero else number.min_normal
        largest_negative = number.max if number.signed else 0.0
    else:
        fraction_bits, emin, smallest = 23, 23, 0.0
        largest_negative = -number.min
    cut_exponent = number.emax + 2
    return Grid(
        bits=number.bits,
        is_codebook=isinstance(number, CodebookFormat),
        is_integer=isinstance(number, IntFormat),
        fraction_bits=fraction_bits,
        emin=emin,
        largest=bits_of(number.max),
        largest_negative=bits_of(largest_negative),
        smallest=bits_of(smallest),
        signed=number.signed,
        has_negative_zero=number.has_negative_zero,
        is_short=(
            isinstance(number, FloatFormat)
            and number.has_zero
            and fraction_bits <= 22
            and emin - fraction_bits >= -125
            and cut_exponent + 23 - fraction_bits <= 127
        )
        or (not isinstance(number, FloatFormat) and number.bits <= 21),
        cut=bits_of(math.ldexp(1.0, min(cut_exponent, 127))),
        fits_bf16=(
            fraction_bits <= 7 and emin - fraction_bits >= -133
            if isinstance(number, FloatFormat)
            else isinstance(number, IntFormat) and max(number.max, -number.min) <= 256
        ),
    )


def why_not_grid(number: Format) -> str | None:
    """None if kernels know the format, else the reason."""
    if not isinstance(number, FloatFormat) or _holds_all_fp32(number):
        return None
    if number.emin - number.fraction_bits < -149 or number.emax > 127 or number.fraction_bits > 23:
        return f"{number.name} has some numbers of fp32 and some beyond; the Triton kernels work on fp32 words"
    return None


def _holds_all_fp32(number: FloatFormat) -> bool:
    has_signs = number.signed and number.has_negative_zero
    return (
        has_signs
        and number.fraction_bits >= 23
        and number.emin <= -126
        and number.emax >= 127
        and number.max >= _FP32_MAX
    )


@cache
def overflow_of(number: Format, rule_name: str) -> Overflow:
    """Return the stand-ins of an overflow rule."""
    values, rule = overflow_values(number, rule_name), find_overflow(rule_name)
    below, drops_sign = 0.0, False
    if isinstance(number, FloatFormat) and not number.signed:
        drops_sign = rule.below == "magnitude"
        below = math.nan if rule.below == "special" and number.has_nan else number.min
    return Overflow(
        beyond=bits_of(values.beyond),
        infinite=bits_of(values.infinite),
        nan=_nan_bits(number, values.nan),
        drops_sign=drops_sign,
        below=bits_of(below),
    )


def _nan_bits(number: Format, nan: float | None) -> int:
    if nan == 0 and not number.has_negative_zero:  # the zero nearest to −0
        nan = 0.0 if number.has_zero else number.min
    return NAN_BITS if nan is None else bits_of(nan)


def rule_of(number: Format, scaling: Scaling, scale_number: Format) -> Rule:
    """Return the scale rule of a scheme."""
    largest = math.ldexp(number.max, scaling.element_exponent)
    return Rule(
        kind=scaling.rule,
        largest=largest,
        emax=number.emax + scaling.element_exponent,
        margin=scaling.margin,
        element_exponent=scaling.element_exponent,
        tensor_limit=scale_number.max * largest if scaling.tensor_scale else 0.0,
        divides_by_product=(
            isinstance(scale_number, FloatFormat)
            and scale_number.fraction_bits == 0
            and not scale_number.has_zero
            and scale_number.emin >= -127
            and not scaling.tensor_scale
            and (scaling.element_exponent == 0 or isinstance(number, IntFormat))
        ),
    )


@cache
def table_of(number: Format, ties_away: bool, device: torch.device) -> Tensor | None:
    """Return a codebook as fp32 [5, 2^bits], None for other formats.

    Rows: values in ascending order; the largest fp32 number that goes to a value and not to the next one, ties settled;
    the largest one up to the middle between the two; 1 where it is the middle; the code of the value.
    """
    if not isinstance(number, CodebookFormat):
        return None
    codes = sorted(range(len(number.values)), key=number.values.__getitem__)
    values = [number.values[code] for code in codes]
    bounds, middles, ties = [0.0], [0.0], [0.0]
    for position, (low, high) in enumerate(pairwise(values)):
        exact = (Fraction(low) + Fraction(high)) / 2
        middle = _fp32_at_or_below(exact)
        is_tie = Fraction(middle) == exact
        near_is_low = middle >= 0  # the neighbour nearer to zero, whose code's parity counts
        near_code = codes[position] if near_is_low else codes[position + 1]
        goes_to_low = near_is_low != (ties_away or near_code % 2 == 1)
        bounds.append(middle if goes_to_low or not is_tie else _next_below(middle))
        middles.append(middle)
        ties.append(float(is_tie))
    rows = [values, [*bounds[1:], 0.0], [*middles[1:], 0.0], [*ties[1:], 0.0], [float(code) for code in codes]]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def _fp32_at_or_below(exact: Fraction) -> float:
    (nearest,) = struct.unpack("f", struct.pack("f", float(exact)))
    return float(nearest) if Fraction(nearest) <= exact else _next_below(nearest)


def _next_below(value: float) -> float:
    """The fp32 number below an fp32 number."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(-math.inf)))
