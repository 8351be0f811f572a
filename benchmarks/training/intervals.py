"""The mean of paired differences and its 95 % interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Two-sided 95 % quantiles of t with 1, 2, 3 … degrees of freedom (ISO 3207, and any table of t).
_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.95996


def t_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, lower end, upper end) of the two-sided 95 % interval; both ends are infinite for one number."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, -math.inf, math.inf
    half = _quantile(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def _quantile(degrees: int) -> float:
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    # the expansion by 1/degrees: right to 0.0001 from 30 on
    z, n = _NORMAL, degrees
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
