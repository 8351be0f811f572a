"""Blocks as GGUF files store them: bytes, laid out by ggml. The record, and the four types with one scale a block.

A block of 32 is one or two fp16 numbers (little-endian) and then the codes q:

    type   bytes  layout                    value                                       d
    q4_0   18     d, 16 × 2 nibbles         (q − 8) · d                                 extreme value / −8
    q4_1   20     d, m, 16 × 2 nibbles      q · d + m            m = min                (max − min) / 15
    q5_0   22     d, 32 fifth bits, nibbles (q − 16) · d                                extreme value / −16
    q8_0   34     d, 32 × int8              q · d                                       amax / 127

Byte j of the nibbles holds code j below and code j + 16 above; bit j of the fifth bits, as one little-endian word,
belongs to code j. The extreme value is the first of largest magnitude, sign included, so that it takes the code of
largest magnitude, which two's complement has below zero only.

All arithmetic is fp32. Codes are found against d *before* it is rounded to fp16, by multiplying with fp32(1/d) (0 where
d = 0): floor(x · (1/d) + 8.5) clipped to 0 … 15 (q5_0: 16.5 and 31; q4_1: (x − m) · (1/d) + 0.5), and for q8_0 to
nearest, half away from zero. So does ggml, and the bytes are ggml's; dividing by the stored d, as `blocks` does, would
be closer to x.

NaN or Inf in a block: its d is NaN (0x7E00) and the rest of it 0 bits, so that all of it decodes to NaN. A finite block
whose d is beyond fp16 stores d = Inf, as ggml does.

Source: ggml, ggml-common.h (block_q4_0 …), ggml-quants.c (quantize_row_*_ref, dequantize_row_*).
Rejected: short last blocks, for which the file format has no place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.errors import FormatError
from bitwright.formats.block_codec import BlockRow, Floats32, exact_float32
from bitwright.formats.round import MAX_RANDOM_BITS

Bytes = npt.NDArray[np.uint8]

#: fp16 in GGUF files.
HALF = np.dtype("<f2")
_NAN_HALF = np.frombuffer(b"\x00\x7e", dtype=np.uint8)
_HALF_MAX = 65504.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenBytes:
    """One block by its layout: the bytes in hexadecimal, and what some elements decode to."""

    stored: str
    values: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFormat:
    """A tensor type of GGUF files."""

    #: Canonical name: ggml's, in lower case.
    name: str
    #: Values in one block.
    block_size: int
    #: Bytes of one block.
    block_bytes: int
    #: Bits of one code.
    code_bits: int
    #: What a code is, and how scales are stored and found: for tables.
    element: str
    scale_format: str
    rule: str
    #: Largest value that a block can hold with d = 1 (and the largest of its inner scales).
    largest_element: float
    #: fp32 [n, block_size], finite → uint8 [n, block_bytes]
    pack: Callable[[Floats32], Bytes]
    #: uint8 [n, block_bytes] → fp32 [n, block_size]
    unpack: Callable[[Bytes], Floats32]
    #: Where d lies in a block, in bytes.
    scale_offset: int = 0
    #: Other names, accepted by `formats.resolve` only.
    aliases: tuple[str, ...] = ()
    #: Document that the layout comes from.
    source: str
    #: Blocks written by hand from that layout.
    golden: tuple[GoldenBytes, ...]

    @property
    def bits_per_value(self) -> float:
        """Bits of storage for one value, scales included."""
        return 8 * self.block_bytes / self.block_size

    @property
    def allows_short_blocks(self) -> bool:
        """Always False."""
        return False

    @property
    def max(self) -> float:
        """Largest value that some block can hold."""
        return self.largest_element * _HALF_MAX

    @property
    def row(self) -> BlockRow:
        """The format in a table."""
        return BlockRow(
            name=self.name,
            bits_per_value=self.bits_per_value,
            element=self.element,
            block_size=self.block_size,
            scale_format=self.scale_format,
            rule=self.rule,
            max=self.max,
            aliases=self.aliases,
            source=self.source,
        )

    def encode(
        self,
        x: npt.ArrayLike,
        rounding: str = "nearest_even",
        *,
        seed: int | None = None,
        random_bits: int = MAX_RANDOM_BITS,
    ) -> Bytes:
        """Return `x` as GGUF stores it: [..., K] exact in fp32 → uint8 [..., K / block_size · block_bytes].

        Raises:
            FormatError: K is no multiple of the block, `x` is not exact in fp32, or a rounding is asked for (ggml fixes
                its own).
        """
        if rounding != "nearest_even":
            raise FormatError(
                f"{self.name} is rounded as ggml rounds it, not by the rule {rounding!r}; leave the rounding out"
            )
        values = exact_float32(x)
        blocks = self._split(values, self.block_size, "values")
        is_finite = np.isfinite(blocks).all(axis=-1)
        with np.errstate(all="ignore"):
            stored = self.pack(np.where(is_finite[:, None], blocks, np.float32(0)))
        stored[~is_finite] = 0
        stored[~is_finite, self.scale_offset : self.scale_offset + 2] = _NAN_HALF
        return stored.reshape(*values.shape[:-1], values.shape[-1] // self.block_size * self.block_bytes)

    def decode(self, stored: npt.ArrayLike) -> Floats32:
        """Return the values of stored blocks: uint8 [..., bytes] → fp32 [..., K].

        Raises:
            FormatError: not bytes, or no multiple of `block_bytes`.
        """
        array = np.asarray(stored)
        if array.dtype != np.uint8:
            raise FormatError(f"{self.name} is decoded from bytes (uint8), got {array.dtype}; view the data as uint8")
        blocks = np.ascontiguousarray(self._split(array, self.block_bytes, "bytes"))
        with np.errstate(all="ignore"):
            values = self.unpack(blocks)
        return values.reshape(*array.shape[:-1], array.shape[-1] // self.block_bytes * self.block_size)

    def _split(self, array: npt.NDArray[Any], width: int, what: str) -> npt.NDArray[Any]:
        """View [..., K] as [n, width]."""
        if array.ndim == 0 or array.shape[-1] % width:
            raise FormatError(
                f"{self.name} takes rows of whole blocks of {width} {what}, got shape {array.shape}; pad the rows or "
                "choose a format with short blocks"
            )
        return array.reshape(array.size // width, width)


def half_bytes(numbers: npt.NDArray[Any]) -> Bytes:
    """Round [n, k] to fp16: uint8 [n, 2k]."""
    return np.ascontiguousarray(numbers.astype(HALF)).view(np.uint8)


def read_halves(stored: Bytes) -> Floats32:
    """Undo `half_bytes`: uint8 [n, 2k] → fp32 [n, k]."""
    return np.ascontiguousarray(stored).view(HALF).astype(np.float32)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Put the second half of the last dimension above the first: [..., 2k] → [..., k]."""
    half = codes.shape[-1] // 2
    return np.bitwise_or(codes[..., :half] & 0x0F, codes[..., half:] << 4, dtype=np.uint8)


