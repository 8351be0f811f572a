"""Stochastic rounding: `modes` with random bits, in loops without branches, which become vectors.

Training rounds every parameter and every gradient this way. Random words are drawn for some numbers at a time, then
those are rounded: with |x| / q = n + r, n + 1 is taken where r, plus the word of that number as a fraction, reaches 1.
Each of the two loops is vectors by itself. Both in one are not, nor is anything that shares a kernel with other modes
(six times as slow). Random bits: `formats/philox.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from bitwright.quantize.backends.cpu.modes import bits_of_double, double_of
from bitwright.quantize.backends.cpu.team import in_team

#: Numbers that words are drawn for at once: both stay in the first cache.
CHUNK = 1024

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_0, _STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@njit(nogil=True, error_model="numpy")
def _random_word(index: Any, seed: Any) -> Any:
    """Word 0 of the Philox4x32-10 block with counter `index` and key `seed`."""
    c0, c1, c2, c3 = index & _MASK, index >> _HALF, np.uint64(0), np.uint64(0)
    k0, k1 = seed & _MASK, seed >> _HALF
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + _STEP_0) & _MASK, (k1 + _STEP_1) & _MASK
    return c0


@njit(nogil=True, error_model="numpy")
def _draw(words: Any, first: Any, num: Any, seed: Any, random_bits: Any) -> None:
    """The random words of elements from `first` on, cut to `random_bits`."""
    shift = np.uint64(32 - random_bits)
    for i in range(num):
        words[i] = _random_word(np.uint64(first) + np.uint64(i), seed) >> shift


@njit(nogil=True, error_model="numpy")
def _round_by(words: Any, x: Any, start: Any, out: Any, first: Any, num: Any, grid: Any, random_bits: Any) -> None:
    """``out[first : first + num] = round(x[start : start + num])``. All beyond the largest number leaves the range."""
    unit = 1.0 / 2.0**random_bits
    beyond_high = grid.largest if grid.beyond == grid.largest else grid.beyond
    beyond_low = -grid.smallest if grid.beyond == grid.largest else grid.beyond
    infinite_high = grid.largest if grid.infinite == grid.largest else grid.infinite
    infinite_low = -grid.smallest if grid.infinite == grid.largest else grid.infinite
    for i in range(num):
        value = np.float64(x[start + i])
        magnitude = abs(value)
        is_negative = np.signbit(value)
        limit = -grid.smallest if is_negative else grid.largest
        beyond = beyond_low if is_negative else beyond_high
        infinite = infinite_low if is_negative else infinite_high
        step_exponent = max((bits_of_double(magnitude) >> 52) - 1023, grid.emin) - grid.fraction_bits
        steps = magnitude * double_of((1023 - step_exponent) << 52)
        whole = np.floor(steps)
        whole += 1.0 if steps - whole >= 1.0 - np.float64(words[i]) * unit else 0.0
        found = whole * double_of((1023 + step_exponent) << 52)
        found = beyond if found > limit else found
        found = infinite if magnitude == np.inf else found
        signed = -found if is_negative else found
        signed = 0.0 if signed == 0.0 and not grid.has_negative_zero else signed
        of_nan = grid.nan if grid.replaces_nan else value
        out[first + i] = np.float32(of_nan if value != value else signed)


@njit(nogil=True, error_model="numpy", cache=True)
def round_stochastic(x: Any, out: Any, first: Any, last: Any, grid: Any, seed: Any, random_bits: Any) -> None:
    """``out[first : last] = round(x[…])``, fp32 arrays; element i draws word i."""
    words = np.empty(CHUNK, np.uint64)
    for start in range(first, last, CHUNK):
        num = min(CHUNK, last - start)
        _draw(words, start, num, seed, random_bits)
        _round_by(words, x, start, out, start, num, grid, random_bits)


@njit(nogil=True, error_model="numpy", cache=True)
def round_stochastic_parallel(x: Any, out: Any, count: Any, grid: Any, seed: Any, random_bits: Any, team: Any) -> None:
    """`round_stochastic` of a whole array on several threads."""
    in_team(round_stochastic, (x, out), count, (grid, seed, random_bits), team)


@njit(nogil=True, error_model="numpy")
def _divide(x: Any, start: Any, quotients: Any, first: Any, num: Any, of_row: Any, size: Any) -> None:
    """Numbers of a row from column `first` on by their scales; a scale of 0 divides as infinity does."""
    done = 0
    while done < num:
        group = (first + done) // size
        divisor = of_row[group] if of_row[group] != np.float32(0.0) else np.float32(np.inf)
        end = min(num, (group + 1) * size - first)
        for i in range(done, end):
            quotients[i] = np.float32(x[start + i] / divisor)
        done = end


@njit(nogil=True, error_model="numpy", cache=True)
def scale_stochastic(
    x: Any,
    out: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    seed: Any,
    random_bits: Any,
) -> None:
    """Codes of rows under scales that are known, ``scales[row // rows, column // size]``: fp32 arrays."""
    words, quotients = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.float32)
    for row in range(first_row, last_row):
        for first in range(0, columns, CHUNK):
            num, place = min(CHUNK, columns - first), row * columns + first
            _divide(x, place, quotients, first, num, scales[row // rows], size)
            _draw(words, place, num, seed, random_bits)
            _round_by(words, quotients, 0, out, place, num, grid, random_bits)


@njit(nogil=True, error_model="numpy", cache=True)
def scale_stochastic_parallel(
    x: Any,
    out: Any,
    scales: Any,
    count: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    seed: Any,
    random_bits: Any,
    team: Any,
) -> None:
    """`scale_stochastic` on several threads."""
    in_team(scale_stochastic, (x, out, scales), count, (columns, size, rows, grid, seed, random_bits), team)
