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

The sign is not looked at: an unsigned format is judged by the magnitudes it holds. Overflow is what rounds beyond the
largest value, whatever a rule then makes of it (Inf, NaN, the largest value).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values
from bitwright.formats.types import FloatFormat, Format, IntFormat
from bitwright.quantize.magnitude_histogram import MagnitudeHistogram

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


def range_shares(histogram: MagnitudeHistogram, format: str | Format, scale: float = 1.0) -> RangeShares:
    """Return what rounding to a format does to the values that a histogram counted.

    Args:
        histogram: from `measure_statistics`.
        format: canonical name, or the record of a scalar format.
        scale: positive and finite; values are divided by it before they are rounded.

    Raises:
        FormatError: `scale` is zero, negative, Inf or NaN.
        UnknownName: no format has that name.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise FormatError(f"the scale is {scale}; it multiplies codes back to values, so give a positive number")
    record = formats.FORMATS[format] if isinstance(format, str) else format
    counts = histogram.nonzero_counts()
    (filled,) = np.nonzero(counts)
    magnitudes = np.minimum(_points_of_bins(filled, histogram.extra_bits), histogram.amax)
    points = magnitudes / scale
    weights = np.broadcast_to(counts[filled, None] / points.shape[1], points.shape)
    rounded = decode_codes(record, encode_values(record, points))
    overflows = _overflows(record, points)
    flushed = rounded == 0
    subnormal = ~flushed & ~overflows & (rounded < _smallest_normal(record))
    num = histogram.num_finite
    lost, small, beyond = (float(weights[mask].sum()) / max(num, 1) for mask in (flushed, subnormal, overflows))
    zero = histogram.num_zero / max(num, 1)
    with np.errstate(over="ignore"):  # a format without zero, scaled, can err by more than float64 squares
        noise = float((weights * (magnitudes - scale * rounded) ** 2).sum())
    return RangeShares(
        num=num,
        zero=zero,
        flushed=lost,
        subnormal=small,
        normal=max(1.0 - zero - lost - small - beyond, 0.0) if num else 0.0,
        overflow=beyond,
        signal=float((weights * magnitudes**2).sum()),
        noise=noise,
    )


def judge_octave(format: str | Format, exponent: int, scale: float = 1.0) -> Fate:
    """Return what becomes of an octave: the fate of its geometric middle, ``2**(exponent + ½)``.

    `scale` is that of `range_shares`.
    """
    record = formats.FORMATS[format] if isinstance(format, str) else format
    middle = np.array([math.ldexp(math.sqrt(2), exponent) / scale])
    if _overflows(record, middle)[0]:
        return "overflow"
    rounded = decode_codes(record, encode_values(record, middle))[0]
    return "zero" if rounded == 0 else "subnormal" if rounded < _smallest_normal(record) else "normal"


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
