"""Groups of consecutive numbers: codes and values in one read and one write, with the scale found on the way.

A *run* of up to 64 groups, small enough for the first cache, is looked at in three steps: largest magnitudes of all its
groups, then all their scales, then codes and values group by group. Each step fills vectors: sixteen reductions share
their shuffles, scales are computed side by side, and a group's numbers are LLVM vectors of 64, 16 or 8 (see `lanes`).

The arithmetic is that of `quantize/scaling.py` and `formats/blocks.py`, operation by operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.grids import FloatGrid, RangeGrid, WideGrid
from bitwright.quantize.backends.cpu.lanes import ANY, bits_of, float_of
from bitwright.quantize.backends.cpu.steps import (
    CORRECTED,
    DIVIDE,
    MULTIPLY,
    NUM_BLOCKS,
    SHORT_CODES,
    amax_bits_of_block,
    amax_bits_of_blocks,
    round_block,
    scaled_block,
    scaled_blocks,
)
from bitwright.quantize.backends.cpu.team import in_team

#: Groups of a run, and numbers of a run at most.
RUN_GROUPS = 64
RUN_NUMBERS = 4096

#: Rules that a kernel follows (`quantize/scaling.py` has them all).
#: EXPONENT_FLOOR is OCP_FLOOR with scales in E8M0: field arithmetic, since most blocks there are have it.
AMAX, OCP_FLOOR, ROUND_UP, POWER_OF_TWO, EXPONENT_FLOOR = 0, 1, 2, 3, 4
#: How a scale is stored: cut to a range, as a float format, as a format with the exponents of fp32.
STORE_RANGE, STORE_FLOAT, STORE_WIDE = 0, 1, 2

_INF_BITS = np.uint32(0x7F800000)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST = np.float32(np.finfo(np.float32).max)
_NAN, _INFINITE = np.float32(np.nan), np.float32(np.inf)
#: Scales between these divide by their reciprocals (`lanes.CORRECTED`).
_SAFE_LOW, _SAFE_HIGH = np.float32(2.0**-60), np.float32(2.0**60)


class Rule(NamedTuple):
    """How amax becomes a scale. Python numbers: Numba takes them apart faster than NumPy's."""

    #: One of the five.
    kind: int
    #: What the largest code stands for under a stored scale of 1, and its exponent.
    top: float
    emax: int
    #: Binary orders of magnitude that POWER_OF_TWO keeps free above amax.
    margin: int
    #: Inverse tensor scale and tensor scale, 1 with one level.
    inv_tensor_scale: float
    tensor_scale: float
    #: 2^element_exponent.
    unit: float
    #: Division that is right for every usual scale: CORRECTED or SHORT_CODES.
    method: int
    #: STORE_RANGE: low, high. STORE_FLOAT: shift, emin_bits, largest. STORE_WIDE: dropped bits, word of the largest.
    store: int
    store_a: float
    store_b: float
    store_c: float


@njit(nogil=True, error_model="numpy", inline="always")
def _exponent(value: Any) -> Any:
    """floor(log2 value) of a positive number, subnormal ones too."""
    is_subnormal = value < np.float32(2.0**-126)
    bits = bits_of(value * np.float32(2.0**24) if is_subnormal else value)
    return np.int32(np.int32(bits >> np.uint32(23)) - np.int32(127) - (np.int32(24) if is_subnormal else np.int32(0)))


@njit(nogil=True, error_model="numpy", inline="always")
def _power_of_two(exponent: Any) -> Any:
    """2^exponent, held within the exponents of fp32, subnormal ones too."""
    exponent = np.int32(max(exponent, np.int32(-149)))
    high = np.int32(min(max(exponent, np.int32(-126)), np.int32(127)))
    low = np.int32(min(max(np.int32(exponent - high), np.int32(-126)), np.int32(0)))
    return float_of(np.uint32(np.uint32(high + np.int32(127)) << np.uint32(23))) * float_of(
        np.uint32(np.uint32(low + np.int32(127)) << np.uint32(23))
    )


