"""Where codes of a packed matrix lie so that the threads of a GPU read whole words and multiply in their own registers.

A row is words of 32 bits. A *lane* is the fewest words that hold whole codes, each a bitstream of its own:

    4 bits    1 word,  8 codes        8 bits    1 word,  4 codes
    6 bits    3 words, 16 codes       3 bits    3 words, 32 codes

L lanes, a power of two, are a *chunk*. Code c of lane i is column c · L + i of the chunk, so that neighbouring lanes
read neighbouring numbers of x; word p of all lanes lies together, so that they read neighbouring words. L is the
largest of up to 32 for which chunks fill whole groups of scales, so that a lane has one scale, and for which what a
row is filled up with at its end stays small. With one lane a chunk is what `quantize/pack.py` writes, in whole words.

Rejected: codes as they are packed in files (neighbouring lanes would read every eighth number of x); groups filled up
to whole chunks (a group of 20 would take as much as one of 32).

Legend: N rows, K columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor

from bitwright.quantize.pack import pack_bits, unpack_bits

WORD_BITS = 32
#: Lanes of a chunk at most.
MAX_CHUNK_LANES = 32
#: What a row may be filled up with for the sake of longer chunks, as a share of its columns.
_MAX_FILLED = 0.004
#: Codes that are laid at once: beyond, rows are taken in turns.
_CODES_AT_ONCE = 1 << 24
_BYTES_OF_WORD = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """The sizes of a matrix of codes in chunks."""

    rows: int
    columns: int
    bits: int
    #: Columns under one scale; all of them without groups.
    group_columns: int
    #: Lanes of a chunk.
    chunk_lanes: int

    @property
    def lane_codes(self) -> int:
        """Codes of a lane."""
        return WORD_BITS // gcd(self.bits, WORD_BITS)

    @property
    def lane_words(self) -> int:
        """Words of a lane."""
        return self.bits // gcd(self.bits, WORD_BITS)

    @property
    def num_lanes(self) -> int:
        """Lanes of a row, the last chunk filled up."""
        return -(-self.columns // (self.lane_codes * self.chunk_lanes)) * self.chunk_lanes

    @property
    def row_words(self) -> int:
        """Words of a row."""
        return self.num_lanes * self.lane_words

    @property
    def group_lanes(self) -> int:
        """Lanes under one scale: 0 where all of a row are, −1 where a lane may have several scales."""
        if self.group_columns >= self.columns:
            return 0
        return -1 if self.group_columns % self.lane_codes else self.group_columns // self.lane_codes

    def lay(self, stream_NB: Tensor) -> Tensor:
        """The bitstream of each row (`quantize/pack.py`), uint8 [N, B], as words in chunks, int32 [N, words]."""
        laid = torch.empty(self.rows, self.row_words, dtype=torch.int32, device=stream_NB.device)
        for some, into in zip(stream_NB.split(self._rows_at_once), laid.split(self._rows_at_once), strict=True):
            codes = unpack_bits(some, self.bits, self.columns)
            filled = torch.nn.functional.pad(codes, (0, self.num_lanes * self.lane_codes - self.columns))
            by_lane = filled.reshape(-1, self.lane_codes, self.chunk_lanes).transpose(1, 2)
            stream = pack_bits(by_lane.reshape(into.shape[0], -1), self.bits).view(torch.int32)
            into.copy_(self._turned(stream, self.chunk_lanes, self.lane_words))
        return laid

    def collect(self, laid: Tensor) -> Tensor:
        """Undo `lay`."""
        num_bytes = -(-self.columns * self.bits // 8)
        stream_NB = torch.empty(self.rows, num_bytes, dtype=torch.uint8, device=laid.device)
        for some, into in zip(laid.split(self._rows_at_once), stream_NB.split(self._rows_at_once), strict=True):
            stream = self._turned(some, self.lane_words, self.chunk_lanes).view(torch.uint8)
            by_lane = unpack_bits(stream, self.bits, self.num_lanes * self.lane_codes)
            codes = by_lane.reshape(-1, self.chunk_lanes, self.lane_codes).transpose(1, 2)
            into.copy_(pack_bits(codes.reshape(into.shape[0], -1)[:, : self.columns], self.bits))
        return stream_NB

    def _turned(self, words: Tensor, rows: int, columns: int) -> Tensor:
        """The words of each chunk as a matrix [rows, columns], transposed."""
        by_chunk = words.reshape(words.shape[0], -1, rows, columns)
        return by_chunk.transpose(2, 3).reshape(words.shape).contiguous()

    @property
    def _rows_at_once(self) -> int:
        return max(1, _CODES_AT_ONCE // max(self.columns, 1))


@cache
def chunks_of(rows: int, columns: int, bits: int, group_columns: int) -> Chunks:
    """Chunks of a matrix; bits: 1 to 16."""
    lanes = MAX_CHUNK_LANES
    while lanes > 1:
        chunks = Chunks(rows=rows, columns=columns, bits=bits, group_columns=group_columns, chunk_lanes=lanes)
        width = chunks.lane_codes * lanes
        num_filled = chunks.num_lanes * chunks.lane_codes - columns
        is_in_groups = group_columns >= columns or group_columns % width == 0
        if is_in_groups and num_filled <= _MAX_FILLED * columns:
            return chunks
        lanes //= 2
    return Chunks(rows=rows, columns=columns, bits=bits, group_columns=group_columns, chunk_lanes=1)
