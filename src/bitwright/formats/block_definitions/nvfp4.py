"""NVFP4: 16 E2M1 numbers under one E4M3 scale, which is stored relative to one fp32 scale per tensor (two levels).

The E4M3 scale spends its three fraction bits on fitting the block's largest value to the code 6, which a power of two
misses by up to a factor of two; its short range is what the tensor scale makes up for. Orders of arithmetic: `blocks`.
"""

from __future__ import annotations

from bitwright.formats import FORMATS
from bitwright.formats.blocks import BlockFormat, GoldenBlock
from bitwright.formats.types import FloatFormat

_E4M3 = FORMATS["fp8_e4m3"]
assert isinstance(_E4M3, FloatFormat)

BLOCK_FORMATS = (
    BlockFormat(
        name="nvfp4",
        element=FORMATS["fp4_e2m1"],
        block_size=16,
        scale=_E4M3,
        scale_rule="amax",
        tensor_scale=True,
        source="NVIDIA Transformer Engine 2.x, reference quantiser for NVFP4 (1×16 blocks, scale 448 · 6 / amax); "
        "elements: OCP MX 1.0 table 5, scales: OFP8 1.0 table 1",
        golden=(
            GoldenBlock(
                scale_code=0b0_0111_100,  # 1.5
                codes=(0b0_00_0, 0b0_00_1, 0b0_01_1, 0b0_10_1, 0b0_11_1, 0b1_11_0, 0b1_00_0),
                values=(0.0, 0.75, 2.25, 4.5, 9.0, -6.0, -0.0),
            ),
            GoldenBlock(scale_code=0b0_1111_110, codes=(0b0_11_1, 0b1_11_1), values=(2688.0, -2688.0)),
            GoldenBlock(scale_code=0b0_0000_001, codes=(0b0_00_1, 0b0_11_1), values=(2.0**-10, 6 * 2.0**-9)),
        ),
    ),
)
