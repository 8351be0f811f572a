"""The GGUF tensor types that checkpoints are commonly stored in."""

from __future__ import annotations

from bitwright.formats.gguf_blocks import (
    GgufFormat,
    GoldenBytes,
    pack_q4_0,
    pack_q4_1,
    pack_q5_0,
    pack_q8_0,
    unpack_q4_0,
    unpack_q4_1,
    unpack_q5_0,
    unpack_q8_0,
)
from bitwright.formats.gguf_super_blocks import pack_q4_k, pack_q6_k, unpack_q4_k, unpack_q6_k

_ONE, _TWO, _HALF = "003c", "0040", "0038"  # fp16, little-endian

BLOCK_FORMATS = (
    GgufFormat(
        name="q4_0",
        block_size=32,
        block_bytes=18,
        code_bits=4,
        element="int4",
        scale_format="fp16",
        rule="extreme / −8",
        largest_element=8.0,
        pack=pack_q4_0,
        unpack=unpack_q4_0,
        aliases=("ggml_q4_0",),
        source="ggml, ggml-common.h, block_q4_0; ggml-quants.c, quantize_row_q4_0_ref",
        golden=(
            GoldenBytes(
                stored=_TWO + "f0" + "08" + "9a" * 14, values=((0, -16.0), (16, 14.0), (1, 0.0), (17, -16.0), (31, 2.0))
            ),
        ),
    ),
    GgufFormat(
        name="q4_1",
        block_size=32,
        block_bytes=20,
        code_bits=4,
        element="uint4",
        scale_format="fp16, and a minimum",
        rule="(max − min) / 15",
        largest_element=16.0,
        pack=pack_q4_1,
        unpack=unpack_q4_1,
        aliases=("ggml_q4_1",),
        source="ggml, ggml-common.h, block_q4_1; ggml-quants.c, quantize_row_q4_1_ref",
        golden=(
            GoldenBytes(stored=_HALF + _ONE + "f0" + "21" * 15, values=((0, 1.0), (16, 8.5), (1, 1.5), (31, 2.0))),
        ),
    ),
    GgufFormat(
        name="q5_0",
        block_size=32,
        block_bytes=22,
        code_bits=5,
        element="int5",
        scale_format="fp16",
        rule="extreme / −16",
        largest_element=16.0,
        pack=pack_q5_0,
        unpack=unpack_q5_0,
        aliases=("ggml_q5_0",),
        source="ggml, ggml-common.h, block_q5_0; ggml-quants.c, quantize_row_q5_0_ref",
        golden=(
            GoldenBytes(
                stored=_ONE + "02000180" + "f0" + "21" * 15,
                values=((0, -16.0), (1, 1.0), (16, 15.0), (17, -14.0), (31, 2.0)),
            ),
        ),
    ),
    GgufFormat(
        name="q8_0",
        block_size=32,
        block_bytes=34,
        code_bits=8,
        element="int8",
        scale_format="fp16",
        rule="amax / 127",
        largest_element=128.0,
        pack=pack_q8_0,
        unpack=unpack_q8_0,
        aliases=("ggml_q8_0",),
        source="ggml, ggml-common.h, block_q8_0; ggml-quants.c, quantize_row_q8_0_ref",
        golden=(
            GoldenBytes(stored=_HALF + "7f80ff" + "02" * 29, values=((0, 63.5), (1, -64.0), (2, -0.5), (31, 1.0))),
        ),
    ),
    GgufFormat(
        name="q4_k",
        block_size=256,
        block_bytes=144,
        code_bits=4,
        element="uint4",
        scale_format="8 × 6 bits × fp16, and minimums",
        rule="least squares",
        largest_element=15.0 * 63.0,
        pack=pack_q4_k,
        unpack=unpack_q4_k,
        aliases=("ggml_q4_k",),
        source="ggml, ggml-common.h, block_q4_K; ggml-quants.c, dequantize_row_q4_K",
        golden=(
            # s = 1, 2, 3, 4, 33, 0, 0, 0; m = 5, 6, 7, 8, 17, 0, 0, 0
            GoldenBytes(
                stored=_TWO + _HALF + "81020304" + "45060708" + "11000000" + "f0" * 128,
                values=((0, -2.5), (32, 57.0), (64, -3.5), (96, 116.0), (128, -8.5), (160, 0.0), (255, 0.0)),
            ),
        ),
    ),
    GgufFormat(
        name="q6_k",
        block_size=256,
        block_bytes=210,
        code_bits=6,
        element="int6",
        scale_format="16 × int8 × fp16",
        rule="least squares",
        largest_element=32.0 * 128.0,
        scale_offset=208,
        pack=pack_q6_k,
        unpack=unpack_q6_k,
        aliases=("ggml_q6_k",),
        source="ggml, ggml-common.h, block_q6_K; ggml-quants.c, dequantize_row_q6_K",
        golden=(
            # low nibble 1 below and 2 above; upper bits 0, 1, 2, 3 of the four runs; s = 1 … 8, −1 … −8
            GoldenBytes(
                stored="21" * 128 + "e4" * 64 + "0102030405060708" + "fffefdfcfbfaf9f8" + _ONE,
                values=((0, -31.0), (16, -62.0), (32, -45.0), (64, 10.0), (96, 126.0), (128, 31.0), (255, -144.0)),
            ),
        ),
    ),
)
