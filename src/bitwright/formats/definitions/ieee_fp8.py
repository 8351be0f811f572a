"""8-bit floats laid out as IEEE 754 would: the whole last binade for Inf and NaN, in E4M3 and in E3M4.

E4M3 is thereby three formats: OCP's reaches 448 without Inf, this one 240 with Inf, MI300's 240 without Inf and −0.
E3M4 trades range for a fourth fraction bit. The width of the exponent fixes the bias, as in IEEE 754-2019 §3.3:
2**(e − 1) − 1.
"""

from __future__ import annotations

from math import inf, nan

from bitwright.formats.types import IEEE_SPECIALS, FloatFormat

FORMATS = (
    FloatFormat(
        name="fp8_e4m3_ieee",
        exponent_bits=4,
        fraction_bits=3,
        bias=7,
        specials=IEEE_SPECIALS,
        aliases=("float8_e4m3",),
        source="ml_dtypes, README, float8_e4m3: IEEE 754 conventions, bias 7; IEEE 754-2019 §3.4",
        golden=(
            (0b0_0000_000, 0.0),
            (0b1_0000_000, -0.0),
            (0b0_0000_001, 2.0**-9),
            (0b0_0000_111, 0.875 * 2.0**-6),
            (0b0_0001_000, 2.0**-6),
            (0b0_0111_000, 1.0),
            (0b0_1110_111, 240.0),
            (0b1_1110_111, -240.0),
            (0b0_1111_000, inf),
            (0b1_1111_000, -inf),
            (0b0_1111_001, nan),
            (0b1_1111_111, nan),
        ),
    ),
    FloatFormat(
        name="fp8_e3m4",
        exponent_bits=3,
        fraction_bits=4,
        bias=3,
        specials=IEEE_SPECIALS,
        aliases=("float8_e3m4", "f8_e3m4", "f8e3m4"),
        source="ml_dtypes, README, float8_e3m4: IEEE 754 conventions, bias 3; IEEE 754-2019 §3.4",
        golden=(
            (0b0_000_0000, 0.0),
            (0b1_000_0000, -0.0),
            (0b0_000_0001, 2.0**-6),
            (0b0_000_1111, 0.9375 * 2.0**-2),
            (0b0_001_0000, 2.0**-2),
            (0b0_011_0000, 1.0),
            (0b0_110_1111, 15.5),
            (0b1_110_1111, -15.5),
            (0b0_111_0000, inf),
            (0b1_111_0000, -inf),
            (0b0_111_0001, nan),
            (0b1_111_1111, nan),
        ),
    ),
)
