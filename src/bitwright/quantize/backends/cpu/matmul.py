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

import numba
import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.matmul_lanes import add_offsets, expand_pairs, multiply_pairs, widen_groups
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS, constant

#: Columns of x that are multiplied together, where there are several.
BLOCK_COLUMNS = 4
#: Pairs of columns of a segment: expanded, 64 rows of them take 16 KiB.
_SEGMENT_PAIRS = 64
_PAIR_BYTES = 4 * TILE_ROWS  # of bf16
#: Groups that codes of scales and offsets are filled up with at most.
_FILLED = 8
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
def _spread_groups(source, tile, sizes, out, unit):  # type: ignore[no-untyped-def]
    """Numbers that several rows share, times `unit`, to `out`, fp32 [groups · 64]."""
    for group in range(sizes.num_groups):
        for i in range(TILE_ROWS):
            row = min(tile * TILE_ROWS + i, sizes.rows - 1) // sizes.rows_of_scale
            out[group * TILE_ROWS + i] = np.float32(source[row * sizes.num_groups + group]) * unit


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_tiles(  # type: ignore[no-untyped-def]
    codes, x, out, scales, offsets, sums, first, last, factor, tables, sizes, bits, mirrored, scale_bits, offset_bits,
    has_dot
):  # fmt: skip
    """`out[m, n]` of the rows n of tiles first … last.

    codes: uint8 [tiles · bytes]; x: uint32 [blocks, pairs, 1 or 4], pairs of bf16; out: fp32 [M, N]. scales, offsets:
    as `widen_groups` or `_spread_groups` take them, one-dimensional; offsets is None without. sums: of x over groups,
    fp32 [M, G]. factor: of all of `out`, fp32 [1]. tables: of codes, scales and offsets (`matmul_tables`). What comes
    after `sizes` are constants (`matmul_layout`).
    """
    table, scale_table, offset_table = tables
    unit = np.float32(sizes.scale_unit)
    num_blocks, num_pairs, block_columns = x.shape
    flat_x, flat_sums = x.reshape(-1), sums.reshape(-1)
    totals = np.empty(num_blocks * block_columns * TILE_ROWS, np.float32)
    of_scales = np.empty((sizes.num_groups + _FILLED) * TILE_ROWS, np.float32)
    of_offsets = np.empty((sizes.num_groups + _FILLED) * TILE_ROWS, np.float32)
    segment = np.empty(_SEGMENT_PAIRS * _PAIR_BYTES, np.uint8)
    for tile in range(first, last):
        if sizes.rows_of_scale:
            _spread_groups(scales, tile, sizes, of_scales, unit)
        else:
            widen_groups(scales, tile, sizes.num_groups, scale_table, of_scales, unit, scale_bits)
        totals[:] = 0.0
        for group in range(sizes.num_groups):
            of_group = sizes.last_pairs if group == sizes.num_groups - 1 else sizes.group_pairs
            for start in range(0, of_group, _SEGMENT_PAIRS):
                pairs = min(_SEGMENT_PAIRS, of_group - start)
                pair, of_scale = group * sizes.group_pairs + start, group * TILE_ROWS
                at = (tile * num_pairs + pair) * sizes.pair_bytes
                for i in range(sizes.num_tables):
                    of_table = i * sizes.num_entries
                    if block_columns == 1:
                        multiply_pairs(
                            codes, at, pairs, table, of_table, flat_x, pair, totals, 0, of_scales, of_scale,
                            bits, mirrored, _ONE, has_dot,
                        )  # fmt: skip
                    elif num_blocks <= sizes.direct_blocks:
                        for block in range(num_blocks):
                            of_x = (block * num_pairs + pair) * BLOCK_COLUMNS
                            multiply_pairs(
                                codes, at, pairs, table, of_table, flat_x, of_x, totals,
                                block * BLOCK_COLUMNS * TILE_ROWS, of_scales, of_scale, bits, mirrored, _BLOCK, has_dot,
                            )  # fmt: skip
                    else:
                        expand_pairs(codes, at, pairs, table, of_table, segment, bits, mirrored)
                        for block in range(num_blocks):
                            of_x = (block * num_pairs + pair) * BLOCK_COLUMNS
                            multiply_pairs(
                                segment, 0, pairs, table, 0, flat_x, of_x, totals, block * BLOCK_COLUMNS * TILE_ROWS,
                                of_scales, of_scale, _BF16, _NONE, _BLOCK, has_dot,
                            )  # fmt: skip
        if offsets is not None:
            if sizes.rows_of_scale:
                _spread_groups(offsets, tile, sizes, of_offsets, np.float32(1.0))
            else:
                widen_groups(offsets, tile, sizes.num_groups, offset_table, of_offsets, np.float32(1.0), offset_bits)
            if sizes.has_zero_points:
                for i in range(sizes.num_groups * TILE_ROWS):
                    of_offsets[i] = -of_offsets[i] * of_scales[i]
            for m in range(sums.shape[0]):
                add_offsets(totals, m * TILE_ROWS, of_offsets, flat_sums, m * sizes.num_groups, sizes.num_groups)
        for m in range(out.shape[0]):
            for row in range(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, sizes.rows)):
                out[m, row] = totals[(m - tile) * TILE_ROWS + row] * factor[0]


@njit(nogil=True, error_model="numpy", parallel=True, cache=True)
def multiply_tiles_parallel(  # type: ignore[no-untyped-def]
    codes, x, out, scales, offsets, sums, num_tiles, factor, tables, sizes, bits, mirrored, scale_bits,
    offset_bits, has_dot, num_threads
):  # fmt: skip
    """`multiply_tiles` of all tiles on several threads."""
    for thread in numba.prange(num_threads):
        first, last = num_tiles * thread // num_threads, num_tiles * (thread + 1) // num_threads
        multiply_tiles(
            codes, x, out, scales, offsets, sums, first, last, factor, tables, sizes, bits, mirrored, scale_bits,
            offset_bits, has_dot,
        )  # fmt: skip
