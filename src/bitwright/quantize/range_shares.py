"""What a format does to a tensor whose histogram is known: the shares that become 0, subnormal, or too large.

Values stand for their bin: a bin is rounded once, with the format's own rounding, and weighs as many values as were
counted in it. Where the values are finer than the bins (``extra_bits`` > 0), a bin is stood for by the 2, 4 or 8 points
that its values can have, or by 8 spread points when there are more:

    share      exact for bf16, fp16, fp8 and narrower values (and float32 arrays of such); otherwise an edge of the
               format's range that cuts a bin (1/128 of an octave) divides that bin's values by points
    SQNR       10 · log10(Σ x² / Σ (x − x̂)²) over finite values, x̂ saturated; estimated to about 0.5 dB from points

`scale` is what codes are multiplied by to give values back, so that ``x / scale`` is what is rounded. A bin of fp16
values is exact in its points but not in how many values each had: its 8 points weigh the same.

float64 values outside float32's range lie in its first and last bin, and are judged as if they were inside.

A histogram of magnitudes knows no signs. A format is judged by its positive numbers, as if the negative ones were the
same (int8 has −128 as well; codebooks may differ), and one without negative numbers is refused. Overflow is what rounds
beyond the largest value, whatever a rule then makes of it (Inf, NaN, the largest value).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values
from bitwright.formats.types import FloatFormat, Format, IntFormat
from bitwright.quantize.magnitude_histogram import NUM_BINS, MagnitudeHistogram

#: What can become of a value other than zero.
Fate = Literal["zero", "subnormal", "normal", "overflow"]
#: Points of a bin whose values are finer than this many bits.
_POINT_BITS = 3
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeShares:
    """Where a format puts the finite values of a tensor. The five shares are of all finite values and add up to 1."""

    #: Finite values, zeros included. The shares are 0 where there is none.
    num: int
    #: Was 0 before.
    zero: float
    #: Rounds to 0, and was not.
    flushed: float
    #: Rounds to a value below the smallest one of full precision.
    subnormal: float
    #: Rounds to a value of full precision.
    normal: float
    #: Rounds beyond the largest value.
    overflow: float
    #: Sum of squares.
    signal: float
    #: Sum of squared errors, the overflow saturated.
    noise: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise in dB; inf without noise, −inf where that overflows, NaN without a signal."""
        if not self.signal:
            return math.nan
        if not self.noise:
            return math.inf
        ratio = self.signal / self.noise
        return 10 * math.log10(ratio) if ratio else -math.inf

    def __add__(self, other: RangeShares) -> RangeShares:
        """Return the shares of both tensors together."""
        num = self.num + other.num
        shares = {
            name: (self.num * getattr(self, name) + other.num * getattr(other, name)) / max(num, 1)
            for name in ("zero", "flushed", "subnormal", "normal", "overflow")
        }
        return RangeShares(num=num, signal=self.signal + other.signal, noise=self.noise + other.noise, **shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RoundedBins:
    """The bins of a histogram that hold values, held against a format."""

    #: Their indices: int64 [bins].
    bins: npt.NDArray[np.int64]
    #: Values of each bin: int64 [bins].
    counts: npt.NDArray[np.int64]
    #: The points that stand for each bin: float64 [bins, points].
    magnitudes: npt.NDArray[np.float64]
    #: What becomes of magnitudes / scale: float64 [bins, points].
    rounded: npt.NDArray[np.float64]
    #: Fate → which points meet it: bool [bins, points].
    fates: Mapping[Fate, npt.NDArray[np.bool_]]


def raise_if_unsigned(format: str | Format) -> None:
    """Refuse a format without negative numbers.

    Raises:
        FormatError: it has none.
        UnknownName: no format has that name.
    """
    record = formats.FORMATS[format] if isinstance(format, str) else format
    if not record.signed:
        raise FormatError(
            f"{record.name} holds no negative numbers, and a histogram looks at magnitudes alone, whatever their sign; "
            "name signed formats"
        )


def range_shares(histogram: MagnitudeHistogram, format: str | Format, scale: float = 1.0) -> RangeShares:
    """Return what rounding to a format does to the values that a histogram counted.

    Args:
        histogram: from `measure_statistics`.
        format: canonical name, or the record of a scalar format, with negative numbers.
        scale: positive and finite; values are divided by it before they are rounded.

    Raises:
        FormatError: the format has no negative numbers, or `scale` is zero, negative, Inf or NaN.
        UnknownName: no format has that name.
    """
    found = _round_bins(histogram, format, scale)
    weights = np.broadcast_to(found.counts[:, None] / found.magnitudes.shape[1], found.magnitudes.shape)
    num = histogram.num_finite
    share = {fate: float(weights[mask].sum()) / max(num, 1) for fate, mask in found.fates.items()}
    zero = histogram.num_zero / max(num, 1)
    with np.errstate(over="ignore"):  # scaled, an error can be more than float64 squares
        noise = float((weights * (found.magnitudes - scale * found.rounded) ** 2).sum())
    lost = share["zero"] + share["subnormal"] + share["overflow"]
    return RangeShares(
        num=num,
        zero=zero,
        flushed=share["zero"],
        subnormal=share["subnormal"],
        normal=max(1.0 - zero - lost, 0.0) if num else 0.0,
        overflow=share["overflow"],
        signal=float((weights * found.magnitudes**2).sum()),
        noise=noise,
    )


def fates_by_octave(
    histogram: MagnitudeHistogram, format: str | Format, scale: float = 1.0, *, below_amax: bool = False
) -> dict[int, frozenset[Fate]]:
    """Return octave → all that becomes of the values in it; octaves without values are left out.

    Args:
        histogram: from `measure_statistics`.
        format: as in `range_shares`.
        scale: as in `range_shares`.
        below_amax: octaves are those of `octaves_below_amax`, in place of `octaves`.

    Raises:
        FormatError: as `range_shares`.
        UnknownName: no format has that name.
    """
    rounded = _round_bins(histogram, format, scale)
    found: dict[int, frozenset[Fate]] = {}
    for fate, mask in rounded.fates.items():
        counts = np.zeros(NUM_BINS, dtype=np.int64)
        counts[rounded.bins[mask.any(axis=1)]] = 1
        part = replace(histogram, counts=counts, num_zero=0)
        for octave in part.octaves_below_amax() if below_amax else part.octaves():
            found[octave] = found.get(octave, frozenset()) | {fate}
    return found


def _round_bins(histogram: MagnitudeHistogram, format: str | Format, scale: float) -> _RoundedBins:
    if not (scale > 0 and math.isfinite(scale)):
        raise FormatError(f"the scale is {scale}; it multiplies codes back to values, so give a positive number")
    raise_if_unsigned(format)
    record = formats.FORMATS[format] if isinstance(format, str) else format
    counts = histogram.nonzero_counts()
    (filled,) = np.nonzero(counts)
    magnitudes = np.minimum(_points_of_bins(filled, histogram.extra_bits), histogram.amax)
    rounded, fates = _judge(record, magnitudes / scale)
    return _RoundedBins(bins=filled, counts=counts[filled], magnitudes=magnitudes, rounded=rounded, fates=fates)


def _judge(
    format: Format, points: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], dict[Fate, npt.NDArray[np.bool_]]]:
    """Return (what points round to, fate → which points meet it). Every point meets one."""
    rounded = decode_codes(format, encode_values(format, points))
    overflow, zero = _overflows(format, points), rounded == 0
    subnormal = ~zero & ~overflow & (rounded < _smallest_normal(format))
    return rounded, {
        "zero": zero,
        "subnormal": subnormal,
        "normal": ~(zero | subnormal | overflow),
        "overflow": overflow,
    }


