"""The element and scale formats of the OCP Microscaling specification: FP6, FP4 and E8M0.

FP6 and FP4 have neither Inf nor NaN: in a block, the scale carries the NaN. E8M0 is that scale: an exponent and nothing
else, so no sign, no zero, no subnormals; 0xFF is NaN. (MX's FP8 elements are those of OFP8, in `ocp_fp8`.)
"""

from __future__ import annotations

from math import nan

from bitwright.formats.types import NO_SPECIALS, TOP_NAN_SPECIALS, FloatFormat

FORMATS = (
    FloatFormat(
        name="fp6_e3m2",
        exponent_bits=3,
        fraction_bits=2,
        bias=3,
        specials=NO_SPECIALS,
        aliases=("float6_e3m2fn", "f6_e3m2", "f6e3m2fn"),
        source="OCP Microscaling Formats (MX) Specification 1.0, table 4 (E3M2)",
        golden=(
            (0b0_000_00, 0.0),
            (0b1_000_00, -0.0),
            (0b0_000_01, 0.0625),
            (0b0_000_11, 0.1875),
            (0b0_001_00, 0.25),
            (0b0_011_00, 1.0),
            (0b0_111_11, 28.0),
            (0b1_111_11, -28.0),
        ),
    ),
    FloatFormat(
        name="fp6_e2m3",
        exponent_bits=2,
        fraction_bits=3,
        bias=1,
        specials=NO_SPECIALS,
        aliases=("float6_e2m3fn", "f6_e2m3", "f6e2m3fn"),
        source="OCP Microscaling Formats (MX) Specification 1.0, table 4 (E2M3)",
        golden=(
            (0b0_00_000, 0.0),
            (0b1_00_000, -0.0),
            (0b0_00_001, 0.125),
            (0b0_00_111, 0.875),
            (0b0_01_000, 1.0),
            (0b0_11_111, 7.5),
            (0b1_11_111, -7.5),
        ),
    ),
    FloatFormat(
        name="fp4_e2m1",
        exponent_bits=2,
        fraction_bits=1,
        bias=1,
        specials=NO_SPECIALS,
        aliases=("float4_e2m1fn", "f4_e2m1", "f4", "f4e2m1fn", "float4_e2m1fn_x2"),
        source="OCP Microscaling Formats (MX) Specification 1.0, table 5 (E2M1)",
        golden=(
            (0b0_00_0, 0.0),
            (0b0_00_1, 0.5),
            (0b0_01_0, 1.0),
            (0b0_01_1, 1.5),
            (0b0_10_0, 2.0),
            (0b0_10_1, 3.0),
            (0b0_11_0, 4.0),
            (0b0_11_1, 6.0),
            (0b1_00_0, -0.0),
            (0b1_11_1, -6.0),
        ),
    ),
    FloatFormat(
        name="e8m0",
        exponent_bits=8,
        fraction_bits=0,
        bias=127,
        specials=TOP_NAN_SPECIALS,
        signed=False,
        has_zero=False,
        aliases=("float8_e8m0fnu", "f8_e8m0", "f8e8m0fnu", "ue8m0"),
        source="OCP Microscaling Formats (MX) Specification 1.0, table 7 (E8M0)",
        golden=(
            (0x00, 2.0**-127),
            (0x01, 2.0**-126),
            (0x7F, 1.0),
            (0x80, 2.0),
            (0xFE, 2.0**127),
            (0xFF, nan),
        ),
    ),
)
