"""Value → code: rounding, then the sign, then the rule for what the format cannot hold.

An *overflow rule* says what becomes of a magnitude that rounds beyond the largest finite value, of an infinite input,
and of a value below the smallest (unsigned formats):

    saturate   the nearest finite value, for infinite inputs too    (OFP8 1.0, saturating conversion; integers)
    ieee       Inf, else NaN, else the nearest finite value         (IEEE 754-2019 §7.4; OFP8, non-saturating)

Under ``ieee`` a directed mode that rounds toward the format's range keeps the largest finite value (§7.4 b–d); infinite
inputs stay infinite. NaN is NaN under both; a format without NaN refuses it, since any number in its place would hide
the fault. A format without zero (E8M0) takes zero and everything below its smallest value to the smallest value, but
under ``ieee`` zero and negative numbers are NaN (as in ml_dtypes).

Integers have neither Inf nor NaN, so both rules clip them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.round import Bools, Floats, StepUp, find_rounding, round_magnitude
from bitwright.formats.types import FloatFormat, Format, IntFormat


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
            ),
        )
    }
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
    format: Format, x: npt.ArrayLike, rounding: str = "nearest_even", overflow: str = "saturate"
) -> npt.NDArray[Any]:
    """Return the code that every value rounds to.

    Args:
        format: the record of the format.
        x: real numbers that float64 holds exactly (floats up to 64 bits, integers up to 2**53), any shape.
        rounding: a name in `ROUNDINGS`.
        overflow: a name in `OVERFLOWS`.

    Returns:
        Codes of `code_dtype`, the shape of `x`. NaN becomes the quiet NaN code; −0 becomes +0
        where the format has no −0.

    Raises:
        FormatError: `x` is not exact in float64, or holds NaN and the format has none.
        UnknownName: no such rounding or overflow rule.
    """
    step_up = find_rounding(rounding)
    rule = find_overflow(overflow)
    values = exact_float64(x)
    is_nan = np.isnan(values)
    if not format.has_nan and is_nan.any():
        raise FormatError(
            f"{int(is_nan.sum())} of {values.size} values are NaN, and {format.name} has no NaN; replace them first, "
            "or choose a format that has one"
        )
    negative = np.signbit(values)
    magnitude = np.where(np.isfinite(values), np.abs(values), 0.0)
    index = round_magnitude(format, magnitude, negative, step_up)
    match format:
        case FloatFormat():
            codes = _float_codes(format, index, values, step_up, rule)
        case IntFormat():
            codes = _int_codes(format, index, values)
    return codes.astype(code_dtype(format))


def _float_codes(
    format: FloatFormat, index: npt.NDArray[np.int64], values: Floats, step_up: StepUp, rule: OverflowRule
) -> npt.NDArray[np.uint64]:
    is_inf = np.isinf(values)
    negative = np.signbit(values)
    largest = format.num_finite_magnitudes - 1
    special_index, special_code = _special(format)
    overflows = ~is_inf & (index > largest)
    index = np.where(is_inf | overflows, largest, index)
    becomes_special = is_inf & rule.inf_becomes_special
    if rule.finite_becomes_special:
        # IEEE 754 §7.4: the mode that would step up from any rest, however small, carries the overflow to Inf.
        beyond = np.full(values.shape, 0.5)
        becomes_special |= overflows & step_up(beyond, np.ones(values.shape, dtype=np.bool_), negative)
    if special_index is not None:
        index = np.where(becomes_special, special_index, index)
    codes = index.astype(np.uint64)
    if format.signed:
        keeps_sign = negative & ((index != 0) | format.has_negative_zero)
        codes |= keeps_sign.astype(np.uint64) << np.uint64(format.magnitude_bits)
    if special_code is not None:
        codes = np.where(becomes_special, np.uint64(special_code), codes)
    if not format.signed:
        codes = _without_negatives(format, codes, values, rule)
    if format.nan_code is not None:
        codes = np.where(np.isnan(values), np.uint64(format.nan_code), codes)
    return codes


def _special(format: FloatFormat) -> tuple[int | None, int | None]:
    """What stands for "too large": a magnitude index that takes the sign (Inf), or a whole code (NaN), or neither."""
    if format.has_inf:
        return format.num_finite_magnitudes, None
    return None, format.nan_code


def _without_negatives(
    format: FloatFormat, codes: npt.NDArray[np.uint64], values: Floats, rule: OverflowRule
) -> npt.NDArray[np.uint64]:
    below: Bools = (values < 0) & (codes != 0) if format.has_zero else values <= 0
    lowest = np.uint64(0)
    if rule.finite_becomes_special and format.nan_code is not None:
        lowest = np.uint64(format.nan_code)
    return np.where(below, lowest, codes)


def _int_codes(format: IntFormat, index: npt.NDArray[np.int64], values: Floats) -> npt.NDArray[np.uint64]:
    beyond = np.where(np.isinf(values), 1 << format.bits, index)
    integer = np.where(np.signbit(values), -beyond, beyond)
    clipped = np.clip(integer, int(format.min), int(format.max))
    return (clipped & ((1 << format.bits) - 1)).astype(np.uint64)


def exact_float64(x: npt.ArrayLike) -> Floats:
    """Return `x` as float64, refusing what float64 would change.

    Raises:
        FormatError: complex, text or extended-precision input, or integers beyond ±2**53.
    """
    array = np.asarray(x)
    if array.dtype.kind in "biu":
        if array.size and (int(array.max()) > 1 << 53 or int(array.min()) < -(1 << 53)):
            raise FormatError(
                f"integers up to {int(np.abs(array.astype(object)).max())} do not fit float64 exactly (limit 2**53); "
                "scale them down first"
            )
    elif array.dtype.kind in "cOSUMm" or not np.can_cast(array.dtype, np.float64, casting="safe"):
        raise FormatError(
            f"values of dtype {array.dtype} cannot be rounded; pass real numbers of at most 64 bits (float or integer)"
        )
    return array.astype(np.float64)
