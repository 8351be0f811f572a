"""fp32 inputs that reach every corner of a format, the same on every run: for the reference and for every backend.

Strata, in this order:
    points      every value of the format, every tie between neighbours, and what lies around its ends: the tie
                with the missing next value, quarters of the last step, 1.5, 2 and 4 times the largest value
    neighbours  the fp32 numbers next below and above each of these
    spread      all 256 exponents × both signs × random fractions (the last exponent is Inf and NaN), in equal shares
    ends        ±0, ±Inf, quiet and negative NaN, the smallest and largest numbers of fp32

Where a format has more values than fit (over 16 bits, or a small `num`), a random sample stands in for the points,
along with its first and last values and its ends.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from bitwright import formats
from bitwright.formats import Format


@cache
def stratified_inputs(format: Format, num: int = 1_000_000) -> np.ndarray:
    """Return about `num` fp32 inputs for one format, read-only, in no useful order.

    Args:
        format: a scalar format.
        num: a few thousand at least; half a million holds every point of a format of 16 bits.
    """
    rng = np.random.default_rng(20)
    points = _points(format, rng, num // 4)
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate([points, np.nextafter(points, _INF), np.nextafter(points, -_INF)])
    per_exponent = max(1, -(-(num - near.size - _ENDS.size) // 512))
    fractions = rng.integers(0, 1 << 23, (512, per_exponent), dtype=np.uint32)
    words = (np.arange(512, dtype=np.uint32) << np.uint32(23))[:, None] | fractions
    x = np.concatenate([near, words.view(np.float32).ravel(), _ENDS])
    x.flags.writeable = False
    return x


def quiet(x: np.ndarray) -> np.ndarray:
    """`x` with one NaN in place of all: casts warn of signalling ones, and treat negative ones as they like."""
    return np.where(np.isnan(x), np.float32(np.nan), x)


_INF = np.float32(np.inf)
_ENDS = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 2.0**-126, -(2.0**-126), 3.4028235e38, -3.4028235e38],
    dtype=np.float32,
)


def _points(format: Format, rng: np.random.Generator, limit: int) -> np.ndarray:
    """At most about `limit` points."""
    codes = np.arange(1 << min(format.bits, 16), dtype=np.uint64)
    if format.bits > 16:
        largest = formats.encode(format.name, format.max).astype(np.uint64)
        pairs = rng.integers(0, 1 << format.bits, limit // 8, dtype=np.uint64)
        codes = np.concatenate([pairs, pairs ^ np.uint64(1), codes[:1000], largest - codes[:1000]])
    values = formats.decode(format.name, codes)
    values = np.unique(values[np.isfinite(values)])
    last_step = values[-1] - values[-2]
    with np.errstate(over="ignore", under="ignore"):
        ends = np.concatenate([values[-1] + last_step * np.arange(1, 9) / 4, values[-1] * np.array([1.5, 2.0, 4.0])])
        inner = np.concatenate([values, values[:-1] / 2 + values[1:] / 2])
        if inner.size > limit:
            inner = np.concatenate([rng.choice(inner, limit, replace=False), values[:100], values[-100:]])
        return np.unique(np.concatenate([inner, ends, -ends]).astype(np.float32))
