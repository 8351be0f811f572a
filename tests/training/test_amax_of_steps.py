"""Delayed scales learn from the micro-batches of steps, and from nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.training.integrations.loop_driver import LoopDriver
from bitwright.training.prepare import prepare
from bitwright.training.run import TrainingRun

X = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)


def new_run(policy: str = "fp8-hybrid", accumulate: int = 2) -> TrainingRun:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return prepare(model, optimizer, policy=policy, accumulate=accumulate)


def loss_of(run: TrainingRun, scale: float = 1.0) -> torch.Tensor:
    return run.model(scale * X).float().square().mean()


def take(run: TrainingRun) -> None:
    for _ in range(run.accumulate):
        with run.step() as step:
            step.backward(loss_of(run))


def forward_outside(run: TrainingRun) -> None:
    loss_of(run, 100.0)


def backward_outside(run: TrainingRun) -> None:
    loss_of(run, 100.0).backward()
    run.optimizer.zero_grad()


def given_up(run: TrainingRun) -> None:
    with pytest.raises(KeyError), run.step() as step:
        step.backward(loss_of(run, 100.0))
        raise KeyError("a batch")


def given_up_before_its_backward_pass(run: TrainingRun) -> None:
    with pytest.raises(KeyError), run.step():
        loss_of(run, 100.0)
        raise KeyError("a batch")


def given_up_at_its_second_micro_batch(run: TrainingRun) -> None:
    with run.step() as step:
        step.backward(loss_of(run, 100.0))
    given_up_before_its_backward_pass(run)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    return bool(a == b)


@pytest.mark.parametrize("policy", ["fp8-hybrid", "nvfp4"])
@pytest.mark.parametrize(
    "disturb",
    [
        forward_outside,
        backward_outside,
        given_up,
        given_up_before_its_backward_pass,
        given_up_at_its_second_micro_batch,
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_goes_on_as_one_that_was_not_disturbed(
    steps: int, disturb: Callable[[TrainingRun], None], policy: str
) -> None:
    runs = new_run(policy), new_run(policy)
    for is_disturbed, run in enumerate(runs):
        for _ in range(steps):
            take(run)
        if is_disturbed:
            disturb(run)
        assert run.products is not None and runs[0].products is not None
        if is_disturbed and not steps:
            assert same(run.products.state_dict(), new_run(policy).products.state_dict())
        for _ in range(2):
            take(run)
    quiet, disturbed = (run.products.state_dict() for run in runs if run.products is not None)
    assert same(quiet, disturbed)
    for here, there in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(here, there)


def test_a_loop_of_somebody_else_learns_from_all_its_micro_batches() -> None:
    own, driven = new_run(accumulate=3), new_run(accumulate=1)
    take(own)
    driver = LoopDriver(driven)
    for index in range(3):
        with driver.forward():
            loss = loss_of(driven) / 3
        driver.backward(loss, is_last=index == 2)
    driver.settle()
    driver.finish()
    assert own.products is not None and driven.products is not None
    assert same(own.products.state_dict(), driven.products.state_dict())
    assert driven.counters.micro_batches == 3
    forward_outside(driven)
    assert same(own.products.state_dict(), driven.products.state_dict())
