"""Updates that rounding swallows: weights, decay, averages, second moments, step counters; the kind, over sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.swallowed import (
    Swallowed,
    count_swallowed,
    count_swallowed_average,
    count_swallowed_decay,
)
from bitwright.training.optimizer.update import UPDATES


def weights(num: int = 4000, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    values = torch.randn(num, generator=torch.Generator().manual_seed(0)).exp()
    return nn.Parameter(values.bfloat16().to(dtype))


def trained(
    rule: str, relative: float, num_steps: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Parameter, nn.Parameter, Update]:
    """Equal steps of a size relative to each weight, all one way; and the weights that they started from."""
    weight, start = weights(dtype=dtype), weights(dtype=dtype)
    weight.grad_dtype = torch.float32
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES[rule], counts=True, seed=9)
    gradient = -relative * start.detach().float()
    for _ in range(num_steps):
        weight.grad = gradient.clone()
        update.step()
    return weight, start, update


@pytest.mark.parametrize("relative", [2.0**-10, 2.0**-12, 1e-5])
def test_small_updates_are_lost_to_nearest_and_to_nothing_else(relative: float) -> None:
    num_steps = 64
    for rule, dtype, moved in (
        ("nearest", torch.bfloat16, 0.0),
        ("stochastic", torch.bfloat16, relative),
        ("kahan", torch.bfloat16, relative),
        ("fp32", torch.float32, relative),
    ):
        weight, start, update = trained(rule, relative, num_steps, dtype)
        total, first = weight.detach().double(), start.detach().double()
        if rule == "kahan":
            total += update.optimizer.state[weight]["compensation"].double()
        mean = float(((total - first) / first).mean()) / num_steps
        assert mean == pytest.approx(moved, rel=0.15, abs=1e-9)
        share = update.swallowed["weights"].share
        match rule:
            case "nearest":
                assert share == 1.0
            case "stochastic":  # a step is taken by chance, that of its size: none is lost on average
                assert share == pytest.approx(1 - relative * 2.0**7 * 1.4, abs=0.1)
            case _:
                assert share < 0.01


def test_what_kahan_loses_is_below_its_own_sixteen_bits() -> None:
    """A compensation in bf16 rounds too: once it is 2⁻¹³, steps below 2⁻²¹ stall it; stochastic rounding takes them."""
    step, num_steps = 0.9 * 2.0**-21, 600
    ends = {}
    for rule, num in (("kahan", 8), ("stochastic", 8000)):
        weight = nn.Parameter(torch.ones(num, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32
        update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES[rule], counts=True, seed=9)
        for _ in range(num_steps):
            weight.grad = torch.full((num,), -step)
            update.step()
        ends[rule] = weight.detach().double() - 1
        if rule == "kahan":
            ends[rule] += update.optimizer.state[weight]["compensation"].double()
            assert update.swallowed["weights"].share == (600 - 256) / 600
    assert ends["kahan"].tolist() == [2.0**-13] * 8
    assert float(ends["stochastic"].mean()) == pytest.approx(num_steps * step, rel=0.25)


def test_counts_are_those_of_torchs_own_arithmetic() -> None:
    weight = weights()
    before = weight.detach().clone()
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 2.0**-8
    weight.grad = gradient.bfloat16()
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["nearest"], counts=True)
    exact = before.float() - weight.grad.float()
    lost = int(((exact != before.float()) & (exact.bfloat16() == before)).sum())
    update.step()
    assert update.swallowed["weights"] == Swallowed(due=int((exact != before.float()).sum()), lost=lost)
    assert 0.2 < update.swallowed["weights"].share < 0.95
    assert update.swallowed.get("decay", Swallowed()) == Swallowed()


def test_weights_in_plain_fp32_are_counted_where_they_have_a_gradient() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1e-9, 1.0]))
    weight.grad = torch.tensor([1e-9, 1e-3, 1e-9, 0.0])
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["fp32"], counts=True)
    update.step()
    assert update.swallowed["weights"] == Swallowed(due=3, lost=1)


def test_nothing_is_counted_unless_asked() -> None:
    weight = weights()
    weight.grad = torch.ones_like(weight)
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["kahan"])
    update.step()
    assert update.swallowed == {}


# --- decay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "dtype", "lost"),
    [
        (1e-5, torch.bfloat16, 1.0),
        (1e-3, torch.bfloat16, 1.0),
        (0.1, torch.bfloat16, 0.0),
        (1e-3, torch.float32, 0.0),
        (1e-9, torch.float32, 1.0),
    ],
)
def test_decay_by_itself(factor: float, dtype: torch.dtype, lost: float) -> None:
    weight = weights(dtype=dtype)
    assert count_swallowed_decay(weight, factor).share == lost
    assert float((weight.detach() * (1 - factor) == weight.detach()).float().mean()) == lost


@pytest.mark.parametrize("rule", ["nearest", "stochastic", "kahan"])
def test_decay_is_counted_beside_the_weights(rule: str) -> None:
    weight = weights()
    update = Update(torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1), UPDATES[rule], counts=True)
    weight.grad = torch.ones_like(weight)
    update.step()
    assert update.swallowed["decay"] == Swallowed(due=4000, lost=4000)


# --- averages and moments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.99, 0.999, 0.9999])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_averages_of_weights(dtype: torch.dtype, bits: int, decay: float) -> None:
    """The average moves by (1 − β) of the difference: lost where that is below half a step."""
    average, value = torch.full((100,), 1.0, dtype=dtype), torch.full((100,), 1.25)
    found = count_swallowed_average([average], [value], decay)
    is_lost = (1 - decay) * 0.25 < 2.0**-bits
    assert found == Swallowed(due=100, lost=100 if is_lost else 0)


def test_an_average_in_bf16_never_moves() -> None:
    average, value = torch.ones(10, dtype=torch.bfloat16), torch.full((10,), 1.25, dtype=torch.bfloat16)
    for _ in range(2000):
        average.lerp_(value, 0.001)
    assert count_swallowed_average([average], [value], 0.999).share == 1.0 and (average == 1).all()


def after_a_burst(rule: str, moments: str) -> tuple[float, Update]:
    """The mean second moment after one large gradient and 700 steps of none: 0.999⁷⁰⁰ = 0.5 of it."""
    weight = nn.Parameter(torch.ones(500))
    update = Update(
        torch.optim.AdamW([weight], lr=0.0, weight_decay=0.0), UPDATES[rule], moments=moments, counts=True, seed=2
    )
    for number in range(701):
        weight.grad = torch.full_like(weight, 0.0 if number else 10.0)
        update.step()
    state = update.optimizer.state[weight]
    second = state["exp_avg_sq"].double() * state.get("exp_avg_sq_scale", torch.ones(1)).double()
    return float(second.mean()), update


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16"])
def test_second_moments_decay_after_a_burst(moments: str) -> None:
    mean, _ = after_a_burst("fp32", moments)
    assert mean == pytest.approx(0.1 * 0.999**700, rel=0.03)


def test_rounded_to_nearest_they_do_not() -> None:
    mean, update = after_a_burst("nearest", "bf16")
    assert mean > 0.09 and update.swallowed["exp_avg_sq"].share > 0.98


# --- counters ---------------------------------------------------------------------------------------------------------


class CountsInDefaultDtype(torch.optim.Optimizer):
    """A step counter made by torch.tensor(0.0), as some optimizers have it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("step", torch.tensor(0.0))
                count += 1
                p.sub_(p.grad, alpha=group["lr"] / float(count))


