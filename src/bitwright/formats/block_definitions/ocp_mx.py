"""OCP Microscaling: 32 numbers under one E8M0 scale, by the rule of section 6.3.

"mxfp8" is E4M3 and "mxfp6" E3M2: what engines mean when they leave the element out. MXINT8's elements are integers
times 2**-6, so that they lie in [−2, 2).
"""

from __future__ import annotations

from bitwright.formats import FORMATS
from bitwright.formats.blocks import BlockFormat, GoldenBlock
from bitwright.formats.types import FloatFormat

_E8M0 = FORMATS["e8m0"]
assert isinstance(_E8M0, FloatFormat)


def _mx(
    name: str, element: str, source: str, golden: GoldenBlock, *, exponent: int = 0, alias: str = ""
) -> BlockFormat:
    assert isinstance(_E8M0, FloatFormat)
    return BlockFormat(
        name=name,
        element=FORMATS[element],
        element_exponent=exponent,
        block_size=32,
        scale=_E8M0,
        scale_rule="ocp_floor",
        aliases=(alias,) if alias else (),
        source=f"OCP Microscaling Formats (MX) Specification 1.0, table 1 ({source}) and §6.3",
        golden=(golden,),
    )


BLOCK_FORMATS = (
    _mx(
        "mxfp8",
        "fp8_e4m3",
        "E4M3",
        GoldenBlock(
            scale_code=0x80,
            codes=(0b0_1111_110, 0b1_0111_000, 0b0_0000_001, 0b1_0000_000),
            values=(896.0, -2.0, 2.0**-8, -0.0),
        ),
        alias="mxfp8_e4m3",
    ),
    _mx(
        "mxfp8_e5m2",
        "fp8_e5m2",
        "E5M2",
        GoldenBlock(
            scale_code=0x7E,
            codes=(0b0_11110_11, 0b1_01111_00, 0b0_00000_01),
            values=(28672.0, -0.5, 2.0**-17),
        ),
    ),
    _mx(
        "mxfp6",
        "fp6_e3m2",
        "E3M2",
        GoldenBlock(
            scale_code=0x81, codes=(0b0_111_11, 0b1_011_00, 0b0_000_01, 0b1_000_00), values=(112.0, -4.0, 0.25, -0.0)
        ),
        alias="mxfp6_e3m2",
    ),
    _mx(
        "mxfp6_e2m3",
        "fp6_e2m3",
        "E2M3",
        GoldenBlock(scale_code=0x81, codes=(0b0_11_111, 0b1_01_000, 0b0_00_001), values=(30.0, -4.0, 0.5)),
    ),
    _mx(
        "mxfp4",
        "fp4_e2m1",
        "E2M1",
        GoldenBlock(
            scale_code=0x7D,
            codes=(0b0_00_0, 0b0_00_1, 0b0_01_0, 0b0_01_1, 0b0_10_0, 0b0_10_1, 0b0_11_0, 0b1_11_1, 0b1_00_0),
            values=(0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, -1.5, -0.0),
        ),
        alias="mxfp4_e2m1",
    ),
    _mx(
        "mxint8",
        "int8",
        "INT8",
        GoldenBlock(
            scale_code=0x7F,
            codes=(0x00, 0x01, 0x40, 0x7F, 0x80, 0xFF),
            values=(0.0, 0.015625, 1.0, 1.984375, -2.0, -0.015625),
        ),
        exponent=-6,
    ),
)
