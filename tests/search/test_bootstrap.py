"""Intervals: closed form of the normal approximation, and coverage over seeded simulations."""

from __future__ import annotations

import numpy as np
import pytest

from bitwright.search.bootstrap import agreement_estimate, bootstrap, kl_estimate, ppl_ratio_estimate
from bitwright.search.compare import TokenEffects

#: 97.5 % point of the standard normal distribution.
Z = 1.959964


def effects(kl: np.ndarray, num_tokens: np.ndarray, **others: np.ndarray) -> TokenEffects:
    zeros = np.zeros_like(kl)
    fields = {"nll_reference": zeros, "nll_plan": zeros, "num_agreeing": zeros} | others
    return TokenEffects(num_scored=num_tokens, kl=kl, **fields)


def test_mean_of_normal_samples_has_the_normal_interval() -> None:
    """Width = 2 · 1.96 · s / √n (s with n in the denominator, as resampling sees it), within 5 %."""
    values = np.random.default_rng(0).normal(3.0, 2.0, size=200)
    found = bootstrap(lambda i: float(values[i].mean()), 200, seed=0)
    half = Z * values.std() / np.sqrt(200)
    assert found.mean == values.mean()
    assert found.low == pytest.approx(values.mean() - half, abs=0.05 * half + 0.02)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05 * half + 0.02)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.07)


def test_ratio_of_sums_has_the_interval_of_the_delta_method() -> None:
    """KL per token is Σ kl / Σ tokens; its variance is that of (kl − r · tokens) / mean tokens."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(20, 128, size=300).astype(float)
    kl = tokens * generator.gamma(4.0, 0.005, size=300)
    found = kl_estimate(effects(kl, tokens), seed=0)
    ratio = kl.sum() / tokens.sum()
    half = Z * (kl - ratio * tokens).std() / tokens.mean() / np.sqrt(300)
    assert found.mean == pytest.approx(ratio, rel=1e-12)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.08)


def test_95_percent_of_intervals_hold_the_truth() -> None:
    """150 simulated evaluations of 64 sequences: coverage of 95 % has a standard deviation of 1.8 %; allowed is ± 3 of
    them, and a percent less for the skew of 64 gamma-distributed sequences."""
    generator = np.random.default_rng(2)
    tokens = np.full(64, 127.0)
    covered = 0
    for seed in range(150):
        kl = 127 * generator.gamma(5.0, 0.004, size=64)
        found = kl_estimate(effects(kl, tokens), seed=seed)
        covered += found.low <= 0.02 <= found.high
    assert 0.885 <= covered / 150 <= 1.0


def test_perplexity_is_paired() -> None:
    """Where every sequence's loss grows by the same 1 %, the ratio is known exactly however much sequences differ."""
    tokens = np.full(64, 100.0)
    base = np.random.default_rng(3).uniform(50, 500, size=64)
    found = ppl_ratio_estimate(effects(np.zeros(64), tokens, nll_reference=base, nll_plan=base + 1.0), seed=0)
    assert found.mean == pytest.approx(np.exp(0.01), rel=1e-9)
    assert found.low == pytest.approx(found.high, rel=1e-9)


def test_agreement_and_the_seed() -> None:
    tokens = np.full(64, 100.0)
    agreeing = np.random.default_rng(4).integers(80, 100, size=64).astype(float)
    of = effects(np.zeros(64), tokens, num_agreeing=agreeing)
    found = agreement_estimate(of, seed=5)
    assert found.low < found.mean == agreeing.sum() / 6400 < found.high <= 1
    assert agreement_estimate(of, seed=5) == found
    assert agreement_estimate(of, seed=6) != found
