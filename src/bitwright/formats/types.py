"""What a number format is: a record of facts, from which every other figure follows.

A float format of ``e`` exponent and ``f`` fraction bits lays its code out as ``[sign | exponent | fraction]``. The bits
below the sign, read as one integer, are the *magnitude index* ``i``: it counts the non-negative values in ascending
order, so that the next larger value is always ``i + 1``, across subnormals and binades alike. With ``E = i >> f`` and
``F = i mod 2**f``:

    value = 2**(E - bias) * (1 + F / 2**f)      E > 0, normal
    value = 2**(1 - bias) * (F / 2**f)          E = 0, zero and the subnormals (absent where ``has_zero`` is False)

Special values sit at the top of the magnitude order (IEEE 754: the whole last binade; OCP E4M3: one code), or on the
code that would be −0 (the FNUZ formats), or nowhere. `Specials` says which; nothing else in the package asks.

Integers are two's complement. A codebook is what no rule of layout describes: one value per code, written out. Scales
are no part of a format: they belong to a scheme.

Sources: IEEE 754-2019 §3.4; OCP 8-bit Floating Point Specification (OFP8) 1.0, tables 1 and 2; OCP
Microscaling Formats (MX) 1.0, tables 4, 5 and 7.
Rejected: one flag per standard ("ieee", "fn", "fnuz"), since a branch on it is a branch on a name in disguise.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise

from bitwright.errors import FormatError

#: Known values from the standard's table: (code, value). NaN stands for every NaN.
Golden = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Specials:
    """Where a float format keeps what is not a finite number."""

    #: The all-ones exponent is taken: fraction 0 is Inf, every other fraction is NaN.
    has_inf: bool
    #: Some code is NaN. Without Inf, that is the all-ones magnitude alone.
    has_nan: bool
    #: The code with only the sign bit set is the one NaN; there is no −0.
    nan_is_negative_zero: bool = False


#: Inf and NaN fill the last binade (IEEE 754 §3.4).
IEEE_SPECIALS = Specials(has_inf=True, has_nan=True)
#: No Inf; NaN is the all-ones magnitude ("FN": OCP E4M3, E8M0).
TOP_NAN_SPECIALS = Specials(has_inf=False, has_nan=True)
#: No Inf, no −0; NaN is the sign bit alone ("FNUZ").
SIGN_NAN_SPECIALS = Specials(has_inf=False, has_nan=True, nan_is_negative_zero=True)
#: Every code is a finite number.
NO_SPECIALS = Specials(has_inf=False, has_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatFormat:
    """A binary floating-point format whose every value is exact in float64.

    Raises:
        FormatError: the fields contradict each other, or a value would not fit a float64.
    """

    #: Canonical name, as engineers write it.
    name: str
    #: Width of the exponent field.
    exponent_bits: int
    #: Width of the fraction field (the hidden bit is not counted).
    fraction_bits: int
    #: What is subtracted from the exponent field.
    bias: int
    #: What the codes that are no finite numbers mean.
    specials: Specials
    #: The top bit is a sign.
    signed: bool = True
    #: Exponent field 0 holds zero and the subnormals. False: it is a binade like any other (E8M0).
    has_zero: bool = True
    #: Names of other libraries, accepted by `formats.resolve` only. Case does not matter.
    aliases: tuple[str, ...] = ()
    #: Document and table that the facts come from.
    source: str
    #: Code → value pairs copied from that table. Formats of the catalog have some; a user's own may go without.
    golden: Golden = ()

    def __post_init__(self) -> None:
        specials = self.specials
        if self.exponent_bits < 1 or self.fraction_bits < 0 or self.bits > 64:
            raise FormatError(
                f"format '{self.name}' has {self.exponent_bits} exponent and {self.fraction_bits} fraction bits; "
                "give at least 1 and 0, and at most 64 in all"
            )
        if specials.has_inf and self.fraction_bits == 0:
            raise FormatError(
                f"format '{self.name}' has Inf but no fraction bits, so that no code is left for NaN; "
                "give it a fraction bit, or specials without Inf"
            )
        if specials.nan_is_negative_zero and not (self.signed and self.has_zero):
            raise FormatError(f"format '{self.name}' has no −0 code to be its NaN; make it signed and with a zero")
        if self.num_finite_magnitudes < 1:
            raise FormatError(f"format '{self.name}' has no finite value; widen its exponent or change its specials")
        if not (-1074 <= self.emin - self.fraction_bits <= 0 and self.emax <= 1023 and self.fraction_bits <= 52):
            raise FormatError(
                f"format '{self.name}' reaches from 2**{self.emin - self.fraction_bits} to 2**{self.emax} with "
                f"{self.fraction_bits} fraction bits; a format must fit float64 (steps of 2**-1074 to 1, maximum "
                "below 2**1024, 52 fraction bits), so choose another bias or fewer bits"
            )
        _raise_without_source(self.name, self.source)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return int(self.signed) + self.exponent_bits + self.fraction_bits

    @property
    def magnitude_bits(self) -> int:
        """Width of a code without its sign."""
        return self.exponent_bits + self.fraction_bits

    @property
    def num_finite_magnitudes(self) -> int:
        """How many magnitude indices are finite numbers; the specials follow at once."""
        specials = self.specials
        if specials.has_inf:
            return ((1 << self.exponent_bits) - 1) << self.fraction_bits
        top_nans = int(specials.has_nan and not specials.nan_is_negative_zero)
        return (1 << self.magnitude_bits) - top_nans

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return int(self.has_zero) - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value: ``floor(log2(max))``."""
        field = (self.num_finite_magnitudes - 1) >> self.fraction_bits
        return max(field - self.bias, self.emin)

    @property
    def max(self) -> float:
        """Largest finite value."""
        field, fraction = divmod(self.num_finite_magnitudes - 1, 1 << self.fraction_bits)
        hidden = int(field > 0 or not self.has_zero)
        significand = (hidden << self.fraction_bits) + fraction
        return math.ldexp(significand, self.emax - self.fraction_bits)

    @property
    def min(self) -> float:
        """Smallest finite value: ``-max`` where signed, else 0 or the smallest positive value."""
        if self.signed:
            return -self.max
        return 0.0 if self.has_zero else self.min_normal

    @property
    def min_normal(self) -> float:
        """Smallest positive value with full precision."""
        return math.ldexp(1.0, self.emin)

    @property
    def min_subnormal(self) -> float | None:
        """Smallest positive value below `min_normal`; None where the format has no subnormals."""
        if not self.has_zero or self.fraction_bits == 0:
            return None
        return math.ldexp(1.0, self.emin - self.fraction_bits)

    @property
    def has_inf(self) -> bool:
        """±Inf have codes."""
        return self.specials.has_inf

    @property
    def has_nan(self) -> bool:
        """NaN has a code."""
        return self.specials.has_nan

    @property
    def has_negative_zero(self) -> bool:
        """−0 has a code of its own."""
        return self.signed and self.has_zero and not self.specials.nan_is_negative_zero

    @property
    def nan_code(self) -> int | None:
        """The code that `encode` writes for NaN (quiet, positive where there is a choice); None without NaN."""
        specials = self.specials
        if not specials.has_nan:
            return None
        if specials.nan_is_negative_zero:
            return 1 << self.magnitude_bits
        quiet_bit = 1 << (self.fraction_bits - 1) if specials.has_inf else 0
        return self.num_finite_magnitudes + quiet_bit


