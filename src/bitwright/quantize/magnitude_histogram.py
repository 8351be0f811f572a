"""Where the magnitudes of a tensor lie: the one log2 histogram of the project.

A float32 word is ``[sign | 8 exponent bits | 23 fraction bits]``, and magnitudes ascend with the word. Its top 15
magnitude bits are the bin: 128 bins per octave, 32,640 for all finite magnitudes, exactly one per magnitude of bf16.

    bin = (word >> 16) & 0x7FFF        lower edge = the float32 whose word is bin << 16

Octave counts, quantiles and the shares of a format (`range_shares`) follow from the bins, so that a tensor is read
once, whatever is asked of it later. `extra_bits` says how much finer than the bins the values are: bf16, fp8 and fp4
values, and wider arrays made of them, use 0 extra bits, and everything derived is exact; fp16 uses 3; arbitrary float32
uses 16, and a magnitude is then known to within one bin (relative width at most 1/128).

Rejected: bins of equal width in value (one outlier leaves a single bin for the rest); octaves alone (a format's largest
value lies inside one); fp16's 1,024 bins per octave (eight times the memory, for edges that hardly any format has).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.errors import FormatError

#: Bins of a histogram; those from NUM_FINITE_BINS on hold Inf and NaN.
NUM_BINS = 1 << 15
#: Bins of finite magnitudes.
NUM_FINITE_BINS = 0x7F80


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MagnitudeHistogram:
    """Counts of magnitudes, 128 bins per octave."""

    #: int64 [32768], read-only. Bin 0 holds zeros and what is below 2**-133; bins from 0x7F80 on hold Inf and NaN.
    counts: npt.NDArray[np.int64]
    #: Zeros of either sign; they are part of bin 0.
    num_zero: int
    #: Most fraction bits that a value had beyond the 7 that tell its bin: 0 where every value is a bin's lower edge.
    extra_bits: int
    #: Largest finite magnitude, exact; 0 where there is none.
    amax: float

    def __add__(self, other: MagnitudeHistogram) -> MagnitudeHistogram:
        """Return the histogram of both."""
        return MagnitudeHistogram(
            counts=read_only(self.counts + other.counts),
            num_zero=self.num_zero + other.num_zero,
            extra_bits=max(self.extra_bits, other.extra_bits),
            amax=max(self.amax, other.amax),
        )

    @property
    def num_finite(self) -> int:
        """Values that are neither Inf nor NaN, zeros included."""
        return int(self.counts[:NUM_FINITE_BINS].sum())

    def nonzero_counts(self) -> npt.NDArray[np.int64]:
        """Return the counts of finite values other than zero: int64 [32640]."""
        counts = self.counts[:NUM_FINITE_BINS].copy()
        counts[0] -= self.num_zero
        return counts

    def octaves(self) -> dict[int, int]:
        """Return k → how many magnitudes lie in [2**k, 2**(k + 1)), ascending, empty octaves left out.

        Zeros, Inf and NaN are in no octave. Exact, but for magnitudes below 2**-133, which all count as k = −134.
        """
        counts = self.nonzero_counts()
        (filled,) = np.nonzero(counts)
        exponents = np.frexp(bin_edges()[filled])[1] - 1
        exponents[filled == 0] = -134
        return _summed_by(exponents, counts[filled])

    def octaves_below_amax(self) -> dict[int, int]:
        """Return k < 0 → how many lie in (2**k, 2**(k + 1)] times the largest magnitude, ascending.

        A bin that such an edge cuts goes to the side where its middle lies (its lower edge where `extra_bits` is 0).
        """
        counts = self.nonzero_counts()
        (filled,) = np.nonzero(counts)
        middle = bin_edges()[filled]
        if self.extra_bits:
            middle = (middle + bin_edges()[filled + 1]) / 2
        mantissa, exponents = np.frexp(np.minimum(middle / self.amax, 1.0) if filled.size else middle)
        return _summed_by(exponents - 1 - (mantissa == 0.5), counts[filled])

    def quantile(self, share: float) -> float:
        """Return the magnitude that a `share` in [0, 1] of all finite values does not exceed.

        The lower edge of the bin that the quantile lies in: exact where `extra_bits` is 0, else at most 1/128 low.

        Raises:
            FormatError: `share` is out of range, or no value is finite.
        """
        if not 0.0 <= share <= 1.0:
            raise FormatError(f"the share of a quantile is {share}; give a number from 0 to 1")
        below = np.cumsum(self.counts[:NUM_FINITE_BINS])
        if not below[-1]:
            raise FormatError("no finite value was counted, so there is no quantile; look at num_nan and num_inf")
        return float(bin_edges()[np.searchsorted(below, max(share * below[-1], 1))])


@cache
def bin_edges() -> npt.NDArray[np.float64]:
    """Return the lower edge of every finite bin, and 2**128 above the last: float64 [32641], read-only."""
    edges = (np.arange(NUM_FINITE_BINS, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    return read_only(np.append(edges, 2.0**128))


def _summed_by(exponents: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> dict[int, int]:
    keys, group = np.unique(exponents, return_inverse=True)
    sums = np.zeros(keys.size, dtype=np.int64)
    np.add.at(sums, group, counts)
    return dict(zip(keys.tolist(), sums.tolist(), strict=True))


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array itself, no longer to be written to."""
    array.flags.writeable = False
    return array
