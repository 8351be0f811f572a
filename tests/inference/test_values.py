"""Rounded values: against attention written down in a few lines, a cache against one pass, and overflows counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_plans import choice, plan_of
from torch import Tensor
from transformers import DynamicCache
from value_models import make_value_model

from bitwright.errors import PlanError
from bitwright.inference import ValueRule, emulate, emulate_plan, emulate_values, value_tensors_of
from bitwright.inference.emulation.values import value_rules
from bitwright.models import find_sites
from bitwright.models.attention_calls import attend
from bitwright.models.value_calls import ValueCalls
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import load_plan, write_plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.value_rounding import static_scale

IDS = torch.arange(44).reshape(2, 22) * 7 % 256


def rule(scheme_name: str, scale: float = 0.02) -> ValueRule:
    """A scheme; static ones with one scale for every operand."""
    scheme = VALUE_SCHEMES[scheme_name]
    return ValueRule(scheme=scheme, scales={operand: torch.tensor([scale]) for operand in "qkvo"})


def sites_of(model: Any, *parts: str) -> list[ValueSite]:
    return [site for site in find_value_sites(model) if site.part in parts]


def logits_of(model: Any, rules: dict[ValueSite, ValueRule], ids: Tensor = IDS) -> Tensor:
    with torch.no_grad(), emulate_values(model, rules):
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("scheme", ["bf16_values", "fp8_e4m3_token", "int8_token", "fp8_e4m3_head"])
def test_a_cache_token_by_token_sees_the_keys_that_one_pass_sees(scheme: str) -> None:
    model = make_value_model("llama")
    rules = {site: rule(scheme) for site in sites_of(model, "k_cache", "v_cache")}
    whole = logits_of(model, rules)
    with torch.no_grad(), emulate_values(model, rules):
        cache = DynamicCache(config=model.config)
        steps = [model(IDS[:, token : token + 1], cache=cache).logits[:, 0] for token in range(IDS.shape[1])]
    # sums in another order push a few numbers over a rounding border, which moves single logits by a trifle
    effect = (whole - logits_of(model, {})).abs().mean()
    assert float((torch.stack(steps, 1) - whole).abs().mean()) < 0.02 * float(effect)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_generation_is_the_greedy_continuation_of_one_pass(architecture: str) -> None:
    model = make_value_model(architecture)
    rules = {site: rule("int4_token") for site in sites_of(model, "k_cache", "v_cache")}
    start = IDS[:1, :9]
    with torch.no_grad(), emulate_values(model, rules):
        mask = torch.ones_like(start)
        found = model.generate(start, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    ids = start
    for _ in range(8):
        ids = torch.cat([ids, logits_of(model, rules, ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids)


def test_keys_per_channel_are_rounded_when_their_group_is_full() -> None:
    model = make_value_model("llama")
    (site,) = (s for s in sites_of(model, "k_cache") if s.layer == 0)
    rules = {site: rule("int4_channel_g32")}
    ids = torch.arange(70).reshape(1, 70) * 11 % 256

    def keys(*, prefill: int) -> Tensor:
        with torch.no_grad(), emulate_values(model, rules):
            cache = DynamicCache(config=model.config)
            model(ids[:, :prefill], cache=cache)
            for token in range(prefill, 70):
                model(ids[:, token : token + 1], cache=cache)
        return cache.layers[0].keys

    with torch.no_grad():
        exact = model(ids, use_cache=True).cache.layers[0].keys
    expected = exact.clone()
    for first in (0, 32):  # tokens 64 … 69 are a group that is not full
        for head in range(2):
            for channel in range(16):
                column = exact[0, head, first : first + 32, channel]
                scale = ((column.max() - column.min()) / 15).half().float()
                minimum = column.min().half().float()
                code = ((column - minimum) / scale).round().clamp(0, 15)
                expected[0, head, first : first + 32, channel] = code * scale + minimum
    for prefill in (1, 33, 70):
        torch.testing.assert_close(keys(prefill=prefill), expected, rtol=1e-5, atol=1e-5)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One causal head in which every operand is rounded: what a kernel with 8-bit operands computes."""

    def per_token(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    q, k, v = per_token(q * 16**-0.5), per_token(k), per_token(v)
    scores = (q @ k.T).masked_fill(~torch.ones(len(q), len(q), dtype=torch.bool).tril(), -torch.inf)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    p = (e * 448).to(torch.float8_e4m3fn).float() / 448
    return (p @ v) / e.sum(-1, keepdim=True)


def test_operands_are_rounded_as_a_kernel_does() -> None:
    model = make_value_model("llama")
    seen: dict[str, Tensor] = {}

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        seen.setdefault(f"{name.rpartition(':')[2]} {operand}", value)
        return value

    with torch.no_grad(), ValueCalls(model, note):
        model(IDS)
    outputs: list[Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    rules = {
        site: rule("fp8_e4m3_unit" if site.part == "softmax" else "fp8_e4m3_token")
        for site in sites_of(model, "qk", "softmax", "pv")
        if site.layer == 0
    }
    logits_of(model, rules)
    q, k, v = seen["qk q"] * 16**0.5, seen["k_cache k"], seen["v_cache v"]
    for head in range(4):
        expected = attention_by_hand(q[1, head], k[1, head // 2], v[1, head // 2])
        torch.testing.assert_close(outputs[-1][1, :, head * 16 : head * 16 + 16], expected, rtol=1e-4, atol=1e-5)


def test_a_norm_rounds_its_input_and_its_output() -> None:
    model = make_value_model("llama")
    norm = model.model.layers[1].post_attention_layernorm
    (site,) = (s for s in find_value_sites(model) if s.name == "model.layers.1.post_attention_layernorm:norm")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), emulate_values(model, {site: rule("bf16_values")}):
        found = norm(x)
    rounded = x.bfloat16().float()
    scale = torch.rsqrt(rounded.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    assert torch.equal(found, (rounded * scale * norm.weight).bfloat16().float())


def test_a_sum_in_bf16_stops_growing() -> None:
    # all keys alike: e is 1 for each, and 64 more are half a step of a bf16 sum of 16384
    model = make_value_model("gpt2")
    (site,) = (s for s in sites_of(model, "softmax_sum") if s.layer == 0)
    attention = model.transformer.h[0].attn
    q, v = torch.zeros(1, 4, 1, 16), torch.ones(1, 4, 17000, 16)
    with emulate_values(model, {site: rule("bf16_values")}):
        output, _ = attend(attention, q, v, v, None, is_causal=False)
    # blocks of 64 are added exactly up to 16384, and not at all beyond it (ties go to the even 16384)
    torch.testing.assert_close(output, torch.full_like(output, 17000 / 16384), rtol=1e-6, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "bert"])
def test_emulation_of_values_beside_weights(architecture: str) -> None:
    model = make_value_model(architecture)
    values = {site: rule("bf16_values") for site in find_value_sites(model)}
    before = model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    counters: dict[str, Any] = {}
    with torch.no_grad(), emulate(model, find_sites(model), {}, values=values, counters=counters):
        model(IDS)
    assert set(counters) == {site.name for site in values}
    assert sum(counts.num_overflows for counts in counters.values()) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_overflows_are_counted_before_the_cast() -> None:
    model = make_value_model("llama")
    k, up = (s for s in find_value_sites(model) if s.name.endswith(("layers.0.self_attn:k_cache", "layers.0.mlp:up")))
    seen: list[Tensor] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, __, y: seen.append(y))
    with torch.no_grad():
        keys = model(IDS, use_cache=True).cache.layers[0].keys
        scale = float(keys.abs().max()) / 127 / 2  # the larger half of the range overflows
        counters: dict[str, Any] = {}
        with emulate_values(model, {k: rule("int8_head", scale), up: rule("fp16_values")}, counters=counters):
            model(IDS)
    # 127.5 goes to the even 128; −128.5 to the even −128, which INT8 has
    beyond = (keys / scale >= 127.5) | (keys / scale < -128.5)
    assert counters[k.name].num_values == keys.numel()
    assert counters[k.name].num_overflows == int(beyond.sum()) > 0
    assert counters[k.name].num_overflowed_tokens == int(beyond.any(-1).any(1).sum())
    assert counters[k.name].num_tokens == IDS.numel()
    assert counters[up.name].num_values == seen[0].numel() and counters[up.name].num_overflows == 0


def test_scales_that_a_plan_keeps() -> None:
    model = make_value_model("llama")
    sites = {site.part: site for site in find_value_sites(model) if site.layer == 0}
    scheme = VALUE_SCHEMES["fp8_e4m3_head"]
    amax = torch.tensor([448.0, 0.0, 3.5, 896.0])
    scale = static_scale(scheme, "q", amax)
    assert scale.tolist() == [1.0, 1.0, 3.5 / 448, 2.0]
    rules = ValueRule(scheme=scheme, scales={"q": scale, "k": scale[:2], "v": scale[:2], "o": scale})
    assert sorted(value_tensors_of(sites["qk"], rules)) == [
        "model.layers.0.self_attn:qk/scale_k",
        "model.layers.0.self_attn:qk/scale_q",
    ]
    assert list(value_tensors_of(sites["pv"], rules)) == ["model.layers.0.self_attn:pv/scale"]
    assert value_tensors_of(sites["k_cache"], ValueRule(scheme=VALUE_SCHEMES["int8_token"])) == {}
    assert value_tensors_of(sites["softmax"], ValueRule(scheme=VALUE_SCHEMES["fp8_e4m3_unit"])) == {}


def test_a_written_plan_runs_as_its_rules_do(tmp_path: Path) -> None:
    model = make_value_model("llama")
    rules = {site: rule("fp8_e4m3_head") for site in sites_of(model, "k_cache", "qk")}
    choices = [choice(site, chosen.scheme.name) for site, chosen in rules.items()]
    tensors = {name: array for site, chosen in rules.items() for name, array in value_tensors_of(site, chosen).items()}
    write_plan(plan_of(choices, tensors), tmp_path / "plan")
    plan = load_plan(tmp_path / "plan")
    counters: dict[str, Any] = {}
    with torch.no_grad(), emulate_plan(plan, model, find_sites(model), counters=counters):
        found = model(IDS, use_cache=False).logits
    assert torch.equal(found, logits_of(model, rules))
    assert set(counters) == {site.name for site in rules}


def test_a_plan_without_the_scales_of_a_site_is_refused() -> None:
    choice = SimpleNamespace(kind="state", name="model.layers.0.self_attn:k_cache", scheme="int8_head")
    made = SimpleNamespace(sites=(choice,), tensors={}, model=SimpleNamespace(name="tiny"))

    sites = find_value_sites(make_value_model("llama"))
    with pytest.raises(PlanError, match=r"hold no 'model.layers.0.self_attn:k_cache/scale'"):
        value_rules(made, sites)  # type: ignore[arg-type]
    choice.name = "model.layers.9.self_attn:k_cache"
    with pytest.raises(PlanError, match="which this model does not have"):
        value_rules(made, sites)  # type: ignore[arg-type]
