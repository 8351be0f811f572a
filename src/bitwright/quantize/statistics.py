"""One pass over a tensor: how many, how large, how spread, and the histogram of its magnitudes.

Everything is taken from the bits: words of float32 and float64 are counted by their bin (see `magnitude_histogram`),
those of formats up to 16 bits by their code, from which the rest follows by the format's table. The loops are in
`backends/cpu_statistics`; arrays and CPU tensors are read where they lie.

Statistics of pieces add up to those of the whole: counts, extremes exactly, sums up to float64 rounding. Pieces have a
fixed size, so that the result depends neither on the number of threads nor on their speed.

NumPy and Numba alone: a histogram is read without torch. Rejected: one pass per figure (memory is the limit, and each
further pass costs as much as all of this); `frexp` or `log2` per element (ten times the cost of reading the bits).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright import formats
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.decode import TABLE_LOOKUP_BITS, decode_codes
from bitwright.formats.encode import code_dtype
from bitwright.quantize.magnitude_histogram import NUM_BINS, MagnitudeHistogram, read_only

#: Bytes that one thread counts at a time.
_PIECE_BYTES = 8 << 20
#: Codes of at most 16 bits are turned into float32 where going through all 65,536 counts would take longer.
_FEW = 1 << 15
#: Threads beyond this wait for memory, not for each other.
_MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorStatistics:
    """What one pass over a tensor tells. ``a + b`` are the statistics of both together."""

    #: Elements.
    num: int
    #: Elements that are NaN.
    num_nan: int
    #: Elements that are +Inf or −Inf.
    num_inf: int
    #: Smallest finite magnitude other than 0, exact; inf where there is none.
    smallest: float
    #: Sum of the finite elements, float64.
    total: float
    #: Sum of their squares, float64.
    total_squares: float
    #: Where the magnitudes lie.
    histogram: MagnitudeHistogram

    def __add__(self, other: TensorStatistics) -> TensorStatistics:
        """Return the statistics of both."""
        return TensorStatistics(
            num=self.num + other.num,
            num_nan=self.num_nan + other.num_nan,
            num_inf=self.num_inf + other.num_inf,
            smallest=min(self.smallest, other.smallest),
            total=self.total + other.total,
            total_squares=self.total_squares + other.total_squares,
            histogram=self.histogram + other.histogram,
        )

    @property
    def amax(self) -> float:
        """Largest finite magnitude, exact; 0 where there is none."""
        return self.histogram.amax

    @property
    def num_zero(self) -> int:
        """Elements that are zero, of either sign."""
        return self.histogram.num_zero

    @property
    def num_finite(self) -> int:
        """Elements that are neither Inf nor NaN."""
        return self.num - self.num_nan - self.num_inf

    @property
    def mean(self) -> float:
        """Mean of the finite elements; NaN where there is none."""
        return self.total / self.num_finite if self.num_finite else float("nan")

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements; NaN where there is none."""
        return float(np.sqrt(self.total_squares / self.num_finite)) if self.num_finite else float("nan")

    @property
    def std(self) -> float:
        """Standard deviation of the finite elements (divided by their number); NaN where there is none."""
        if not self.num_finite:
            return float("nan")
        return float(np.sqrt(max(self.total_squares / self.num_finite - self.mean**2, 0.0)))


def empty_statistics() -> TensorStatistics:
    """Return the statistics of no elements: the zero of ``+``."""
    return _from_counts(
        np.zeros(NUM_BINS, dtype=np.int64),
        num=0,
        num_zero=0,
        num_inf=0,
        extra_bits=0,
        amax=0.0,
        smallest=float("inf"),
        total=0.0,
        total_squares=0.0,
    )


