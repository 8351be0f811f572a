"""Exact numbers as text. A binary fraction ends in decimals too, so "exact" is meant to the last digit.

Nothing goes through a float: what is long is cut by `Decimal`, and says so by "≈".
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction

from bitwright.formats.written_number import Real

#: Digits of 2**-1074, doubled: every value of every format, and its distance to what was written, is exact with these.
_EXACT = Context(prec=12000, Emax=MAX_EMAX, Emin=MIN_EMIN)
#: Digits of a number that is cut: they tell any two float64 values apart.
_CUT = 17
#: Positional notation for numbers from 1e-6 to below 1e17 (and longer integers, where all digits are shown).
_SMALLEST_PLAIN, _LARGEST_PLAIN = -7, 17
#: Percentages in positional notation end at 0.001 %.
_SMALLEST_PLAIN_RATIO = Fraction(1, 100_000)


def spell_number(x: Real, *, digits: int = 40) -> str:
    """Return ``x`` to the last digit, or ≈ and fewer ``digits`` where it has more."""
    if isinstance(x, float):
        if math.isnan(x):
            return "NaN"
        if math.isinf(x):
            return "Inf" if x > 0 else "−Inf"
        if x == 0:
            return "0" if math.copysign(1, x) > 0 else "−0"
        x = Fraction(x)
    exact = _EXACT.divide(Decimal(x.numerator), Decimal(x.denominator)).normalize(_EXACT)
    if len(exact.as_tuple().digits) <= digits:
        return _notation(exact)
    return "≈ " + _notation(exact.normalize(Context(prec=min(digits, _CUT), Emax=MAX_EMAX, Emin=MIN_EMIN)))


def spell_short(x: Real, digits: int = 6) -> str:
    """Return ``x`` to so many significant digits, without "≈"."""
    return spell_number(x, digits=digits).removeprefix("≈ ")


def spell_signed(x: Fraction, digits: int = 6) -> str:
    """Return ``x`` with "+" or "−" before it, cut to so many significant digits; 0 has no sign."""
    text = spell_number(x, digits=digits)
    cut = "≈ " if text.startswith("≈ ") else ""
    return f"{cut}+{text.removeprefix(cut)}" if x > 0 else text


def spell_binary(x: Fraction) -> str:
    """Return a binary fraction as "2^-11" or "205 × 2^-11"; integers up to a million as they are."""
    if x.denominator == 1 and abs(x) <= 1_000_000:
        return _minus(str(x.numerator))
    twos = (x.numerator & -x.numerator).bit_length() - 1 if x else 0
    odd, exponent = x.numerator >> twos, twos - (x.denominator.bit_length() - 1)
    power = f"2^{exponent}"
    return power if odd == 1 else f"−{power}" if odd == -1 else f"{_minus(str(odd))} × {power}"


def spell_count(number: int, what: str) -> str:
    """Return "1 tensor", "2,000 tensors"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def spell_step(x: Fraction) -> str:
    """Return a distance: powers of two as "2^-11", others in six digits."""
    text = spell_binary(x)
    return spell_short(x) if " × " in text else text


def spell_percent(x: Fraction) -> str:
    """Return a ratio as a signed percentage of three digits."""
    if x and abs(x) < _SMALLEST_PLAIN_RATIO:
        sign = "−" if x < 0 else "+"
        return f"{sign}{_EXACT.divide(Decimal(100 * abs(x.numerator)), Decimal(x.denominator)):.2e} %"
    return f"{spell_signed(100 * x, 3).removeprefix('≈ ')} %"


def _notation(x: Decimal) -> str:
    plain = _SMALLEST_PLAIN < x.adjusted() < max(_LARGEST_PLAIN, len(x.as_tuple().digits))
    text = f"{x:f}" if plain else f"{x:e}".replace("e+", "e")
    return _minus(text)


def _minus(text: str) -> str:
    return "−" + text[1:] if text.startswith("-") else text
