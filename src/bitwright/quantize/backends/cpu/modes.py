"""Every rounding mode, number by number: `formats/round.py` in a loop.

Less in a hurry than `elementwise` and `tiles`, which know nearest even alone. In fp64 each step is exact: with the step
q = 2^(max(floor(log2 |x|), emin) − fraction_bits), |x| / q = n + r splits into an integer and a rest, the mode says
from r, the parity of n, the sign and the random bits whether n + 1 is taken, and n · q is the value. Integers are the
format with q = 1. Random bits: `formats/philox.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from bitwright.formats import FloatFormat, Format, IntFormat
from bitwright.formats.encode import overflow_values
from bitwright.quantize.backends.cpu.team import in_team

#: Names of `formats.ROUNDINGS` and how kernels call them.
MODES = {"nearest_even": 0, "nearest_away": 1, "toward_zero": 2, "up": 3, "down": 4, "stochastic": 5}


class ModeGrid(NamedTuple):
    """A format, Python numbers throughout."""

    #: Exponent of the smallest normal number; of integers, one so large that the step is 1 everywhere.
    emin: int
    fraction_bits: int
    #: Largest and smallest number.
    largest: float
    smallest: float
    #: What stands for larger magnitudes, for infinite ones, and for NaN; and whether NaN has a stand-in at all.
    beyond: float
    infinite: float
    nan: float
    replaces_nan: bool
    has_negative_zero: bool


def why_no_mode(format: Format) -> str | None:
    """None if `mode_grid` has an answer, else the reason in words."""
    if isinstance(format, IntFormat):
        return None
    if not isinstance(format, FloatFormat):
        return f"codebook {format.name} is rounded to nearest even only"
    if not (format.signed and format.has_zero):
        return f"{format.name} has no sign or no zero"
    return None if format.bits < 32 else f"{format.name} has no room between its numbers"


def mode_grid(format: Format, overflow: str) -> ModeGrid:
    """The numbers by which the kernel rounds; `why_no_mode` must have said None."""
    stand_in = overflow_values(format, overflow)
    is_float = isinstance(format, FloatFormat)
    return ModeGrid(
        emin=format.emin if isinstance(format, FloatFormat) else 200,
        fraction_bits=format.fraction_bits if isinstance(format, FloatFormat) else 200,
        largest=float(format.max),
        smallest=float(format.min),
        beyond=float(stand_in.beyond),
        infinite=float(stand_in.infinite),
        nan=float("nan") if stand_in.nan is None else float(stand_in.nan),
        replaces_nan=stand_in.nan is not None,
        has_negative_zero=is_float and format.has_negative_zero,
    )


def _bitcast(source: Any, target: Any, llvm_type: ir.Type) -> Callable[..., Any]:
    def typing(typing_context: Any, value: Any) -> Any:
        return target(source), lambda context, builder, signature, args: builder.bitcast(args[0], llvm_type)

    return typing


_bits_of_double = intrinsic(_bitcast(types.float64, types.int64, ir.IntType(64)))
_double_of = intrinsic(_bitcast(types.int64, types.float64, ir.DoubleType()))

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


@njit(nogil=True, error_model="numpy", inline="always")
def _steps_up(mode: Any, rest: Any, is_odd: Any, is_negative: Any, threshold: Any) -> Any:
    """Whether the larger magnitude is taken. `threshold`: 1 − R / 2^b, of stochastic rounding."""
    if mode == 0:
        return rest > 0.5 or (rest == 0.5 and is_odd)
    if mode == 1:
        return rest >= 0.5
    if mode == 2:
        return False
    if mode == 3:
        return rest > 0.0 and not is_negative
    if mode == 4:
        return rest > 0.0 and is_negative
    return rest >= threshold


@njit(nogil=True, error_model="numpy", inline="always")
def _round_one(number: Any, index: Any, grid: Any, mode: Any, seed: Any, random_bits: Any) -> Any:
    """One fp32 number on the grid; `index` is that of its random word."""
    value = np.float64(number)
    magnitude = abs(value)
    is_negative = np.signbit(value)
    if np.isnan(value):
        return np.float32(grid.nan) if grid.replaces_nan else number
    limit = -grid.smallest if is_negative else grid.largest
    if magnitude == np.inf:
        found = limit if grid.infinite == grid.largest else grid.infinite
    else:
        threshold = 1.0
        if mode == 5:
            word = _random_word(np.uint64(index), seed) >> np.uint64(32 - random_bits)
            # rest, cut to its first bits, plus the random ones reaches 1
            threshold = 1.0 - np.float64(word) / 2.0**random_bits
        exponent = max((_bits_of_double(magnitude) >> 52) - 1023, grid.emin)
        step_exponent = exponent - grid.fraction_bits
        steps = magnitude * _double_of((1023 - step_exponent) << 52)
        whole = np.floor(steps)
        rest = steps - whole
        if _steps_up(mode, rest, whole % 2.0 == 1.0, is_negative, threshold):
            whole += 1.0
        found = whole * _double_of((1023 + step_exponent) << 52)
        if found > limit:
            leaves_range = _steps_up(mode, 1.0, True, is_negative, threshold)
            found = grid.beyond if leaves_range and grid.beyond != grid.largest else limit
    signed = -found if is_negative else found
    if signed == 0.0 and not grid.has_negative_zero:
        signed = 0.0
    return np.float32(signed)


@njit(nogil=True, error_model="numpy", cache=True)
def round_modes(x: Any, out: Any, first: Any, last: Any, grid: Any, mode: Any, seed: Any, random_bits: Any) -> None:
    """``out[first : last] = round(x[…])``, fp32 arrays."""
    for i in range(first, last):
        out[i] = _round_one(x[i], i, grid, mode, seed, random_bits)


@njit(nogil=True, error_model="numpy", cache=True)
def round_modes_parallel(
    x: Any, out: Any, count: Any, grid: Any, mode: Any, seed: Any, random_bits: Any, team: Any
) -> None:
    """`round_modes` of a whole array on several threads."""
    in_team(round_modes, (x, out), count, (grid, mode, seed, random_bits), team)


@njit(nogil=True, error_model="numpy", cache=True)
def scale_modes(
    x: Any,
    out: Any,
    scales: Any,
    first_row: Any,
    last_row: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    mode: Any,
    seed: Any,
    random_bits: Any,
) -> None:
    """Codes of rows under scales that are known, ``scales[row // rows, column // size]``: fp32 arrays."""
    for row in range(first_row, last_row):
        for group in range((columns + size - 1) // size):
            scale = scales[row // rows, group]
            divisor = scale if scale != np.float32(0.0) else np.float32(np.inf)
            start = row * columns + group * size
            for i in range(start, min(start + size, (row + 1) * columns)):
                out[i] = _round_one(np.float32(x[i] / divisor), i, grid, mode, seed, random_bits)


@njit(nogil=True, error_model="numpy", cache=True)
def scale_modes_parallel(
    x: Any,
    out: Any,
    scales: Any,
    count: Any,
    columns: Any,
    size: Any,
    rows: Any,
    grid: Any,
    mode: Any,
    seed: Any,
    random_bits: Any,
    team: Any,
) -> None:
    """`scale_modes` on several threads."""
    in_team(scale_modes, (x, out, scales), count, (columns, size, rows, grid, mode, seed, random_bits), team)
