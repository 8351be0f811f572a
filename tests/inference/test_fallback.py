"""Tokens whose inputs overflow: which are computed again, what is counted, and that no matrix flaps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import uniform_plan
from torch import nn

from bitwright.errors import SchemeError
from bitwright.inference import FallbackSettings, apply
from bitwright.inference.hysteresis import Hysteresis
from bitwright.inference.packed.break_even import BreakEven, measure_break_even
from bitwright.inference.packed.modules import PackedLinear
from bitwright.models import find_sites
from bitwright.quantize import SCHEMES, fake_quantize

CALLS = st.lists(st.booleans(), max_size=200)
SETTINGS = st.builds(
    lambda enter, more, leave: FallbackSettings(enter=enter, window=enter + more, leave=leave),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(1, 8),
)


def run(chosen: FallbackSettings, calls: list[bool]) -> list[bool]:
    """Whether each call was held wide."""
    machine = Hysteresis(settings=chosen)
    held = []
    for overflowed in calls:
        held.append(machine.is_wide)
        machine.step(overflowed)
    return held


@settings(max_examples=60, deadline=None)
@given(SETTINGS, CALLS)
def test_a_matrix_is_held_only_after_enough_overflows(chosen: FallbackSettings, calls: list[bool]) -> None:
    held = run(chosen, calls)
    for at, is_held in enumerate(held):
        if is_held and not held[at - 1]:
            assert sum(calls[max(0, at - chosen.window) : at]) >= chosen.enter


@settings(max_examples=60, deadline=None)
@given(SETTINGS, CALLS)
def test_between_two_holds_lie_many_calls(chosen: FallbackSettings, calls: list[bool]) -> None:
    held = run(chosen, calls)
    begins = [at for at in range(1, len(held)) if held[at] and not held[at - 1]]
    for first, second in pairwise(begins):
        assert second - first >= chosen.leave + chosen.enter
    for at in range(1, len(held)):
        if held[at - 1] and not held[at]:
            assert not any(calls[at - chosen.leave : at])


@settings(max_examples=60, deadline=None)
@given(SETTINGS, CALLS)
def test_calm_always_lets_go_and_storms_always_hold(chosen: FallbackSettings, calls: list[bool]) -> None:
    assert not run(chosen, [*calls, *[False] * (chosen.window + chosen.leave), False])[-1]
    assert run(chosen, [*calls, *[True] * chosen.enter, True])[-1]


@pytest.mark.parametrize(
    "wrong", [{"enter": 0}, {"leave": 0}, {"window": 3, "enter": 4}, {"max_fallbacks_per_batch": -1}]
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SchemeError, match="contradict each other"):
        FallbackSettings(**wrong)


def planned_layer(mode: str, **changes: Any) -> tuple[Any, torch.Tensor]:
    """A layer with static INT8 inputs in [−127 · 0.02, 127 · 0.02], and its weight's values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False)).requires_grad_(False)
    plan = uniform_plan(find_sites(model), "int8_static")
    planned = apply(plan, model, mode=mode, dtype=torch.float32, fallback=FallbackSettings(**changes))
    weights = SCHEMES["int8_static"].weights
    assert weights is not None
    return planned, fake_quantize(model[0].weight, weights)


@pytest.mark.parametrize("mode", ["packed", "native"])
def test_tokens_that_overflow_are_multiplied_unrounded(mode: str) -> None:
    planned, weight = planned_layer(mode)
    x = torch.rand(8, 64) * 2
    x[2, 5], x[6, 0] = 40.0, -3.0  # 127.5 · 0.02 = 2.55 is the first that overflows, −128.5 · 0.02 = −2.57 below
    x[4, 1] = 2.549
    found = planned(x)
    rounded = (x / 0.02).round().clamp(-128, 127) * 0.02
    expected = rounded @ weight.T
    expected[[2, 6]] = x[[2, 6]] @ weight.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    (counts,) = planned.bitwright_run.counters.fallbacks.values()
    assert (counts.calls, counts.tokens, counts.overflows, counts.overflowed_tokens) == (1, 8, 2, 2)
    assert (counts.token_fallbacks, counts.batch_fallbacks) == (2, 0)


