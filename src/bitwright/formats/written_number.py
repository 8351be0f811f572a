"""Numbers and codes as people write them, exactly: a `Fraction`, or one of −0, ±Inf, NaN.

Formats are rounded from float64, and "0.1" is none. Rounding twice may go wrong, so the float64 on the way is rounded
*to odd*: of the two around x the one whose last bit is 1 (S. Boldo and G. Melquiond, "Emulation of a FMA and correctly
rounded sums", 2008). A format of at most 51 significant bits then rounds as if from x itself. For a wider one the
float64 on the way is found by the rounding mode asked for, which is the whole rounding where the format is fp64.
"""

from __future__ import annotations

import math
import re
import sys
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import numpy as np

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError
from bitwright.formats.round import find_rounding
from bitwright.formats.types import FloatFormat, Format

#: A number as it was written: exact, or one of −0, ±Inf, NaN.
Real = Fraction | float

#: Decimal exponents that a written number may have; every format ends long before.
MAX_DECIMAL_EXPONENT = 5000
_HEX_FLOAT = re.compile(r"([+-]?)0x(?=\.?[0-9a-f])([0-9a-f]*)\.?([0-9a-f]*)p([+-]?\d{1,4})", re.IGNORECASE)


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
    step_up = find_rounding(rounding, 1, None, 1)(np.array([rest]), np.array([is_odd]), np.array([x < 0]))
    return sign * (high if step_up[0] else low)


def _signed(size: Fraction, negative: bool) -> Real:
    if not size:
        return -0.0 if negative else size
    return -size if negative else size
