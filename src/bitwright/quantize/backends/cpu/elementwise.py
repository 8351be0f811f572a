"""Every number by itself: rounded in one read and one write."""

from __future__ import annotations

from typing import Any

from numba import njit

from bitwright.quantize.backends.cpu.lanes import ANY, EXACT
from bitwright.quantize.backends.cpu.steps import BLOCK, round_block
from bitwright.quantize.backends.cpu.team import in_team


@njit(nogil=True, error_model="numpy", cache=True)
def round_range(
    x: Any, out: Any, first: Any, last: Any, grid: Any, is_bounded: Any, is_short: Any, streams: Any
) -> None:
    """``out[first : last] = round(x[…])``.

    is_bounded: nothing rounds beyond the largest number. is_short: every result is a bf16, should `out` hold those.
    """
    i = first
    if is_bounded and is_short:
        while i + BLOCK <= last:
            round_block(x, i, out, grid, BLOCK, 1, EXACT, streams)
            i += BLOCK
    elif is_bounded:
        while i + BLOCK <= last:
            round_block(x, i, out, grid, BLOCK, 1, ANY, streams)
            i += BLOCK
    else:
        while i + BLOCK <= last:
            round_block(x, i, out, grid, BLOCK, 0, ANY, streams)
            i += BLOCK
    while i < last:
        round_block(x, i, out, grid, 1, 0, ANY, None)
        i += 1


@njit(nogil=True, error_model="numpy", cache=True)
def round_parallel(
    x: Any, out: Any, count: Any, grid: Any, is_bounded: Any, is_short: Any, streams: Any, team: Any
) -> None:
    """`round_range` of a whole array on several threads, in pieces of whole blocks."""
    in_team(round_range, (x, out), count, (grid, is_bounded, is_short, streams), team)
