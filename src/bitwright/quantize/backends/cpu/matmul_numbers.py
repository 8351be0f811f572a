"""How codes of a format become numbers in registers (`matmul_expand`): which way, and the table that it looks up.

    words       bf16, by one permutation of 32 words or of 64                 up to 6 bits       AVX-512
    bytes       bf16, low and high bytes by permutations of 128 bytes         8 bits             AVX-512
    floats      fp32, by one permutation of 16                                up to 4 bits       AVX-512
    eight       fp32, by two permutations of 8                                up to 4 bits       AVX2
    stored      16 bits that are bf16 already, or fp16 that the processor converts
    integer     shifted up until the sign fills the word, shifted down, and converted
    fields      sign, exponent and fraction moved to where fp32 has them
    table       one after the other from a table of fp32                      whatever else there is

The upper four take permutations of whole registers; the others are arithmetic on vectors of any width, which LLVM has
for every processor. A way is taken because it gives the value of every code, as `value_table` has them, and for no
other reason: subnormal numbers, NaN, odd biases and codebooks need no care of their own.

*Fields*: with the exponent field e and the fraction f where fp32 has them, e + 127 − bias is the exponent of fp32, and
(1 + f) 2^(e − bias) comes out. Of subnormal codes, e = 0, the hidden bit is taken off again: ((1 + f) − 1) 2^(1 − bias)
comes out. What is above the largest finite code gets all exponent bits, which makes it Inf or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt

from bitwright.formats import FloatFormat, Format
from bitwright.formats.decode import value_table
from bitwright.quantize.backends.cpu.features import (
    BYTE_PERMUTATIONS,
    EIGHT_FLOATS,
    HALF_CONVERSIONS,
    WIDE_REGISTERS,
    WORD_PERMUTATIONS,
)

#: Codes up to this width are looked up by words; those of 8 bits by bytes.
_WORD_TABLE_BITS = 6
_BYTE_TABLE_BITS = 8
#: Entries of the narrowest permutation of words, and of that of fp32: shorter tables are repeated.
_MIN_WORDS, _NUM_FLOATS = 32, 16
#: Wider codes are 16 bits that the processor knows as they are.
_MAX_TABLE_BITS = 8
#: Below this a product of bf16 counts as zero.
_SMALLEST = 2.0**-126
_EXPONENT_BITS = np.uint32(0x7F800000)
_FRACTION_BITS = 23


class Kind(IntEnum):
    """The ways; numbers, since kernels are compiled for them."""

    WORDS = 1
    BYTES = 2
    #: The upper half of the codes is the lower half with the other sign: the table has the lower half only.
    MIRRORED_BYTES = 3
    FLOATS = 4
    STORED_BF16 = 5
    STORED_FP16 = 6
    SIGNED = 7
    UNSIGNED = 8
    TABLE = 9
    EIGHT_FLOATS = 10
    #: The last one: above it, the width of the fraction is added (`Expansion.code`).
    FIELDS = 11


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expansion:
    """How codes of a format become numbers."""

    bits: int
    kind: Kind
    #: Of FIELDS: width of the fraction.
    fraction_bits: int = 0
    #: WORDS: uint16, bf16 of each code. BYTES: uint8, low bytes, then high bytes. FLOATS, EIGHT_FLOATS, TABLE: fp32.
    #: FIELDS: words of the exponent offset and of the last finite magnitude, and −2 · 2^−bias.
    entries: npt.NDArray[np.uint16] | npt.NDArray[np.uint8] | npt.NDArray[np.float32]

    @property
    def code(self) -> int:
        """Kind and width of the fraction as one number."""
        return self.kind + self.fraction_bits

    @property
    def spelled(self) -> str:
        """For people."""
        return f"codes of {self.bits} bits {_SPELLED[self.kind]}"


_SPELLED = {
    Kind.WORDS: "looked up by permutations of words",
    Kind.BYTES: "looked up by permutations of bytes",
    Kind.MIRRORED_BYTES: "looked up by permutations of bytes",
    Kind.FLOATS: "looked up by permutations of fp32",
    Kind.EIGHT_FLOATS: "looked up by permutations of eight fp32",
    Kind.STORED_BF16: "taken as the bf16 that they are",
    Kind.STORED_FP16: "converted from fp16",
    Kind.SIGNED: "converted from integers",
    Kind.UNSIGNED: "converted from integers",
    Kind.FIELDS: "put together from their fields",
    Kind.TABLE: "looked up one by one",
}
_NO_ENTRIES = np.zeros(1, np.float32)


def why_no_numbers(number: Format) -> str | None:
    """Return why codes of a format are not expanded, or None if they are."""
    if number.bits <= _MAX_TABLE_BITS or _stored_kind(number) is not None:
        return None
    return f"codes of {number.bits} bits are not expanded in registers, those of 1 to 8 are, and fp16 and bf16"


def why_no_pairs(number: Format, features: frozenset[str]) -> str | None:
    """Return why codes of a format do not become pairs of bf16, or None if they do."""
    values = _values(number)
    if not np.array_equal(upper_half(values), values, equal_nan=True):
        return f"bf16 does not hold the values of {number.name}"
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    if magnitudes.size and magnitudes.min() < _SMALLEST:
        return f"{number.name} has values below 2^-126, which products of bf16 take for zero"
    if _stored_kind(number) is not None:
        return None
    needed = _permutation_of_words(number)
    if needed is None:
        return f"there is no permutation for codes of {number.bits} bits"
    missing = needed - features
    return (
        f"the processor has no permutations of registers for them ({', '.join(sorted(missing))})" if missing else None
    )


@cache
def pairs_expansion(number: Format) -> Expansion:
    """How codes become pairs of bf16; `why_no_pairs` has said None."""
    stored = _stored_kind(number)
    if stored is not None:
        return Expansion(bits=number.bits, kind=stored, entries=_NO_ENTRIES)
    words = (_values(number).view(np.uint32) >> 16).astype(np.uint16)
    if number.bits <= _WORD_TABLE_BITS:
        repeated = np.tile(words, max(1, _MIN_WORDS // words.size))
        return Expansion(bits=number.bits, kind=Kind.WORDS, entries=repeated)
    half = words.size // 2
    is_mirrored = np.array_equal(words[half:], words[:half] | 0x8000) and not (words[:half] & 0x8000).any()
    kept = words[:half] if is_mirrored else words
    entries = np.concatenate([kept & 0xFF, kept >> 8]).astype(np.uint8)
    kind = Kind.MIRRORED_BYTES if is_mirrored else Kind.BYTES
    return Expansion(bits=number.bits, kind=kind, entries=entries)


@cache
def floats_expansion(number: Format, features: frozenset[str]) -> Expansion:
    """How codes become fp32 numbers; `why_no_numbers` has said None."""
    stored, values = _stored_kind(number), _values(number)
    if stored == Kind.STORED_BF16 or (stored is not None and features & HALF_CONVERSIONS):
        return Expansion(bits=number.bits, kind=stored, entries=_NO_ENTRIES)
    if features >= WIDE_REGISTERS and values.size <= _NUM_FLOATS:
        return Expansion(bits=number.bits, kind=Kind.FLOATS, entries=np.tile(values, _NUM_FLOATS // values.size))
    codes = np.arange(values.size)
    for kind, integers in ((Kind.UNSIGNED, codes), (Kind.SIGNED, codes - (codes >= values.size // 2) * values.size)):
        if np.array_equal(values, integers):
            return Expansion(bits=number.bits, kind=kind, entries=_NO_ENTRIES)
    needed = _permutation_of_words(number)
    if needed is not None and why_no_pairs(number, features | needed) is None and features >= needed:
        return pairs_expansion(number)
    if features >= EIGHT_FLOATS and values.size <= _NUM_FLOATS:
        entries = np.tile(values, _NUM_FLOATS // values.size)
        return Expansion(bits=number.bits, kind=Kind.EIGHT_FLOATS, entries=entries)
    facts = None if not isinstance(number, FloatFormat) else _fields_of(number)
    if facts is not None:
        assert isinstance(number, FloatFormat)
        return Expansion(bits=number.bits, kind=Kind.FIELDS, fraction_bits=number.fraction_bits, entries=facts)
    return Expansion(bits=number.bits, kind=Kind.TABLE, entries=values)


def upper_half(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """fp32 numbers cut to bf16, towards zero; NaN stays NaN."""
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), cut)


@cache
def _values(number: Format) -> npt.NDArray[np.float32]:
    return value_table(number).astype(np.float32)


def _permutation_of_words(number: Format) -> frozenset[str] | None:
    """What a processor has to have for the permutation that expands codes of so many bits; None if there is none."""
    if number.bits <= _WORD_TABLE_BITS:
        return WORD_PERMUTATIONS
    return BYTE_PERMUTATIONS if number.bits == _BYTE_TABLE_BITS else None


def _stored_kind(number: Format) -> Kind | None:
    """bf16 and fp16, whatever they are called: the values of all 16-bit words tell."""
    if number.bits != 16:
        return None
    words = np.arange(1 << 16, dtype=np.uint16)
    for kind, stored in (
        (Kind.STORED_BF16, (words.astype(np.uint32) << 16).view(np.float32)),
        (Kind.STORED_FP16, words.view(np.float16).astype(np.float32)),
    ):
        if np.array_equal(_values(number), stored, equal_nan=True):
            return kind
    return None


def _fields_of(number: FloatFormat) -> npt.NDArray[np.float32] | None:
    """The facts of FIELDS (see `Expansion.entries`), if with them every code comes out."""
    values, exponent = _values(number), 127 - number.bias
    if not 0 < exponent < 255 - (1 << number.exponent_bits) or number.fraction_bits > _FRACTION_BITS:
        return None
    offset = np.uint32(exponent << _FRACTION_BITS)
    last = np.uint32((number.num_finite_magnitudes - 1) << (_FRACTION_BITS - number.fraction_bits))
    hidden = np.array([offset]).view(np.float32)
    codes = np.arange(values.size, dtype=np.uint32)
    sign_bit = number.bits - 1
    placed = (codes & np.uint32((1 << sign_bit) - 1)) << np.uint32(_FRACTION_BITS - number.fraction_bits)
    normal = (placed + offset).view(np.float32)
    magnitudes = np.where(placed < 1 << _FRACTION_BITS, 2 * (normal - hidden), normal)
    words = magnitudes.view(np.uint32) | np.where(placed > last, _EXPONENT_BITS, np.uint32(0))
    found = (words | (codes >> np.uint32(sign_bit)) << np.uint32(31)).view(np.float32)
    if not np.array_equal(found, values, equal_nan=True) or (np.signbit(found) != np.signbit(values))[found == 0].any():
        return None
    return np.concatenate([np.array([offset, last], np.uint32).view(np.float32), -2 * hidden])
