"""What errors cost in a mixture of experts beyond the second order.

An error anywhere before a router moves its logits. Near the border between two experts the smallest move swaps them,
and the output jumps. The probability of that grows with the *size* σ of the move, not with its square, while the smooth
part of the KL, S, grows with σ². A score S is the smooth part alone; what is measured is

    KL(S) = S + c √S

with one c for a model: sites of all roles and schemes of a tiny random mixture kept it within a factor of 2 over four
decades of S, where measured / S fell from 190 to 6. Errors of many sites add up in the variance of the logits, so that
the same law holds for a whole assignment, with S the sum of its scores. Since KL(S) rises with S, the best assignment
under a limit of KL is the best one under the limit S(KL): the choosing problem stays linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Range of log10 c in which a fit looks, and how finely.
_DECADES = (-5.0, 2.0)
_STEPS = 1401


@dataclass(frozen=True, kw_only=True, slots=True)
class Jumps:
    """The law of a model: c is 0 where no expert is chosen."""

    #: In √(nats per scored prediction).
    c: float

    def total(self, smooth: float) -> float:
        """KL that is to be measured where scores add up to `smooth`."""
        return smooth + self.c * math.sqrt(max(smooth, 0.0))

    def smooth(self, total: float) -> float:
        """The inverse of `total`."""
        root = (math.sqrt(self.c**2 + 4 * max(total, 0.0)) - self.c) / 2
        return root**2


def fit_jumps(pairs: Sequence[tuple[float, float]]) -> Jumps:
    """The c whose law is nearest to measurements in the logarithm.

    Args:
        pairs: (sum of scores, measured KL) of probes, both positive; others are left out.

    Returns:
        c = 0 where there are none, or where no jumps are seen.
    """
    usable = [(s, m) for s, m in pairs if s > 0 and m > 0]
    if not usable:
        return Jumps(c=0.0)
    low, high = _DECADES
    tried = [0.0, *(10 ** (low + (high - low) * i / (_STEPS - 1)) for i in range(_STEPS))]
    return Jumps(c=min(tried, key=lambda c: sum(math.log(Jumps(c=c).total(s) / m) ** 2 for s, m in usable)))
