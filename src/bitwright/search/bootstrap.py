"""Intervals for means over tokens that are not independent.

Tokens of one sequence depend on each other, sequences do not: whole sequences are drawn anew with replacement, and the
statistic of plan and reference is taken on the same draw (paired). Percentile intervals: Efron and Tibshirani, "An
Introduction to the Bootstrap" (1993), chapters 8 and 13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bitwright.plan import Interval
from bitwright.search.compare import TokenEffects
from bitwright.search.output import Effects

#: Resamples: enough that the ends of a 95 % interval move by about 2 % of its width.
NUM_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean with the ends of its interval."""

    mean: float
    low: float
    high: float

    @property
    def interval(self) -> Interval:
        """The same as a plan's record."""
        return Interval(mean=self.mean, low=self.low, high=self.high)


def bootstrap(
    statistic: Callable[[npt.NDArray[np.int64]], float], num_sequences: int, seed: int, confidence: float = 0.95
) -> Estimate:
    """Percentile interval of a statistic of resampled sequences.

    Args:
        statistic: indices of sequences → number; called with 0 … n−1 for the point estimate.
        num_sequences: how many sequences there are.
        seed: of the resampling.
        confidence: level of the interval.
    """
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, num_sequences, size=(NUM_RESAMPLES, num_sequences))
    values = np.array([statistic(draw) for draw in draws])
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Estimate(mean=statistic(np.arange(num_sequences)), low=float(low), high=float(high))


def kl_estimate(effects: Effects, seed: int) -> Estimate:
    """Mean KL per scored prediction with its interval."""
    return bootstrap(lambda i: float(effects.kl[i].sum() / effects.num_scored[i].sum()), len(effects.kl), seed)


def ppl_ratio_estimate(effects: Effects, seed: int) -> Estimate:
    """Perplexity of the plan over the reference's, paired; only where tokens are predicted."""
    assert isinstance(effects, TokenEffects), "a limit on perplexity is refused for other outputs"
    difference = effects.nll_plan - effects.nll_reference
    return bootstrap(lambda i: float(np.exp(difference[i].sum() / effects.num_scored[i].sum())), len(difference), seed)


def agreement_estimate(effects: TokenEffects, seed: int) -> Estimate:
    """Share of tokens at which plan and reference rank the same token first."""
    return bootstrap(
        lambda i: float(effects.num_agreeing[i].sum() / effects.num_scored[i].sum()), len(effects.kl), seed
    )
