"""Tables of bf16 by which codes are expanded (`matmul_lanes`), from the values of a format and nothing else.

What bf16 does not hold is the exact sum of up to three numbers that it holds, each the upper half of what is left: a
format of such values (NF4) has so many tables, and its products are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from bitwright.formats import Format
from bitwright.formats.decode import value_table

#: Codes that are looked up by words; those of 8 bits are looked up by bytes.
_WORD_TABLE_BITS = 6
_BYTE_TABLE_BITS = 8
#: Entries of the narrowest permutation: shorter tables are repeated.
_MIN_WORDS = 32
#: Below this a product of bf16 counts as zero.
_SMALLEST = 2.0**-126


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """Tables of a format, one after the other."""

    #: uint16 [tables · entries], or uint8 [512]: low bytes, then high bytes of the value of each code.
    entries: npt.NDArray[np.uint16] | npt.NDArray[np.uint8]
    #: Tables whose values add up.
    num_tables: int
    #: Entries of a table.
    num_entries: int
    #: The upper half of 8-bit codes is the lower half with the other sign; `entries` has the lower half only.
    is_mirrored: bool


def why_no_table(number: Format) -> str | None:
    """Return why codes of a format are not expanded by tables, or None if they are."""
    if number.bits > _WORD_TABLE_BITS and number.bits != _BYTE_TABLE_BITS:
        return f"codes of {number.bits} bits are not expanded in registers, those of 1 to 6 and of 8 are"
    parts = _parts(number)
    if len(parts) > 1 and number.bits == _BYTE_TABLE_BITS:
        return f"bf16 does not hold the values of {number.name}, and three tables of 256 leave no registers"
    magnitudes = np.abs(parts[np.isfinite(parts) & (parts != 0)])
    if magnitudes.size and magnitudes.min() < _SMALLEST:
        return f"{number.name} has values below 2^-126, which products of bf16 take for zero"
    return None


@cache
def table_of(number: Format, *, can_mirror: bool = True) -> Table:
    """Return the tables of a format; `why_no_table` must have said None, save for what it says of small values.

    can_mirror: whether one half of the table will do where it mirrors the other.
    """
    parts = _words(_parts(number))
    if number.bits == _BYTE_TABLE_BITS:
        words = parts[0]
        is_mirrored = can_mirror and bool(
            np.array_equal(words[128:], words[:128] | 0x8000) and not (words[:128] & 0x8000).any()
        )
        kept = words[:128] if is_mirrored else words
        entries = np.concatenate([kept & 0xFF, kept >> 8]).astype(np.uint8)
        return Table(entries=entries, num_tables=1, num_entries=entries.size, is_mirrored=is_mirrored)
    repeated = np.tile(parts, (1, max(1, _MIN_WORDS // parts.shape[1])))
    return Table(
        entries=np.ascontiguousarray(repeated.reshape(-1)),
        num_tables=len(repeated),
        num_entries=repeated.shape[1],
        is_mirrored=False,
    )


def _words(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def upper_half(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """fp32 numbers cut to bf16, towards zero; NaN stays NaN."""
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), cut)


def _parts(number: Format) -> npt.NDArray[np.float32]:
    """Numbers that bf16 holds and that add up to each value: fp32 [1 to 3, codes]."""
    values = value_table(number).astype(np.float32)
    parts = [upper_half(values)]
    finite = np.where(np.isfinite(values), values, np.float32(0))
    rest = finite - upper_half(finite)
    while rest.any():
        parts.append(upper_half(rest))
        rest = rest - parts[-1]
    return np.stack(parts)