def unpack_nibbles(stored: Bytes) -> Bytes:
    """Undo `pack_nibbles`: [..., k] → [..., 2k]."""
    return np.concatenate([stored & 0x0F, stored >> 4], axis=-1)


def pack_q4_0(x: Floats32) -> Bytes:
    """Pack blocks [n, 32] of q4_0."""
    scale, codes = _from_extreme(x, lowest=-8)
    return np.concatenate([half_bytes(scale), pack_nibbles(codes)], axis=-1)


def unpack_q4_0(stored: Bytes) -> Floats32:
    """Values of q4_0 blocks [n, 18]."""
    codes = unpack_nibbles(stored[:, 2:]).astype(np.float32) - np.float32(8)
    return read_halves(stored[:, :2]) * codes


def pack_q4_1(x: Floats32) -> Bytes:
    """Pack blocks [n, 32] of q4_1."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale = (high - low) / np.float32(15)
    codes = _floor_codes((x - low) * _reciprocal(scale) + np.float32(0.5), 15)
    return np.concatenate([half_bytes(scale), half_bytes(low), pack_nibbles(codes)], axis=-1)


def unpack_q4_1(stored: Bytes) -> Floats32:
    """Values of q4_1 blocks [n, 20]."""
    scale, low = read_halves(stored[:, :2]), read_halves(stored[:, 2:4])
    return scale * unpack_nibbles(stored[:, 4:]).astype(np.float32) + low


def pack_q5_0(x: Floats32) -> Bytes:
    """Pack blocks [n, 32] of q5_0."""
    scale, codes = _from_extreme(x, lowest=-16)
    fifth_bits = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return np.concatenate([half_bytes(scale), fifth_bits, pack_nibbles(codes)], axis=-1)


def unpack_q5_0(stored: Bytes) -> Floats32:
    """Values of q5_0 blocks [n, 22]."""
    fifth_bits = np.unpackbits(stored[:, 2:6], axis=-1, bitorder="little")
    codes = unpack_nibbles(stored[:, 6:]) | (fifth_bits << 4)
    return read_halves(stored[:, :2]) * (codes.astype(np.float32) - np.float32(16))


def pack_q8_0(x: Floats32) -> Bytes:
    """Pack blocks [n, 32] of q8_0."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    steps = x * _reciprocal(scale)
    whole = np.trunc(steps)
    away = whole + np.copysign(np.float32(1), steps) * (np.abs(steps - whole) >= 0.5)
    return np.concatenate([half_bytes(scale), np.clip(away, -128, 127).astype(np.int8).view(np.uint8)], axis=-1)


def unpack_q8_0(stored: Bytes) -> Floats32:
    """Values of q8_0 blocks [n, 34]."""
    codes = np.ascontiguousarray(stored[:, 2:]).view(np.int8).astype(np.float32)
    return codes * read_halves(stored[:, :2])


def _from_extreme(x: Floats32, lowest: int) -> tuple[Floats32, Bytes]:
    """Scales [n, 1] that map the extreme value to the lowest code, and codes [n, 32] counted from it."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    scale = extreme / np.float32(lowest)
    return scale, _floor_codes(x * _reciprocal(scale) + np.float32(0.5 - lowest), -2 * lowest - 1)


def _reciprocal(scale: Floats32) -> Floats32:
    """1 / scale; 0 where the scale is 0, or so small that it has no reciprocal (its fp16 is 0 too)."""
    inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _floor_codes(steps: Floats32, highest: int) -> Bytes:
    return np.clip(np.trunc(steps), 0, highest).astype(np.uint8)
