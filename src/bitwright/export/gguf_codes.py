"""ggml's tensor types as codes and scales: what a block's bytes hold, and the bytes that hold given codes.

    type    codes            under one scale    value                       scale, minimum
    q4_0    −8 … 7           32                 q · d                       fp16
    q5_0    −16 … 15         32                 q · d                       fp16
    q8_0    −128 … 127       32                 q · d                       fp16
    q4_1    0 … 15           32                 q · d + m                   fp16, fp16
    q5_1    0 … 31           32                 q · d + m                   fp16, fp16
    mxfp4   E2M1             32                 q · 2^(e − 127)             E8M0
    q2_k    0 … 3            16                 q · (d · s) − dmin · m      products of fp16 and 4 bits
    q3_k    −4 … 3           16                 q · (d · s)                 product of fp16 and 6 bits
    q4_k    0 … 15           32                 q · (d · s) − dmin · m      products of fp16 and 6 bits
    q5_k    0 … 31           32                 q · (d · s) − dmin · m      products of fp16 and 6 bits
    q6_k    −32 … 31         16                 q · (d · s)                 product of fp16 and 8 bits

The products are exact in fp32, and codes times them are computed as ggml computes them: so a type of the lower half is
a matrix of fp32 scales here, bit for bit. Codes can be put into a type of the upper half, whose scales are stored as
they are (`pack`); what has inner scales is encoded from values (`formats/gguf_super_blocks.py`).

Source: ggml, ggml-common.h and ggml-quants.c (dequantize_row_*).
Rejected: the types whose codes are places in lists (IQ…, TQ…), which no format here is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright import formats
from bitwright.formats.block_codec import Floats32
from bitwright.formats.gguf_blocks import Bytes, half_bytes, pack_nibbles, read_halves, unpack_nibbles
from bitwright.formats.gguf_super_blocks import unpack_six_bits
from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling, TensorScheme

#: Codes [n, block], scales [n, G], minima [n, G] or None.
Parts = tuple[Floats32, Floats32, Floats32 | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufCodes:
    """One tensor type."""

    #: ggml's name in lower case.
    name: str
    #: Format of a code.
    number: str
    #: Codes under one scale, and in one block.
    group_size: int
    block_size: int
    block_bytes: int
    scale_format: str
    has_minimum: bool
    #: Bytes of blocks [n, block_bytes] → their parts.
    unpack: Callable[[Bytes], Parts]
    #: Parts → bytes, where a block stores its scales as they are.
    pack: Callable[[Floats32, Floats32, Floats32 | None], Bytes] | None = None

    @property
    def scheme(self) -> TensorScheme:
        """The type in the terms of schemes."""
        return TensorScheme(
            format=self.number,
            scaling=Scaling(
                granularity=group(self.group_size),
                scale_format=self.scale_format,
                rule="ocp_floor" if self.scale_format == "e8m0" else "amax",
                symmetry="minimum" if self.has_minimum else "symmetric",
            ),
        )

    @property
    def bits_per_value(self) -> float:
        """Stored bits of a value, scales included."""
        return 8 * self.block_bytes / self.block_size


# --- blocks of 32 whose scales are stored as they are -----------------------------------------------------------------


def _q4_0(stored: Bytes) -> Parts:
    return unpack_nibbles(stored[:, 2:]).astype(np.float32) - np.float32(8), read_halves(stored[:, :2]), None


def _pack_q4_0(codes: Floats32, scales: Floats32, _: Any) -> Bytes:
    return _joined(half_bytes(scales), pack_nibbles((codes + 8).astype(np.uint8)))


def _q4_1(stored: Bytes) -> Parts:
    halves = read_halves(stored[:, :4])
    return unpack_nibbles(stored[:, 4:]).astype(np.float32), halves[:, :1], halves[:, 1:]


def _pack_q4_1(codes: Floats32, scales: Floats32, minima: Floats32 | None) -> Bytes:
    assert minima is not None
    return _joined(half_bytes(scales), half_bytes(minima), pack_nibbles(codes.astype(np.uint8)))


def _five_bits(stored: Bytes) -> Floats32:
    """Codes 0 … 31 of a word of fifth bits and 16 bytes of nibbles: [n, 20] → [n, 32]."""
    fifth = np.unpackbits(stored[:, :4], axis=-1, bitorder="little")
    return (unpack_nibbles(stored[:, 4:]) | fifth << 4).astype(np.float32)


def _pack_five_bits(codes: Floats32) -> Bytes:
    whole = codes.astype(np.uint8)
    return _joined(np.packbits(whole >> 4, axis=-1, bitorder="little"), pack_nibbles(whole))


def _q5_0(stored: Bytes) -> Parts:
    return _five_bits(stored[:, 2:]) - np.float32(16), read_halves(stored[:, :2]), None


def _pack_q5_0(codes: Floats32, scales: Floats32, _: Any) -> Bytes:
    return _joined(half_bytes(scales), _pack_five_bits(codes + 16))


def _q5_1(stored: Bytes) -> Parts:
    halves = read_halves(stored[:, :4])
    return _five_bits(stored[:, 4:]), halves[:, :1], halves[:, 1:]


def _pack_q5_1(codes: Floats32, scales: Floats32, minima: Floats32 | None) -> Bytes:
    assert minima is not None
    return _joined(half_bytes(scales), half_bytes(minima), _pack_five_bits(codes))


def _q8_0(stored: Bytes) -> Parts:
    codes = np.ascontiguousarray(stored[:, 2:]).view(np.int8).astype(np.float32)
    return codes, read_halves(stored[:, :2]), None


def _pack_q8_0(codes: Floats32, scales: Floats32, _: Any) -> Bytes:
    return _joined(half_bytes(scales), codes.astype(np.int8).view(np.uint8))


def _mxfp4(stored: Bytes) -> Parts:
    codes = formats.decode("fp4_e2m1", unpack_nibbles(stored[:, 1:])).astype(np.float32)
    return codes, formats.decode("e8m0", stored[:, :1]).astype(np.float32), None


def _pack_mxfp4(codes: Floats32, scales: Floats32, _: Any) -> Bytes:
    exponents = formats.encode("e8m0", scales).astype(np.uint8)
    return _joined(exponents, pack_nibbles(formats.encode("fp4_e2m1", codes).astype(np.uint8)))


# --- super-blocks of 256 ----------------------------------------------------------------------------------------------


def _q2_k(stored: Bytes) -> Parts:
    steps = stored[:, :16]
    halves = read_halves(stored[:, 80:84])
    codes = (stored[:, 16:80].reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6)) & 3
    scales = halves[:, :1] * (steps & 0x0F).astype(np.float32)
    return codes.reshape(-1, 256).astype(np.float32), scales, -(halves[:, 1:] * (steps >> 4).astype(np.float32))


def _q3_k(stored: Bytes) -> Parts:
    low = (stored[:, 32:96].reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6)) & 3
    high = (stored[:, :32].reshape(-1, 1, 1, 32) >> _shifts(*range(8)).reshape(2, 4, 1)) & 1
    codes = low.astype(np.float32) - np.float32(4) * (1 - high.astype(np.float32))
    packed = stored[:, 96:108]
    nibbles = (packed[:, None, :8] >> _shifts(0, 4)).reshape(-1, 16) & 0x0F
    upper = (packed[:, None, 8:] >> _shifts(0, 2, 4, 6)).reshape(-1, 16) & 3
    steps = (nibbles | upper << 4).astype(np.float32) - np.float32(32)
    return codes.reshape(-1, 256), read_halves(stored[:, 108:]) * steps, None


def _scales_and_minima(stored: Bytes) -> tuple[Floats32, Floats32]:
    """Of Q4_K and Q5_K: bytes [n, ≥ 16] → [n, 8] each."""
    scale_steps, minimum_steps = unpack_six_bits(stored[:, 4:16])
    scales = read_halves(stored[:, :2]) * scale_steps.astype(np.float32)
    return scales, -(read_halves(stored[:, 2:4]) * minimum_steps.astype(np.float32))


def _q4_k(stored: Bytes) -> Parts:
    codes = unpack_nibbles(stored[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return codes.astype(np.float32), *_scales_and_minima(stored)


def _q5_k(stored: Bytes) -> Parts:
    low = unpack_nibbles(stored[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (stored[:, 16:48].reshape(-1, 1, 32) >> _shifts(*range(8))) & 1
    return (low | high << 4).reshape(-1, 256).astype(np.float32), *_scales_and_minima(stored)


def _q6_k(stored: Bytes) -> Parts:
    low = unpack_nibbles(stored[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    top = (stored[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(0, 2, 4, 6)) & 3
    codes = (low | top << 4).reshape(-1, 256).astype(np.float32) - np.float32(32)
    steps = np.ascontiguousarray(stored[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, read_halves(stored[:, 208:]) * steps, None


def _shifts(*bits: int) -> npt.NDArray[np.uint8]:
    return np.array(bits, dtype=np.uint8)[:, None]


def _joined(*parts: Bytes) -> Bytes:
    return np.concatenate(parts, axis=-1)


def _block(name: str, number: str, block_bytes: int, unpack: Any, pack: Any, **changes: Any) -> GgufCodes:
    facts: dict[str, Any] = {"group_size": 32, "block_size": 32, "scale_format": "fp16", "has_minimum": False}
    return GgufCodes(name=name, number=number, block_bytes=block_bytes, unpack=unpack, pack=pack, **(facts | changes))


def _super_block(
    name: str, number: str, block_bytes: int, unpack: Any, group_size: int, has_minimum: bool
) -> GgufCodes:
    return GgufCodes(
        name=name,
        number=number,
        group_size=group_size,
        block_size=256,
        block_bytes=block_bytes,
        scale_format="fp32",
        has_minimum=has_minimum,
        unpack=unpack,
    )


#: Every type with codes, by ggml's name in lower case.
GGUF_CODES: dict[str, GgufCodes] = {
    record.name: record
    for record in (
        _block("q4_0", "int4", 18, _q4_0, _pack_q4_0),
        _block("mxfp4", "fp4_e2m1", 17, _mxfp4, _pack_mxfp4, scale_format="e8m0"),
        _block("q4_1", "uint4", 20, _q4_1, _pack_q4_1, has_minimum=True),
        _block("q5_0", "int5", 22, _q5_0, _pack_q5_0),
        _block("q5_1", "uint5", 24, _q5_1, _pack_q5_1, has_minimum=True),
        _block("q8_0", "int8", 34, _q8_0, _pack_q8_0),
        _super_block("q2_k", "uint2", 84, _q2_k, 16, True),
        _super_block("q3_k", "int3", 110, _q3_k, 16, False),
        _super_block("q4_k", "uint4", 144, _q4_k, 32, True),
        _super_block("q5_k", "uint5", 176, _q5_k, 32, True),
        _super_block("q6_k", "int6", 210, _q6_k, 16, False),
    )
}
