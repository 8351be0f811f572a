"""Rounding: which neighbour of ``|x|`` is chosen, as if the format had no largest value.

With the step ``q = 2**(max(floor(log2 |x|), emin) - fraction_bits)`` around x, ``|x| / q = n + r`` splits without error
into the significand ``n`` and the rest ``0 <= r < 1``; the neighbours are ``n`` and ``n + 1``. A rounding mode only
decides whether to step up, from ``r``, the parity of ``n`` and the sign:

    nearest_even    r > ½, or r = ½ and n odd        (IEEE 754-2019 §4.3.1 roundTiesToEven)
    nearest_away    r >= ½                           (roundTiesToAway)
    toward_zero     never                            (§4.3.2 roundTowardZero)
    up              r > 0 and x > 0                  (roundTowardPositive)
    down            r > 0 and x < 0                  (roundTowardNegative)

The result is a magnitude index (see `types`): integers, so that stepping up crosses binades by itself. In a format of
one significant bit (E8M0) every ``n`` is 1, hence odd, and a tie goes up: IEEE 754 says so in §4.3.1, torch and
ml_dtypes do so, gfloat takes the even code instead.

What happens beyond the largest value is a rule of `encode`, not of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from bitwright.catalog import nearest_name_hint
from bitwright.errors import UnknownName
from bitwright.formats.types import FloatFormat, Format, IntFormat

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

#: Decides where to step to the larger magnitude: (rest r, n is odd, x is negative), all of one shape, → bool.
StepUp = Callable[[Floats, Bools, Bools], Bools]


def _nearest_even(rest: Floats, odd: Bools, negative: Bools) -> Bools:
    return (rest > 0.5) | ((rest == 0.5) & odd)


def _nearest_away(rest: Floats, odd: Bools, negative: Bools) -> Bools:
    return rest >= 0.5


def _toward_zero(rest: Floats, odd: Bools, negative: Bools) -> Bools:
    return np.zeros(rest.shape, dtype=np.bool_)


def _up(rest: Floats, odd: Bools, negative: Bools) -> Bools:
    return (rest > 0) & ~negative


def _down(rest: Floats, odd: Bools, negative: Bools) -> Bools:
    return (rest > 0) & negative


#: Every rounding mode by name.
ROUNDINGS: Mapping[str, StepUp] = MappingProxyType(
    {
        "nearest_even": _nearest_even,
        "nearest_away": _nearest_away,
        "toward_zero": _toward_zero,
        "up": _up,
        "down": _down,
    }
)


def find_rounding(name: str) -> StepUp:
    """Return the rounding mode of that name.

    Raises:
        UnknownName: there is none; the message names those that exist.
    """
    if name not in ROUNDINGS:
        known = list(ROUNDINGS)
        raise UnknownName(f"unknown rounding {name!r}{nearest_name_hint(name, known)} Known: {', '.join(known)}")
    return ROUNDINGS[name]


def round_magnitude(format: Format, magnitude: Floats, negative: Bools, step_up: StepUp) -> npt.NDArray[np.int64]:
    """Return the magnitude index that ``|x|`` rounds to, unbounded above.

    Args:
        format: the record of the format.
        magnitude: finite ``|x|``, float64, any shape.
        negative: sign of x, same shape; the directed modes need it.
        step_up: a mode from `ROUNDINGS`.

    Returns:
        int64 indices; an index at or above ``format.num_finite_magnitudes`` is an overflow. For integers the index is
        the rounded magnitude itself, at most ``2**bits + 1`` where it is out of range. In a float format without zero
        what lies below the smallest value has index 0 too.
    """
    match format:
        case FloatFormat():
            return _float_index(format, magnitude, negative, step_up)
        case IntFormat():
            bounded = np.minimum(magnitude, float(1 << format.bits))
            return _round_to_integer(bounded, negative, step_up)


def _float_index(format: FloatFormat, magnitude: Floats, negative: Bools, step_up: StepUp) -> npt.NDArray[np.int64]:
    fraction_bits = format.fraction_bits
    exponent = np.maximum(np.frexp(magnitude)[1].astype(np.int64) - 1, format.emin)
    exponent = np.where(magnitude == 0, format.emin, exponent)
    steps = np.ldexp(magnitude, (fraction_bits - exponent).astype(np.int32))
    significand = _round_to_integer(steps, negative, step_up)
    index = ((exponent - format.emin) << fraction_bits) + significand
    if not format.has_zero:
        index = np.maximum(index - (1 << fraction_bits), 0)
    return index


def _round_to_integer(steps: Floats, negative: Bools, step_up: StepUp) -> npt.NDArray[np.int64]:
    floor = np.floor(steps)
    whole = floor.astype(np.int64)
    return whole + step_up(steps - floor, (whole & 1).astype(np.bool_), negative)
