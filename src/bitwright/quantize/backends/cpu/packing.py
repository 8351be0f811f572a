"""Codes as bits and back: a row is quantised into a buffer of one code a byte, which is then squeezed, and the reverse.

The buffer of a row stays in the cache. Layout of the bitstream: `quantize/pack.py`. Rows are looked at 64 codes at a
time, the last ones through a buffer that is filled up with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.steps import BLOCK, decoded_block, decoded_blocks, pack_block, unpack_block
from bitwright.quantize.backends.cpu.team import in_team
from bitwright.quantize.backends.cpu.tiles import new_work, quantize_row, scale_row


@njit(nogil=True, error_model="numpy")
def _pack_whole(codes: Any, num: Any, packed: Any, position: Any, bits: Any) -> None:
    """``codes[0 : num]``, a multiple of 64, to bytes from packed[position] on."""
    if bits == 8:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i, 8)
    elif bits == 6:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i // 8 * 6, 6)
    elif bits == 4:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i // 8 * 4, 4)
    elif bits == 3:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i // 8 * 3, 3)
    elif bits == 2:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i // 8 * 2, 2)
    elif bits == 5:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i // 8 * 5, 5)
    else:
        for i in range(0, num, BLOCK):
            pack_block(codes, i, packed, position + i // 8 * 7, 7)


@njit(nogil=True, error_model="numpy")
def _unpack_whole(packed: Any, position: Any, codes: Any, num: Any, bits: Any) -> None:
    """Undo `_pack_whole`."""
    if bits == 8:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i, codes, i, 8)
    elif bits == 6:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i // 8 * 6, codes, i, 6)
    elif bits == 4:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i // 8 * 4, codes, i, 4)
    elif bits == 3:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i // 8 * 3, codes, i, 3)
    elif bits == 2:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i // 8 * 2, codes, i, 2)
    elif bits == 5:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i // 8 * 5, codes, i, 5)
    else:
        for i in range(0, num, BLOCK):
            unpack_block(packed, position + i // 8 * 7, codes, i, 7)


@njit(nogil=True, error_model="numpy", cache=True)
def pack_bits(codes: Any, num: Any, packed: Any, position: Any, bits: Any) -> None:
    """``codes[0 : num]``, one a byte, to the bitstream from packed[position] on."""
    whole = num // BLOCK * BLOCK
    _pack_whole(codes, whole, packed, position, bits)
    if whole < num:
        rest, squeezed = np.zeros(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
        rest[: num - whole] = codes[whole:num]
        _pack_whole(rest, BLOCK, squeezed, 0, bits)
        start = position + whole // 8 * bits
        for i in range(((num - whole) * bits + 7) // 8):
            packed[start + i] = squeezed[i]


@njit(nogil=True, error_model="numpy", cache=True)
def unpack_bits(packed: Any, position: Any, codes: Any, num: Any, bits: Any) -> None:
    """Undo `pack_bits`."""
    whole = num // BLOCK * BLOCK
    _unpack_whole(packed, position, codes, whole, bits)
    if whole < num:
        rest, squeezed = np.empty(BLOCK, np.uint8), np.zeros(BLOCK, np.uint8)
        start = position + whole // 8 * bits
        for i in range(((num - whole) * bits + 7) // 8):
            squeezed[i] = packed[start + i]
        _unpack_whole(squeezed, 0, rest, BLOCK, bits)
        codes[whole:num] = rest[: num - whole]


@njit(nogil=True, error_model="numpy", cache=True)
def pack_rows(
    x: Any,
    packed: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rule: Any,
    grid: Any,
    bits: Any,
) -> None:
    """Rows to codes and scales, ``packed[row]`` being a row's bytes."""
    groups = (columns + size - 1) // size
    codes, work = np.empty(columns, np.uint8), new_work()
    for row in range(first_row, last_row):
        of_row = x[row * columns : (row + 1) * columns]
        quantize_row(of_row, codes, scales, 0, row * groups, columns, size, rule, grid, True, None, work)
        pack_bits(codes, columns, packed[row], 0, bits)