@njit(nogil=True, error_model="numpy")
def _find_scales(amax_bits: Any, ideal: Any, stored: Any, rule: Any) -> None:
    """Stored scales of a whole run, NaN where the group holds NaN or Inf."""
    top, inv_tensor_scale = np.float32(rule.top), np.float32(rule.inv_tensor_scale)
    emax, margin = np.int32(rule.emax), np.int32(rule.margin)
    if rule.kind == EXPONENT_FLOOR:
        for t in range(RUN_GROUPS):
            field = np.int32(np.int32(amax_bits[t] >> np.uint32(23)) - emax)
            field = np.int32(min(max(field, np.int32(0)), np.int32(254)))
            # the field 0 stands for 2^−127, which is subnormal in fp32
            scale = float_of(np.uint32(np.uint32(field) << np.uint32(23)) if field > 0 else np.uint32(1 << 22))
            stored[t] = scale if amax_bits[t] < _INF_BITS else _NAN
        return
    if rule.kind == AMAX:
        for t in range(RUN_GROUPS):
            ideal[t] = (float_of(amax_bits[t]) / top) * inv_tensor_scale
    elif rule.kind == OCP_FLOOR:
        for t in range(RUN_GROUPS):
            amax = float_of(amax_bits[t])
            power = _power_of_two(np.int32(_exponent(amax) - emax)) * inv_tensor_scale
            ideal[t] = power if amax > _ZERO else _ZERO
    elif rule.kind == ROUND_UP:
        for t in range(RUN_GROUPS):
            ratio = float_of(amax_bits[t]) / top
            exponent = _exponent(ratio)
            is_above = _power_of_two(exponent) < ratio
            power = _power_of_two(np.int32(exponent + (np.int32(1) if is_above else np.int32(0))))
            ideal[t] = power * inv_tensor_scale if ratio > _ZERO else _ZERO
    else:
        for t in range(RUN_GROUPS):
            amax = float_of(amax_bits[t])
            inverse = top / amax
            inverse = inverse if inverse < _LARGEST else _LARGEST
            power = _power_of_two(np.int32(margin - _exponent(inverse)))
            ideal[t] = power * inv_tensor_scale if amax > _ZERO else _ZERO
    if rule.store == STORE_RANGE:
        round_block(
            ideal, 0, stored, RangeGrid(np.float32(rule.store_a), np.float32(rule.store_b)), RUN_GROUPS, 1, ANY, None
        )
    elif rule.store == STORE_FLOAT:
        largest = np.float32(rule.store_c)
        grid = FloatGrid(np.uint32(rule.store_a), np.uint32(rule.store_b), largest, largest, largest, np.uint32(24))
        round_block(ideal, 0, stored, grid, RUN_GROUPS, 1, ANY, None)
    else:
        wide = WideGrid(np.uint32(rule.store_a), np.uint32(rule.store_b))
        round_block(ideal, 0, stored, wide, RUN_GROUPS, 1, ANY, None)
    for t in range(RUN_GROUPS):
        stored[t] = stored[t] if amax_bits[t] < _INF_BITS else _NAN


@njit(nogil=True, error_model="numpy")
def amax_bits_of(x: Any, start: Any, size: Any) -> Any:
    """Word of the largest magnitude of ``x[start : start + size]``; above that of Inf where there is a NaN."""
    found = np.uint32(0)
    i = 0
    while i + 64 <= size:
        found = np.uint32(max(found, amax_bits_of_block(x, start + i, 64)))
        i += 64
    while i + 8 <= size:
        found = np.uint32(max(found, amax_bits_of_block(x, start + i, 8)))
        i += 8
    while i < size:
        found = np.uint32(max(found, amax_bits_of_block(x, start + i, 1)))
        i += 1
    return found


