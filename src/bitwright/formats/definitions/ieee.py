"""IEEE 754 binary formats and the two shortened forms of binary32: bfloat16 and TF32.

TF32 is the 19 bits that a tensor core reads (1 sign, 8 exponent, 10 fraction); in memory a TF32 number is a binary32
whose low 13 bits are ignored, so that its code here is the binary32 code shifted right by 13.
"""

from __future__ import annotations

from math import inf, nan

from bitwright.formats.types import IEEE_SPECIALS, FloatFormat

FORMATS = (
    FloatFormat(
        name="fp64",
        exponent_bits=11,
        fraction_bits=52,
        bias=1023,
        specials=IEEE_SPECIALS,
        aliases=("float64", "double", "binary64", "f64"),
        source="IEEE 754-2019, table 3.5 (binary64)",
        golden=(
            (0x0000000000000000, 0.0),
            (0x8000000000000000, -0.0),
            (0x0000000000000001, 2.0**-1074),
            (0x0010000000000000, 2.0**-1022),
            (0x3FF0000000000000, 1.0),
            (0x3FF0000000000001, 1.0 + 2.0**-52),
            (0x7FEFFFFFFFFFFFFF, (2.0 - 2.0**-52) * 2.0**1023),
            (0x7FF0000000000000, inf),
            (0xFFF0000000000000, -inf),
            (0x7FF8000000000000, nan),
        ),
    ),
    FloatFormat(
        name="fp32",
        exponent_bits=8,
        fraction_bits=23,
        bias=127,
        specials=IEEE_SPECIALS,
        aliases=("float32", "single", "binary32", "f32"),
        source="IEEE 754-2019, table 3.5 (binary32)",
        golden=(
            (0x00000000, 0.0),
            (0x80000000, -0.0),
            (0x00000001, 2.0**-149),
            (0x007FFFFF, 2.0**-126 * (1 - 2.0**-23)),
            (0x00800000, 2.0**-126),
            (0x3F800000, 1.0),
            (0xC0490FDB, -13176795 * 2.0**-22),
            (0x7F7FFFFF, (2.0 - 2.0**-23) * 2.0**127),
            (0x7F800000, inf),
            (0xFF800000, -inf),
            (0x7FC00000, nan),
        ),
    ),
    FloatFormat(
        name="tf32",
        exponent_bits=8,
        fraction_bits=10,
        bias=127,
        specials=IEEE_SPECIALS,
        aliases=("tensorfloat32", "tensor_float_32"),
        source="NVIDIA A100 Tensor Core GPU Architecture (2020), TF32: range of FP32, precision of FP16",
        golden=(
            (0x00000, 0.0),
            (0x40000, -0.0),
            (0x00001, 2.0**-136),
            (0x00400, 2.0**-126),
            (0x1FC00, 1.0),
            (0x1FC01, 1.0 + 2.0**-10),
            (0x3FBFF, (2.0 - 2.0**-10) * 2.0**127),
            (0x3FC00, inf),
            (0x3FE00, nan),
        ),
    ),
    FloatFormat(
        name="fp16",
        exponent_bits=5,
        fraction_bits=10,
        bias=15,
        specials=IEEE_SPECIALS,
        aliases=("float16", "half", "binary16", "f16"),
        source="IEEE 754-2019, table 3.5 (binary16)",
        golden=(
            (0x0000, 0.0),
            (0x8000, -0.0),
            (0x0001, 2.0**-24),
            (0x03FF, 2.0**-14 * (1 - 2.0**-10)),
            (0x0400, 2.0**-14),
            (0x3C00, 1.0),
            (0xC000, -2.0),
            (0x7BFF, 65504.0),
            (0x7C00, inf),
            (0xFC00, -inf),
            (0x7E00, nan),
        ),
    ),
    FloatFormat(
        name="bf16",
        exponent_bits=8,
        fraction_bits=7,
        bias=127,
        specials=IEEE_SPECIALS,
        aliases=("bfloat16",),
        source="Intel, BFLOAT16 – Hardware Numerics Definition 1.0 (2018): the upper half of binary32",
        golden=(
            (0x0000, 0.0),
            (0x8000, -0.0),
            (0x0001, 2.0**-133),
            (0x0080, 2.0**-126),
            (0x3F80, 1.0),
            (0xC000, -2.0),
            (0x4049, 3.140625),
            (0x7F7F, (2.0 - 2.0**-7) * 2.0**127),
            (0x7F80, inf),
            (0xFF80, -inf),
            (0x7FC0, nan),
        ),
    ),
)