def judge_octave(format: str | Format, exponent: int, scale: float = 1.0) -> Fate:
    """Return what becomes of an octave: the fate of its geometric middle, ``2**(exponent + ½)``.

    `scale` is that of `range_shares`.
    """
    record = formats.FORMATS[format] if isinstance(format, str) else format
    _, fates = _judge(record, np.array([math.ldexp(math.sqrt(2), exponent) / scale]))
    return next(fate for fate, mask in fates.items() if mask[0])


def scale_to_largest(amax: float, format: str | Format) -> float:
    """Return the scale that puts `amax` on the format's largest value; 1 where `amax` is 0 or the scale is not normal.

    This is per-tensor scaling by amax as a recipe would do it, without rounding of the scale.
    """
    record = formats.FORMATS[format] if isinstance(format, str) else format
    scale = amax / record.max
    return scale if scale >= np.finfo(np.float64).tiny else 1.0


def _points_of_bins(bins: npt.NDArray[Any], extra_bits: int) -> npt.NDArray[np.float64]:
    """Return the magnitudes that stand for each bin: float64 [bins, points], each exact in float32."""
    if extra_bits <= _POINT_BITS:
        low = np.arange(1 << extra_bits) << 16 - extra_bits
    else:
        # Spread evenly, but on no binary grid, which would meet a format's own steps at the same place each time.
        low = ((np.arange(1 << _POINT_BITS) + 0.5) * _GOLDEN % 1 * (1 << 16)).astype(np.int64)
    words = (bins[:, None] << 16) + low
    return words.astype(np.uint32).view(np.float32).astype(np.float64)


def _overflows(format: Format, magnitudes: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Where a magnitude lies beyond the largest value by more than half a step, or by half where a tie goes up."""
    match format:
        case FloatFormat():
            half_step = math.ldexp(1.0, format.emax - format.fraction_bits - 1)
            largest_is_odd = format.fraction_bits == 0 or (format.num_finite_magnitudes - 1) % 2 == 1
        case IntFormat():
            half_step, largest_is_odd = 0.5, int(format.max) % 2 == 1
        case _:
            # A codebook has no step beyond its last value.
            return magnitudes > format.max
    limit = format.max + half_step
    return magnitudes >= limit if largest_is_odd else magnitudes > limit


def _smallest_normal(format: Format) -> float:
    return format.min_normal if isinstance(format, FloatFormat) else 0.0
