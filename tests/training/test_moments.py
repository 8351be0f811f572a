"""Moments in fp16 and bf16: scales, values, and what must not vanish."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bitwright import formats
from bitwright.training.optimizer.moments import find_scales, round_runs


def random_run(num: int, size: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-8, 1.0, 1e4, 1e30])
def test_a_scale_is_a_power_of_two_that_uses_all_of_fp16(size: float) -> None:
    runs = [random_run(100, size, seed) for seed in range(3)]
    for run, scale in zip(runs, find_scales(runs).tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5
        largest = float(run.abs().max()) / scale
        assert largest < 2.0**15 and (largest >= 2.0**14 or scale == 2.0**-126)


def test_what_has_no_size_has_a_scale_of_one() -> None:
    runs = [torch.zeros(3), torch.tensor([1.0, torch.inf]), torch.tensor([torch.nan, 1.0])]
    assert find_scales(runs).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_values_come_back_within_a_step_of_fp16(size: float) -> None:
    flat = torch.cat([random_run(500, size), random_run(300, size * 1e-9, 1)])
    before = flat.clone()
    runs = list(flat.split([500, 300]))
    scales = round_runs(flat, runs, "fp16", "stochastic", 7)
    assert scales is not None
    for run, scale, exact in zip(runs, scales, before.split([500, 300]), strict=True):
        assert torch.equal(run.half().float(), run)
        values = run.half().float() * scale
        step = torch.maximum(exact.abs() * 2.0**-10, exact.abs().max() * 2.0**-38)
        assert ((values - exact).abs() <= step).all()


def test_squares_of_small_gradients_do_not_vanish() -> None:
    """(1e−4)² is a subnormal of fp16, (1e−5)² is zero there."""
    gradients = torch.logspace(-9, -4, 64)
    assert (gradients.square().half() == 0).float().mean() > 0.7
    flat = gradients.square()
    scales = round_runs(flat, [flat], "fp16", "stochastic", 0)
    assert scales is not None and (flat.half() > 0).all()
    large = gradients > 1e-6
    assert torch.allclose(flat[large] * scales, gradients[large].square(), rtol=1e-3)


def test_what_is_positive_stays_positive_only_where_nothing_is_negative() -> None:
    squares = torch.tensor([1.0, 1e-20, 0.0])
    round_runs(squares, [squares], "fp16", "stochastic", 0)
    assert (squares > 0).tolist() == [True, True, False]
    firsts = torch.tensor([1.0, 1e-20, -1.0])
    round_runs(firsts, [firsts], "fp16", "nearest_even", 0)
    assert firsts[1] == 0


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_rounding_draws_the_words_of_the_formats_own_rounding(format: str) -> None:
    flat = random_run(2000, 1000.0)
    expected = flat.numpy().copy()
    if format == "fp16":
        expected *= np.float32(1 / find_scales([flat]).item())
    round_runs(flat, [flat], format, "stochastic", 12345)
    rounded = formats.round(format, expected, "stochastic", "ieee", seed=12345)
    assert np.array_equal(flat.numpy(), rounded.astype(np.float32))


def test_fp32_is_left_alone() -> None:
    flat = random_run(50, 1.0)
    before = flat.clone()
    assert round_runs(flat, [flat], "fp32", "stochastic", 0) is None and torch.equal(flat, before)
