"""What becomes of one number in one format, fact by fact: what `bitwright formats show` and `compare` print.

Arithmetic is exact: a written number is a `Fraction`, and so are errors, distances and steps. With v the value that the
number x is kept as,

    error      v − x
    relative   (v − x) / x, the share of itself that x gains
    ulps       (v − x) / ulp,   ulp = 2**(e − fraction_bits): the distance of two values in the binade of x, where
               e = floor(log2 |x|), but no less than the smallest normal exponent and no more than the largest

(of the definitions in J.-M. Muller, "On the definition of ulp(x)", INRIA RR-5504, 2005, the one that is a function of
the binade alone). An integer's ulp is 1; a codebook's is the gap that x falls into.

Formats are rounded from float64, and "0.1" is none. Rounding twice may go wrong, so the float64 on the way is rounded
*to odd*: of the two around x the one whose last bit is 1 (S. Boldo and G. Melquiond, "Emulation of a FMA and correctly
rounded sums", 2008). A format of at most 51 significant bits then rounds as if from x itself. For a wider one the
float64 on the way is found by the rounding mode asked for, which is the whole rounding where the format is fp64.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal

import numpy as np

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import OVERFLOWS, encode_values
from bitwright.formats.round import StepUp, find_rounding, round_magnitude
from bitwright.formats.types import FloatFormat, Format, IntFormat

#: A number as it was written: exact, or one of −0, ±Inf, NaN.
Real = Fraction | float
#: What a code stands for.
Kind = Literal["normal", "subnormal", "zero", "infinity", "NaN", "integer", "codebook entry"]
#: What became of a number. "exact": nothing; "subnormal": rounded to one; "NaN lost": NaN became a number.
Fate = Literal["exact", "rounded", "subnormal", "zero", "infinite", "NaN", "saturated", "NaN lost"]

#: Decimal exponents that a written number may have; every format ends long before.
MAX_DECIMAL_EXPONENT = 5000
_HEX_FLOAT = re.compile(r"([+-]?)0x([0-9a-f]+)\.?([0-9a-f]*)p([+-]?\d{1,4})", re.IGNORECASE)


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
    #: Rounded as if the format had no end, the number is beyond it; infinite ones, and 0 where there is none, too.
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


def parse_number(text: str) -> Real:
    """Return a written number exactly: "0.1", "-0", "1e-45", "0x1.8p3", "inf", "nan".

    Raises:
        FormatError: it is no number, or its exponent is beyond every format.
    """
    written = text.strip().lower().replace("−", "-")
    if match := _HEX_FLOAT.fullmatch(written):
        sign, whole, rest, exponent = match.groups()
        size = int(whole + rest, 16) * Fraction(2) ** (int(exponent) - 4 * len(rest))
        return _signed(size, sign == "-")
    if written.lstrip("+-").startswith("0x"):
        raise FormatError(
            f"{text!r} may be a code or a number; write --code {text} for the code, or {text}p0 for the number"
        )
    try:
        number = Decimal(written)
    except InvalidOperation:
        hint = nearest_name_hint(written, ["inf", "-inf", "nan", "infinity"])
        raise FormatError(f"{text!r} is no number{hint} Write it as 0.1, 1e-45, 0x1.8p3, inf or nan") from None
    if number.is_nan():
        return math.nan
    if number.is_infinite():
        return math.copysign(math.inf, number)
    if number and abs(number.adjusted()) > MAX_DECIMAL_EXPONENT:
        raise FormatError(
            f"{text!r} has an exponent beyond ±{MAX_DECIMAL_EXPONENT}, where no format has values; "
            "write inf, 0 or a number closer to 1"
        )
    return _signed(abs(Fraction(number)), number.is_signed())


def parse_code(format: Format, text: str) -> int:
    """Return a written code: "0x3dcd", "0b11", "15821".

    Raises:
        FormatError: it is no integer, or the format has no such code.
    """
    try:
        code = int(text, 0)
    except ValueError:
        raise FormatError(f"{text!r} is no code; write it as 0x3c, 0b111100 or 60") from None
    if not 0 <= code < 1 << format.bits:
        raise FormatError(
            f"code {text} is not in [0, 2**{format.bits}), the codes of {format.name}; "
            f"give one from 0 to {(1 << format.bits) - 1:#x}"
        )
    return code


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


def through_float64(format: Format, x: Real, rounding: str) -> float:
    """Return the float64 that rounds to `format` as `x` itself would (see the opening)."""
    if isinstance(x, float):
        return x
    size, sign = abs(x), -1.0 if x < 0 else 1.0
    low = sys.float_info.max if size > sys.float_info.max else float(size)
    if Fraction(low) > size:
        low = math.nextafter(low, 0.0)
    if Fraction(low) == size:
        return sign * low
    high = math.nextafter(low, math.inf)
    is_odd = bool(np.float64(low).view(np.int64) & 1)
    if not (isinstance(format, FloatFormat) and format.fraction_bits > 50):
        return sign * (low if is_odd else high)
    half = Fraction(low) + Fraction(math.ulp(low)) / 2
    rest = 0.25 if size < half else 0.5 if size == half else 0.75
    step_up = _decision(rounding)(np.array([rest]), np.array([is_odd]), np.array([x < 0]))
    return sign * (high if step_up[0] else low)


def _signed(size: Fraction, negative: bool) -> Real:
    if not size:
        return -0.0 if negative else size
    return -size if negative else size


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
            return below or index >= format.num_finite_magnitudes or (start == 0 and not format.has_zero)
        case IntFormat():
            index = _magnitude_index(format, start, rounding)
            return not format.min <= (-index if negative else index) <= format.max
        case _:
            return not format.min <= start <= format.max


def _magnitude_index(format: FloatFormat | IntFormat, start: float, rounding: str) -> int:
    negative = np.signbit(np.array([start]))
    return int(round_magnitude(format, np.array([abs(start)]), negative, _decision(rounding))[0])


def _decision(rounding: str) -> StepUp:
    """The decision of a mode for one number; one that draws says that it has no seed."""
    return find_rounding(rounding, (1,), None, 1)


def _fate(x: Real, point: Point, *, out_of_range: bool) -> Fate:
    if x != x:
        return "exact" if point.kind == "NaN" else "NaN lost"
    if point.kind == "NaN":
        return "NaN"
    if point.value == x:
        return "exact"
    if point.kind == "infinity":
        return "infinite"
    if out_of_range:
        return "saturated"
    if point.value == 0:
        return "zero"
    return "subnormal" if point.kind == "subnormal" else "rounded"
