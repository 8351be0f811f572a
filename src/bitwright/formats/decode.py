"""Bit layout → value: ``value = (-1)**sign * significand * 2**(exponent - fraction_bits)``, exact in float64.

The layout and its source are in `types`; a codebook lists its values there. A code is an unsigned integer; wider arrays
are taken as they are, so that int64 codes work as well as uint8 ones. Values of formats up to 16 bits are read from the
table of all their values, which this module computes once per format.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.errors import FormatError
from bitwright.formats.types import CodebookFormat, FloatFormat, Format, IntFormat

#: Formats up to this width decode through their table.
TABLE_LOOKUP_BITS = 16
#: The widest format whose table is given out (8 MiB of float64).
MAX_TABLE_BITS = 20


def decode_codes(format: Format, codes: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the value of every code.

    Args:
        format: the record that says what a code means.
        codes: integers of any dtype and shape, each in ``[0, 2**format.bits)``; signed integers are stored in two's
            complement within these bits (int8: −1 is 0xFF).

    Returns:
        float64, the shape of `codes`. −0 keeps its sign; every NaN code gives NaN.

    Raises:
        FormatError: `codes` are not integers, or one is out of range.
    """
    code_array = np.asarray(codes)
    if code_array.size == 0:
        return np.zeros(code_array.shape)
    if code_array.dtype.kind not in "iu":
        raise FormatError(
            f"codes of dtype {code_array.dtype} cannot be decoded; codes are integers, so view or cast them first"
        )
    lowest, highest = int(code_array.min()), int(code_array.max())
    if lowest < 0 or highest >= 1 << format.bits:
        raise FormatError(
            f"code {lowest if lowest < 0 else highest} is not in [0, 2**{format.bits}), the codes of {format.name}; "
            "signed integers are passed as their stored bits (x & mask)"
        )
    if format.bits <= TABLE_LOOKUP_BITS:
        return np.asarray(value_table(format)[code_array.astype(np.intp)])
    return _arithmetic(format, code_array.astype(np.uint64))


@cache
def value_table(format: Format) -> npt.NDArray[np.float64]:
    """Return the value of every code in order: float64 ``[2**bits]``, read-only, computed once.

    Raises:
        FormatError: the format has more than 20 bits.
    """
    if format.bits > MAX_TABLE_BITS:
        raise FormatError(
            f"{format.name} has 2**{format.bits} values, too many for a table (at most 2**{MAX_TABLE_BITS}); "
            "decode the codes you need instead"
        )
    table = _arithmetic(format, np.arange(1 << format.bits, dtype=np.uint64))
    table.flags.writeable = False
    return table


def _arithmetic(format: Format, codes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    match format:
        case FloatFormat():
            return _float_values(format, codes)
        case IntFormat():
            values = codes.astype(np.float64)
            return np.where(values > format.max, values - float(1 << format.bits), values)
        case CodebookFormat():
            return np.asarray(format.values, dtype=np.float64)[codes.astype(np.intp)]


def _float_values(format: FloatFormat, codes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    fraction_bits = format.fraction_bits
    magnitude_mask = (1 << format.magnitude_bits) - 1
    index = (codes & np.uint64(magnitude_mask)).astype(np.int64)
    field = index >> fraction_bits
    hidden = (field > 0) | (not format.has_zero)
    significand = (index & ((1 << fraction_bits) - 1)) + (hidden.astype(np.int64) << fraction_bits)
    exponent = np.maximum(field - format.bias, format.emin) - fraction_bits
    finite = index < format.num_finite_magnitudes
    magnitude: npt.NDArray[Any] = np.full(codes.shape, np.nan)
    magnitude[finite] = np.ldexp(significand[finite].astype(np.float64), exponent[finite].astype(np.int32))
    if format.has_inf:
        magnitude[index == format.num_finite_magnitudes] = np.inf
    if not format.signed:
        return magnitude
    negative = codes > magnitude_mask
    if format.specials.nan_is_negative_zero:
        magnitude[negative & (index == 0)] = np.nan
    return np.where(negative, -magnitude, magnitude)
