"""Parameters that a run would not train: those that join the model, and those that the optimizer does not hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.training.prepare import prepare
from bitwright.training.run import TrainingRun

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def new_run(model: nn.Module, held: nn.Module | None = None, policy: str = "fp16-mixed", **options: Any) -> TrainingRun:
    parameters = (model if held is None else held).parameters()
    return prepare(model, torch.optim.AdamW(parameters, lr=0.01), policy=policy, **options)


def take(run: TrainingRun) -> None:
    with run.step() as step:
        step.backward(run.model(X).float().square().mean())


def replaces_a_weight(model: Tower) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def replaces_a_layer(model: Tower) -> None:
    model.last = nn.Linear(16, 2)


def grows_a_layer(model: Tower) -> None:
    model.extra = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize("change", [replaces_a_weight, replaces_a_layer, grows_a_layer])
@pytest.mark.parametrize("steps", [0, 3])
def test_what_joins_the_model_is_told_at_the_next_step(change: Callable[[Tower], None], steps: int) -> None:
    model = Tower()
    run = new_run(model)
    for _ in range(steps):
        take(run)
    change(model)
    for _ in range(2):  # as often as it is tried
        with pytest.raises(TrainingError, match=r"joined the model since the run was prepared.*run\.close\(\)"):
            take(run)
    assert run.counters.steps == steps


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_embeddings_that_are_resized(tied: bool, steps: int, make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama").requires_grad_(True)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    run = new_run(model, policy="bf16-mixed")
    ids = torch.arange(8)[None]

    def take_step() -> None:
        with run.step() as step:
            step.backward(model(input_ids=ids, labels=ids).loss)

    for _ in range(steps):
        take_step()
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    with pytest.raises(TrainingError, match=r"since the run was prepared"):
        take_step()


def test_what_joins_frozen_is_nobodys_business() -> None:
    model = Tower()
    run = new_run(model)
    model.extra = nn.Linear(2, 2).requires_grad_(False)
    take(run)
    assert run.counters.updates == 1


def test_trained_parameters_outside_the_optimizer_are_told_at_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Tower()
    run = new_run(model, model.first)
    with caplog.at_level(logging.WARNING, logger="bitwright"):
        take(run)
        take(run)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "2 trained parameters are in no group of the optimizer" in said[0]
    assert "last.weight" in said[0]


def test_their_gradients_do_not_pile_up() -> None:
    model = Tower()
    run = new_run(model, model.first, accumulate=2)
    for is_complete in (False, True):
        take(run)
        assert (model.last.weight.grad is None) == is_complete


def test_what_is_unfrozen_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Not at once, since only a walk over all parameters shows it: by twice as many steps at the latest."""
    model = Tower()
    model.last.requires_grad_(False)
    run = new_run(model, model.first)
    for _ in range(3):
        take(run)
    model.last.requires_grad_(True)
    with caplog.at_level(logging.WARNING, logger="bitwright"):
        for _ in range(3):
            take(run)
    assert ["last.weight" in record.getMessage() for record in caplog.records] == [True]
    assert model.last.weight.grad is None


def test_a_step_does_not_walk_over_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tower()
    run = new_run(model)
    walks = []
    plain = nn.Module.named_parameters

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walks.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_parameters", counted)
    for _ in range(100):
        take(run)
    assert len(walks) == 8  # steps 0, 1, 2, 4, …, 64
