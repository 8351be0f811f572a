"""Learning rates by closed forms, and optimizers by torch's names."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError, UnknownName
from bitwright.training.fine_tuning.schedules import make_schedule, schedule_factor
from bitwright.training.optimizer.optimizers import known_optimizers, make_optimizer, raise_if_unusable_optimizer


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


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("adamw", {"differentiable": True}, "differentiable = True, and a run's step is in no graph"),
        ("sgd", {"differentiable": True}, "leave differentiable out"),
        ("adamw", {"capturable": True}, "leave capturable out"),
        ("adam", {"betas": [0.9, True]}, r"betas = \[0\.9, True\], which is no tuple\[float"),
        ("adam", {"betas": [0.9, 0.99, 0.999]}, "Tuple should have at most 2 items"),
        ("rprop", {"etas": [0.5, 1.2, 2.0]}, "Tuple should have at most 2 items"),
        ("adamw", {"lr": True}, "lr = True, which is no float"),
        ("adamw", {"lr": "1e-3"}, "lr = '1e-3', which is no float"),
        ("sgd", {"momentum": "0.9"}, "momentum = '0.9'"),
        ("sgd", {"weight_decay": True}, "weight_decay = True"),
        ("sgd", {"weight_decay": float("nan")}, "Input should be a finite number"),
        ("sgd", {"nesterov": "yes", "momentum": 0.9}, "nesterov = 'yes', which is no bool"),
        ("sgd", {"foreach": 1}, "foreach = 1"),
        ("muon", {"ns_steps": 2.5}, "ns_steps = 2.5, which is no int"),
        ("muon", {"ns_steps": 100}, "takes no step"),
        ("adamw", {"foreach": True, "fused": True}, "refused by torch"),
    ],
)
def test_options_that_torch_takes_and_cannot_step_with(name: str, options: dict[str, Any], says: str) -> None:
    """Found without the model: by their types, by what a run is not, by a step of a small optimizer."""
    with pytest.raises(TrainingError, match=says):
        raise_if_unusable_optimizer(name, {"lr": 0.1, **options})


@pytest.mark.parametrize("name", sorted(known_optimizers()))
def test_options_that_are_as_torch_has_them(name: str) -> None:
    """Also those that say outright what is so anyway; integers are numbers."""
    signature = inspect.signature(known_optimizers()[name]).parameters
    defaults = {option: given.default for option, given in signature.items() if option != "params"}
    raise_if_unusable_optimizer(name, {**defaults, "lr": 1})


def test_options_that_no_run_can_use_are_not_listed() -> None:
    with pytest.raises(UnknownName) as error:
        raise_if_unusable_optimizer("adamw", {"weight_decy": 1})
    assert "capturable" not in str(error.value) and "differentiable" not in str(error.value)
