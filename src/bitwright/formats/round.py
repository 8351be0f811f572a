"""Rounding: which neighbour of ``|x|`` is chosen, as if the format had no largest value.

With the step ``q = 2**(max(floor(log2 |x|), emin) - fraction_bits)`` around x, ``|x| / q = n + r`` splits without error
into the significand ``n`` and the rest ``0 <= r < 1``; the neighbours are ``n`` and ``n + 1``. A rounding mode only
decides whether to step up, from ``r``, the parity of ``n`` and the sign:

    nearest_even    r > ½, or r = ½ and n odd        (IEEE 754-2019 §4.3.1 roundTiesToEven)
    nearest_away    r >= ½                           (roundTiesToAway)
    toward_zero     never                            (§4.3.2 roundTowardZero)
    up              r > 0 and x > 0                  (roundTowardPositive)
    down            r > 0 and x < 0                  (roundTowardNegative)
    stochastic      floor(r · 2**b) + R >= 2**b      (R uniform in [0, 2**b): with chance r, to b bits)

Stochastic rounding adds b random bits below the last bit that is kept, and truncates; a value that the format has
never moves. R is the top b bits of the element's word of Philox (see `philox`), so that every backend draws the same.

The result is a magnitude index (see `types`): integers, so that stepping up crosses binades by itself. In a format of
one significant bit (E8M0) every ``n`` is 1, hence odd, and a tie goes up: IEEE 754 says so in §4.3.1, torch and
ml_dtypes do so, gfloat takes the even code instead.

A codebook has no step. There n is the neighbour of x nearer to zero (the same side of x for values of one sign), the
other one is n + 1, r is how far x lies on the way between them, and "odd" is said of the code of n. In float64 the
quotient r may be off in its last place, which only the chance of a stochastic step can notice: ties and exact values
are compared without dividing.

What happens beyond the largest value is a rule of `encode`, not of rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.philox import random_words
from bitwright.formats.types import CodebookFormat, FloatFormat, IntFormat

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

#: Decides where to step to the larger magnitude: (rest r, n is odd, x is negative), all of one shape, → bool.
StepUp = Callable[[Floats, Bools, Bools], Bools]

#: Random bits of a stochastic step unless a caller says otherwise, and at most: one word of the generator.
MAX_RANDOM_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingMode:
    """A way to choose between the two neighbours of a value."""

    #: Name that callers pass as ``rounding=``.
    name: str
    #: One line for tables.
    description: str
    #: (rest, odd, negative, threshold) → step up? The threshold is ``1 - R / 2**b``, or 1 where no bits are drawn.
    decide: Callable[[Floats, Bools, Bools, Floats], Bools]
    #: Random bits are drawn, hence a seed has to be given.
    needs_seed: bool = False


def _nearest_even(rest: Floats, odd: Bools, negative: Bools, threshold: Floats) -> Bools:
    return (rest > 0.5) | ((rest == 0.5) & odd)


def _nearest_away(rest: Floats, odd: Bools, negative: Bools, threshold: Floats) -> Bools:
    return rest >= 0.5


def _toward_zero(rest: Floats, odd: Bools, negative: Bools, threshold: Floats) -> Bools:
    return np.zeros(rest.shape, dtype=np.bool_)


def _up(rest: Floats, odd: Bools, negative: Bools, threshold: Floats) -> Bools:
    return (rest > 0) & ~negative


def _down(rest: Floats, odd: Bools, negative: Bools, threshold: Floats) -> Bools:
    return (rest > 0) & negative


def _stochastic(rest: Floats, odd: Bools, negative: Bools, threshold: Floats) -> Bools:
    # floor(r · 2**b) + R >= 2**b, for an integer R the same as r >= 1 - R / 2**b; every term is exact.
    return rest >= threshold


#: Every rounding mode by name.
ROUNDINGS: Mapping[str, RoundingMode] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            RoundingMode(name="nearest_even", description="nearest; ties to the even code", decide=_nearest_even),
            RoundingMode(name="nearest_away", description="nearest; ties away from zero", decide=_nearest_away),
            RoundingMode(name="toward_zero", description="the neighbour nearer to zero", decide=_toward_zero),
            RoundingMode(name="up", description="the larger neighbour", decide=_up),
            RoundingMode(name="down", description="the smaller neighbour", decide=_down),
            RoundingMode(
                name="stochastic",
                description="either neighbour, the nearer the likelier: unbiased",
                decide=_stochastic,
                needs_seed=True,
            ),
        )
    }
)


def find_mode(name: str) -> RoundingMode:
    """Return the rounding mode of that name.

    Raises:
        UnknownName: there is none; the message names those that exist.
    """
    if name not in ROUNDINGS:
        known = list(ROUNDINGS)
        raise UnknownName(f"unknown rounding {name!r}{nearest_name_hint(name, known)} Known: {', '.join(known)}")
    return ROUNDINGS[name]


def find_rounding(name: str, num_values: int, seed: int | None, random_bits: int) -> StepUp:
    """Return the decision of a rounding mode for one array, its random bits drawn.

    Args:
        name: a name in `ROUNDINGS`.
        num_values: how many are rounded, as a flat array.
        seed: in [0, 2**64); read by modes that draw random bits, which need it.
        random_bits: how many each element draws, 1 to 32.

    Raises:
        FormatError: the mode needs a seed and got none, or a number is out of range.
        UnknownName: there is no such mode; the message names those that exist.
    """
    mode = find_mode(name)
    threshold = _draw_thresholds(name, num_values, seed, random_bits) if mode.needs_seed else np.ones(())
    return partial(_decide, mode, threshold)


def _decide(mode: RoundingMode, threshold: Floats, rest: Floats, odd: Bools, negative: Bools) -> Bools:
    return mode.decide(rest, odd, negative, threshold)


def _draw_thresholds(name: str, num_values: int, seed: int | None, random_bits: int) -> Floats:
    if seed is None:
        raise FormatError(
            f"rounding '{name}' draws random bits and was given no seed, so that no run could be repeated; "
            "pass seed=0, and another seed for every further draw"
        )
    if not 0 <= seed < 1 << 64:
        raise FormatError(f"seed {seed} is not in [0, 2**64), the keys of the random bits; choose another one")
    if not 1 <= random_bits <= MAX_RANDOM_BITS:
        raise FormatError(f"{random_bits} random bits were asked for; give 1 to {MAX_RANDOM_BITS}")
    drawn = random_words(seed, num_values) >> np.uint32(MAX_RANDOM_BITS - random_bits)
    return 1.0 - np.ldexp(drawn.astype(np.float64), -random_bits)


def round_magnitude(
    format: FloatFormat | IntFormat, magnitude: Floats, negative: Bools, step_up: StepUp
) -> npt.NDArray[np.int64]:
    """Return the magnitude index that ``|x|`` rounds to, unbounded above.

    Args:
        format: the record of the format.
        magnitude: ``|x|`` without NaN, float64, any shape; finite for floats.
        negative: sign of x, same shape; the directed modes need it.
        step_up: what `find_rounding` returned.

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


