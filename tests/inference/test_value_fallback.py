"""Values of attention and of caches that overflow: counted before the cast, and kept as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from value_models import make_value_model

from bitwright.inference import FallbackSettings, ValueRule, apply
from bitwright.inference.cache.token_codes import TokenCodes, coding_of
from bitwright.inference.counters import FallbackCounts
from bitwright.inference.emulation.values import value_tensors_of
from bitwright.inference.fallback import Fallback
from bitwright.inference.generation.generate import generate
from bitwright.inference.overflow_watch import OverflowWatch
from bitwright.models import find_sites, find_value_sites
from bitwright.plan import Plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.value_rounding import round_values

IDS = torch.arange(18).reshape(2, 9) * 7 % 256
SCHEME = VALUE_SCHEMES["fp8_e4m3_head"]
NEVER_HELD = {"window": 100, "enter": 100}


def plan_with(model: Any, scales: Mapping[str, float], weights: str = "int8_w") -> Plan:
    """Parts of attention → the static scale of all heads there."""
    values = [site for site in find_value_sites(model) if site.part in scales]
    plan = uniform_plan(find_sites(model), weights)
    tensors = dict(plan.tensors)
    for site in values:
        scale = torch.full((1,), scales[site.part])
        tensors |= value_tensors_of(site, ValueRule(scheme=SCHEME, scales=dict.fromkeys(site.operands, scale)))
    return plan_of([*plan.sites, *(choice(site, SCHEME.name) for site in values)], tensors)


def logits_of(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, **inputs).logits
    return found


def counts_of(planned: Any) -> dict[str, tuple[int, int]]:
    """Site → tokens, and those that overflowed."""
    fallbacks = planned.bitwright_run.counters.fallbacks
    return {name: (counts.tokens, counts.overflowed_tokens) for name, counts in fallbacks.items()}


@pytest.mark.parametrize("mode", ["emulate", "packed"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_where_everything_overflows_attention_is_that_of_the_model(mode: str, use_cache: bool) -> None:
    """A scale of 1e-6 reaches 0.0004: all operands and all keys and values stay as they are."""
    model = make_value_model("llama")
    expected = logits_of(apply(uniform_plan(find_sites(model), "int8_w"), model), use_cache=use_cache)
    plan = plan_with(model, dict.fromkeys(("k_cache", "v_cache", "qk"), 1e-6))
    planned: Any = apply(plan, model, mode=mode, dtype=torch.float32, fallback=FallbackSettings())
    torch.testing.assert_close(logits_of(planned, use_cache=use_cache), expected, rtol=1e-4, atol=1e-5)
    layer = "model.layers.0.self_attn"
    wanted = [f"{layer}:{part}" for part in ("k_cache", "v_cache", "qk/q", "qk/k")]
    counts = planned.bitwright_run.counters.fallbacks
    assert {name for name in counts if name.startswith(layer) and ":" in name} == set(wanted)
    for name in wanted:
        assert (counts[name].tokens, counts[name].overflowed_tokens, counts[name].batch_fallbacks) == (18, 18, 1)


def test_emulation_counts_and_saturates_as_it_is_measured() -> None:
    model = make_value_model("llama")
    plan = plan_with(model, {"k_cache": 2e-4, "v_cache": 2e-4, "qk": 1e-4, "pv": 1e-4})  # reach 0.09 and 0.045
    planned: Any = apply(plan, model)
    found = logits_of(planned)
    assert not torch.equal(found, logits_of(apply(uniform_plan(find_sites(model), "int8_w"), model)))
    assert all(overflowed > 9 for _, overflowed in counts_of(planned).values())
    metrics = planned.bitwright_run.counters.metrics()
    assert metrics["fallback_token_fallbacks"] == metrics["fallback_batch_fallbacks"] == 0
    packed: Any = apply(plan, model, mode="packed", dtype=torch.float32, fallback=None)
    torch.testing.assert_close(logits_of(packed), found, rtol=1e-3, atol=1e-3)


def test_inputs_of_matrices_fall_back_in_emulation_too_where_it_is_asked_for() -> None:
    model = make_value_model("llama")
    plan = uniform_plan(find_sites(model), "int8_static")
    tensors = {name: np.full_like(array, 1e-6) for name, array in plan.tensors.items()}
    plan = plan.attach(tensors=tensors)
    weights_alone = logits_of(apply(uniform_plan(find_sites(model), "int8_w"), model))
    settings = FallbackSettings(max_fallbacks_per_batch=0)
    torch.testing.assert_close(logits_of(apply(plan, model, fallback=settings)), weights_alone, rtol=1e-4, atol=1e-5)


def fallback_of(**settings: int) -> Fallback:
    return Fallback.new(FallbackSettings(**settings), OverflowWatch(), FallbackCounts())


def test_a_cache_keeps_what_its_codes_do_not_reach() -> None:
    """Of single tokens that lie beyond, the numbers themselves; of others what codes stand for, at every later look."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 40, 32)
    rule = ValueRule(scheme=SCHEME, scales={"k": torch.tensor([0.02, 0.03])})  # reaches 8.96 and 13.44
    x[0, 1, 3, 5], x[1, 0, 17, 2], x[1, 1, 30, 0] = 100.0, -60.0, 14.5
    expected = round_values(x, SCHEME, rule.scale("k"))
    for sequence, place in ((0, 3), (1, 17), (1, 30)):
        expected[sequence, :, place] = x[sequence, :, place]
    fallback = fallback_of()
    store = TokenCodes(coding_of(rule, "k", 32, x.device), fallback)
    bare = TokenCodes(coding_of(rule, "k", 32, x.device))
    for part in x.split([20, 1, 9, 1, 9], dim=2):
        store.append(part)
        bare.append(part)
    assert torch.equal(store.read(torch.float32), expected)
    assert store.nbytes == bare.nbytes + 3 * 2 * 2 * 32 * 4
    assert (fallback.counts.tokens, fallback.counts.overflowed_tokens, fallback.counts.token_fallbacks) == (80, 3, 3)
    bring_back = store.remember()
    store.keep(0, 25)
    assert torch.equal(store.read(torch.float32), expected[:, :, :25])
    bring_back()
    assert torch.equal(store.read(torch.float32), expected)
    store.keep(10, 40)
    assert torch.equal(store.read(torch.float32), expected[:, :, 10:])
    store.append(x[:, :, 3:4])
    store.change(lambda part: part.flip(0))
    assert torch.equal(store.read(torch.float32), torch.cat([expected[:, :, 10:], expected[:, :, 3:4]], dim=2).flip(0))