def measure_statistics(x: Any, *, format: str | None = None, threads: int | None = None) -> TensorStatistics:
    """Return the statistics of a tensor in one pass over its memory.

    Args:
        x: NumPy array of float64, float32, float16 or an ml_dtypes float, any shape and strides; or a torch tensor of
            any float dtype (or int8, uint8). CPU tensors are read where they lie, others are copied to the CPU.
        format: canonical name of a format: `x` then holds its codes, as unsigned integers of the code's width.
        threads: how many may count at once; as many as there are cores where None, 8 at most.

    Raises:
        FormatError: a dtype that has no format here, integers without `format`, or codes out of range.
    """
    flat, format = _flat_codes(x, format)
    per_piece = _PIECE_BYTES // flat.itemsize
    pieces = [flat[start : start + per_piece] for start in range(0, flat.size, per_piece)] or [flat]
    count = _counter(flat.dtype, format)
    num_threads = min(threads if threads is not None else available_threads(), len(pieces))
    if num_threads <= 1:
        return reduce(add, map(count, pieces))
    with ThreadPoolExecutor(num_threads) as pool:
        return reduce(add, pool.map(count, pieces))


def available_threads() -> int:
    """Return how many threads may count at once: the cores that this process may use, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


#: Formats whose words a processor computes with: they are read as numbers, all others as codes.
_NATIVE = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64)}


def _flat_codes(x: Any, format: str | None) -> tuple[npt.NDArray[Any], str]:
    """Return (values of float32 or float64, or codes of at most 16 bits; 1-D, contiguous), and their format."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach().to("cpu")
        if format is None:
            format = _format_of(str(x.dtype))
        array = x.numpy() if format in _NATIVE else x.view(getattr(torch, f"uint{8 * x.itemsize}")).numpy()
    else:
        array = np.asarray(x)
        if format is None:
            if array.dtype.kind in "biu":
                raise FormatError(
                    f"an array of {array.dtype} may hold numbers or codes; name the format of its codes (format=…), "
                    "or convert numbers to a float dtype"
                )
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
            format = _format_of(str(array.dtype))
    record = formats.FORMATS[format]
    dtype = code_dtype(record)
    if array.dtype != _NATIVE.get(format):
        if array.itemsize != dtype.itemsize:
            raise FormatError(f"codes of {format} are passed as {dtype}, not {array.dtype}; view or cast them first")
        array = array.view(_NATIVE.get(format, dtype))
    if format not in _NATIVE and (record.bits > TABLE_LOOKUP_BITS or not _fits_fp32(format)):
        array, format = decode_codes(record, array), "fp64"
    # Counting needs no order, so that a transposed array is read as it lies.
    return np.require(array.ravel(order="K"), requirements=["A", "C"]), format


@cache
def _format_of(dtype: str) -> str:
    try:
        return formats.resolve(dtype)
    except UnknownName as error:
        raise FormatError(f"dtype {dtype} has no format with statistics; convert the tensor to float32") from error


def _counter(dtype: np.dtype[Any], format: str) -> Callable[[npt.NDArray[Any]], TensorStatistics]:
    """Return what turns one piece of `_flat_codes` into its statistics."""
    # Numba takes a third of a second to import: whoever only adds up or asks for shares does without.
    from bitwright.quantize.backends import cpu_statistics as kernels

    def count_values(values: npt.NDArray[Any]) -> TensorStatistics:
        kernel = kernels.count_fp32 if values.itemsize == 4 else kernels.count_fp64
        words = values.view(f"u{values.itemsize}")
        counts = np.zeros(NUM_BINS, dtype=np.uint32)
        largest, smallest, used, num_zero, num_inf, total, squares = kernel(values, words, counts)
        extremes = np.array([largest, smallest + 1 & (1 << 8 * values.itemsize) - 1], dtype=words.dtype)
        amax, smallest_value = extremes.view(values.dtype).tolist()
        # Bits of a word below those that tell the bin.
        hidden = 16 if values.itemsize == 4 else 45
        return _from_counts(
            counts,
            num=values.size,
            num_zero=num_zero,
            num_inf=num_inf,
            extra_bits=_num_leading(used, hidden),
            amax=amax,
            smallest=smallest_value or float("inf"),
            total=total,
            total_squares=squares,
        )

    def count_codes(codes: npt.NDArray[Any]) -> TensorStatistics:
        if codes.size <= _FEW and formats.FORMATS[format].bits == 8 * codes.itemsize:
            return count_values(_fp32_table(format)[codes])
        return _from_code_counts(_count_by_code(codes, kernels.count_codes), format)

    return count_values if dtype.kind == "f" else count_codes