@pytest.mark.parametrize("rule", ["fp32", "stochastic"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16])
def test_counters_count_on_whatever_the_default_dtype_is(default: torch.dtype, rule: str) -> None:
    """In bf16 256 + 1 is 256, in fp16 2048 + 1 is 2048."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float32 if rule == "fp32" else torch.bfloat16))
    torch.set_default_dtype(default)
    try:
        update = Update(CountsInDefaultDtype([weight]), UPDATES[rule])
        for _ in range(270 if default == torch.bfloat16 else 2060):
            weight.grad = torch.zeros_like(weight)
            update.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(update.optimizer.state[weight]["step"]) in (270, 2060)


def test_a_saved_counter_in_bf16_is_widened_when_it_is_loaded() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    update = Update(torch.optim.AdamW([weight]), UPDATES["stochastic"])
    weight.grad = torch.ones_like(weight)
    update.step()
    saved = update.optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(256.0).bfloat16()
    update.optimizer.load_state_dict(saved)
    update.step()
    assert float(update.optimizer.state[weight]["step"]) == 257


def test_counts_add_up() -> None:
    assert Swallowed(due=3, lost=1) + Swallowed(due=1, lost=1) == Swallowed(due=4, lost=2)
    assert (Swallowed().share, Swallowed(due=4, lost=1).share) == (0.0, 0.25)
    before = torch.tensor([1.0, 2.0, 0.0]).bfloat16()
    assert count_swallowed(
        before, torch.tensor([1.001, 2.5, 0.0]), torch.tensor([1.0, 2.5, 0.0]).bfloat16()
    ) == Swallowed(due=2, lost=1)
