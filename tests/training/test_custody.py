"""While a run has a model and an optimizer nobody else steps, clears or prepares them; afterwards everybody may."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.training.prepare import prepare
from bitwright.training.run import TrainingRun

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def new_run(policy: str = "fp16-mixed", **options: Any) -> TrainingRun:
    model = net()
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy=policy, **options)


def loss_of(run: TrainingRun) -> torch.Tensor:
    return run.model(X).float().square().mean()


def weights_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return copy.deepcopy(run.model.state_dict())


def stays(run: TrainingRun, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-pure-sr"])
def test_an_optimizer_that_is_stepped_by_hand(policy: str) -> None:
    """Under a loss scale its gradients are 65,536 times too long."""
    run = new_run(policy)
    before = weights_of(run)
    with pytest.raises(TrainingError, match=r"leave optimizer\.step\(\) out"), run.step() as step:
        step.backward(loss_of(run))
        run.optimizer.step()
    assert stays(run, before) and run.counters.steps == 0
    with run.step() as step:
        step.backward(loss_of(run))
    assert run.counters.updates == 1 and not stays(run, before)
    with pytest.raises(TrainingError, match=r"leave optimizer\.step\(\) out"):
        run.optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_by_hand(to_none: bool) -> None:
    run = new_run()
    before = weights_of(run)
    run.optimizer.zero_grad()  # as loops of other libraries do, before there is anything
    with pytest.raises(TrainingError, match=r"leave optimizer\.zero_grad\(\) out"), run.step() as step:
        step.backward(loss_of(run))
        run.optimizer.zero_grad(set_to_none=to_none)
    assert stays(run, before) and run.counters.steps == 0


def test_gradients_that_are_cleared_between_micro_batches() -> None:
    run = new_run(accumulate=2)
    with pytest.raises(TrainingError, match="are gone"):
        for _ in range(2):
            with run.step() as step:
                step.backward(loss_of(run))
            run.model.zero_grad()
    assert run.pending == 0


def test_a_step_without_gradients_is_no_update() -> None:
    run = new_run()
    before = weights_of(run)
    with pytest.raises(TrainingError, match="no parameter that the optimizer holds has a gradient"), run.step() as step:
        step.backward(loss_of(run))
        run.model.zero_grad()
    assert stays(run, before) and run.counters.steps == 0 and run.pending == 0


def test_gradients_of_a_backward_pass_by_hand_are_dropped() -> None:
    run = new_run()
    with pytest.raises(TrainingError, match=r"not loss\.backward"), run.step():
        loss_of(run).backward()
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_closed_run_lets_go() -> None:
    run = new_run()
    run.close()
    loss_of(run).backward()
    before = weights_of(run)
    run.optimizer.step()
    assert not stays(run, before)
    run.optimizer.zero_grad()
    assert "zero_grad" not in vars(run.optimizer)
    with pytest.raises(TrainingError, match="the run is closed"), run.step():
        pass


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp8-hybrid"])
def test_a_model_belongs_to_one_run(policy: str) -> None:
    model = net()
    run = prepare(model, sgd(model), policy=policy)
    for second in (model, Around(model), model[0]):
        with pytest.raises(TrainingError, match=r"is under a run already.*run\.close\(\)"):
            prepare(second, sgd(second), policy="fp32")
    run.close()
    prepare(model, sgd(model), policy="fp32").close()


def test_an_optimizer_belongs_to_one_run() -> None:
    """Of a part that is frozen when the second run is prepared, and held by the optimizer all the same."""
    model = net()
    optimizer = sgd(model)
    run = prepare(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1), policy="fp32")
    run.close()
    run = prepare(model, optimizer, policy="fp32")
    other = Around(model).requires_grad_(False)
    last = nn.Linear(2, 2)
    other.last = last
    optimizer.param_groups[0]["params"].extend(last.parameters())
    with pytest.raises(TrainingError, match="the optimizer is under a run already"):
        prepare(other, optimizer, policy="fp32")
    run.close()


def test_a_refused_model_is_free() -> None:
    model = net()
    model[2].forward = model[2].forward
    with pytest.raises(TrainingError, match="forward of its own"):
        prepare(model, sgd(model), policy="fp8-hybrid")
    del model[2].__dict__["forward"]
    prepare(model, sgd(model), policy="fp8-hybrid").close()


def test_a_copy_of_a_model_is_free() -> None:
    model = net()
    run = prepare(model, sgd(model), policy="bf16-mixed")
    twin = copy.deepcopy(model)
    prepare(twin, sgd(twin), policy="bf16-mixed").close()
    run.close()


def test_gradients_that_no_step_has_made() -> None:
    """They were never multiplied by the loss scale, and would be divided by it."""
    run = new_run()
    loss_of(run).backward()
    with pytest.raises(TrainingError, match="gradients are there before"), run.step() as step:
        step.backward(loss_of(run))
    with run.step() as step:
        step.backward(loss_of(run))
    assert run.counters.updates == 1
