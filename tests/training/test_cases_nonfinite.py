"""Gradients that are not finite, or whose norm is not: detect, skip, say; and torch's own answers beside ours."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.training.gradients import clip, unscale_and_check
from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.update import UPDATES


def parameter(gradient: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient.clone()
    return made


def test_torch_turns_finite_gradients_into_zeros_and_one_inf_into_nan() -> None:
    large, one = parameter(torch.full((3,), 1e20)), parameter(torch.tensor([math.inf, 1.0, 2.0]))
    nn.utils.clip_grad_norm_([large], 1.0)
    nn.utils.clip_grad_norm_([one], 1.0)
    assert large.grad.tolist() == [0.0, 0.0, 0.0]  # type: ignore[union-attr]
    assert str(one.grad.tolist()) == "[nan, 0.0, 0.0]"  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1e19, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("num", [1, 3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_shortens_finite_gradients_of_any_size(dtype: torch.dtype, num: int, size: float) -> None:
    weight = parameter(torch.full((num,), size).to(dtype))
    named = [("weight", weight)]
    check = unscale_and_check(named)
    assert check.is_finite
    clip(named, 1.0, check)
    assert float(weight.grad.double().norm()) == pytest.approx(1.0, rel=5e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 7, 31, 32, 4095, 4999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e30])
def test_one_bad_number_is_found_wherever_it_is(bad: float, place: int, dtype: torch.dtype, size: float) -> None:
    gradient = torch.full((5000,), size).to(dtype)
    gradient[place] = bad
    check = unscale_and_check([("first", parameter(torch.ones(3))), ("second", parameter(gradient))])
    assert (check.parameter, check.norm) == ("second", None)


def test_one_bad_gradient_ruins_a_run_of_torch() -> None:
    """AdamW: Inf/√Inf. One step later the weight is NaN, and stays so."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.tensor([math.inf, 1.0, 1.0])
    optimizer.step()
    assert weight[0].isnan()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    ],
)
@pytest.mark.parametrize("rule", ["fp32", "nearest", "stochastic", "kahan"])
def test_a_skipped_step_leaves_nothing_behind(make: Any, rule: str) -> None:
    """Parameters, moments and counters are those of a run that never saw the bad batch: fused or not."""
    dtype = torch.float32 if rule == "fp32" else torch.bfloat16

    def run(batches: list[float]) -> tuple[Tensor, dict[str, Any]]:
        weight = nn.Parameter(torch.ones(40, dtype=dtype))
        update = Update(make([weight]), UPDATES[rule], seed=4)
        for value in batches:
            weight.grad = torch.linspace(-1, 1, 40).to(dtype) * value
            if unscale_and_check([("weight", weight)]).is_finite:
                update.step()
        return weight.detach(), copy.deepcopy(update.optimizer.state_dict())

    weight, state = run([1.0, math.inf, 2.0, math.nan, 3.0])
    clean, clean_state = run([1.0, 2.0, 3.0])
    assert torch.equal(weight, clean) and str(state) == str(clean_state)


def test_the_reason_names_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.tensor([[1.0, math.nan]])).sum().backward()
    check = unscale_and_check(model.named_parameters())
    assert check.reason == "the gradient of 0.weight is not finite"
