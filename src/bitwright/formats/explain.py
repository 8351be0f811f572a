"""What becomes of one number in one format, fact by fact: what `bitwright formats show` and `compare` print.

Arithmetic is exact: a `written_number` is a Fraction, and so are errors, distances and steps. With v the value that the
number x is kept as,

    error      v − x
    relative   (v − x) / x, the share of itself that x gains
    ulps       (v − x) / ulp,   ulp = 2**(e − fraction_bits): the distance of two values in the binade of x, where
               e = floor(log2 |x|), but no less than the smallest normal exponent and no more than the largest

(of the definitions in J.-M. Muller, "On the definition of ulp(x)", INRIA RR-5504, 2005, the one that is a function of
the binade alone). An integer's ulp is 1; a codebook's is the gap that x falls into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import OVERFLOWS, encode_values
from bitwright.formats.round import find_rounding, round_magnitude
from bitwright.formats.types import FloatFormat, Format, IntFormat
from bitwright.formats.written_number import Real, through_float64

#: What a code stands for.
Kind = Literal["normal", "subnormal", "zero", "infinity", "NaN", "integer", "codebook entry"]
#: What became of a number. "exact": nothing; "subnormal": rounded to one; "sign lost": −0 became +0; "NaN lost": NaN
#: became a number.
Fate = Literal["exact", "rounded", "subnormal", "zero", "sign lost", "infinite", "NaN", "saturated", "NaN lost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Bits of a code that belong together."""

    #: "sign", "exponent", "fraction", "integer", "index".
    name: str
    #: The bits, high to low, as 0 and 1.
    bits: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """The value next to another one of the same format."""

    code: int
    value: float
    #: How far off it is, above 0; None where one of the two is infinite.
    distance: Fraction | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One code of one format."""

    format: Format
    code: int
    #: What the code stands for, exact in float64.
    value: float
    kind: Kind
    #: The bits of the code, high to low.
    fields: tuple[Field, ...]
    #: The next smaller and the next larger value; None where there is none.
    below: Neighbour | None
    above: Neighbour | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What becomes of one number in one format."""

    asked: Real
    #: What it is kept as.
    point: Point
    fate: Fate
    #: Kept minus asked; None unless both are finite.
    error: Fraction | None
    #: The distance of values around what was asked; None where there is no such thing.
    ulp: Fraction | None
    #: Rounded as if the format had no end, the number is beyond it: larger than its largest value, infinite, or, in a
    #: format without 0, smaller than its smallest.
    out_of_range: bool
    #: Overflow rule → what it makes of this number; empty for NaN.
    by_rule: Mapping[str, float]

    @property
    def relative_error(self) -> Fraction | None:
        """error / asked; None where that is no number."""
        return self.error / Fraction(self.asked) if self.error is not None and self.asked else None

    @property
    def error_ulps(self) -> Fraction | None:
        """error / ulp; None where that is no number."""
        return self.error / self.ulp if self.error is not None and self.ulp is not None else None


def explain_code(format: Format, code: int) -> Point:
    """Return what a code of a format stands for, and what lies beside it.

    Raises:
        FormatError: the format has no such code.
    """
    value = _value(format, code)
    return Point(
        format=format,
        code=code,
        value=value,
        kind=_kind(format, value),
        fields=_fields(format, code),
        below=_neighbour(format, value, -math.inf, "down"),
        above=_neighbour(format, value, math.inf, "up"),
    )


def explain(format: Format, x: Real, rounding: str = "nearest_even", overflow: str = "ieee") -> Explanation:
    """Return what becomes of `x` in a format.

    Args:
        format: the record of the format.
        x: an exact number, or −0.0, ±Inf, NaN.
        rounding: a mode in `ROUNDINGS` that draws nothing; for those that do see `chances`.
        overflow: a name in `OVERFLOWS`.

    Raises:
        FormatError: `x` is NaN, for which neither the format nor the rule has an answer.
        UnknownName: no such rounding or overflow rule.
    """
    start = through_float64(format, x, rounding)
    point = explain_code(format, int(encode_values(format, start, rounding, overflow)))
    out_of_range = _is_out_of_range(format, start, rounding)
    rules = () if math.isnan(start) else OVERFLOWS
    by_rule = {rule: _value(format, int(encode_values(format, start, rounding, rule))) for rule in rules}
    both_finite = math.isfinite(point.value) and (isinstance(x, Fraction) or x == 0)
    return Explanation(
        asked=x,
        point=point,
        fate=_fate(x, point, out_of_range=out_of_range),
        error=Fraction(point.value) - Fraction(x) if both_finite else None,
        ulp=_ulp(format, x, start),
        out_of_range=out_of_range,
        by_rule=by_rule,
    )


