"""Every rounding mode without random bits, number by number: `formats/round.py` in a loop.

Less in a hurry than `elementwise` and `tiles`, which know nearest even alone. In fp64 each step is exact: with the step
q = 2^(max(floor(log2 |x|), emin) − fraction_bits), |x| / q = n + r splits into an integer and a rest, the mode says
from r, the parity of n and the sign whether n + 1 is taken, and n · q is the value. Integers are the format with q = 1.
`stochastic` does the same with random bits.
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

#: Names of `formats.ROUNDINGS` and how the kernel calls them.
MODES = {"nearest_even": 0, "nearest_away": 1, "toward_zero": 2, "up": 3, "down": 4}


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


bits_of_double = intrinsic(_bitcast(types.float64, types.int64, ir.IntType(64)))
double_of = intrinsic(_bitcast(types.int64, types.float64, ir.DoubleType()))


@njit(nogil=True, error_model="numpy", inline="always")
def _steps_up(mode: Any, rest: Any, is_odd: Any, is_negative: Any) -> Any:
    """Whether the larger magnitude is taken, in modes without random bits."""
    if mode == 0:
        return rest > 0.5 or (rest == 0.5 and is_odd)
    if mode == 1:
        return rest >= 0.5
    if mode == 2:
        return False
    if mode == 3:
        return rest > 0.0 and not is_negative
    return rest > 0.0 and is_negative


@njit(nogil=True, error_model="numpy", cache=True)
def round_modes(x: Any, out: Any, first: Any, last: Any, grid: Any, mode: Any) -> None:
    """``out[first : last] = round(x[…])``, fp32 arrays."""
    for i in range(first, last):
        value = np.float64(x[i])
        magnitude = abs(value)
        is_negative = np.signbit(value)
        if np.isnan(value):
            out[i] = np.float32(grid.nan) if grid.replaces_nan else x[i]
            continue
        limit = -grid.smallest if is_negative else grid.largest
        if magnitude == np.inf:
            found = limit if grid.infinite == grid.largest else grid.infinite
        else:
            step_exponent = max((bits_of_double(magnitude) >> 52) - 1023, grid.emin) - grid.fraction_bits
            steps = magnitude * double_of((1023 - step_exponent) << 52)
            whole = np.floor(steps)
            if _steps_up(mode, steps - whole, whole % 2.0 == 1.0, is_negative):
                whole += 1.0
            found = whole * double_of((1023 + step_exponent) << 52)
            if found > limit:
                leaves_range = _steps_up(mode, 1.0, True, is_negative)
                found = grid.beyond if leaves_range and grid.beyond != grid.largest else limit
        signed = -found if is_negative else found
        if signed == 0.0 and not grid.has_negative_zero:
            signed = 0.0
        out[i] = np.float32(signed)


@njit(nogil=True, error_model="numpy", cache=True)
def round_modes_parallel(x: Any, out: Any, count: Any, grid: Any, mode: Any, team: Any) -> None:
    """`round_modes` of a whole array on several threads."""
    in_team(round_modes, (x, out), count, (grid, mode), team)