@dataclass(frozen=True, kw_only=True, slots=True)
class IntFormat:
    """An integer format: two's complement where signed. Codes are the stored bits, read as unsigned.

    Raises:
        FormatError: the width is not in 1..32 (2..32 where signed).
    """

    #: Canonical name.
    name: str
    #: Width of a code.
    bits: int
    #: Two's complement, from ``-2**(bits-1)``; otherwise from 0.
    signed: bool
    #: Names of other libraries, accepted by `formats.resolve` only. Case does not matter.
    aliases: tuple[str, ...] = ()
    #: Document and table that the facts come from.
    source: str
    #: Code → value pairs copied from that table. Formats of the catalog have some; a user's own may go without.
    golden: Golden = ()

    def __post_init__(self) -> None:
        if not 1 + self.signed <= self.bits <= 32:
            raise FormatError(f"format '{self.name}' has {self.bits} bits; give 1 to 32, at least 2 where signed")
        _raise_without_source(self.name, self.source)

    @property
    def max(self) -> float:
        """Largest value."""
        return float((1 << (self.bits - self.signed)) - 1)

    @property
    def min(self) -> float:
        """Smallest value; one more in magnitude than `max` where signed."""
        return -float(1 << (self.bits - 1)) if self.signed else 0.0

    @property
    def emax(self) -> int:
        """Exponent of the largest value: ``floor(log2(max))``."""
        return self.bits - self.signed - 1

    @property
    def has_inf(self) -> bool:
        """Always False."""
        return False

    @property
    def has_nan(self) -> bool:
        """Always False."""
        return False

    @property
    def has_zero(self) -> bool:
        """Always True."""
        return True

    @property
    def has_negative_zero(self) -> bool:
        """Always False."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class CodebookFormat:
    """A format that is a list of values, one per code, in any order. Neither Inf nor NaN, nor a second zero.

    Raises:
        FormatError: there are not ``2**bits`` values, two are equal, one is not exact in fp32 or not finite, or none
            is positive.
    """

    #: Canonical name.
    name: str
    #: Width of a code, 1 to 16.
    bits: int
    #: The value of every code in order; exact in fp32, since kernels keep the list in fp32.
    values: tuple[float, ...]
    #: Names of other libraries, accepted by `formats.resolve` only. Case does not matter.
    aliases: tuple[str, ...] = ()
    #: Document and table that the facts come from.
    source: str
    #: Code → value pairs copied from that table. Formats of the catalog have some; a user's own may go without.
    golden: Golden = ()

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise FormatError(f"format '{self.name}' has {self.bits} bits; give a codebook 1 to 16")
        if len(self.values) != 1 << self.bits:
            raise FormatError(
                f"format '{self.name}' lists {len(self.values)} values for {self.bits} bits; "
                f"list {1 << self.bits}, one per code"
            )
        for value in self.values:
            if not abs(value) <= _FP32_MAX or struct.unpack("f", struct.pack("f", value))[0] != value:
                raise FormatError(
                    f"format '{self.name}' lists {value!r}, which is no finite fp32 number; round it first"
                )
            if value == 0 and math.copysign(1.0, value) < 0:
                raise FormatError(f"format '{self.name}' lists −0, which a codebook cannot tell from 0; write 0")
        ascending = sorted(self.values)
        for value, following in pairwise(ascending):
            if value == following:
                raise FormatError(f"format '{self.name}' lists {value!r} twice; give every code a value of its own")
        if ascending[-1] <= 0:
            raise FormatError(f"format '{self.name}' has no positive value; a scale could not be fitted to it")
        _raise_without_source(self.name, self.source)

    @property
    def signed(self) -> bool:
        """Some value is negative."""
        return self.min < 0

    @property
    def max(self) -> float:
        """Largest value."""
        return max(self.values)

    @property
    def min(self) -> float:
        """Smallest value."""
        return min(self.values)

    @property
    def emax(self) -> int:
        """Exponent of the largest value: ``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

    @property
    def has_inf(self) -> bool:
        """Always False."""
        return False

    @property
    def has_nan(self) -> bool:
        """Always False."""
        return False

    @property
    def has_zero(self) -> bool:
        """Zero is among the values."""
        return 0.0 in self.values

    @property
    def has_negative_zero(self) -> bool:
        """Always False."""
        return False


#: What the catalog holds.
Format = FloatFormat | IntFormat | CodebookFormat

_FP32_MAX = (2.0 - 2.0**-23) * 2.0**127


def _raise_without_source(name: str, source: str) -> None:
    if not source.strip():
        raise FormatError(f"format '{name}' has no source; name the document and table that its facts come from")