def test_too_many_tokens_send_the_whole_batch() -> None:
    planned, weight = planned_layer("native", max_fallbacks_per_batch=3)
    x = torch.rand(8, 64)
    x[:4, 0] = 50.0
    torch.testing.assert_close(planned(x), x @ weight.T, rtol=1e-5, atol=1e-4)
    x[3, 0] = 0.0
    rounded = (x / 0.02).round().clamp(-128, 127) * 0.02
    expected = rounded @ weight.T
    expected[:3] = x[:3] @ weight.T
    torch.testing.assert_close(planned(x), expected, rtol=1e-5, atol=1e-4)
    (counts,) = planned.bitwright_run.counters.fallbacks.values()
    assert (counts.batch_fallbacks, counts.token_fallbacks, counts.overflows) == (1, 3, 7)
    metrics = planned.bitwright_run.counters.metrics()
    assert metrics["fallback_batch_fallbacks"] == 1 and metrics["fallback_calls"] == 2


def test_a_matrix_that_overflows_often_stays_wide_until_it_is_calm() -> None:
    planned, weight = planned_layer("packed", window=4, enter=2, leave=3)
    calm, storm = torch.rand(2, 64), torch.full((2, 64), 9.0)
    rounded = ((calm / 0.02).round() * 0.02) @ weight.T
    exact = calm @ weight.T
    was_exact = []
    for x in (calm, storm, storm, calm, calm, calm, calm):
        found = planned(x)
        if x is calm:
            was_exact.append(bool((found - exact).abs().max() < (found - rounded).abs().max()))
    assert was_exact == [False, True, True, True, False]
    (counts,) = planned.bitwright_run.counters.fallbacks.values()
    assert counts.held_calls == 3 and counts.switches == 2


def test_what_cannot_overflow_is_not_counted(make_tiny_model: Any) -> None:
    model = make_tiny_model("llama")
    planned: Any = apply(uniform_plan(find_sites(model), "int8"), model, mode="auto")
    planned(input_ids=torch.arange(6).unsqueeze(0))
    assert planned.bitwright_run.counters.fallbacks == {}
    saturating: Any = apply(uniform_plan(find_sites(model), "int8_static"), model, mode="auto", fallback=None)
    assert saturating.bitwright_run.counters.fallbacks == {}


def test_fp16_inputs_overflow_too() -> None:
    model = nn.Sequential(nn.Linear(32, 16, bias=False)).requires_grad_(False)
    planned: Any = apply(uniform_plan(find_sites(model), "fp16"), model, mode="packed", dtype=torch.float32)
    x = torch.randn(3, 32)
    x[1, 3] = 1e6
    assert torch.isfinite(planned(x)).all()
    (counts,) = planned.bitwright_run.counters.fallbacks.values()
    assert counts.token_fallbacks == 1


def test_break_even_is_where_both_ways_take_as_long() -> None:
    even = BreakEven(num_tokens=4, narrow_s=2.0, wide_s=5.0, few_s=4.0)
    for rate in (0.0, 0.5, even.rate, 1.0):
        mixed = (1 - rate) * even.narrow_s + rate * (even.narrow_s + even.few_s)
        assert (mixed < even.wide_s) == (rate < even.rate) or rate == even.rate
    assert BreakEven(num_tokens=1, narrow_s=3.0, wide_s=2.0, few_s=2.0).rate == 0.0
    assert BreakEven(num_tokens=1, narrow_s=1.0, wide_s=9.0, few_s=2.0).rate == 1.0
    planned, _ = planned_layer("native")
    assert isinstance(planned[0], PackedLinear)
    measured = measure_break_even(planned[0].packed, 16, repeats=3)
    assert min(measured.narrow_s, measured.wide_s, measured.few_s) > 0 and 0 <= measured.rate <= 1
    with pytest.raises(SchemeError, match="does not round its inputs"):
        weight_only = nn.Sequential(nn.Linear(32, 16))
        other: Any = apply(uniform_plan(find_sites(weight_only), "int8_w"), weight_only, mode="packed")
        measure_break_even(other[0].packed, 4)
