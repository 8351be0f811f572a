"""Number formats as kernels see them: a record of `formats` turned into the few numbers that the arithmetic needs.

Which record it becomes says how it is rounded (`rounding`): Numba compiles a kernel once for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values, overflow_values


class FloatGrid(NamedTuple):
    """A float format of at most 22 fraction bits whose numbers are normal in fp32, with room above."""

    #: (23 − fraction_bits) << 23: from the exponent field of c to that of M.
    shift: Any
    #: Exponent field of the smallest normal number, in place.
    emin_bits: Any
    #: |x| is cut here before it is rounded: the largest number, or one beyond it where overflow is to be seen.
    limit: Any
    #: Largest number.
    largest: Any
    #: What replaces a rounded magnitude above `largest`.
    beyond: Any
    #: 32 − bits of a code: from the sign of fp32 to that of the code.
    sign_shift: Any


class OneZeroGrid(NamedTuple):
    """The same for a format without −0."""

    shift: Any
    emin_bits: Any
    limit: Any
    largest: Any
    beyond: Any
    sign_shift: Any


class WideGrid(NamedTuple):
    """A float format with the exponent field of fp32 (bf16, tf32): rounding is integer arithmetic on the word."""

    #: Number of fraction bits cut off.
    dropped_bits: Any
    #: Magnitudes end here: the word of the largest number, or that of Inf.
    limit_bits: Any


class IntGrid(NamedTuple):
    """Integers from low to high, at most 22 bits."""

    low: Any
    high: Any
    #: Ones where a code has bits.
    code_mask: Any


class RangeGrid(NamedTuple):
    """Every fp32 number from low to high (fp32 itself; powers of two, which E8M0 holds once they are in its range)."""

    low: Any
    high: Any


class CodebookGrid(NamedTuple):
    """A list of 16 values. Shorter ones are filled up with what no number rounds to.

    One fp32 array, which Numba hands to its threads where it would not hand tuples: 15 bounds, the i-th being the
    largest fp32 that rounds to the i-th value in ascending order; the 16 values in that order; their codes.
    """

    table: Any


class FloatCode(NamedTuple):
    """How codes of a float format of at most 8 bits are read."""

    sign_shift: Any
    #: 23 − fraction_bits: from the magnitude of a code to the fields of fp32.
    fraction_shift: Any
    #: 2^(127 − bias): what the exponent is off by after that. The product is exact, for subnormals too.
    factor: Any
    #: Magnitudes from here on are Inf (the first, where there is one) and NaN; and what the first is.
    num_finite: Any
    first_special: Any
    #: The code of −0 means NaN (1) or −0 (0).
    nan_is_negative_zero: Any


class IntCode(NamedTuple):
    """How codes of an integer format are read: (code ^ s) − s, s the sign bit, or 0 where there is none."""

    sign_bit: Any


class CodebookCode(NamedTuple):
    """The value of every code in order, an fp32 array filled up to 16."""

    values: Any


#: What a format is rounded to.
Grid = FloatGrid | OneZeroGrid | WideGrid | IntGrid | RangeGrid | CodebookGrid
#: How its codes are read.
Code = FloatCode | IntCode | CodebookCode

#: A codebook is compared value by value: longer ones are not.
CODEBOOK_VALUES = 16
#: 1.5 · 2^23 + n is exact for |n| up to 2^22.
MAX_INT_BITS = 22


def why_no_grid(format: Format, overflow: str) -> str | None:
    """None if `grid_of` has an answer, else the reason in words."""
    if isinstance(format, IntFormat):
        return None if format.bits <= MAX_INT_BITS else f"{format.name} has more than {MAX_INT_BITS} bits"
    if isinstance(format, CodebookFormat):
        return (
            None if len(format.values) <= CODEBOOK_VALUES else f"codebook {format.name} has {len(format.values)} values"
        )
    stand_in = overflow_values(format, overflow)
    if stand_in.nan is not None and not math.isnan(stand_in.nan):
        return f"overflow rule {overflow} replaces the NaN that {format.name} lacks"
    if not _same(stand_in.beyond, stand_in.infinite):
        return f"overflow rule {overflow} tells infinite from too large values of {format.name}"
    if not (format.signed and format.has_zero):
        return f"{format.name} has no sign or no zero"
    if not (_is_wide(format) or _has_room(format)):
        return f"{format.name} fills the exponents of fp32 without having its exponent field"
    return None


def grid_of(format: Format, overflow: str = "saturate") -> Grid:
    """The numbers by which kernels round to a format; `why_no_grid` must have said None."""
    match format:
        case IntFormat():
            return IntGrid(np.float32(format.min), np.float32(format.max), np.uint32((1 << format.bits) - 1))
        case CodebookFormat():
            return _codebook_grid(format)
    beyond = overflow_values(format, overflow).beyond
    saturates = beyond == format.max
    if _is_wide(format):
        limit = np.float32(format.max if saturates else np.inf)
        return WideGrid(np.uint32(23 - format.fraction_bits), limit.view(np.uint32))
    kind = FloatGrid if format.has_negative_zero else OneZeroGrid
    return kind(
        np.uint32((23 - format.fraction_bits) << 23),
        np.uint32((format.emin + 127) << 23),
        np.float32(format.max if saturates else 2.0 ** (format.emax + 1)),
        np.float32(format.max),
        np.float32(beyond),
        np.uint32(32 - format.bits),
    )


def why_no_code(format: Format) -> str | None:
    """None if codes of a format can be read and written by kernels, else the reason in words."""
    if format.bits > 8:
        return f"codes of {format.name} are wider than a byte"
    if isinstance(format, FloatFormat) and not (format.signed and format.has_zero and not _is_wide(format)):
        return f"{format.name} has no sign or no zero"
    return why_no_grid(format, "saturate")


def code_of(format: Format) -> Code:
    """The numbers by which kernels read codes of a format; `why_no_code` must have said None."""
    match format:
        case IntFormat():
            return IntCode(np.uint32(1 << (format.bits - 1) if format.signed else 0))
        case CodebookFormat():
            return CodebookCode(_filled(format.values, 0.0))
    return FloatCode(
        np.uint32(32 - format.bits),
        np.uint32(23 - format.fraction_bits),
        np.float32(2.0 ** (127 - format.bias)),
        np.uint32(format.num_finite_magnitudes),
        np.float32(np.inf if format.has_inf else np.nan),
        np.uint32(not format.has_negative_zero),
    )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _is_wide(format: FloatFormat) -> bool:
    """Whether the word of fp32, cut short, is the code."""
    return format.exponent_bits == 8 and format.bias == 127 and format.has_inf and 1 <= format.fraction_bits < 23


def _has_room(format: FloatFormat) -> bool:
    """Whether every number of the format is normal in fp32, and M of the largest one too."""
    return (
        1 <= format.fraction_bits <= 22
        and format.emin - format.fraction_bits >= -126
        and format.emax + 1 + 23 - format.fraction_bits <= 127
    )


def _codebook_grid(format: CodebookFormat) -> CodebookGrid:
    codes = sorted(range(1 << format.bits), key=lambda code: format.values[code])
    values = [format.values[code] for code in codes]
    bounds = []
    for low, high in pairwise(values):
        middle = np.float32(low + (high - low) / 2)
        # the largest fp32 number that goes to `low`: the middle, or its neighbour, as the reference has it
        around = (np.nextafter(middle, np.float32(-np.inf)), middle, np.nextafter(middle, np.float32(np.inf)))
        rounded = decode_codes(format, encode_values(format, np.array(around)))
        bounds.append(float(np.array(around)[rounded == low][-1]))
    parts = (_filled(bounds, np.inf)[:-1], _filled(values, 0.0), _filled(codes, 0.0))
    return CodebookGrid(np.concatenate(parts))


def _filled(numbers: Sequence[float], filling: float) -> npt.NDArray[np.float32]:
    """Numbers filled up to CODEBOOK_VALUES."""
    return np.array([*numbers, *[filling] * (CODEBOOK_VALUES - len(numbers))], np.float32)
