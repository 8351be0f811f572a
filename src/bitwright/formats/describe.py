"""The facts of every format as rows of a table: what `bitwright formats` prints.

Derived figures, for a format of p significant bits (the hidden one included):

    decimal digits    p · log10(2)      (fp32 7.2, bf16 2.4)
    steps per octave  2**(p − 1)        values from 2**k up to, not including, 2**(k+1), in the normal range

The steps of integers and codebooks do not grow with the value, so that they have none per octave. Their digits are
log10(max / widest step): an integer's are those of its largest value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from bitwright.formats.types import CodebookFormat, FloatFormat, Format, IntFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRow:
    """One format in a table. Values are exact; None means that the format has no such thing."""

    #: Canonical name.
    name: str
    #: Width of a code.
    bits: int
    #: Fields from the top bit: "1·4·3" is sign, exponent, fraction; "two's complement" and "unsigned" are integers, and
    #: a "codebook" is a list of values.
    layout: str
    #: Largest finite value.
    max: float
    #: Smallest finite value.
    min: float
    #: Smallest positive value with full precision.
    min_normal: float
    #: Smallest positive value below it.
    min_subnormal: float | None
    #: Decimal digits that the significand is worth.
    decimal_digits: float
    #: Values per factor of two, in the normal range.
    steps_per_octave: int | None
    #: ±Inf have codes.
    has_inf: bool
    #: NaN has a code.
    has_nan: bool
    #: What else the format is called.
    aliases: tuple[str, ...]
    #: Document and table.
    source: str


def describe(format: Format) -> FormatRow:
    """Return the row of one format."""
    min_subnormal: float | None
    steps_per_octave: int | None
    match format:
        case FloatFormat():
            layout = f"{int(format.signed)}·{format.exponent_bits}·{format.fraction_bits}"
            min_normal, min_subnormal = format.min_normal, format.min_subnormal
            steps_per_octave = 1 << format.fraction_bits
            digits = (format.fraction_bits + 1) * math.log10(2)
        case IntFormat():
            layout = "two's complement" if format.signed else "unsigned"
            min_normal, min_subnormal = 1.0, None
            steps_per_octave = None
            digits = math.log10(format.max)
        case CodebookFormat():
            layout = "codebook"
            ascending = sorted(format.values)
            min_normal, min_subnormal = min(value for value in ascending if value > 0), None
            steps_per_octave = None
            digits = max(0.0, math.log10(format.max / max(b - a for a, b in pairwise(ascending))))
    return FormatRow(
        name=format.name,
        bits=format.bits,
        layout=layout,
        max=format.max,
        min=format.min,
        min_normal=min_normal,
        min_subnormal=min_subnormal,
        decimal_digits=digits,
        steps_per_octave=steps_per_octave,
        has_inf=format.has_inf,
        has_nan=format.has_nan,
        aliases=format.aliases,
        source=format.source,
    )


def describe_all(formats: Iterable[Format]) -> tuple[FormatRow, ...]:
    """Return the rows of many formats: floats, codebooks, integers; wide before narrow, then by name."""
    kinds = (FloatFormat, CodebookFormat, IntFormat)

    def order(format: Format) -> tuple[int, int, str]:
        return kinds.index(type(format)), -format.bits, format.name

    return tuple(describe(format) for format in sorted(formats, key=order))