@pytest.mark.parametrize(("max_fallbacks", "num_kept"), [(3, 4), (1, 0)])
def test_too_many_tokens_of_a_call_are_all_kept(max_fallbacks: int, num_kept: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 32)
    x[0, 0, 1:3] *= 100
    rule = ValueRule(scheme=SCHEME, scales={"k": torch.tensor([0.02])})
    store = TokenCodes(coding_of(rule, "k", 32, x.device), fallback_of(max_fallbacks_per_batch=max_fallbacks))
    store.append(x)
    differing = (store.read(torch.float32) != x).any(-1).any(1).sum()
    assert int(differing) == num_kept


@pytest.mark.parametrize(
    ("architecture", "scales"),
    [
        ("llama", {"k_cache": 0.004, "v_cache": 0.004}),
        ("llama", {"k_cache": 0.004, "qk": 0.001, "pv": 0.002}),
        ("gemma3", {"k_cache": 0.006, "v_cache": 0.004}),
    ],
)
def test_what_is_heard_late_is_the_same_rule(architecture: str, scales: dict[str, float]) -> None:
    """Steps whose keys overflow, or operands of attention: the same tokens and counts as where the host looks."""
    model = make_value_model(architecture)
    plan = plan_with(model, scales)  # 0.004 reaches 1.8
    runs: list[Any] = []
    found = []
    for lag in (0, 1):
        settings = FallbackSettings(**NEVER_HELD)
        runs.append(apply(plan, model, mode="packed", dtype=torch.float32, fallback=settings))
        found.append(generate(runs[-1], IDS, max_new_tokens=12, lag=lag))
    assert found[1].tokens == found[0].tokens
    assert counts_of(runs[1]) == counts_of(runs[0])
    assert sum(0 < overflowed for _, overflowed in counts_of(runs[1]).values()) >= 3
    assert runs[1].bitwright_run.counters.overflowed_steps > 0


