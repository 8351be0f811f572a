"""Products with a packed matrix: codes are expanded in registers, so that memory moves no more than the codes.

    y[m, n] = Σ_g scale[n, g] · Σ_k code[n, k] · x[m, k]  +  Σ_g offset[n, g] · Σ_k x[m, k]         k in group g

Codes and x are exact, sums are fp32, and a scale multiplies the sum of its group. offset is the minimum, or
−zero point · scale.

A thread goes from tile to tile (`matmul_layout`), and through a tile in runs of groups, or of parts of a group. What
happens to a run (`matmul_ways` chooses):

    DIRECT        codes are expanded in registers, anew for every block of columns of x
    EXPANDED      a run is expanded once, to the first cache, and multiplied by every block from there
    SCALED        the same with codes that are multiplied by their scales there, where that is exact: no sum has to be
                  scaled then, which matters where groups are small

Expanding to memory for torch's matmul gains nothing up to 512 tokens, where both multiply at the speed of the dot
products (`benchmarks/inference.py matmul` measures all of them).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.lanes import bits_of
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS
from bitwright.quantize.backends.cpu.matmul_scales import GROUPS, add_offsets, widen_groups
from bitwright.quantize.backends.cpu.matmul_steps import expand_groups, multiply_groups
from bitwright.quantize.backends.cpu.team import in_team

#: What happens to a run.
DIRECT, EXPANDED, SCALED = 0, 1, 2
#: Lanes of 32 bits of a run that is expanded: 16 KiB.
RUN_LANES = 4096
_CACHE_LINE = 64
_FLOAT_BYTES = 4
#: The word of the smallest scale that is usual, 2^−60, and how many more are, up to 2^60.
_SMALLEST_SCALE, _SCALES = np.uint32(67 << 23), np.uint32(120 << 23)


class Sizes(NamedTuple):
    """Numbers that kernels are given: sizes of the matrix (see `matmul_layout.Tiles`)."""

    rows: int
    num_groups: int
    group_pairs: int
    last_pairs: int
    #: Bytes of a pair of columns of a tile.
    pair_bytes: int
    #: Rows that share scales, which then are fp32 numbers [R, G]; 0 where each row has its own, in tiles.
    rows_of_scale: int
    #: Offsets are zero points.
    has_zero_points: bool
    #: What stored scales are multiplied by.
    scale_unit: float
    #: Where codes are multiplied by scales: some are beyond the exponents of bf16, and have to be looked at.
    scales_vary: bool
    #: Pairs of columns of a run; where nothing is expanded, all there are.
    run_pairs: int


@njit(nogil=True, error_model="numpy")
def _aligned(like, size):  # type: ignore[no-untyped-def]
    """Memory for numbers of 32 bits that begins with a cache line."""
    memory = np.empty(size + _CACHE_LINE // _FLOAT_BYTES, like.dtype)
    start = -memory.ctypes.data % _CACHE_LINE // _FLOAT_BYTES
    return memory[start : start + size]


@njit(nogil=True, error_model="numpy")
def _widen(source, tile, first, count, sizes, table, out, unit, how):  # type: ignore[no-untyped-def]
    """Scales or offsets of `count` groups from `first` on, times `unit`, to `out`, fp32 [groups · 64]."""
    if not sizes.rows_of_scale:
        widen_groups(source, tile, sizes.num_groups, first, count, table, out, unit, how)
        return
    for group in range(count):
        for i in range(TILE_ROWS):
            row = min(tile * TILE_ROWS + i, sizes.rows - 1) // sizes.rows_of_scale
            out[group * TILE_ROWS + i] = np.float32(source[row * sizes.num_groups + first + group]) * unit


@njit(nogil=True, error_model="numpy")
def _are_usual(scales, size):  # type: ignore[no-untyped-def]
    """Whether codes times all of these, which are positive, are surely numbers of bf16 of usual size."""
    farthest = np.uint32(0)
    for i in range(size):
        farthest = max(farthest, np.uint32(bits_of(scales[i]) - _SMALLEST_SCALE))
    return farthest <= _SCALES


@njit(nogil=True, error_model="numpy", inline="always")
def _multiply_run(  # type: ignore[no-untyped-def]
    codes, at, pair, num_groups, pairs, flat_x, shape, totals, scales, of_scale, are_usual, ones, run, table, how,
    columns, vectors, mode
):  # fmt: skip
    """totals += Σ scales · codes · x over groups of `pairs` pairs of columns, from the pair `pair` of a tile on."""
    num_blocks, num_pairs, halves, _ = shape
    if len(mode) == EXPANDED:
        expand_groups(codes, at, 1, num_groups * pairs, table, run, None, 0, how)
    elif len(mode) == SCALED:
        if are_usual:
            expand_groups(codes, at, num_groups, pairs, table, run, scales, of_scale, how)
            scales, of_scale, num_groups, pairs = ones, 0, 1, num_groups * pairs
        else:
            expand_groups(codes, at, 1, num_groups * pairs, table, run, ones, 0, how)
    for block in range(num_blocks):
        of_x = (block * num_pairs + pair) * halves * len(columns)
        of_totals = block * len(columns) * TILE_ROWS
        if len(mode) == DIRECT:
            multiply_groups(
                codes, at, num_groups, pairs, table, flat_x, of_x, totals, of_totals, scales, of_scale, how, columns,
                vectors,
            )  # fmt: skip
        else:
            multiply_groups(
                run, 0, num_groups, pairs, table, flat_x, of_x, totals, of_totals, scales, of_scale, how, columns,
                vectors,
            )  # fmt: skip


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_tiles(  # type: ignore[no-untyped-def]
    codes, x, out, scales, offsets, sums, first, last, factor, tables, sizes, constants
):
    """`out[m, n]` of the rows n of tiles first … last.

    codes: uint8 [tiles · bytes]; x: [blocks, pairs, 1, columns] pairs of bf16 as uint32, or [blocks, pairs, 2, columns]
    in fp32; out: fp32 [M, N]. scales, offsets: what is kept of them (`matmul_parts`), one-dimensional; offsets is None
    without. sums: of x over groups, fp32 [M, G]. factor: of all of `out`, fp32 [1]. tables: of codes, scales and
    offsets. constants: how those three are expanded, columns and vectors of a block, and what happens to a run; kernels
    are compiled for them (`matmul_ways.Way.constants`).
    """
    table, scale_table, offset_table = tables
    how, scale_how, offset_how, columns, vectors, mode = constants
    num_groups, num_pairs, flat_x, flat_sums = sizes.num_groups, x.shape[1], x.reshape(-1), sums.reshape(-1)
    totals = _aligned(out, x.shape[0] * len(columns) * TILE_ROWS)
    of_scales, of_offsets = _aligned(out, GROUPS * TILE_ROWS), _aligned(out, GROUPS * TILE_ROWS)
    run, ones = _aligned(x, RUN_LANES), np.ones(TILE_ROWS, np.float32)
    for tile in range(first, last):
        totals[:] = 0.0
        for some in range(0, num_groups, GROUPS):
            end = min(some + GROUPS, num_groups)
            unit = np.float32(sizes.scale_unit)
            _widen(scales, tile, some, end - some, sizes, scale_table, of_scales, unit, scale_how)
            are_usual = not sizes.scales_vary or _are_usual(of_scales, (end - some) * TILE_ROWS)
            group = some
            while group < end:
                is_last = group == num_groups - 1
                pairs = sizes.last_pairs if is_last else sizes.group_pairs
                # groups of equal length; the last one may be shorter
                alike = end if end < num_groups or sizes.last_pairs == sizes.group_pairs else num_groups - 1
                together = 1 if is_last else max(1, min(alike - group, sizes.run_pairs // pairs))
                step = pairs if together > 1 else sizes.run_pairs
                for start in range(0, pairs, step):
                    pair = group * sizes.group_pairs + start
                    at = (tile * num_pairs + pair) * sizes.pair_bytes
                    _multiply_run(
                        codes, at, pair, together, min(step, pairs - start), flat_x, x.shape, totals, of_scales,
                        (group - some) * TILE_ROWS, are_usual, ones, run, table, how, columns, vectors, mode,
                    )  # fmt: skip
                group += together
            if offsets is not None:
                count, one = end - some, np.float32(1.0)
                _widen(offsets, tile, some, count, sizes, offset_table, of_offsets, one, offset_how)
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
    codes, x, out, scales, offsets, sums, count, factor, tables, sizes, constants, team
):
    """`multiply_tiles` of all tiles on several threads."""
    in_team(multiply_tiles, (codes, x, out, scales, offsets, sums), count, (factor, tables, sizes, constants), team)
