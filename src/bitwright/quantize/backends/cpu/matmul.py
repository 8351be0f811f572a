"""Products with a packed matrix: codes are expanded in registers, so that memory moves no more than the codes.

    y[m, n] = Σ_g scale[n, g] · Σ_k code[n, k] · x[m, k]  +  Σ_g offset[n, g] · Σ_k x[m, k]         k in group g

Codes and x are exact in bf16, so that all products are exact; sums are fp32, and a scale multiplies the sum of its
group. offset is the minimum, or −zero point · scale.

A thread goes from tile to tile (`matmul_layout`), and through a tile in segments of up to 128 columns of one group.
What happens there depends on how many columns of x there are:

    1 … 4    each code is expanded in registers, once for all of them
    more     a segment is expanded once, to bf16 in the first cache, and multiplied by four columns of x at a time

Expanding anew for every four columns loses from 8 on, and expanding to memory for torch's matmul gains nothing up to
512, where both multiply at the speed of the dot products (`benchmarks/inference.py matmul` measures all three).

x of more precision than bf16 is the exact sum of two or three bf16, each a column of its own whose results add up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.matmul_lanes import GROUPS, add_offsets, expand_pairs, multiply_pairs, widen_groups
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS, constant
from bitwright.quantize.backends.cpu.team import in_team

#: Columns of x that are multiplied together, where there are several.
BLOCK_COLUMNS = 4
#: Pairs of columns of a segment: expanded, 64 rows of them take 16 KiB.
_SEGMENT_PAIRS = 64
_PAIR_BYTES = 4 * TILE_ROWS  # of bf16
_ONE, _BLOCK, _BF16, _NONE = constant(1), constant(BLOCK_COLUMNS), constant(16), constant(0)


class Sizes(NamedTuple):
    """Numbers that kernels are given: sizes of the matrix (see `matmul_layout.Tiles`) and of its tables."""

    rows: int
    num_groups: int
    group_pairs: int
    last_pairs: int
    #: Bytes of a pair of columns of a tile.
    pair_bytes: int
    #: Tables whose products add up, and entries of one.
    num_tables: int
    num_entries: int
    #: Rows that share scales, which then are fp32 numbers [R, G]; 0 where each row has its own, in tiles.
    rows_of_scale: int
    #: Offsets are zero points.
    has_zero_points: bool
    #: What stored scales are multiplied by.
    scale_unit: float
    #: Blocks of columns of x up to which codes are expanded in registers, anew for each.
    direct_blocks: int


@njit(nogil=True, error_model="numpy")
def _widen(source, tile, first, count, sizes, table, out, unit, bits):  # type: ignore[no-untyped-def]
    """Scales or offsets of `count` groups from `first` on, times `unit`, to `out`, fp32 [groups · 64]."""
    if not sizes.rows_of_scale:
        widen_groups(source, tile, sizes.num_groups, first, count, table, out, unit, bits)
        return
    for group in range(count):
        for i in range(TILE_ROWS):
            row = min(tile * TILE_ROWS + i, sizes.rows - 1) // sizes.rows_of_scale
            out[group * TILE_ROWS + i] = np.float32(source[row * sizes.num_groups + first + group]) * unit


@njit(nogil=True, error_model="numpy", inline="always")
def _multiply_segment(  # type: ignore[no-untyped-def]
    codes, at, pair, pairs, flat_x, shape, totals, scales, of_scale, segment, table, sizes, bits, mirrored, has_dot
):
    """totals += scales · codes · x of up to 128 columns of one group of a tile."""
    num_blocks, num_pairs, block_columns = shape
    for i in range(sizes.num_tables):
        of_table = i * sizes.num_entries
        if block_columns == 1:
            multiply_pairs(
                codes, at, pairs, table, of_table, flat_x, pair, totals, 0, scales, of_scale, bits, mirrored, _ONE,
                has_dot,
            )  # fmt: skip
            continue
        is_direct = num_blocks <= sizes.direct_blocks
        if not is_direct:
            expand_pairs(codes, at, pairs, table, of_table, segment, bits, mirrored)
        for block in range(num_blocks):
            of_x, of_totals = (block * num_pairs + pair) * BLOCK_COLUMNS, block * BLOCK_COLUMNS * TILE_ROWS
            if is_direct:
                multiply_pairs(
                    codes, at, pairs, table, of_table, flat_x, of_x, totals, of_totals, scales, of_scale, bits,
                    mirrored, _BLOCK, has_dot,
                )  # fmt: skip
            else:
                multiply_pairs(
                    segment, 0, pairs, table, 0, flat_x, of_x, totals, of_totals, scales, of_scale, _BF16, _NONE,
                    _BLOCK, has_dot,
                )  # fmt: skip


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_tiles(  # type: ignore[no-untyped-def]
    codes, x, out, scales, offsets, sums, first, last, factor, tables, sizes, bits, mirrored, scale_bits, offset_bits,
    has_dot
):  # fmt: skip
    """`out[m, n]` of the rows n of tiles first … last.

    codes: uint8 [tiles · bytes]; x: uint32 [blocks, pairs, 1 or 4], pairs of bf16; out: fp32 [M, N]. scales, offsets:
    what is kept of them (`matmul_parts`), one-dimensional; offsets is None without. sums: of x over groups, fp32
    [M, G]. factor: of all of `out`, fp32 [1]. tables: of codes, scales and offsets (`matmul_tables`). What comes after
    `sizes` are constants (`matmul_layout`).
    """
    table, scale_table, offset_table = tables
    num_groups, num_pairs, flat_x, flat_sums = sizes.num_groups, x.shape[1], x.reshape(-1), sums.reshape(-1)
    totals = np.empty(x.shape[0] * x.shape[2] * TILE_ROWS, np.float32)
    of_scales, of_offsets = np.empty(GROUPS * TILE_ROWS, np.float32), np.empty(GROUPS * TILE_ROWS, np.float32)
    segment = np.empty(_SEGMENT_PAIRS * _PAIR_BYTES, np.uint8)
    for tile in range(first, last):
        totals[:] = 0.0
        for some in range(0, num_groups, GROUPS):
            count = min(GROUPS, num_groups - some)
            unit = np.float32(sizes.scale_unit)
            _widen(scales, tile, some, count, sizes, scale_table, of_scales, unit, scale_bits)
            for group in range(some, some + count):
                of_group = sizes.last_pairs if group == num_groups - 1 else sizes.group_pairs
                for start in range(0, of_group, _SEGMENT_PAIRS):
                    pair = group * sizes.group_pairs + start
                    at = (tile * num_pairs + pair) * sizes.pair_bytes
                    _multiply_segment(
                        codes, at, pair, min(_SEGMENT_PAIRS, of_group - start), flat_x, x.shape, totals, of_scales,
                        (group - some) * TILE_ROWS, segment, table, sizes, bits, mirrored, has_dot,
                    )  # fmt: skip
            if offsets is not None:
                one = np.float32(1.0)
                _widen(offsets, tile, some, count, sizes, offset_table, of_offsets, one, offset_bits)
                if sizes.has_zero_points:
                    for i in range(count * TILE_ROWS):
                        of_offsets[i] = -of_offsets[i] * of_scales[i]
                for m in range(sums.shape[0]):
                    add_offsets(totals, m * TILE_ROWS, of_offsets, flat_sums, m * num_groups + some, count)
        for m in range(out.shape[0]):
            for row in range(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, sizes.rows)):
                out[m, row] = totals[(m - tile) * TILE_ROWS + row] * factor[0]


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_tiles_parallel(  # type: ignore[no-untyped-def]
    codes, x, out, scales, offsets, sums, count, factor, tables, sizes, bits, mirrored, scale_bits, offset_bits,
    has_dot, team
):  # fmt: skip
    """`multiply_tiles` of all tiles on several threads."""
    in_team(
        multiply_tiles, (codes, x, out, scales, offsets, sums), count,
        (factor, tables, sizes, bits, mirrored, scale_bits, offset_bits, has_dot), team,
    )  # fmt: skip