@njit(nogil=True, error_model="numpy")
def _find_amaxes(x: Any, start: Any, size: Any, num: Any, found: Any) -> None:
    """Largest magnitudes of `num` groups of `size` numbers each."""
    t = 0
    if size == 32:
        while t + NUM_BLOCKS <= num:
            amax_bits_of_blocks(x, start + t * 32, found, t, 32)
            t += NUM_BLOCKS
    elif size == 16:
        while t + NUM_BLOCKS <= num:
            amax_bits_of_blocks(x, start + t * 16, found, t, 16)
            t += NUM_BLOCKS
    elif size == 8:
        while t + NUM_BLOCKS <= num:
            amax_bits_of_blocks(x, start + t * 8, found, t, 8)
            t += NUM_BLOCKS
    while t < num:
        found[t] = amax_bits_of(x, start + t * size, size)
        t += 1


@njit(nogil=True, error_model="numpy")
def _write_usual(
    x: Any, start: Any, size: Any, num: Any, out: Any, run: Any, grid: Any, method: Any, streams: Any
) -> Any:
    """Round the first groups of `num`, whose scales are all usual; returns how many were rounded."""
    scale, inverse, multiplier = run
    if method == SHORT_CODES:
        if size == 32:
            for t in range(0, num - 1, 2):
                scaled_blocks(x, start + t * 32, out, scale, inverse, multiplier, grid, t, 32, SHORT_CODES, streams)
            return num // 2 * 2
        if size == 8:
            for t in range(0, num - 7, 8):
                scaled_blocks(x, start + t * 8, out, scale, inverse, multiplier, grid, t, 8, SHORT_CODES, streams)
            return num // 8 * 8
    if size == 32:
        for t in range(0, num - 1, 2):
            scaled_blocks(x, start + t * 32, out, scale, inverse, multiplier, grid, t, 32, CORRECTED, streams)
        return num // 2 * 2
    if size == 16:
        for t in range(0, num - 3, 4):
            scaled_blocks(x, start + t * 16, out, scale, inverse, multiplier, grid, t, 16, CORRECTED, streams)
        return num // 4 * 4
    for t in range(num):
        i, end = start + t * size, start + (t + 1) * size
        while i + 64 <= end:
            scaled_block(x, i, out, scale[t], inverse[t], multiplier[t], grid, 64, CORRECTED, streams)
            i += 64
        while i + 8 <= end:
            scaled_block(x, i, out, scale[t], inverse[t], multiplier[t], grid, 8, CORRECTED, None)
            i += 8
        while i < end:
            divisor = scale[t] if scale[t] != _ZERO else _INFINITE
            scaled_block(x, i, out, divisor, inverse[t], multiplier[t], grid, 1, DIVIDE, None)
            i += 1
    return num


@njit(nogil=True, error_model="numpy")
def _write_unusual(x: Any, start: Any, size: Any, first: Any, num: Any, out: Any, run: Any, grid: Any) -> None:
    """Round groups `first` to `num`, dividing by whatever scale there is; 0 divides as infinity does."""
    scale, inverse, multiplier = run
    for t in range(first, num):
        divisor = scale[t] if scale[t] != _ZERO else _INFINITE
        for i in range(start + t * size, start + (t + 1) * size):
            scaled_block(x, i, out, divisor, inverse[t], multiplier[t], grid, 1, DIVIDE, None)


@njit(nogil=True, error_model="numpy")
def _write_run(
    x: Any,
    start: Any,
    size: Any,
    num: Any,
    out: Any,
    run: Any,
    gives_codes: Any,
    grid: Any,
    method: Any,
    streams: Any,
) -> None:
    """Round `num` groups under their scales, in one of the fast ways if all scales are usual."""
    scale, inverse, multiplier = run
    for t in range(RUN_GROUPS):
        # a scale that was stored as 0 divides as infinity does: x · 0, in every method
        inverse[t] = _ONE / scale[t] if scale[t] != _ZERO else _ZERO
        multiplier[t] = _ONE if gives_codes else scale[t]
    num_usual = 0
    for t in range(num):
        is_usual = (scale[t] >= _SAFE_LOW and scale[t] <= _SAFE_HIGH) or scale[t] == _ZERO
        num_usual += 1 if is_usual else 0
    done = 0
    if num_usual == num:
        done = _write_usual(x, start, size, num, out, run, grid, method, streams)
    _write_unusual(x, start, size, done, num, out, run, grid)


