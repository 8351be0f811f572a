"""fp32 inputs that reach every corner of a format, the same on every run: for the reference and for every backend.

Strata, in this order:
    points      every value of the format, every tie between neighbours, and what lies around its ends: the tie
                with the missing next value, quarters of the last step, 1.5, 2 and 4 times the largest value
    neighbours  the fp32 numbers next below and above each of these
    spread      all 256 exponents × both signs × random fractions (the last exponent is Inf and NaN), in equal shares
    ends        ±0, ±Inf, quiet and negative NaN, the smallest and largest numbers of fp32

A format of more than 16 bits has too many values for all of them: a random sample, its first and its last ones stand in.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from bitwright import formats
from bitwright.formats import Format

#: How many of its first and last magnitudes are taken of a format that is too wide for all.
_NUM_AT_ENDS = 4096


@cache
def stratified_inputs(format: Format, num: int = 1_000_000) -> np.ndarray:
    """Return about `num` fp32 inputs for one format, read-only, in no useful order.

    Args:
        format: a scalar format.
        num: at least this many come back where the values of the format leave room; never fewer than 512.
    """
    rng = np.random.default_rng(20)
    points = _points(format, rng, num // 6)
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate([points, np.nextafter(points, _INF), np.nextafter(points, -_INF)])
    per_exponent = max(1, -(-(num - near.size - _ENDS.size) // 512))
    words = (np.arange(512, dtype=np.uint32) << np.uint32(23))[:, None] | rng.integers(
        0, 1 << 23, (512, per_exponent), dtype=np.uint32
    )
    x = np.concatenate([near, words.view(np.float32).ravel(), _ENDS])
    x.flags.writeable = False
    return x


_INF = np.float32(np.inf)
_ENDS = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 2.0**-126, -(2.0**-126), 3.4028235e38, -3.4028235e38],
    dtype=np.float32,
)


def _points(format: Format, rng: np.random.Generator, limit: int) -> np.ndarray:
    codes = np.arange(1 << min(format.bits, 16), dtype=np.uint64)
    if format.bits > 16:
        first = np.arange(_NUM_AT_ENDS, dtype=np.uint64)
        codes = rng.integers(0, 1 << format.bits, limit // 4, dtype=np.uint64)
        largest = formats.encode(format.name, format.max)
        codes = np.concatenate([codes, codes ^ np.uint64(1), first, largest - first])
    values = formats.decode(format.name, codes)
    values = np.unique(values[np.isfinite(values)])
    last_step = values[-1] - values[-2]
    ends = np.concatenate([values[-1] + last_step * np.arange(1, 9) / 4, values[-1] * np.array([1.5, 2.0, 4.0])])
    points = np.concatenate([values, values[:-1] / 2 + values[1:] / 2, ends, -ends])
    with np.errstate(over="ignore", under="ignore"):
        return np.unique(points.astype(np.float32))