def chances(
    format: Format, x: Real, overflow: str = "ieee", random_bits: int | None = None
) -> tuple[tuple[Fraction, Explanation], ...]:
    """Return what stochastic rounding makes of `x`: (chance, outcome), one or two of them, toward zero first.

    The chance of stepping away from zero is the rest of |x| / ulp, as with any number of random bits.

    Raises:
        FormatError: as `explain`.
        UnknownName: no such overflow rule.
    """
    inner = explain(format, x, "toward_zero", overflow)
    away = "up" if x > 0 else "down"
    if inner.ulp is None or inner.out_of_range or not inner.error:
        return ((Fraction(1), explain(format, x, away, overflow) if inner.out_of_range else inner),)
    rest = abs(inner.error) / inner.ulp
    return (1 - rest, inner), (rest, explain(format, x, away, overflow))


def beyond_range(format: Format) -> Mapping[str, float]:
    """Return what a number far above the largest value becomes: overflow rule → value."""
    return explain(format, Fraction(2) ** 1100).by_rule


def _value(format: Format, code: int) -> float:
    return float(decode_codes(format, np.uint64(code)))


def _kind(format: Format, value: float) -> Kind:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity"
    match format:
        case FloatFormat():
            if value == 0:
                return "zero"
            return "subnormal" if abs(value) < format.min_normal else "normal"
        case IntFormat():
            return "integer"
        case _:
            return "codebook entry"


def _fields(format: Format, code: int) -> tuple[Field, ...]:
    match format:
        case FloatFormat():
            widths = {
                "sign": int(format.signed),
                "exponent": format.exponent_bits,
                "fraction": format.fraction_bits,
            }
        case IntFormat():
            widths = {"sign": int(format.signed), "integer": format.bits - format.signed}
        case _:
            widths = {"index": format.bits}
    bits = f"{code:0{format.bits}b}"
    fields = []
    for name, width in widths.items():
        if width:
            fields.append(Field(name=name, bits=bits[:width]))
            bits = bits[width:]
    return tuple(fields)


def _neighbour(format: Format, value: float, direction: float, rounding: str) -> Neighbour | None:
    """Round the next float64 on, in the same direction: what comes out is the next value of the format."""
    if math.isnan(value) or value == direction:
        return None
    code = int(encode_values(format, math.nextafter(value, direction), rounding, "ieee"))
    found = _value(format, code)
    if math.isnan(found) or found == value:
        return None
    finite = math.isfinite(found) and math.isfinite(value)
    return Neighbour(code=code, value=found, distance=abs(Fraction(found) - Fraction(value)) if finite else None)


def _ulp(format: Format, x: Real, start: float) -> Fraction | None:
    if isinstance(x, float) and x != 0:
        return None
    match format:
        case FloatFormat():
            exponent = format.emin if not x else min(max(_floor_log2(abs(Fraction(x))), format.emin), format.emax)
            return Fraction(2) ** (exponent - format.fraction_bits)
        case IntFormat():
            return Fraction(1)
        case _:
            low, high = (_value(format, int(encode_values(format, start, mode))) for mode in ("down", "up"))
            return Fraction(high) - Fraction(low) if high > low else None


def _floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def _is_out_of_range(format: Format, start: float, rounding: str) -> bool:
    """Round as if there were no end; a codebook ends where its values do."""
    if not math.isfinite(start):
        return math.isinf(start)
    negative = math.copysign(1.0, start) < 0
    match format:
        case FloatFormat():
            index = _magnitude_index(format, start, rounding)
            below = negative and not format.signed and (index > 0 or not format.has_zero)
            return below or index >= format.num_finite_magnitudes or _is_too_small(format, start, rounding)
        case IntFormat():
            index = _magnitude_index(format, start, rounding)
            return not format.min <= (-index if negative else index) <= format.max
        case _:
            return not format.min <= start <= format.max


def _is_too_small(format: FloatFormat, start: float, rounding: str) -> bool:
    """Whether a format without 0 would need another binade below its own.

    Four times the number are rounded: that index is the same number of binades higher, and even or odd as well.
    """
    if format.has_zero or abs(start) >= format.min_normal:
        return False
    return _magnitude_index(format, 4 * start, rounding) < 2 << format.fraction_bits


def _magnitude_index(format: FloatFormat | IntFormat, start: float, rounding: str) -> int:
    negative = np.signbit(np.array([start]))
    return int(round_magnitude(format, np.array([abs(start)]), negative, find_rounding(rounding, 1, None, 1))[0])


def _fate(x: Real, point: Point, *, out_of_range: bool) -> Fate:
    if x != x:
        return "exact" if point.kind == "NaN" else "NaN lost"
    if point.kind == "NaN":
        return "NaN"
    if point.value == x:
        return "exact" if math.copysign(1, point.value) == math.copysign(1, x) else "sign lost"
    if point.kind == "infinity":
        return "infinite"
    if out_of_range:
        return "saturated"
    if point.value == 0:
        return "zero"
    return "subnormal" if point.kind == "subnormal" else "rounded"