@njit(nogil=True, error_model="numpy", cache=True)
def pack_rows_parallel(
    x: Any, packed: Any, scales: Any, count: Any, columns: Any, size: Any, rule: Any, grid: Any, bits: Any, team: Any
) -> None:
    """`pack_rows` on several threads."""
    in_team(pack_rows, (x, packed, scales), count, (columns, size, rule, grid, bits), team)


@njit(nogil=True, error_model="numpy", cache=True)
def pack_scaled_rows(
    x: Any,
    packed: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    bits: Any,
) -> None:
    """Rows to codes under scales that are known (see `tiles.scale_rows`)."""
    codes, work = np.empty(columns, np.uint8), new_work()
    for row in range(first_row, last_row):
        of_row = x[row * columns : (row + 1) * columns]
        scale_row(of_row, codes, scales[row // rows], 0, columns, size, grid, True, None, work)
        pack_bits(codes, columns, packed[row], 0, bits)


@njit(nogil=True, error_model="numpy", cache=True)
def pack_scaled_rows_parallel(
    x: Any, packed: Any, scales: Any, count: Any, columns: Any, size: Any, rows: Any, grid: Any, bits: Any, team: Any
) -> None:
    """`pack_scaled_rows` on several threads."""
    in_team(pack_scaled_rows, (x, packed, scales), count, (columns, size, rows, grid, bits), team)


@njit(nogil=True, error_model="numpy")
def _decode_group(
    codes: Any, first: Any, last: Any, out: Any, position: Any, multiplier: Any, code: Any, streams: Any
) -> None:
    i = first
    while i + BLOCK <= last:
        decoded_block(codes, i, out, position + i, multiplier, code, BLOCK, streams)
        i += BLOCK
    while i + 16 <= last:
        decoded_block(codes, i, out, position + i, multiplier, code, 16, None)
        i += 16
    while i + 8 <= last:
        decoded_block(codes, i, out, position + i, multiplier, code, 8, None)
        i += 8
    while i < last:
        decoded_block(codes, i, out, position + i, multiplier, code, 1, None)
        i += 1


@njit(nogil=True, error_model="numpy")
def _decode_small_groups(
    codes: Any, columns: Any, out: Any, position: Any, multipliers: Any, size: Any, code: Any, streams: Any
) -> Any:
    """Blocks of 64 codes that hold several groups; returns how many groups were decoded."""
    whole = columns // BLOCK * BLOCK
    if size == 32:
        for i in range(0, whole, BLOCK):
            decoded_blocks(codes, i, out, position + i, multipliers, code, i // 32, 32, streams)
        return whole // 32
    if size == 16:
        for i in range(0, whole, BLOCK):
            decoded_blocks(codes, i, out, position + i, multipliers, code, i // 16, 16, streams)
        return whole // 16
    if size == 8:
        for i in range(0, whole, BLOCK):
            decoded_blocks(codes, i, out, position + i, multipliers, code, i // 8, 8, streams)
        return whole // 8
    return 0


@njit(nogil=True, error_model="numpy", cache=True)
def unpack_rows(
    packed: Any,
    out: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rows: Any,
    code: Any,
    bits: Any,
    streams: Any,
) -> None:
    """Bytes of rows to values; ``scales[row // rows, column // size]`` is what multiplies codes."""
    codes = np.empty(columns, np.uint8)
    for row in range(first_row, last_row):
        unpack_bits(packed[row], 0, codes, columns, bits)
        of_row = scales[row // rows]
        done = _decode_small_groups(codes, columns, out, row * columns, of_row, size, code, streams)
        for group in range(done, of_row.size):
            first = group * size
            _decode_group(codes, first, min(first + size, columns), out, row * columns, of_row[group], code, streams)


@njit(nogil=True, error_model="numpy", cache=True)
def unpack_rows_parallel(
    packed: Any,
    out: Any,
    scales: Any,
    count: Any,
    columns: Any,
    size: Any,
    rows: Any,
    code: Any,
    bits: Any,
    streams: Any,
    team: Any,
) -> None:
    """`unpack_rows` on several threads."""
    in_team(unpack_rows, (packed, out, scales), count, (columns, size, rows, code, bits, streams), team)
