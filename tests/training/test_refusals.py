"""What `prepare` and a run refuse with a sentence, fp64 parameters, which they take, and steps that are given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.training.prepare import prepare


def made(**options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"accumulate": 1.5}, "accumulate is 1.5"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"patience": 2.5}, "patience is 2.5"),
        ({"monitor": 5}, "monitor is 5"),
        ({"policy": None}, "policy is None"),
        ({"scheduler": "cosine"}, "scheduler is 'cosine'"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
        ({"seed": True}, "seed is True"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"device": torch.device("cpu")}, r"device is device\(type='cpu'\); give a name of `bitwright hardware`"),
        ({"device": 3}, "device is 3"),
        ({"emulate": "yes"}, "emulate is 'yes'; give True, False or None"),
        ({"emulate": 1}, "emulate is 1"),
        ({"count_swallowed": "yes"}, "count_swallowed is 'yes'; give True or False"),
        ({"count_lost": None}, "count_lost is None; give True or False"),
    ],
)
def test_values_that_are_none(asked: dict[str, Any], says: str) -> None:
    model, optimizer = made()
    with pytest.raises(TrainingError, match=says):
        prepare(model, optimizer, **{"policy": "fp32", **asked})


def test_what_is_no_model_or_no_optimizer() -> None:
    model, optimizer = made()
    for given in (None, optimizer, "demo"):
        with pytest.raises(TrainingError, match=r"model is .* give a torch\.nn\.Module"):
            prepare(given, optimizer, policy="fp32")  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"model is None"):
        prepare(None, None)  # type: ignore[arg-type]
    for no_optimizer in (None, model, torch.optim.SGD, "adamw"):
        with pytest.raises(TrainingError, match=r"optimizer is .* torch\.optim"):
            prepare(model, no_optimizer, policy="fp32")  # type: ignore[arg-type]


def test_schedulers_that_a_run_cannot_step() -> None:
    model, optimizer = made()
    _, other = made()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TrainingError, match="asks for a validation loss"):
        prepare(model, optimizer, policy="fp32", scheduler=plateau)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="another optimizer"):
        prepare(model, optimizer, policy="fp32", scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_need_more_than_gradients(name: str) -> None:
    model, _ = made()
    with pytest.raises(TrainingError, match=f"{name} needs"):
        prepare(model, getattr(torch.optim, name)(model.parameters()), policy="bf16-mixed")


def test_a_parameter_that_came_later_is_not_updated_unscaled() -> None:
    model, optimizer = made()
    late = nn.Parameter(torch.ones(4))
    run = prepare(model, optimizer, policy="fp16-mixed")
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(TrainingError, match=r"held 2 parameters .* holds 3"), run.step():
        pass
    assert torch.equal(late, torch.ones(4))


def test_fp64_parameters_are_masters_too() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="fp32", max_grad_norm=1.0)
    with run.step() as step:
        step.backward(model(torch.full((1, 4), 3.0, dtype=torch.float64)).sum())
    # every row of the weight has gradient 3, the bias 1: four of 3² in each of four rows, and four of 1
    assert run.last is not None and run.last.grad_norm == pytest.approx((16 * 9 + 4) ** 0.5)


def test_a_step_that_is_given_up_draws_nothing() -> None:
    """Stochastic gradients of nvfp4: a run goes on as one does that never began that step."""
    ends = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="nvfp4", accumulate=2)
        x = torch.randn(16, 32)
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt), run.step() as step:
                step.backward(model(x).float().square().mean())
                raise KeyboardInterrupt
        with run.step() as step:
            for _ in range(2):
                step.backward(model(x).float().square().mean())
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize(("option", "says"), [("differentiable", "no graph"), ("capturable", "on a GPU")])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-pure-sr"])
def test_options_of_an_optimizer_that_no_run_can_step(option: str, says: str, policy: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), **{option: True})
    with pytest.raises(TrainingError, match=f"the optimizer has {option}=True.*{says}.*make it without"):
        prepare(model, optimizer, policy=policy)
