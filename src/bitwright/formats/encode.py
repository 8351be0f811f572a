"""Value → code: rounding, then the sign, then the rule for what the format cannot hold.

An *overflow rule* says what becomes of a magnitude that rounds beyond the largest finite value, of an infinite input,
of NaN in a format without NaN, and of what an unsigned format cannot hold:

    saturate    the nearest finite value, for infinite inputs too    (OFP8 1.0, saturating conversion; integers)
    ieee        Inf, else NaN, else the nearest finite value         (IEEE 754-2019 §7.4; OFP8, non-saturating)
    torch       as ieee, but OCP's E4M3 saturates, infinite inputs too; E8M0 drops the sign    (torch 2.13, `Tensor.to`)
    ml_dtypes   as ieee; NaN in FP6 and FP4 is −0                    (ml_dtypes 0.6, `astype`)
    te          as saturate; NaN in FP6 and FP4 is the largest value    (PTX ISA, cvt.rn.satfinite: Transformer Engine)

Under the first two, NaN is refused by a format that has none, since any number in its place would hide the fault. A
directed mode that rounds toward the format's range keeps the largest finite value (§7.4 b–d) where the others overflow;
infinite inputs stay infinite. A format without zero (E8M0) takes zero and everything below its smallest value to the
smallest value; zero and negative numbers are NaN under ``ieee`` and ``ml_dtypes``.

Integers and codebooks have neither Inf nor NaN, so that every rule clips what they are given and refuses NaN: what the
libraries' own casts to integers do (wrap, or whatever the processor does) is no rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.round import (
    MAX_RANDOM_BITS,
    Bools,
    Floats,
    StepUp,
    find_rounding,
    round_magnitude,
    round_to_codebook,
)
from bitwright.formats.types import TOP_NAN_SPECIALS, CodebookFormat, FloatFormat, Format, IntFormat

#: What an unsigned float format makes of numbers that need a sign, and one without zero of zero.
Below = Literal["smallest", "special", "magnitude"]
#: What a float format without NaN makes of NaN.
LostNaN = Literal["refused", "negative_zero", "largest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowRule:
    """What becomes of a value that a format cannot hold."""

    #: Name that callers pass as ``overflow=``.
    name: str
    #: One line for tables.
    description: str
    #: Finite inputs beyond the range become Inf, else NaN, where the format has them; otherwise the largest value.
    finite_becomes_special: bool
    #: The same for infinite inputs.
    inf_becomes_special: bool
    #: Signed formats whose one special is the all-ones magnitude (OCP's E4M3) saturate all the same.
    top_nan_saturates: bool = False
    #: Unsigned floats: negative numbers become the smallest value, NaN, or |x|; zero, where there is none, does too.
    below: Below = "smallest"
    #: Floats without NaN: NaN is refused, or becomes −0 or the largest value.
    lost_nan: LostNaN = "refused"


#: Every overflow rule by name.
OVERFLOWS: Mapping[str, OverflowRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            OverflowRule(
                name="saturate",
                description="the nearest finite value, for Inf too",
                finite_becomes_special=False,
                inf_becomes_special=False,
            ),
            OverflowRule(
                name="ieee",
                description="Inf, else NaN, else the nearest finite value",
                finite_becomes_special=True,
                inf_becomes_special=True,
                below="special",
            ),
            OverflowRule(
                name="torch",
                description="torch 2.13: as ieee, but OCP's E4M3 saturates",
                finite_becomes_special=True,
                inf_becomes_special=True,
                top_nan_saturates=True,
                below="magnitude",
            ),
            OverflowRule(
                name="ml_dtypes",
                description="ml_dtypes 0.6: as ieee; NaN in FP6 and FP4 is −0",
                finite_becomes_special=True,
                inf_becomes_special=True,
                below="special",
                lost_nan="negative_zero",
            ),
            OverflowRule(
                name="te",
                description="Transformer Engine: as saturate; NaN in FP6 and FP4 is the largest value",
                finite_becomes_special=False,
                inf_becomes_special=False,
                lost_nan="largest",
            ),
        )
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowValues:
    """What stands for positive inputs that a format cannot hold. Negative ones take the sign; NaN has none."""

    #: For a finite input that rounds beyond the largest finite value: that value, Inf, or NaN.
    beyond: float
    #: For an infinite input.
    infinite: float
    #: For NaN: NaN, −0, or the largest value; None where NaN is refused.
    nan: float | None


def overflow_values(format: Format, rule: OverflowRule | str) -> OverflowValues:
    """Return the three values by which a rule acts on a format, for kernels that know no rules.

    They hold for rounding to nearest and stochastic rounding. Integers and codebooks saturate at `min` below.

    Raises:
        UnknownName: no overflow rule has that name.
    """
    rule = find_overflow(rule) if isinstance(rule, str) else rule
    if not isinstance(format, FloatFormat):
        return OverflowValues(beyond=format.max, infinite=format.max, nan=None)
    special = math.inf if format.has_inf else math.nan if format.has_nan else format.max
    if rule.top_nan_saturates and format.signed and format.specials == TOP_NAN_SPECIALS:
        special = format.max
    lost_nan: dict[LostNaN, float | None] = {"refused": None, "negative_zero": -0.0, "largest": format.max}
    return OverflowValues(
        beyond=special if rule.finite_becomes_special else format.max,
        infinite=special if rule.inf_becomes_special else format.max,
        nan=math.nan if format.has_nan else lost_nan[rule.lost_nan],
    )


def find_overflow(name: str) -> OverflowRule:
    """Return the overflow rule of that name.

    Raises:
        UnknownName: there is none; the message names those that exist.
    """
    if name not in OVERFLOWS:
        known = list(OVERFLOWS)
        raise UnknownName(f"unknown overflow rule {name!r}{nearest_name_hint(name, known)} Known: {', '.join(known)}")
    return OVERFLOWS[name]


def code_dtype(format: Format) -> np.dtype[Any]:
    """Return the narrowest unsigned dtype that holds one code: uint8, uint16, uint32 or uint64."""
    return np.min_scalar_type((1 << format.bits) - 1)


def encode_values(
    format: Format,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> npt.NDArray[Any]:
    """Return the code that every value rounds to.

    Args:
        format: the record of the format.
        x: real numbers that float64 holds exactly (floats up to 64 bits, integers up to 2**53), any shape.
        rounding: a name in `ROUNDINGS`.
        overflow: a name in `OVERFLOWS`.
        seed: in [0, 2**64); needed, and read, by stochastic rounding only.
        random_bits: 1 to 32, of each element; read by stochastic rounding only.

    Returns:
        Codes of `code_dtype`, the shape of `x`. NaN becomes the quiet NaN code; −0 becomes +0
        where the format has no −0.

    Raises:
        FormatError: `x` is not exact in float64, or holds NaN and the format has none, or the seed is missing.
        UnknownName: no such rounding or overflow rule.
    """
    rule = find_overflow(overflow)
    stand_in = overflow_values(format, rule)
    values = exact_float64(x)
    step_up = find_rounding(rounding, values.size, seed, random_bits)
    is_nan = np.isnan(values)
    if stand_in.nan is None and is_nan.any():
        raise FormatError(
            f"{int(is_nan.sum())} of {values.size} values are NaN, and {format.name} has no NaN; replace them first, "
            "or choose a format that has one"
        )
    flat = values.reshape(-1)
    match format:
        case FloatFormat():
            codes = _float_codes(format, flat, step_up, rule, stand_in)
        case IntFormat():
            codes = _int_codes(format, flat, step_up)
        case CodebookFormat():
            codes = round_to_codebook(format, flat, step_up)
    return codes.astype(code_dtype(format)).reshape(values.shape)


def _float_codes(
    format: FloatFormat, values: Floats, step_up: StepUp, rule: OverflowRule, stand_in: OverflowValues
) -> npt.NDArray[np.uint64]:
    """Codes of flat `values`."""
    is_finite, negative = np.isfinite(values), np.signbit(values)
    index = round_magnitude(format, np.where(is_finite, np.abs(values), 0.0), negative, step_up)
    largest = format.num_finite_magnitudes - 1
    overflows = is_finite & (index > largest)
    codes = _signed_codes(format, np.minimum(index, largest), negative)
    if overflows.any():
        # IEEE 754 §7.4: the mode that would step up from any rest, however close to the next value, leaves the range.
        overflows &= step_up(np.ones(values.shape), np.ones(values.shape, dtype=np.bool_), negative)
        codes[overflows] = _codes_of(format, stand_in.beyond, negative[overflows])
    if not is_finite.all():
        is_inf, is_nan = np.isinf(values), np.isnan(values)
        codes[is_inf] = _codes_of(format, stand_in.infinite, negative[is_inf])
        if stand_in.nan is not None:
            codes[is_nan] = _codes_of(format, stand_in.nan, np.signbit(np.full(int(is_nan.sum()), stand_in.nan)))
    if not format.signed and rule.below != "magnitude":
        below: Bools = (values < 0) & (codes != 0) if format.has_zero else values <= 0
        nan_code = format.nan_code if rule.below == "special" else None
        codes[below] = 0 if nan_code is None else nan_code
    return codes


def _codes_of(format: FloatFormat, value: float, negative: Bools) -> npt.NDArray[np.uint64]:
    """Codes of one stand-in under each sign: zero, the largest value, Inf, or NaN (whose sign is dropped)."""
    if math.isnan(value):
        assert format.nan_code is not None, format
        return np.full(negative.shape, format.nan_code, dtype=np.uint64)
    index = 0 if value == 0 else format.num_finite_magnitudes - (0 if math.isinf(value) else 1)
    return _signed_codes(format, np.full(negative.shape, index, dtype=np.int64), negative)


def _signed_codes(format: FloatFormat, index: npt.NDArray[np.int64], negative: Bools) -> npt.NDArray[np.uint64]:
    codes = index.astype(np.uint64)
    if format.signed:
        keeps_sign = negative & ((index != 0) | format.has_negative_zero | (not format.has_zero))
        codes |= keeps_sign.astype(np.uint64) << np.uint64(format.magnitude_bits)
    return codes


def _int_codes(format: IntFormat, values: Floats, step_up: StepUp) -> npt.NDArray[np.uint64]:
    negative = np.signbit(values)
    index = round_magnitude(format, np.abs(values), negative, step_up)
    clipped = np.clip(np.where(negative, -index, index), int(format.min), int(format.max))
    return (clipped & ((1 << format.bits) - 1)).astype(np.uint64)


def as_array(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return `x` as NumPy reads it.

    Raises:
        FormatError: NumPy cannot (ragged lists, tensors of dtypes that it lacks or that have a gradient).
    """
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"NumPy cannot read a {type(x).__name__} as numbers ({error}); pass an array, or a tensor as "
            "x.detach().float().numpy()"
        ) from None


def exact_float64(x: npt.ArrayLike) -> Floats:
    """Return `x` as float64, refusing what float64 would change.

    Raises:
        FormatError: complex, text or extended-precision input, integers beyond ±2**53, or what NumPy cannot read.
    """
    array = as_array(x)
    if array.dtype.kind in "biu":
        furthest = max(abs(int(array.max())), abs(int(array.min()))) if array.size else 0
        if furthest > 1 << 53:
            raise FormatError(
                f"integers up to {furthest} do not fit float64 exactly (limit 2**53); scale them down first"
            )
    elif array.dtype.kind in "cOSUMm" or not np.can_cast(array.dtype, np.float64, casting="safe"):
        raise FormatError(
            f"values of dtype {array.dtype} cannot be rounded; pass real numbers of at most 64 bits (float or integer)"
        )
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
        return array.astype(np.float64)