def _count_by_code(codes: npt.NDArray[Any], count: Callable[..., None]) -> npt.NDArray[np.int64]:
    """Return how often each code occurs: int64 [256] or [65536]."""
    counts = np.zeros(1 << 16, dtype=np.uint32)
    if codes.itemsize == 2:
        count(codes, counts)
        return counts.astype(np.int64)
    # Bytes are counted in pairs; those that an odd address or length leaves over, one by one.
    first = codes.__array_interface__["data"][0] % 2 if codes.size else 0
    last = codes.size - (codes.size - first) % 2
    count(codes[first:last].view(np.uint16), counts)
    pairs = counts.reshape(256, 256).astype(np.int64)
    single = pairs.sum(axis=0) + pairs.sum(axis=1)
    np.add.at(single, np.concatenate([codes[:first], codes[last:]]), 1)
    return single


def _from_code_counts(counts: npt.NDArray[np.int64], format: str) -> TensorStatistics:
    values, words = _code_table(format)
    (present,) = np.nonzero(counts)
    if present.size and present[-1] >= values.size:
        raise FormatError(
            f"code {present[-1]} is not in [0, {values.size}), the codes of {format}; unpack codes that share a byte"
        )
    num = int(counts.sum())
    counts, values, words = counts[present], values[present], words[present]
    binned = np.bincount(words >> 16, weights=counts, minlength=NUM_BINS).astype(np.int64)
    finite = np.isfinite(values)
    num_inf = int(counts[np.isinf(values)].sum())
    counts, values, words = counts[finite], values[finite], words[finite]
    magnitudes = np.abs(values[values != 0])
    return _from_counts(
        binned,
        num=num,
        num_zero=int(counts[values == 0].sum()),
        num_inf=num_inf,
        extra_bits=_num_leading(int(np.bitwise_or.reduce(words)), 16),
        amax=float(magnitudes.max(initial=0.0)),
        smallest=float(magnitudes.min(initial=np.inf)),
        total=float(counts @ values),
        total_squares=float(counts @ values**2),
    )


def _from_counts(
    counts: npt.NDArray[Any],
    *,
    num: int,
    num_zero: int,
    num_inf: int,
    extra_bits: int,
    amax: float,
    smallest: float,
    total: float,
    total_squares: float,
) -> TensorStatistics:
    histogram = MagnitudeHistogram(
        counts=read_only(counts.astype(np.int64)), num_zero=int(num_zero), extra_bits=extra_bits, amax=amax
    )
    return TensorStatistics(
        num=num,
        num_nan=num - histogram.num_finite - int(num_inf),
        num_inf=int(num_inf),
        smallest=smallest,
        total=total,
        total_squares=total_squares,
        histogram=histogram,
    )


def _num_leading(used: int, width: int) -> int:
    """How many of the low `width` bits are needed, counted from their top: 0 where none of them is set."""
    low = int(used) & (1 << width) - 1
    return width + 1 - (low & -low).bit_length() if low else 0


@cache
def _code_table(format: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint32]]:
    """Return (value, fp32 magnitude word) of every code."""
    return formats.table(format), np.abs(_fp32_table(format)).view(np.uint32)


@cache
def _fp32_table(format: str) -> npt.NDArray[np.float32]:
    """Return the value of every code."""
    return formats.table(format).astype(np.float32)


@cache
def _fits_fp32(format: str) -> bool:
    """Whether float32 holds every value of a format of at most 16 bits."""
    values = formats.table(format)
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.array_equal(values.astype(np.float32), values, equal_nan=True))
