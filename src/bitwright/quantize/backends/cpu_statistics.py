"""Counting loops behind `bitwright.quantize.statistics`, compiled by Numba: one pass over memory, no allocation inside.

fp32 goes through the cache in blocks of 16 KiB. While a block is in the first-level cache, short loops that the
compiler turns into vector instructions find largest, smallest, sums and zeros, and a last one counts bins. Blocks with
NaN or Inf, which are rare, take a plain loop. Sums are float64, in an order that depends on the input alone.

Values of at most 16 bits are only counted by code, one increment each; everything else follows from the counts and the
format's table. Two 8-bit codes are counted as one 16-bit number, which halves the work and folds apart at the end.

Every loop releases the interpreter's lock, so that callers may cut an array into pieces for their own threads.
Rejected: `parallel=True`, since two of Numba's three threading layers fall over when two threads call in at once;
several count tables side by side to hide store-to-load stalls (slower, even where all values are equal).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

_BLOCK = 4096
_ONE = np.uint32(1)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INF = np.uint32(0x7F80_0000)
_MAGNITUDE_64 = np.uint64(0x7FFF_FFFF_FFFF_FFFF)
_INF_64 = np.uint64(0x7FF0_0000_0000_0000)

_inlined = numba.njit(nogil=True)
#: Sums may be reassociated into vector lanes; nothing else about floats is relaxed.
_summing = numba.njit(nogil=True, fastmath={"reassoc"})


@_inlined
def _largest(words):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for i in range(words.size):
        found = max(found, np.uint32(words[i] & _MAGNITUDE))
    return found


@_inlined
def _smallest_less_one(words):  # type: ignore[no-untyped-def]
    # 0 − 1 wraps around to the largest word, so that zero never is the smallest.
    found = np.uint32(0xFFFF_FFFF)
    for i in range(words.size):
        found = min(found, np.uint32(np.uint32(words[i] & _MAGNITUDE) - _ONE))
    return found


@_inlined
def _used_bits(words):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for i in range(words.size):
        found = np.uint32(found | words[i])
    return found


@_inlined
def _num_zeros(words):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for i in range(words.size):
        found = np.uint32(found + np.uint32(np.uint32(words[i] & _MAGNITUDE) == np.uint32(0)))
    return found


@_summing
def _sums(values):  # type: ignore[no-untyped-def]
    total, squares = 0.0, 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value
        squares += value * value
    return total, squares


def _count_fp32(values, words, counts):  # type: ignore[no-untyped-def]
    """Count `words` (uint32, the bits of float32 `values`) by their top 15 magnitude bits into `counts`.

    Returns (largest finite magnitude word, smallest non-zero one less 1, bits in use, zeros, infinite, Σx, Σx²).
    """
    largest, smallest, used = np.uint32(0), np.uint32(0xFFFF_FFFF), np.uint32(0)
    num_zero, num_inf = 0, 0
    total, squares = 0.0, 0.0
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        highest = _largest(block)
        if highest < _INF:
            largest = max(largest, highest)
            smallest = min(smallest, _smallest_less_one(block))
            used = np.uint32(used | _used_bits(block))
            num_zero += _num_zeros(block)
            block_total, block_squares = _sums(values[start : start + _BLOCK])
            total += block_total
            squares += block_squares
        else:
            for i in range(block.size):
                word = np.uint32(block[i] & _MAGNITUDE)
                if word < _INF:
                    largest = max(largest, word)
                    smallest = min(smallest, np.uint32(word - _ONE))
                    used = np.uint32(used | word)
                    num_zero += word == 0
                    value = np.float64(values[start + i])
                    total += value
                    squares += value * value
                else:
                    num_inf += word == _INF
        for i in range(block.size):
            counts[np.uint32(block[i] & _MAGNITUDE) >> np.uint32(16)] += _ONE
    return largest, smallest, used, num_zero, num_inf, total, squares


def _count_fp64(values, words, counts):  # type: ignore[no-untyped-def]
    """Count `words` (uint64, the bits of float64 `values`) by the bin of fp32 that they lie in, into `counts`.

    What lies beyond fp32's range counts in the last finite bin, what lies below it in the first. Returns what
    `_count_fp32` does, with the bits in use of the 45 that a bin does not look at.
    """
    largest, smallest, used = np.uint64(0), np.uint64(0xFFFF_FFFF_FFFF_FFFF), np.uint64(0)
    num_zero, num_inf = 0, 0
    total, squares = 0.0, 0.0
    for i in range(words.size):
        word = np.uint64(words[i] & _MAGNITUDE_64)
        if word >= _INF_64:
            num_inf += word == _INF_64
            counts[0x7F80 + np.int64(word != _INF_64)] += _ONE
            continue
        largest = max(largest, word)
        smallest = min(smallest, np.uint64(word - np.uint64(1)))
        used = np.uint64(used | word)
        num_zero += word == 0
        value = values[i]
        total += value
        squares += value * value
        field = np.int64(word >> np.uint64(52)) - 896
        if field >= 255:
            bin_index = np.int64(0x7F7F)
            used = np.uint64(used | np.uint64(1))
        elif field >= 1:
            bin_index = np.int64(word >> np.uint64(45)) - (896 << 7)
        elif field > -7:
            significand = np.int64(word & np.uint64(0xF_FFFF_FFFF_FFFF)) | (1 << 52)
            bin_index = significand >> (46 - field)
            used = np.uint64(used | np.uint64(1))
        else:
            bin_index = np.int64(0)
            used = np.uint64(used | np.uint64(word != 0))
        counts[bin_index] += _ONE
    return largest, smallest, used, num_zero, num_inf, total, squares


def _count_codes(codes, counts):  # type: ignore[no-untyped-def]
    """Count `codes` (uint16) into `counts` (uint32 [65536])."""
    for i in range(codes.size):
        counts[codes[i]] += _ONE


def _readonly(kind: Any) -> Any:
    """Type of a contiguous array that is only read; a writable one fits too, without being compiled again."""
    return numba.types.Array(kind, 1, "C", readonly=True)


@cache
def _compiled(function: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
    arguments = (*(_readonly(kind) for kind in inputs), numba.uint32[::1])
    kernel: Callable[..., Any]
    try:
        kernel = numba.njit(arguments, nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        # No folder for the cache can be written to: compiled for this process alone.
        kernel = numba.njit(arguments, nogil=True)(function)
    return kernel


def count_fp32(values: Any, words: Any, counts: Any) -> tuple[int, int, int, int, int, float, float]:
    """Run `_count_fp32`; contiguous arrays of fewer than 2**32 elements."""
    return _compiled(_count_fp32, numba.float32, numba.uint32)(values, words, counts)


def count_fp64(values: Any, words: Any, counts: Any) -> tuple[int, int, int, int, int, float, float]:
    """Run `_count_fp64`; contiguous arrays of fewer than 2**32 elements."""
    return _compiled(_count_fp64, numba.float64, numba.uint64)(values, words, counts)


def count_codes(codes: Any, counts: Any) -> None:
    """Run `_count_codes`; contiguous arrays of fewer than 2**32 elements."""
    _compiled(_count_codes, numba.uint16)(codes, counts)
