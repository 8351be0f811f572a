"""The magnitudes of a whole checkpoint against the range of number formats, in one pass over its files.

Unscaled, every value is held against a format as it is, and the shares follow from the histogram of all tensors.
Scaled, each tensor is first divided so that its largest magnitude lies on the format's largest value, as per-tensor
scaling does; shares are then taken tensor by tensor and added up, and the histogram counts octaves below each tensor's
own largest magnitude. A tensor's histogram is dropped as soon as it has been used: memory does not grow with the model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from bitwright.errors import ModelError
from bitwright.models.tensor_files import StoredTensor, read_into
from bitwright.quantize.range_shares import (
    Fate,
    RangeShares,
    fates_by_octave,
    raise_if_unsigned,
    range_shares,
    scale_to_largest,
)
from bitwright.quantize.statistics import TensorStatistics, available_threads, empty_statistics, measure_statistics

#: Bytes that a thread reads and counts at a time.
_PIECE_BYTES = 4 << 20
#: Bits of a code → its dtype: as files store it, lowest byte first.
_CODE_DTYPES = {8: "u1", 16: "<u2", 32: "<u4", 64: "<u8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """One tensor of a survey."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num: int
    num_nan: int
    num_inf: int
    #: Largest finite magnitude.
    amax: float
    #: Root mean square of the finite values; NaN where there is none.
    rms: float
    #: Format → what it does to the tensor.
    shares: dict[str, RangeShares]


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What one pass over a checkpoint tells."""

    #: Names of the formats, in the order they were asked for.
    formats: tuple[str, ...]
    #: Each tensor was divided by its own scale.
    scaled: bool
    num_tensors: int
    #: dtype → how many tensors of it were left out, since their elements are no floats of whole bytes.
    skipped: dict[str, int]
    #: Of all tensors together, unscaled.
    statistics: TensorStatistics
    #: k → values in the octave from 2**k; scaled: from 2**k times the largest magnitude of their tensor.
    octaves: dict[int, int]
    #: Format → octave → all that becomes of the values in it.
    fates: dict[str, dict[int, frozenset[Fate]]]
    #: Format → what it does to all values.
    shares: dict[str, RangeShares]
    #: One row per tensor, where asked for.
    rows: tuple[TensorRow, ...]


def readable_tensors(tensors: Sequence[StoredTensor]) -> tuple[tuple[StoredTensor, ...], dict[str, int]]:
    """Return the tensors whose values can be counted, and dtype → how many cannot.

    Raises:
        ModelError: there is none to count.
    """
    readable = tuple(tensor for tensor in tensors if tensor.format is not None)
    skipped = dict(Counter(tensor.dtype for tensor in tensors if tensor.format is None))
    if not readable:
        what = ", ".join(f"{number} of {dtype}" for dtype, number in skipped.items())
        raise ModelError(
            f"there is no tensor of floats to look at ({what or 'no tensor at all'}); a histogram needs F64, F32, F16, "
            "BF16 or one of the 8-bit floats"
        )
    return readable, skipped


def survey_tensors(
    tensors: Sequence[StoredTensor],
    formats: Sequence[str],
    *,
    scaled: bool = False,
    per_tensor: bool = False,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> Survey:
    """Read all tensors once and hold their values against formats.

    Args:
        tensors: from `list_tensors`; those without a float format are left out.
        formats: canonical names of scalar formats with negative numbers.
        scaled: put the largest magnitude of each tensor on the format's largest value.
        per_tensor: keep a row per tensor.
        on_read: called with the number of bytes after each piece.

    Raises:
        FormatError: a format has no negative numbers.
        ModelError: a file cannot be read, no tensor holds floats, or no value is finite.
        UnknownName: no such format.
    """
    for name in formats:
        raise_if_unsigned(name)
    readable, skipped = readable_tensors(tensors)
    whole = empty_statistics()
    octaves: Counter[int] = Counter()
    totals: dict[str, RangeShares] = {}
    fates: dict[str, dict[int, frozenset[Fate]]] = {name: {} for name in formats}
    rows: list[TensorRow] = []
    for tensor, statistics in measure_tensors(readable, on_read):
        whole += statistics
        shares: dict[str, RangeShares] = {}
        if scaled or per_tensor:
            for name in formats:
                scale = scale_to_largest(statistics.amax, name) if scaled else 1.0
                shares[name] = range_shares(statistics.histogram, name, scale)
                if scaled:
                    found = fates_by_octave(statistics.histogram, name, scale, below_amax=True)
                    fates[name] |= {octave: fates[name].get(octave, frozenset()) | found[octave] for octave in found}
        if scaled:
            totals = {name: totals[name] + shares[name] if name in totals else shares[name] for name in formats}
            octaves.update(statistics.histogram.octaves_below_amax())
        if per_tensor:
            rows.append(_row(tensor, statistics, shares))
    if not whole.num:
        empty = f"the {len(readable)} tensors have" if len(readable) > 1 else f"{readable[0].name!r} has"
        raise ModelError(f"{empty} no values, so there is nothing to draw; choose other tensors")
    if not whole.num_finite:
        raise ModelError(
            f"none of the {whole.num:,} values is finite ({whole.num_nan:,} NaN, {whole.num_inf:,} Inf), so there is "
            "nothing to draw; look at the run that wrote them, or choose other tensors"
        )
    return Survey(
        formats=tuple(formats),
        scaled=scaled,
        num_tensors=len(readable),
        skipped=skipped,
        statistics=whole,
        octaves=dict(sorted(octaves.items())) if scaled else whole.histogram.octaves(),
        fates=fates if scaled else {name: fates_by_octave(whole.histogram, name) for name in formats},
        shares=totals if scaled else {name: range_shares(whole.histogram, name) for name in formats},
        rows=tuple(rows),
    )


def prepare_counting(tensors: Sequence[StoredTensor]) -> None:
    """Compile the loops that count these tensors, a matter of seconds, or load them from disk where that was done.

    `measure_tensors` does so itself; whoever shows progress or measures time calls this first.
    """
    for tensor in {tensor.format: tensor for tensor in tensors}.values():
        measure_statistics(np.empty(0, dtype=_CODE_DTYPES[tensor.bits]), format=tensor.format)


def measure_tensors(
    tensors: Sequence[StoredTensor], on_read: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[tuple[StoredTensor, TensorStatistics]]:
    """Yield (tensor, its statistics), in their order.

    Threads read and count one piece of 4 MiB each, which is still in the cache when it is counted. They are never more
    than a few pieces ahead of what is yielded, and pieces are added up in order: the sums are the same every time.

    Raises:
        ModelError: a file cannot be read.
    """
    prepare_counting(tensors)
    num_threads = available_threads()
    buffers: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(num_threads):
        buffers.put(bytearray(_PIECE_BYTES))
    pool = ThreadPoolExecutor(num_threads)
    try:
        pending: deque[Future[TensorStatistics]] = deque()
        ahead = _pieces(tensors)
        current = empty_statistics()
        for tensor, first, num_bytes in _pieces(tensors):
            while len(pending) < 3 * num_threads and (piece := next(ahead, None)) is not None:
                pending.append(pool.submit(_measure_piece, *piece, buffers))
            current += pending.popleft().result()
            on_read(num_bytes)
            if first + num_bytes == tensor.num_bytes:
                yield tensor, current
                current = empty_statistics()
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(tensors: Sequence[StoredTensor]) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield (tensor, first byte, number of bytes); an empty tensor is one piece."""
    for tensor in tensors:
        for first in range(0, max(tensor.num_bytes, 1), _PIECE_BYTES):
            yield tensor, first, min(_PIECE_BYTES, tensor.num_bytes - first)


def _measure_piece(
    tensor: StoredTensor, first_byte: int, num_bytes: int, buffers: SimpleQueue[bytearray]
) -> TensorStatistics:
    buffer = buffers.get()
    try:
        memory = memoryview(buffer)[:num_bytes]
        read_into(memory, tensor, first_byte)
        codes = np.frombuffer(memory, dtype=_CODE_DTYPES[tensor.bits])
        return measure_statistics(codes, format=tensor.format, threads=1)
    finally:
        buffers.put(buffer)


def _row(tensor: StoredTensor, statistics: TensorStatistics, shares: dict[str, RangeShares]) -> TensorRow:
    return TensorRow(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        num=statistics.num,
        num_nan=statistics.num_nan,
        num_inf=statistics.num_inf,
        amax=statistics.amax,
        rms=statistics.rms,
        shares=shares,
    )
