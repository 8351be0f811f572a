"""The loss scale against torch.amp.GradScaler itself, and against DeepSpeed's and Megatron's rules written out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bitwright.errors import TrainingError
from bitwright.training.loss_scale import DEEPSPEED_RULE, MEGATRON_RULE, TORCH_RULE, LossScaler, LossScaleRule


def sequences(length: int = 400) -> Iterator[list[bool]]:
    """Bad steps in bursts and alone, from rare to frequent."""
    for seed, share in enumerate((0.0, 0.01, 0.1, 0.4, 0.9, 1.0)):
        draw = random.Random(seed)
        yield [draw.random() < share for _ in range(length)]
    yield [True] * 200 + [False] * 200


class Torch:
    """torch's own state machine, one tensor with or without Inf in its gradient."""

    def __init__(self, **settings: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.scaler.scale(torch.zeros(1))

    def update(self, found: bool) -> float:
        self.parameter.grad = torch.tensor([torch.inf if found else 0.0])
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("interval", [1, 3, 50])
def test_the_trajectory_is_torchs(interval: int) -> None:
    for sequence in sequences():
        theirs = Torch(growth_interval=interval)
        ours = LossScaler(LossScaleRule(floor=0.0, interval=interval))
        for found in sequence:
            ours.update(found)
            assert ours.scale == theirs.update(found)


def test_factors_that_are_no_powers_of_two_round_as_in_torch() -> None:
    theirs = Torch(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    ours = LossScaler(LossScaleRule(initial=1000.0, growth=1.7, backoff=0.3, interval=2, floor=0.0))
    for sequence in sequences(150):
        for found in sequence:
            ours.update(found)
            assert ours.scale == theirs.update(found)


def test_the_default_of_torch_is_a_record() -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert theirs.get_scale() == TORCH_RULE.initial and theirs.get_growth_interval() == TORCH_RULE.interval
    assert theirs.get_growth_factor() == TORCH_RULE.growth and theirs.get_backoff_factor() == TORCH_RULE.backoff


def deepspeed(scale: float, window: int, shift: int, consecutive: bool, least: float) -> Callable[[bool], float]:
    """DynamicLossScaler as its source reads, in other words."""
    now = {"scale": scale, "left": shift, "step": 0, "last_bad": -1}

    def update(found: bool) -> float:
        if found:
            if shift == 1 or now["left"] == 1:
                now["scale"] = max(now["scale"] / 2, least)
            else:
                now["left"] -= 1
            now["last_bad"] = now["step"]
        else:
            if consecutive:
                now["left"] = shift
            stable = now["step"] - now["last_bad"] - 1
            if stable > 0 and stable % window == 0:
                if not consecutive:
                    now["left"] = shift
                now["scale"] *= 2
        now["step"] += 1
        return now["scale"]

    return update


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_the_rule_of_deepspeed(shift: int, consecutive: bool) -> None:
    for sequence in sequences():
        theirs = deepspeed(2.0**16, 7, shift, consecutive, 1.0)
        rule = LossScaleRule(
            interval=7, hysteresis=shift, growth_delay=1, refilled_by="good step" if consecutive else "growth"
        )
        ours = LossScaler(rule)
        for found in sequence:
            ours.update(found)
            assert ours.scale == theirs(found)


def megatron(scale: float, window: int, hysteresis: int, least: float) -> Callable[[bool], float]:
    """DynamicGradScaler as its source reads, in other words."""
    now = {"scale": scale, "good": 0, "left": hysteresis}

    def update(found: bool) -> float:
        if found:
            now["good"] = 0
            now["left"] -= 1
            if now["left"] <= 0:
                now["scale"] = max(now["scale"] * 0.5, least)
        else:
            now["good"] += 1
            if now["good"] == window:
                now["good"], now["left"] = 0, hysteresis
                now["scale"] *= 2
        return now["scale"]

    return update


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_the_rule_of_megatron(hysteresis: int) -> None:
    for sequence in sequences():
        theirs = megatron(2.0**32, 9, hysteresis, 1.0)
        ours = LossScaler(LossScaleRule(initial=2.0**32, interval=9, hysteresis=hysteresis))
        for found in sequence:
            ours.update(found)
            assert ours.scale == min(theirs(found), 2.0**127)


def test_deepspeed_gives_up_at_the_floor_and_the_others_do_not() -> None:
    ours = LossScaler(DEEPSPEED_RULE)
    with pytest.raises(TrainingError, match=r"loss scale of 1, its floor, after 18 bad steps.*bf16-mixed"):
        for _ in range(18):
            ours.update(True)
    assert (MEGATRON_RULE.initial, MEGATRON_RULE.hysteresis, MEGATRON_RULE.raises_at_floor) == (2.0**32, 2, False)


def test_every_change_is_said() -> None:
    scaler = LossScaler(LossScaleRule(initial=2.0, interval=2, hysteresis=2, cap=4.0))
    kinds = [scaler.update(found).kind for found in (False, False, False, False, True, True, True, True)]
    assert kinds == ["kept", "grew", "kept", "kept", "tolerated", "backed off", "backed off", "at floor"]
    assert scaler.scale == 1.0 and scaler.bad_steps == scaler.bad_steps_in_a_row == 4
    assert "floor" in scaler.update(True).reason and "stays 1" in scaler.update(False).reason
    assert scaler.bad_steps_in_a_row == 0


@pytest.mark.parametrize("rule", [TORCH_RULE, MEGATRON_RULE, LossScaleRule(interval=3, hysteresis=3, growth_delay=1)])
def test_a_state_that_is_loaded_goes_on_as_if_nothing_had_been(rule: LossScaleRule) -> None:
    for sequence in sequences(60):
        straight, stopped = LossScaler(rule), LossScaler(rule)
        for found in sequence[:31]:
            straight.update(found), stopped.update(found)
        resumed = LossScaler(rule)
        resumed.load_state_dict(stopped.state_dict())
        for found in sequence[31:]:
            assert straight.update(found) == resumed.update(found)
        assert straight.state_dict() == resumed.state_dict()


def test_a_state_of_torch_is_taken() -> None:
    theirs = Torch(growth_interval=4)
    for found in (False, False, True, False, False, False):
        theirs.update(found)
    ours = LossScaler(LossScaleRule(interval=4))
    ours.load_state_dict(theirs.scaler.state_dict())
    for found in (False, False, False, True, False):
        ours.update(found)
        assert ours.scale == theirs.update(found)


def test_a_state_of_torch_below_the_floor_is_raised_to_it() -> None:
    theirs = Torch()
    for _ in range(170):
        theirs.update(True)
    assert theirs.scaler.get_scale() == 0.0
    ours = LossScaler()
    ours.load_state_dict(theirs.scaler.state_dict())
    assert ours.scale == 1.0


def test_a_state_without_its_parts_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"lacks good_steps, tolerance"):
        LossScaler().load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"growth": 0.5}, "growth is 0.5"),
        ({"backoff": 1.0}, "backoff is 1.0"),
        ({"interval": 0}, "interval is 0"),
        ({"floor": -1.0}, "floor is -1.0"),
        ({"initial": 0.5}, r"initial is 0.5, give a number from the floor 1.0 to the cap None"),
        ({"cap": 2.0}, "initial is 65536.0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"initial": float("nan")}, "initial is nan"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        LossScaleRule(**settings)  # type: ignore[arg-type]
