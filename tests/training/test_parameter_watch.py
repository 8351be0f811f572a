"""Parameters that a run would not train: those that join the model, and those that the optimizer does not hold."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from bitwright.training.forward.islands import NARROW_DTYPES
from bitwright.training.parameter_watch import ParameterWatch
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


def frozen_at_first(policy: str, **options: Any) -> TrainingRun:
    """A run whose optimizer holds all parameters, some of them frozen."""
    model = Tower()
    model.last.requires_grad_(False)
    return new_run(model, policy=policy, **options)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "fp8-hybrid"])
def test_what_a_group_holds_trains_once_it_is_unfrozen(policy: str) -> None:
    """As a run does that was prepared with it unfrozen: the same bits, moments, norms."""
    run = frozen_at_first(policy, max_grad_norm=0.1)
    take(run)
    assert run.model.last.weight not in run.optimizer.state
    state, moments = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.model.last.requires_grad_(True)
    other = new_run(Tower(), policy=policy, max_grad_norm=0.1)
    other.model.load_state_dict(state)
    other.optimizer.load_state_dict(moments)
    other.load_state_dict(run.state_dict())
    for _ in range(3):
        take(run)
        take(other)
    assert run.last == other.last
    assert run.model.last.weight.dtype == run.optimizer.state[run.model.last.weight]["exp_avg"].dtype == torch.float32
    for here, there in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("policy", ["bf16-pure", "bf16-pure-sr", "bf16-pure-kahan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_not_cast_is_refused_at_the_next_step_and_can_be_prepared(policy: str, dtype: torch.dtype) -> None:
    model = Tower()
    model.last.requires_grad_(False).to(dtype)
    run = new_run(model, policy=policy)
    for _ in range(3):  # the next step is none at which all parameters are compared
        take(run)
    before = model.last.weight.detach().clone()
    model.last.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"2 parameters that were frozen .* \(last\.weight first\).*run\.close\(\)"):
        take(run)
    assert torch.equal(model.last.weight, before) and run.counters.updates == 3
    run.close()
    again = prepare(model, run.optimizer, policy=policy)
    again.load_state_dict(run.state_dict())
    take(again)
    assert model.last.weight.dtype == torch.bfloat16 and again.counters.updates == 4
    assert not torch.equal(model.last.weight, before.bfloat16())


def test_what_is_unfrozen_is_not_exchanged_between_processes() -> None:
    model = Tower()
    model.last.requires_grad_(False)
    watch = ParameterWatch(model, torch.optim.SGD(model.parameters(), lr=0.1), world_size=2)
    watch.raise_if_changed(3)
    model.last.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"last\.weight first\), and the 2 processes would not exchange"):
        watch.raise_if_changed(3)


POLICIES_AND_FROZEN = [
    *((policy, dtype) for policy in ("bf16-mixed", "fp16-mixed", "fp8-hybrid") for dtype in NARROW_DTYPES),
    *((policy, torch.float16) for policy in ("bf16-pure", "bf16-pure-sr", "bf16-pure-kahan")),
]


@pytest.mark.parametrize(("policy", "dtype"), POLICIES_AND_FROZEN)
def test_a_frozen_base_in_16_bits_may_be_held(policy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It has no gradient, so that nothing of it is stored: the run is that of an optimizer without it."""

    def begin(holds_all: bool) -> TrainingRun:
        model = Tower()
        model.last.requires_grad_(False).to(dtype)
        return new_run(model, None if holds_all else model.first, policy=policy, count_swallowed=True)

    run, other = begin(True), begin(False)
    frozen = run.model.last.weight.detach().clone()
    for _ in range(2):
        take(run)
        take(other)
    save_checkpoint(tmp_path / "held", run, step=2)
    again = begin(True)
    load_checkpoint(tmp_path / "held", again)
    for each in (run, other, again):
        take(each)
    assert run.last == other.last == again.last and run.swallowed == other.swallowed
    assert torch.equal(run.model.last.weight, frozen) and run.model.last.weight not in run.optimizer.state
    for here, there, resumed in zip(*(each.model.parameters() for each in (run, other, again)), strict=True):
        assert torch.equal(here, there) and torch.equal(here, resumed)


def test_what_is_frozen_does_not_ask_for_pieces() -> None:
    """An optimizer that treats matrices as wholes steps fp32 parameters, whatever the frozen ones are in."""
    model = Tower()
    model.last.requires_grad_(False).bfloat16()
    run = prepare(model, torch.optim.Adafactor(model.parameters(), lr=0.01), policy="bf16-mixed")
    take(run)
    assert run.counters.updates == 1


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_a_base_in_16_bits_is_not_trained_once_it_is_unfrozen(dtype: torch.dtype) -> None:
    """It has no masters."""
    model = Tower()
    model.last.requires_grad_(False).to(dtype)
    run = new_run(model, policy="bf16-mixed")
    for _ in range(3):
        take(run)
    before = model.last.weight.detach().clone()
    model.last.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"\(last\.weight first\): .* 16 bits.*fp32.*run\.close\(\)"):
        take(run)
    assert torch.equal(model.last.weight, before) and run.counters.updates == 3
    run.close()
    model.last.float()
    again = prepare(model, run.optimizer, policy="bf16-mixed")
    take(again)
    assert model.last.weight.dtype == torch.float32 and not torch.equal(model.last.weight, before.float())


def test_a_group_that_is_added_within_a_step_is_not_updated_unscaled() -> None:
    model = Tower()
    run = new_run(model, model.first)
    before = model.last.weight.detach().clone()
    with pytest.raises(TrainingError, match=r"held 2 parameters .* holds 4"), run.step() as step:
        step.backward(model(X).float().square().mean())
        run.optimizer.add_param_group({"params": list(model.last.parameters())})
    assert torch.equal(model.last.weight, before)


def test_a_group_whose_parameters_are_others() -> None:
    model = Tower()
    run = new_run(model, model.first)
    run.optimizer.param_groups[0]["params"] = list(model.last.parameters())
    with pytest.raises(TrainingError, match="holds other parameters than when the run was prepared"):
        take(run)


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
