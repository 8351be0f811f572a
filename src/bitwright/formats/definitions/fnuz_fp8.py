"""The 8-bit floats of AMD's MI300 and Graphcore: Finite, NaN in place of Unsigned Zero.

The bias is one larger than in the OCP formats, so the same byte reads as half the value, and byte 0x80 is NaN instead
of −0. An OCP checkpoint needs both mended before such a device may read it.
"""

from __future__ import annotations

from math import nan

from bitwright.formats.types import SIGN_NAN_SPECIALS, FloatFormat

FORMATS = (
    FloatFormat(
        name="fp8_e4m3fnuz",
        exponent_bits=4,
        fraction_bits=3,
        bias=8,
        specials=SIGN_NAN_SPECIALS,
        aliases=("float8_e4m3fnuz", "f8_e4m3fnuz", "f8e4m3fnuz"),
        source="ONNX, Float stored in 8 bits, table E4M3FNUZ; Noune et al., arXiv:2206.02915",
        golden=(
            (0b0_0000_000, 0.0),
            (0b1_0000_000, nan),
            (0b0_0000_001, 2.0**-10),
            (0b0_0000_111, 0.875 * 2.0**-7),
            (0b0_0001_000, 2.0**-7),
            (0b0_1000_000, 1.0),
            (0b0_1111_111, 240.0),
            (0b1_1111_111, -240.0),
        ),
    ),
    FloatFormat(
        name="fp8_e5m2fnuz",
        exponent_bits=5,
        fraction_bits=2,
        bias=16,
        specials=SIGN_NAN_SPECIALS,
        aliases=("float8_e5m2fnuz", "f8_e5m2fnuz", "f8e5m2fnuz"),
        source="ONNX, Float stored in 8 bits, table E5M2FNUZ; Noune et al., arXiv:2206.02915",
        golden=(
            (0b0_00000_00, 0.0),
            (0b1_00000_00, nan),
            (0b0_00000_01, 2.0**-17),
            (0b0_00000_11, 0.75 * 2.0**-15),
            (0b0_00001_00, 2.0**-15),
            (0b0_10000_00, 1.0),
            (0b0_11111_11, 57344.0),
            (0b1_11111_11, -57344.0),
        ),
    ),
)
