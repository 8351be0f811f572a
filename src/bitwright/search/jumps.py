"""What errors cost in a mixture of experts beyond the second order.

An error anywhere before a router moves its logits. Near the border between two experts the smallest move swaps them,
and the output jumps. The probability of that grows with the *size* σ of the move, not with its square, while the smooth
part of the KL, S, grows with σ². A score S is the smooth part alone; what is measured is

    KL(S) = S + c √S

with one c for a model. On a tiny random mixture measured / S rose from 1.5 to 100 over four decades of S at every site
before a router, weights and values alike, and was 1 behind the last one. Errors of many sites add up in the variance of
the logits, so that the same law holds for a whole assignment, with S the sum of its scores. With c from the probes,
assignments of little error, of which down to 1/18 was told, are told within a factor of 3.6; from a KL of 0.003 on both
are within a third (tests/search/test_jumps.py). Since KL(S) rises with S, the best assignment under a limit of KL is
the best one under the limit S(KL): the choosing problem stays linear.

Experts of the last layer feed no router; the law overstates them, whose share of a model is small. Rejected: a √ for
the sites before a router alone, which no longer adds up in the choosing problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Range of log10 c in which a fit looks, and how finely.
_DECADES = (-5.0, 2.0)
_STEPS = 701


@dataclass(frozen=True, kw_only=True, slots=True)
class Jumps:
    """The law of a model."""

    #: In √(nats per scored prediction); 0 where no expert is chosen.
    c: float = 0.0

    def total(self, smooth: float) -> float:
        """KL that is to be measured where scores add up to `smooth`."""
        return smooth + self.c * math.sqrt(max(smooth, 0.0))

    def smooth(self, total: float) -> float:
        """The inverse of `total`."""
        if self.c == 0.0 or total <= 0:
            return max(total, 0.0)
        return (2 * total / (self.c + math.sqrt(self.c**2 + 4 * total))) ** 2  # the root without a difference


def fit_jumps(pairs: Sequence[tuple[float, float]]) -> Jumps:
    """The c whose law is nearest to measurements in the logarithm.

    Args:
        pairs: (sum of scores, measured KL) of probes, both positive; others are left out.

    Returns:
        c = 0 where there are none, or where no jumps are seen.
    """
    usable = [(s, m) for s, m in pairs if s > 0 and m > 0]
    if not usable:
        return Jumps()
    low, high = _DECADES
    tried = [0.0, *(10 ** (low + (high - low) * i / (_STEPS - 1)) for i in range(_STEPS))]
    return Jumps(c=min(tried, key=lambda c: sum(math.log(Jumps(c=c).total(s) / m) ** 2 for s, m in usable)))