@njit(nogil=True, error_model="numpy")
def new_work() -> Any:
    """What a run is found in: amaxes, ideal and stored scales, and the scales, reciprocals and multipliers that divide.

    Allocated once a thread: six allocations a row would take longer than the row.
    """
    return (
        np.zeros(RUN_GROUPS, np.uint32),
        np.empty(RUN_GROUPS, np.float32),
        np.empty(RUN_GROUPS, np.float32),
        np.ones(RUN_GROUPS, np.float32),
        np.empty(RUN_GROUPS, np.float32),
        np.empty(RUN_GROUPS, np.float32),
    )


@njit(nogil=True, error_model="numpy")
def _quantize_groups(
    x: Any,
    out: Any,
    scales: Any,
    start: Any,
    size: Any,
    first: Any,
    num: Any,
    rule: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
    work: Any,
) -> None:
    """Groups of `size` numbers from x[start] on: values, or the values of codes, into `out`, scales into
    ``scales[first : first + num]`` (none where `scales` is empty)."""
    amax_bits, ideal, stored, scale, inverse, multiplier = work
    unit, tensor_scale = np.float32(rule.unit), np.float32(rule.tensor_scale)
    groups = max(1, min(RUN_GROUPS, RUN_NUMBERS // max(size, 1)))
    for run_start in range(0, num, groups):
        count = min(groups, num - run_start)
        offset = start + run_start * size
        _find_amaxes(x, offset, size, count, amax_bits)
        _find_scales(amax_bits, ideal, stored, rule)
        for t in range(RUN_GROUPS):
            scale[t] = stored[t] * unit * tensor_scale
        if scales.size:
            for t in range(count):
                scales[first + run_start + t] = stored[t] * unit
        run = (scale, inverse, multiplier)
        _write_run(x, offset, size, count, out, run, gives_codes, grid, rule.method, streams)


@njit(nogil=True, error_model="numpy")
def quantize_row(
    x: Any,
    out: Any,
    scales: Any,
    start: Any,
    first: Any,
    columns: Any,
    size: Any,
    rule: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
    work: Any,
) -> None:
    """One row from x[start] on, of groups of `size` numbers, the last one perhaps shorter."""
    whole = columns // size
    rest = columns - whole * size
    _quantize_groups(x, out, scales, start, size, first, whole, rule, grid, gives_codes, streams, work)
    if rest:
        end, last = start + whole * size, first + whole
        _quantize_groups(x, out, scales, end, rest, last, 1, rule, grid, gives_codes, streams, work)


@njit(nogil=True, error_model="numpy", cache=True)
def quantize_rows(
    x: Any,
    out: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rule: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
) -> None:
    """Rows one after the other; ``scales[row · groups + group]``. Rows of whole groups are one long row."""
    work = new_work()
    groups = (columns + size - 1) // size
    if groups * size == columns:
        start, first, num = first_row * columns, first_row * groups, (last_row - first_row) * groups
        _quantize_groups(x, out, scales, start, size, first, num, rule, grid, gives_codes, streams, work)
        return
    for row in range(first_row, last_row):
        start, first = row * columns, row * groups
        quantize_row(x, out, scales, start, first, columns, size, rule, grid, gives_codes, streams, work)


@njit(nogil=True, error_model="numpy", cache=True)
def quantize_rows_parallel(
    x: Any,
    out: Any,
    scales: Any,
    count: Any,
    columns: Any,
    size: Any,
    rule: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
    team: Any,
) -> None:
    """`quantize_rows` on several threads."""
    in_team(quantize_rows, (x, out, scales), count, (columns, size, rule, grid, gives_codes, streams), team)


@njit(nogil=True, error_model="numpy")
def scale_row(
    x: Any,
    out: Any,
    scales: Any,
    start: Any,
    columns: Any,
    size: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
    work: Any,
) -> None:
    """One row from x[start] on, under scales that are known: ``scales[column // size]`` is what multiplies codes."""
    _, _, _, scale, inverse, multiplier = work
    run = (scale, inverse, multiplier)
    whole = columns // size
    rest = columns - whole * size
    groups = max(1, min(RUN_GROUPS, RUN_NUMBERS // max(size, 1)))
    for first in range(0, whole, groups):
        count = min(groups, whole - first)
        for t in range(count):
            scale[t] = scales[first + t]
        _write_run(x, start + first * size, size, count, out, run, gives_codes, grid, CORRECTED, streams)
    if rest:
        scale[0] = scales[whole]
        _write_run(x, start + whole * size, rest, 1, out, run, gives_codes, grid, CORRECTED, streams)


@njit(nogil=True, error_model="numpy", cache=True)
def scale_rows(
    x: Any,
    out: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
) -> None:
    """Rows under scales that are known: ``scales[row // rows, column // size]`` is what multiplies codes."""
    work = new_work()
    for row in range(first_row, last_row):
        scale_row(x, out, scales[row // rows], row * columns, columns, size, grid, gives_codes, streams, work)


@njit(nogil=True, error_model="numpy", cache=True)
def scale_rows_parallel(
    x: Any,
    out: Any,
    scales: Any,
    count: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    gives_codes: Any,
    streams: Any,
    team: Any,
) -> None:
    """`scale_rows` on several threads."""
    in_team(scale_rows, (x, out, scales), count, (columns, size, rows, grid, gives_codes, streams), team)


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_range(
    x: Any, out: Any, amax_bits: Any, first: Any, last: Any, inverse: Any, scale: Any, grid: Any, streams: Any
) -> None:
    """``out[first : last] = round(x[…] · inverse) · scale``, and the largest magnitude's word of each run: one read."""
    for start in range(first, last, RUN_NUMBERS):
        end = min(last, start + RUN_NUMBERS)
        amax_bits[start // RUN_NUMBERS] = amax_bits_of(x, start, end - start)
        i = start
        while i + 64 <= end:
            scaled_block(x, i, out, scale, inverse, scale, grid, 64, MULTIPLY, streams)
            i += 64
        while i < end:
            scaled_block(x, i, out, scale, inverse, scale, grid, 1, MULTIPLY, None)
            i += 1


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_parallel(
    x: Any, out: Any, amax_bits: Any, count: Any, inverse: Any, scale: Any, grid: Any, streams: Any, team: Any
) -> None:
    """`multiply_range` of a whole array on several threads."""
    in_team(multiply_range, (x, out, amax_bits), count, (inverse, scale, grid, streams), team)


@njit(nogil=True, error_model="numpy", cache=True)
def amax_rows(x: Any, amax_bits: Any, first_row: Any, last_row: Any, columns: Any, size: Any) -> None:
    """The word of the largest magnitude of every group of every row, into ``amax_bits[row, group]``."""
    for row in range(first_row, last_row):
        for group in range(amax_bits.shape[1]):
            start = group * size
            amax_bits[row, group] = amax_bits_of(x, row * columns + start, min(size, columns - start))


@njit(nogil=True, error_model="numpy", cache=True)
def amax_rows_parallel(x: Any, amax_bits: Any, count: Any, columns: Any, size: Any, team: Any) -> None:
    """`amax_rows` on several threads."""
    in_team(amax_rows, (x, amax_bits), count, (columns, size), team)
