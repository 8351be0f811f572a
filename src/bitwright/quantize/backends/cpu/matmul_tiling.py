"""Codes of a matrix to their places in tiles (`matmul_layout`) and back, code by code: all rows, or those asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from bitwright.quantize.backends.cpu.arrays import run_rows
from bitwright.quantize.backends.cpu.matmul_layout import VECTOR_WORDS, Tiles, unit_of
from bitwright.quantize.backends.cpu.team import in_team

#: Tiles begin with a cache line, so that no vector of codes straddles two.
_CACHE_LINE = 64


@cache
def pieces_of(bits: int) -> npt.NDArray[np.int64]:
    """Pieces of each code vector of a unit: int64 [code vectors, pieces, 4]; those of no bits are none."""
    codes = unit_of(bits).codes
    pieces = np.zeros((len(codes), max(map(len, codes)), 4), np.int64)
    for i, code in enumerate(codes):
        for j, piece in enumerate(code):
            pieces[i, j] = piece.vector, piece.shift, piece.num_bits, piece.target
    return pieces


@njit(nogil=True, error_model="numpy", cache=True)
def lay_tiles(stream, words, places, first, last, pieces, num_vectors, bits):  # type: ignore[no-untyped-def]
    """Codes to tiles first … last. stream: uint8 [N, bytes] (`quantize/pack.py`); words: uint16 [tiles, vectors, 32],
    zeros; places: where columns lie (`Tiles.column_places`)."""
    num_codes, num_pieces = pieces.shape[:2]
    for tile in range(first, last):
        for column in range(places.size):
            for row in range(min(64, stream.shape[0] - tile * 64)):
                bit = column * bits
                byte = bit // 8
                window = np.int64(stream[tile * 64 + row, byte])
                if bit % 8 + bits > 8:
                    window |= np.int64(stream[tile * 64 + row, byte + 1]) << 8
                code = (window >> (bit % 8)) & ((1 << bits) - 1)
                index = places[column] // 2 * 4 + row // 16
                lane = row % 16 * 2 + places[column] % 2
                for j in range(num_pieces):
                    vector, shift, num_bits, target = pieces[index % num_codes, j]
                    part = ((code >> target) & ((1 << num_bits) - 1)) << shift
                    words[tile, index // num_codes * num_vectors + vector, lane] |= np.uint16(part)


@njit(nogil=True, error_model="numpy", cache=True)
def lay_tiles_parallel(stream, words, places, count, pieces, num_vectors, bits, team):  # type: ignore[no-untyped-def]
    """`lay_tiles` of all tiles on several threads."""
    in_team(lay_tiles, (stream, words, places), count, (pieces, num_vectors, bits), team)


@njit(nogil=True, error_model="numpy", cache=True)
def collect_rows(  # type: ignore[no-untyped-def]
    stream, words, places, rows, first, last, pieces, num_vectors, bits
):
    """Codes of `rows`, int64, from their tiles; stream: zeros, a row for each of `rows`."""
    num_codes, num_pieces = pieces.shape[:2]
    for i in range(first, last):
        tile, row = divmod(rows[i], 64)
        for column in range(places.size):
            index = places[column] // 2 * 4 + row // 16
            lane = row % 16 * 2 + places[column] % 2
            code = np.int64(0)
            for j in range(num_pieces):
                vector, shift, num_bits, target = pieces[index % num_codes, j]
                word = np.int64(words[tile, index // num_codes * num_vectors + vector, lane])
                code |= ((word >> shift) & ((1 << num_bits) - 1)) << target
            bit = column * bits
            byte = bit // 8
            window = code << (bit % 8)
            stream[i, byte] |= np.uint8(window & 0xFF)
            if window > 0xFF:
                stream[i, byte + 1] |= np.uint8(window >> 8)


@njit(nogil=True, error_model="numpy", cache=True)
def collect_rows_parallel(  # type: ignore[no-untyped-def]
    stream, words, places, rows, count, pieces, num_vectors, bits, team
):
    """`collect_rows` of all of them on several threads."""
    in_team(collect_rows, (stream, words, places, rows), count, (pieces, num_vectors, bits), team)


def to_tiles(stream: npt.NDArray[np.uint8], tiles: Tiles) -> npt.NDArray[np.uint8]:
    """Codes of a matrix in tiles: uint8 [N, bytes of a row] → uint8 [tiles, bytes of a tile]."""
    memory = np.zeros(tiles.num_tiles * tiles.tile_bytes + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    laid = memory[start : start + tiles.num_tiles * tiles.tile_bytes].reshape(tiles.num_tiles, tiles.tile_bytes)
    arrays = (stream, _words_of(laid, tiles), tiles.column_places)
    run_rows(lay_tiles, lay_tiles_parallel, arrays, tiles.num_tiles, _facts_of(tiles), tiles.rows * tiles.columns)
    return laid


def from_tiles(
    laid: npt.NDArray[np.uint8], tiles: Tiles, rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.uint8]:
    """Undo `to_tiles`; of those rows, if any are given."""
    rows = np.arange(tiles.rows) if rows is None else rows
    stream = np.zeros((len(rows), -(-tiles.columns * tiles.bits // 8)), np.uint8)
    arrays = (stream, _words_of(laid, tiles), tiles.column_places, rows)
    run_rows(collect_rows, collect_rows_parallel, arrays, len(rows), _facts_of(tiles), len(rows) * tiles.columns)
    return stream


def _words_of(laid: npt.NDArray[np.uint8], tiles: Tiles) -> npt.NDArray[np.uint16]:
    return laid.view(np.uint16).reshape(tiles.num_tiles, -1, VECTOR_WORDS)


def _facts_of(tiles: Tiles) -> tuple[Any, ...]:
    return pieces_of(tiles.bits), unit_of(tiles.bits).num_vectors, tiles.bits
