"""Loss scales that collapse, that are clipped with, that are too small: the kind, and torch's own hole beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.training.gradients import clip, unscale_and_check
from bitwright.training.loss_scale import TORCH_RULE, LossScaler, LossScaleRule
from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.update import UPDATES

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def step(
    weight: nn.Parameter, update: Update, scaler: LossScaler, gradient: torch.Tensor, max_norm: float | None = None
) -> str | None:
    """One step as a run takes it: a gradient of the scaled loss, unscaled, checked, clipped, applied or skipped."""
    weight.grad = gradient * scaler.scale
    named = [("weight", weight)]
    check = unscale_and_check(named, scaler.scale)
    if check.reason is None:
        if max_norm is not None:
            clip(named, max_norm, check)
        update.step()
    scaler.update(not check.is_finite)
    return check.reason


def torch_after(num_bad: int, name: str) -> tuple[nn.Parameter, torch.amp.GradScaler]:
    """torch's own loop: so many bad batches, then a good one."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([weight])
    scaler = torch.amp.GradScaler("cpu")
    for batch in range(num_bad + 1):
        factor = torch.tensor(1.0 if batch == num_bad else math.inf)
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight, scaler


# a fused kernel divides by the scale, and so fails only once that is 0
@pytest.mark.parametrize(
    ("name", "num_bad"),
    [("sgd", 144), ("sgd", 150), ("sgd", 170), ("adamw", 144), ("adamw", 170), ("adamw fused", 170)],
)
def test_torch_turns_weights_into_nan_after_144_bad_batches_and_a_good_one(name: str, num_bad: int) -> None:
    weight, _ = torch_after(num_bad, name)
    assert not weight.isfinite().any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_survives_143_of_them(name: str) -> None:
    weight, _ = torch_after(143, name)
    assert weight.isfinite().all()


def test_the_scale_of_torch_stays_zero_for_ever() -> None:
    assert torch_after(170, "sgd")[1].get_scale() == 0.0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_bad", [1, 17, 144, 150, 170, 1000])
def test_ours_survives_them_and_learns_from_the_good_one(name: str, num_bad: int) -> None:
    weight = nn.Parameter(torch.ones(3))
    update, scaler = Update(OPTIMIZERS[name]([weight]), UPDATES["fp32"]), LossScaler()
    for _ in range(num_bad):
        assert step(weight, update, scaler, torch.full((3,), math.inf)) is not None
    assert torch.equal(weight, torch.ones(3)) and scaler.scale >= 1.0
    assert step(weight, update, scaler, torch.ones(3)) is None
    assert weight.isfinite().all() and (weight < 1).all()


@pytest.mark.parametrize("num_bad", [144, 170])
def test_under_torchs_own_rule_weights_are_safe_too(num_bad: int) -> None:
    """Without a floor the scale has no inverse any more: that is said, and no gradient is multiplied by Inf."""
    weight = nn.Parameter(torch.ones(3))
    update, scaler = Update(OPTIMIZERS["sgd"]([weight]), UPDATES["fp32"]), LossScaler(TORCH_RULE)
    for _ in range(num_bad):
        step(weight, update, scaler, torch.full((3,), math.inf))
    reason = step(weight, update, scaler, torch.ones(3))
    assert reason is not None and "has no inverse in fp32" in reason and torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 1.0, 1e-3])
def test_the_scale_does_not_change_what_is_learned(name: str, max_norm: float | None) -> None:
    """Gradients are clipped after they are unscaled: for any power of two the weights are the same bits."""
    ends = []
    for exponent in (0, 8, 16, 24):
        weight = nn.Parameter(torch.linspace(-1, 1, 50))
        update = Update(OPTIMIZERS[name]([weight]), UPDATES["fp32"])
        scaler = LossScaler(LossScaleRule(initial=2.0**exponent))
        for number in range(5):
            step(weight, update, scaler, torch.sin(torch.arange(50.0) + number), max_norm)
        ends.append(weight.detach().clone())
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_clipping_before_unscaling_would_have_shrunk_the_update() -> None:
    """What the order is about: with a scale of 2¹⁶ gradients of 0.1 to 0.4, clipped at 1, move weights by 1e−5."""
    gradient = torch.tensor([0.1, 0.2, 0.3, 0.4])
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = gradient * 2.0**16
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert (weight.grad / 2.0**16).abs().max() < 2e-5
    update, scaler = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["fp32"]), LossScaler()
    step(weight, update, scaler, gradient, 1.0)
    assert torch.allclose(weight, -gradient)


@pytest.mark.parametrize("size", [1e-4, 1e-6, 1e-7])
def test_a_floor_keeps_the_scale_above_what_small_gradients_need(size: float) -> None:
    """A scale of 2⁻⁸ flushes fp16 gradients of 1e−6; one that never falls below its floor does not."""
    assert float(torch.tensor(1e-6 * 2.0**-8).half()) == 0.0
    scaler = LossScaler(LossScaleRule(floor=128.0))
    for _ in range(100):
        scaler.update(True)
    assert scaler.scale == 128.0
    in_fp16 = float(torch.tensor(size * scaler.scale).half()) / scaler.scale
    assert in_fp16 == pytest.approx(size, rel=5e-3)


def test_a_run_that_only_skips_is_told_by_its_counters() -> None:
    scaler = LossScaler()
    kinds = [scaler.update(True).kind for _ in range(40)]
    assert kinds[15:17] == ["backed off", "at floor"] and set(kinds[16:]) == {"at floor"}
    assert scaler.bad_steps_in_a_row == scaler.bad_steps == 40
