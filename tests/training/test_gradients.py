"""Unscaling, checking and clipping against torch, and where torch's norm leaves fp32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.gradients import Reduction, clip, raise_if_scaled_elsewhere, unscale_and_check


def with_gradients(*gradients: Tensor) -> list[tuple[str, nn.Parameter]]:
    named = []
    for index, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        named.append((f"p{index}", parameter))
    return named


def random_gradients(seed: int, size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7,), (64, 33), (), (3, 5, 2), (1000,)]
    return [torch.randn(shape, generator=generator) * size for shape in shapes]


def same(a: list[tuple[str, nn.Parameter]], b: list[tuple[str, nn.Parameter]]) -> bool:
    return all(torch.equal(p.grad, q.grad) for (_, p), (_, q) in zip(a, b, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4, 1e12])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 37.0])
def test_clipping_is_torchs_bit_for_bit_where_squares_fit(size: float, max_norm: float) -> None:
    for seed in range(3):
        ours, theirs = (with_gradients(*random_gradients(seed, size)) for _ in range(2))
        check = unscale_and_check(ours)
        clip(ours, max_norm, check)
        norm = nn.utils.clip_grad_norm_([p for _, p in theirs], max_norm)
        assert check.norm == norm.item() and same(ours, theirs)


@pytest.mark.parametrize("scale", [2.0**16, 3000.0, 2.0**-20, 1.0])
def test_unscaling_is_torchs_bit_for_bit(scale: float) -> None:
    ours, theirs = (with_gradients(*random_gradients(5, scale)) for _ in range(2))
    unscale_and_check(ours, scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(1))
    scaler.unscale_(torch.optim.SGD([p for _, p in theirs]))
    assert same(ours, theirs)


@pytest.mark.parametrize("size", [1e20, 1e30, 1e-30, 1e-40])
def test_norms_whose_squares_leave_fp32(size: float) -> None:
    gradients = random_gradients(1, size)
    exact = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
    named = with_gradients(*gradients)
    check = unscale_and_check(named)
    assert check.norm == pytest.approx(exact, rel=1e-6)
    factor = clip(named, exact / 2, check)
    assert factor == pytest.approx(0.5 if size > 1 else exact / 2 / (exact + 1e-6), rel=1e-5)
    for (_, parameter), before in zip(named, gradients, strict=True):
        assert torch.allclose(parameter.grad, before * factor, rtol=1e-5, atol=0)  # type: ignore[arg-type]


def test_the_sum_of_gradients_of_which_each_fits() -> None:
    """Every norm is finite, only their sum of squares is not."""
    named = with_gradients(*[torch.full((4,), 8e18)] * 4)
    check = unscale_and_check(named)
    assert check.norm == pytest.approx(3.2e19, rel=1e-6)
    clip(named, 1.0, check)
    assert float(torch.stack([p.grad for _, p in named]).norm()) == pytest.approx(1.0, rel=1e-5)  # type: ignore[misc]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_first_bad_gradient_is_named_and_nothing_is_clipped(bad: float) -> None:
    gradients = random_gradients(2, 1.0)
    gradients[1][3, 4] = bad
    gradients[3][0, 0, 0] = bad
    named = with_gradients(*gradients)
    check = unscale_and_check(named)
    assert (check.norm, check.parameter, check.is_finite) == (None, "p1", False)
    assert check.reason == "the gradient of p1 is not finite"
    with pytest.raises(TrainingError, match="p1 is not finite; skip the step"):
        clip(named, 1.0, check)
    assert torch.equal(named[0][1].grad, gradients[0])  # type: ignore[arg-type]


def test_a_bad_gradient_beside_a_large_one() -> None:
    named = with_gradients(torch.full((3,), 1e30), torch.tensor([1.0, math.nan]))
    assert unscale_and_check(named).parameter == "p1"


def test_gradients_are_looked_at_after_they_are_divided() -> None:
    """Finite as they are, Inf once divided by a scale below 1: torch looks before, and lets it pass."""
    named = with_gradients(torch.full((2,), 1e38))
    check = unscale_and_check(named, 2.0**-10)
    assert not check.is_finite and check.parameter == "p0"


@pytest.mark.parametrize("scale", [2.0**-128, 0.0, 2.0**-149])
def test_a_scale_without_inverse_touches_nothing(scale: float) -> None:
    gradients = random_gradients(3, 1e-6)
    named = with_gradients(*gradients)
    check = unscale_and_check(named, scale)
    assert check.reason is not None and "no inverse in fp32" in check.reason
    assert all(torch.equal(p.grad, g) for (_, p), g in zip(named, gradients, strict=True))  # type: ignore[arg-type]


def test_no_gradients_and_zero_gradients() -> None:
    assert unscale_and_check([("p", nn.Parameter(torch.ones(3)))]).norm == 0.0
    named = with_gradients(torch.zeros(3), torch.zeros(2, 2))
    check = unscale_and_check(named, 8.0)
    assert (check.norm, check.num_gradients) == (0.0, 2)
    assert clip(named, 1.0, check) == 1.0


def test_short_gradients_stay_as_they_are() -> None:
    gradients = random_gradients(4, 1.0)
    named = with_gradients(*gradients)
    check = unscale_and_check(named)
    assert clip(named, 1e6, check) == clip(named, math.inf, check) == 1.0
    assert all(torch.equal(p.grad, g) for (_, p), g in zip(named, gradients, strict=True))  # type: ignore[arg-type]


def test_norms_of_bf16_gradients_are_sums_in_fp32() -> None:
    gradient = torch.full((300, 300), 1.0, dtype=torch.bfloat16)
    assert unscale_and_check(with_gradients(gradient)).norm == 300.0


def test_ranks_with_parts_come_to_one_result() -> None:
    gradients = random_gradients(6, 1e20)
    whole = unscale_and_check(with_gradients(*gradients))
    parts = [with_gradients(*gradients[:2]), with_gradients(*gradients[2:])]
    for size in (1e20, 1.0):
        squares = sum(float((g.double() / 1e20 * size).square().sum()) for g in gradients)
        reduction = Reduction(sum=lambda x, s=squares: torch.full_like(x, s), max=lambda x: x)  # type: ignore[misc]
        for part in parts:
            for (_, p), g in zip(part, gradients[:2] if part is parts[0] else gradients[2:], strict=True):
                p.grad = g / 1e20 * size
            norm = unscale_and_check(part, reduction=reduction).norm
            assert norm == pytest.approx(whole.norm * size / 1e20, rel=1e-6)  # type: ignore[operator]


def test_a_bad_gradient_on_another_rank_stops_this_one() -> None:
    reduction = Reduction(sum=lambda x: x + math.nan, max=torch.ones_like)
    check = unscale_and_check(with_gradients(torch.ones(3)), reduction=reduction)
    assert (check.reason, check.parameter) == ("the gradient on another rank is not finite", None)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_length_that_is_none_is_refused(max_norm: float) -> None:
    named = with_gradients(torch.ones(2))
    with pytest.raises(TrainingError, match="positive number"):
        clip(named, max_norm, unscale_and_check(named))


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(TrainingError, match=r"weight is sparse.*sparse=False"):
        unscale_and_check(embedding.named_parameters())


def test_fp16_gradients_are_not_unscaled() -> None:
    named = with_gradients(torch.ones(2, dtype=torch.float16))
    with pytest.raises(TrainingError, match=r"p0 is in fp16.*model.float\(\)"):
        unscale_and_check(named, 2.0)


def test_an_optimizer_of_a_grad_scaler_is_refused() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    raise_if_scaled_elsewhere(optimizer)
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(TrainingError, match=r"found_inf set.*GradScaler"):
        raise_if_scaled_elsewhere(optimizer)
