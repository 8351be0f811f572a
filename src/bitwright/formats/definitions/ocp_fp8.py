"""The two 8-bit floats of the Open Compute Project: E4M3 for weights and activations, E5M2 for gradients.

E4M3 gives up Inf and all NaNs but one per sign, and reaches 448 that way. It is what torch calls ``float8_e4m3fn``. The
IEEE-style E4M3 (ml_dtypes' ``float8_e4m3``, maximum 240, with Inf) is another format, in `ieee_fp8`, and no alias of
this one.
"""

from __future__ import annotations

from math import inf, nan

from bitwright.formats.types import IEEE_SPECIALS, TOP_NAN_SPECIALS, FloatFormat

FORMATS = (
    FloatFormat(
        name="fp8_e4m3",
        exponent_bits=4,
        fraction_bits=3,
        bias=7,
        specials=TOP_NAN_SPECIALS,
        aliases=("float8_e4m3fn", "f8_e4m3", "f8e4m3fn", "fp8_e4m3fn"),
        source="OCP 8-bit Floating Point Specification (OFP8) 1.0, tables 1 and 2",
        golden=(
            (0b0_0000_000, 0.0),
            (0b1_0000_000, -0.0),
            (0b0_0000_001, 2.0**-9),
            (0b0_0000_111, 0.875 * 2.0**-6),
            (0b0_0001_000, 2.0**-6),
            (0b0_0111_000, 1.0),
            (0b0_1111_110, 448.0),
            (0b1_1111_110, -448.0),
            (0b0_1111_111, nan),
            (0b1_1111_111, nan),
        ),
    ),
    FloatFormat(
        name="fp8_e5m2",
        exponent_bits=5,
        fraction_bits=2,
        bias=15,
        specials=IEEE_SPECIALS,
        aliases=("float8_e5m2", "f8_e5m2", "f8e5m2"),
        source="OCP 8-bit Floating Point Specification (OFP8) 1.0, tables 1 and 2",
        golden=(
            (0b0_00000_00, 0.0),
            (0b1_00000_00, -0.0),
            (0b0_00000_01, 2.0**-16),
            (0b0_00000_11, 0.75 * 2.0**-14),
            (0b0_00001_00, 2.0**-14),
            (0b0_01111_00, 1.0),
            (0b0_11110_11, 57344.0),
            (0b1_11110_11, -57344.0),
            (0b0_11111_00, inf),
            (0b1_11111_00, -inf),
            (0b0_11111_01, nan),
            (0b0_11111_10, nan),
            (0b1_11111_11, nan),
        ),
    ),
)