def test_where_the_device_has_both_nothing_is_run_again() -> None:
    """Operands are there rounded and unrounded; only what a cache has saturated takes a second run."""
    model = make_value_model("llama")
    for parts, repeats in ((("qk", "pv"), False), (("v_cache",), True)):
        plan = plan_with(model, dict.fromkeys(parts, 1e-4))
        planned: Any = apply(plan, model, mode="packed", dtype=torch.float32)
        generate(planned, IDS, max_new_tokens=5, lag=1)
        counters = planned.bitwright_run.counters
        assert counters.overflowed_steps == 4 and (counters.repeated_steps > 0) == repeats


@pytest.mark.parametrize("mode", ["emulate", "packed"])
def test_a_copy_of_a_model_counts_for_itself(mode: str) -> None:
    model = make_value_model("llama")
    planned: Any = apply(plan_with(model, {"qk": 1e-4}), model, mode=mode, dtype=torch.float32)
    copied = copy.deepcopy(planned)
    assert torch.equal(logits_of(copied), logits_of(planned))
    logits_of(copied)
    wanted = {name: (18, 18) for name in counts_of(planned)}
    assert counts_of(planned) == wanted and len(wanted) == 4
    assert counts_of(copied) == {name: (36, 36) for name in wanted}


def test_scales_lie_where_the_values_are() -> None:
    """A scale that every call brought to a GPU would make the host wait."""
    scheme = VALUE_SCHEMES["fp8_e4m3_head"]
    rule = ValueRule(scheme=scheme, scales={"v": torch.tensor([0.5])}).on(torch.device("meta"), ("p", "v"))
    for operand in ("p", "v"):
        scale = rule.scale(operand)
        assert scale is not None and scale.device.type == "meta" and rule.scale(operand) is scale
    dynamic = ValueRule(scheme=VALUE_SCHEMES["fp8_e4m3_token"])
    assert dynamic.on(torch.device("meta"), ("q", "k")) is dynamic


@pytest.mark.parametrize("fallback", [FallbackSettings(**NEVER_HELD), "as_the_mode"])
def test_emulation_that_is_heard_late_counts_the_same(fallback: Any) -> None:
    """In a cache of somebody's own, too: nothing has to be taken back."""

    class OwnLayer(DynamicLayer):  # type: ignore[misc]
        pass

    model = make_value_model("llama")
    plan = plan_with(model, {"k_cache": 0.004, "qk": 0.001}, weights="int8_static")
    runs: list[Any] = [apply(plan, model, fallback=fallback) for _ in range(2)]
    caches = [None, Cache(layer_class_to_replicate=OwnLayer)]
    found = [generate(runs[lag], IDS, max_new_tokens=6, lag=lag, cache=caches[lag]) for lag in (0, 1)]
    assert found[0].tokens == found[1].tokens and found[1].notes == ()
    assert counts_of(runs[0]) == counts_of(runs[1])
    assert runs[1].bitwright_run.counters.repeated_steps == 0


def test_scales_that_are_found_on_every_call_cover_what_they_meet() -> None:
    model = make_value_model("llama")
    caches = [site for site in find_value_sites(model) if site.role == "kv_cache"]
    planned: Any = apply(plan_of([choice(site, "fp8_e4m3_token") for site in caches]), model, mode="packed")
    assert planned.bitwright_run.counters.fallbacks == {}