def round_to_codebook(format: CodebookFormat, values: Floats, step_up: StepUp) -> npt.NDArray[np.uint64]:
    """Return the code of the listed value that x rounds to; what lies beyond the ends goes to the end.

    Args:
        format: the record of the format.
        values: x, float64 without NaN, any shape; ±Inf is beyond the ends.
        step_up: what `find_rounding` returned.
    """
    listed, codes, middle, middle_is_exact = _codebook(format)
    x = np.clip(values, listed[0], listed[-1])
    negative = x < 0
    near = np.where(negative, np.searchsorted(listed, x, "left"), np.searchsorted(listed, x, "right") - 1)
    far = np.clip(near + np.where(negative, -1, 1), 0, listed.size - 1)
    distance = np.abs(x - listed[near])
    rest = np.divide(distance, np.abs(listed[far] - listed[near]), out=np.zeros_like(x), where=distance > 0)
    between = np.minimum(np.minimum(near, far), middle.size - 1)
    side = np.sign(x - middle[between])  # exact where it is 0: gradual underflow
    side = np.where((side == 0) & ~middle_is_exact[between], -1.0, side)
    beyond_middle = np.where(negative, -side, side)
    rest = np.where(beyond_middle > 0, np.clip(rest, _ABOVE_HALF, _BELOW_ONE), np.minimum(rest, _BELOW_HALF))
    rest = np.where(beyond_middle == 0, 0.5, rest)
    rest = np.where(distance > 0, np.maximum(rest, _TINY), 0.0)
    stepped = np.where(step_up(rest, (codes[near] & np.uint64(1)).astype(np.bool_), negative), far, near)
    return np.asarray(codes[stepped])


_BELOW_HALF, _ABOVE_HALF = float(np.nextafter(0.5, 0)), float(np.nextafter(0.5, 1))
_BELOW_ONE, _TINY = float(np.nextafter(1.0, 0)), 2.0**-1074


@cache
def _codebook(format: CodebookFormat) -> tuple[Floats, npt.NDArray[np.uint64], Floats, Bools]:
    """The values in ascending order, their codes, the float64 at or below the middle of each pair, and whether at."""
    order = sorted(range(len(format.values)), key=format.values.__getitem__)
    listed = [format.values[code] for code in order]
    exact = [(Fraction(a) + Fraction(b)) / 2 for a, b in pairwise(listed)]
    nearest = [float(middle) for middle in exact]
    below = [
        f if Fraction(f) <= middle else math.nextafter(f, -math.inf) for f, middle in zip(nearest, exact, strict=True)
    ]
    is_exact = [Fraction(f) == middle for f, middle in zip(below, exact, strict=True)]
    return np.array(listed), np.array(order, dtype=np.uint64), np.array(below), np.array(is_exact)
