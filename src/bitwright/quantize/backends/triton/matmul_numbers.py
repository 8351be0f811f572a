"""What kernels of products know of a number format: how a code becomes its value, settled when a kernel is compiled.

    integer    the code's bits under the exponent of 2^23 are 2^23 + code: one subtraction, exact up to 16 bits
    float      the code's exponent and fraction under those of fp32 are value · 2^(bias − 127): one product, exact,
               subnormal numbers of the format included (they are subnormal fp32 numbers before it)
    table      everything else (codebooks, exponents alone, NaN at −0): its values in a list

Which one it is follows from the values: the arithmetic is done here for every code, and a format for which it gives
anything else than the format's own table goes by the table. Inf and NaN stand at the top of the magnitudes.

Products of matrix units are of 16-bit floats. A number that bf16 does not hold is the exact sum of two or three that
it does, each the upper half of what is left (`num_parts`); where fp16 holds both factors it is taken as it is.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.formats import FloatFormat, Format, IntFormat
from bitwright.formats.decode import value_table

#: Wider codes are not decoded here.
MAX_CODE_BITS = 16
_UPPER_HALF = np.uint32(0xFFFF0000)


class Number(NamedTuple):
    """A format as kernels decode it."""

    #: "integer", "float" or "table".
    kind: str
    bits: int
    #: Of integers: the top bit, which counts negatively; 0 where unsigned.
    top: int = 0
    #: Of floats.
    exponent_bits: int = 0
    #: 2^(127 − bias).
    factor: float = 1.0
    #: Some codes are no finite numbers: those that the arithmetic takes for more than the largest. Inf is one of them,
    #: NaN all others; −1 without Inf.
    has_specials: bool = False
    largest: float = 0.0
    inf: float = -1.0


def why_no_number(number: Format) -> str | None:
    """Return why kernels do not decode a format, or None if they do."""
    if number.bits > MAX_CODE_BITS:
        return f"{number.name} has {number.bits} bits, and its kernels decode up to {MAX_CODE_BITS}"
    values = value_table(number)
    with np.errstate(over="ignore"):
        is_same = np.isnan(values) | (values.astype(np.float32) == values)
    return None if is_same.all() else f"fp32 does not hold the values of {number.name}"


@cache
def number_of(number: Format) -> Number:
    """Return how codes of a format that `why_no_number` does not refuse are decoded."""
    if isinstance(number, IntFormat):
        return Number(kind="integer", bits=number.bits, top=1 << (number.bits - 1) if number.signed else 0)
    by_table = Number(kind="table", bits=number.bits)
    if not isinstance(number, FloatFormat) or not number.signed or number.bias < 0:
        return by_table
    plain = Number(
        kind="float",
        bits=number.bits,
        exponent_bits=number.exponent_bits,
        factor=2.0 ** (127 - number.bias),
    )
    special = plain._replace(
        has_specials=True, largest=number.max, inf=2.0 ** (number.emax + 1) if number.has_inf else -1.0
    )
    values = value_table(number).astype(np.float32)
    return next((known for known in (plain, special) if _is_same(_values(known), values)), by_table)


def _is_same(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    both_nan = np.isnan(expected) & np.isnan(found)
    return bool((both_nan | (expected.view(np.uint32) == found.view(np.uint32))).all())


def _values(number: Number) -> npt.NDArray[np.float32]:
    """What the arithmetic of floats gives for every code."""
    codes = np.arange(1 << number.bits, dtype=np.uint32)
    fields = (codes << np.uint32(32 - number.bits)).view(np.int32) >> np.int32(8 - number.exponent_bits)
    fraction_bits = number.bits - 1 - number.exponent_bits
    kept = ((1 << (number.bits - 1)) - 1) << (23 - fraction_bits) | 1 << 31
    with np.errstate(over="ignore", invalid="ignore"):
        values = (fields.view(np.uint32) & np.uint32(kept)).view(np.float32) * np.float32(number.factor)
        specials = np.where(np.abs(values) == np.float32(number.inf), values * np.float32(np.inf), np.float32(np.nan))
    return np.where(number.has_specials & (np.abs(values) > np.float32(number.largest)), specials, values)


@cache
def values_of(number: Format, device: torch.device) -> Tensor | None:
    """Return the value of every code, fp32, for kernels that look them up; None where they compute them."""
    if number_of(number).kind != "table":
        return None
    return torch.from_numpy(value_table(number).astype(np.float32)).to(device)


@cache
def fits(number: Format, dtype: torch.dtype) -> bool:
    """Whether every number of a format, and every difference of two integers of it, is one of a 16-bit dtype."""
    values = _widest(number)
    return bool(torch.equal(values.to(dtype).to(torch.float64), values))


@cache
def num_parts(number: Format) -> int:
    """Return how many numbers of bf16 add up to each number of a format, and to each difference of its integers."""
    rest = _widest(number).float().numpy()
    parts = 0
    while parts == 0 or rest.any():
        rest = rest - (rest.view(np.uint32) & _UPPER_HALF).view(np.float32)
        parts += 1
    return parts


def _widest(number: Format) -> Tensor:
    """All finite values, and of integers all that is left when one is subtracted: fp64."""
    values = value_table(number)
    values = values[np.isfinite(values)]
    if isinstance(number, IntFormat):
        span = number.max - number.min
        values = np.arange(-span, span + 1)
    return torch.from_numpy(np.array(values, dtype=np.float64))
