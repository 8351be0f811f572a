"""Learning rates by closed forms, and optimizers by torch's names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError, UnknownName
from bitwright.training.fine_tuning.schedules import make_schedule, schedule_factor
from bitwright.training.optimizer.optimizers import make_optimizer, raise_if_unusable_optimizer


def factors(kind: str, steps: int, warmup_steps: int, final_share: float) -> list[float]:
    return [
        schedule_factor(kind, step, steps=steps, warmup_steps=warmup_steps, final_share=final_share)
        for step in range(steps)
    ]


def test_linear() -> None:
    assert factors("linear", 7, 2, 0.2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_ends_at_its_share_and_passes_the_middle_half_way() -> None:
    found = factors("cosine", 101, 0, 0.1)
    assert (found[0], found[50], found[100]) == pytest.approx((1.0, 0.55, 0.1))
    assert found[25] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_constant_and_a_single_step() -> None:
    assert factors("constant", 3, 1, 0.5) == pytest.approx([0.5, 1.0, 1.0])
    assert factors("cosine", 1, 0, 0.1) == [1.0]
    assert schedule_factor("linear", 500, steps=10, warmup_steps=0, final_share=0.25) == 0.25


def test_the_scheduler_is_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = make_schedule(optimizer, "linear", steps=3)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == [0.5, 0.25, 0.0]


def test_an_unknown_schedule() -> None:
    with pytest.raises(UnknownName, match="did you mean 'cosine'"):
        make_schedule(torch.optim.SGD([nn.Parameter(torch.ones(1))]), "cosin", steps=3)


def test_decay_pulls_matrices_only() -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer("adamw", model.parameters(), {"lr": 0.1, "betas": [0.8, 0.9]})
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.01), (1, 0.0)]
    assert optimizer.param_groups[1]["params"][0] is model.bias
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    plain = make_optimizer("adamw", model.parameters(), {"lr": 0.1, "weight_decay": 0.0})
    assert len(plain.param_groups) == 1


def test_what_torch_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownName, match="unknown optimizer 'adamv'; did you mean 'adam"):
        raise_if_unusable_optimizer("adamv", {})
    with pytest.raises(UnknownName, match="unknown optimizer 'lbfgs'"):
        raise_if_unusable_optimizer("lbfgs", {})
    with pytest.raises(UnknownName, match="'adamw' has no option 'weight_decy'; did you mean 'weight_decay'"):
        raise_if_unusable_optimizer("adamw", {"weight_decy": 1})
    with pytest.raises(TrainingError, match="is refused by torch"):
        make_optimizer("adamw", nn.Linear(1, 1).parameters(), {"lr": 0.1, "betas": [2.0, 0.9]})
    with pytest.raises(TrainingError, match="no parameter of the model is trained"):
        make_optimizer("adamw", nn.Linear(1, 1).requires_grad_(False).parameters(), {"lr": 0.1})
