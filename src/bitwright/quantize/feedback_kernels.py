"""Error feedback inside a block of columns, and single codes changed afterwards, as Numba kernels.

Rows do not depend on each other: they are dealt to threads, and results do not depend on how many there are. Each
kernel works on a range of rows; `…_parallel` gives each thread one (`backends/cpu/arrays.py: run_rows` calls either).

Legend: N rows, B columns of a block, K columns, G groups, S scales that are tried.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.team import in_team
from bitwright.quantize.feedback_lanes import LANES, feed_column, round_column

_FAST = {"reassoc", "contract", "nsz", "arcp"}


class Codes(NamedTuple):
    """The values that a code can stand for."""

    #: Whether they are all whole numbers from the first to the last.
    uniform: bool
    lowest: np.float32
    highest: np.float32
    #: Ascending, fp32, and the midpoints between neighbours.
    values: Any
    midpoints: Any


@njit(inline="always")
def _nearest(x, codes):  # type: ignore[no-untyped-def]
    if codes.uniform:
        return min(max(np.rint(x), codes.lowest), codes.highest)
    low, high = 0, codes.midpoints.size
    while low < high:
        middle = (low + high) >> 1
        if x > codes.midpoints[middle]:
            low = middle + 1
        else:
            high = middle
    return codes.values[low]


@njit(nogil=True, error_model="numpy", fastmath=_FAST, cache=True)
def feed_back_block(  # type: ignore[no-untyped-def]
    aims, weights, found, errors, best, first, last, feedback, pivots, scales, shifts, width, codes
):
    """Codes of a block of columns; of the scales that are tried for a group, those whose codes do the least damage.

    aims: what columns aim at after all earlier blocks; weights: what they are, fp32 [N, B]. feedback [B, B] and pivots
    [B]: the block's part of `Curvature`. scales, shifts: fp32 [S, N, G], value = code · scale + shift, S ≤ LANES.
    width: columns of a group. Written: found and errors (weight − value), fp32 [N, B]; best, the index of the scale,
    int64 [N, G].
    """
    num_columns = aims.shape[1]
    num_tries, _, num_groups = scales.shape
    num_rows = LANES // num_tries
    aim = np.empty((num_rows, num_columns), np.float32)
    code = np.empty((num_columns, LANES), np.float32)
    tried = np.empty((num_columns, LANES), np.float32)
    target = np.empty((num_columns, LANES), np.float32)
    scale, shift = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    inverse, damage = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for n in range(first, last, num_rows):
        rows = min(num_rows, last - n)
        aim[:rows] = aims[n : n + rows]
        for g in range(num_groups):
            start = g * width
            stop = min(num_columns, start + width)
            for lane in range(LANES):  # lanes to spare do the last row's work again
                row, s = min(lane // num_tries, rows - 1), lane % num_tries
                scale[lane], shift[lane] = scales[s, n + row, g], shifts[s, n + row, g]
                for j in range(start, stop):
                    tried[j, lane] = aim[row, j]
                    target[j, lane] = weights[n + row, j]
            for lane in range(LANES):
                inverse[lane] = np.float32(0.0) if scale[lane] == 0.0 else np.float32(1.0) / scale[lane]
                damage[lane] = 0.0
            for j in range(start, stop):
                if codes.uniform:
                    round_column(tried, code, inverse, shift, j, codes.lowest, codes.highest)
                else:
                    for lane in range(LANES):
                        code[j, lane] = _nearest((tried[j, lane] - shift[lane]) * inverse[lane], codes)
                feed_column(tried, target, code, damage, scale, shift, feedback, pivots, j, stop)
            for row in range(rows):
                winner = row * num_tries
                for lane in range(winner + 1, winner + num_tries):
                    if damage[lane] < damage[winner]:
                        winner = lane
                best[n + row, g] = winner - row * num_tries
                for j in range(start, stop):
                    found[n + row, j] = code[j, winner]
                    error = target[j, winner] - (code[j, winner] * scale[winner] + shift[winner])
                    errors[n + row, j] = error
                    for k in range(stop, num_columns):
                        aim[row, k] += error * feedback[j, k]


@njit(nogil=True, error_model="numpy", cache=True)
def feed_back_block_parallel(  # type: ignore[no-untyped-def]
    aims, weights, found, errors, best, count, feedback, pivots, scales, shifts, width, codes, team
):
    """`feed_back_block` of all rows on several threads."""
    in_team(
        feed_back_block,
        (aims, weights, found, errors, best),
        count,
        (feedback, pivots, scales, shifts, width, codes),
        team,
    )


@njit(nogil=True, error_model="numpy", fastmath=_FAST, cache=True)
def change_codes(  # type: ignore[no-untyped-def]
    slopes, found, first, last, matrix, inverses, scales, width, codes, num_passes
):
    """Change single codes for as long as that lowers the damage, column by column, in place.

    slopes: E H of the errors E = value − weight, fp32 [N, K], kept up to date; matrix: H; inverses: 1 / H_jj [K];
    scales: fp32 [N, G]. The best value of one weight, all others held, is value − slope / H_jj; a code moves to the
    nearest to it.
    """
    num_columns = found.shape[1]
    for n in range(first, last):
        for _ in range(num_passes):
            changed = False
            for g in range(scales.shape[1]):
                scale = scales[n, g]
                if scale == 0.0:
                    continue
                inverse = np.float32(1.0) / scale
                for j in range(g * width, min(num_columns, (g + 1) * width)):
                    c = _nearest(found[n, j] - slopes[n, j] * inverses[j] * inverse, codes)
                    if c != found[n, j]:
                        move = (c - found[n, j]) * scale
                        found[n, j] = c
                        changed = True
                        for k in range(num_columns):
                            slopes[n, k] += move * matrix[j, k]
            if not changed:
                break


@njit(nogil=True, error_model="numpy", cache=True)
def change_codes_parallel(slopes, found, count, matrix, inverses, scales, width, codes, num_passes, team):  # type: ignore[no-untyped-def]
    """`change_codes` of all rows on several threads."""
    in_team(change_codes, (slopes, found), count, (matrix, inverses, scales, width, codes, num_passes), team)
