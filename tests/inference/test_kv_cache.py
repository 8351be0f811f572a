"""Caches of codes: the values of emulation, in the bytes of the codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor
from transformers import DynamicCache
from value_models import make_value_model

from bitwright.inference import ValueRule, apply
from bitwright.inference.cache.coded_cache import CodedLayer, cache_bytes
from bitwright.inference.cache.token_codes import TokenCodes, coding_of
from bitwright.models import find_sites, find_value_sites
from bitwright.plan import Plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.value_rounding import round_values

IDS = torch.arange(88).reshape(2, 44) * 7 % 256
CACHE_SCHEMES = [name for name, scheme in VALUE_SCHEMES.items() if scheme.fits("kv_cache", "k_cache")]


def rule_of(name: str, heads: int) -> ValueRule:
    scheme = VALUE_SCHEMES[name]
    count = heads if scheme.axis == "head" else 1
    return ValueRule(scheme=scheme, scales={"k": torch.linspace(0.01, 0.03, count)} if scheme.static else {})


@pytest.mark.parametrize("name", CACHE_SCHEMES)
@pytest.mark.parametrize("steps", [(70,), (1, 40, 1, 1, 27), (33, 1, 36)])
def test_reading_gives_the_rounded_values(name: str, steps: tuple[int, ...]) -> None:
    """Bit for bit, however they came; and the bytes are those of the scheme."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 70, 32)
    rule = rule_of(name, 4)
    store = TokenCodes(coding_of(rule, "k", 32, x.device))
    for part in x.split(list(steps), dim=2):
        store.append(part)
    expected = round_values(x, rule.scheme, rule.scale("k"))
    assert torch.equal(store.read(torch.float32), expected)
    assert store.num_tokens == 70
    unit = rule.scheme.group_tokens
    full = 70 // unit * unit
    coded = rule.scheme.stored_bits(32) * 2 * 4 * 32 * full / 8
    if not rule.scheme.static:
        room = 1.13 if unit == 1 else 1.5  # room for more
        assert coded <= store.nbytes - (70 - full) * 2 * 4 * 32 * 4 <= coded * room + 2 * 4 * 32 * 8


@pytest.mark.parametrize("name", ["int8_token", "int4_channel_g32", "fp8_e4m3_head"])
def test_tokens_are_forgotten_at_both_ends(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 70, 32)
    rule = rule_of(name, 2)
    store = TokenCodes(coding_of(rule, "k", 32, x.device))
    store.append(x)
    expected = round_values(x, rule.scheme, rule.scale("k"))
    hidden = store.keep(0, 67)
    assert hidden == 0 and torch.equal(store.read(torch.float32), expected[:, :, :67])
    hidden = store.keep(40, 67)
    assert torch.equal(store.read(torch.float32)[:, :, hidden:], expected[:, :, 40:67])
    assert hidden == (8 if rule.scheme.group_tokens == 32 else 0)
    store.change(lambda part: part.repeat_interleave(3, dim=0))
    assert store.read(torch.float32).shape[0] == 3


def planned_models(architecture: str, scheme: str, parts: tuple[str, ...]) -> tuple[Any, Any, Plan]:
    model = make_value_model(architecture)
    chosen = [site for site in find_value_sites(model) if site.part in parts]
    static = VALUE_SCHEMES[scheme].static
    tensors = {f"{s.name}/scale": np.full(s.num_heads, 0.02, np.float32) for s in chosen if static}
    weights = uniform_plan(find_sites(model), "int8_w")
    plan = plan_of([*weights.sites, *(choice(site, scheme) for site in chosen)], tensors)
    return apply(plan, model), apply(plan, model, mode="packed", dtype=torch.float32), plan


def step_by_step(model: Any, prefill: int) -> tuple[Tensor, Any]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = [model(input_ids=IDS[:, :prefill], cache=cache).logits]
        logits += [model(input_ids=IDS[:, t : t + 1], cache=cache).logits for t in range(prefill, IDS.shape[1])]
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize(
    ("architecture", "scheme", "parts"),
    [
        ("llama", "int8_token", ("k_cache", "v_cache")),
        ("llama", "fp8_e4m3_head", ("k_cache", "v_cache")),
        ("llama", "int4_channel_g32", ("k_cache",)),
        ("gemma3", "int4_token_g32", ("k_cache", "v_cache")),
    ],
)
def test_a_model_with_codes_in_its_cache_runs_as_emulated(
    architecture: str, scheme: str, parts: tuple[str, ...]
) -> None:
    emulated, planned, _ = planned_models(architecture, scheme, parts)
    expected, plain = step_by_step(emulated, 39)
    found, coded = step_by_step(planned, 39)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert all(isinstance(layer, CodedLayer) for layer in coded.layers)
    bits = [VALUE_SCHEMES[scheme].stored_bits(16) if p in parts else 32 for p in ("k_cache", "v_cache")]
    if "channel" not in scheme:
        assert cache_bytes(coded) < 1.3 * cache_bytes(plain) * sum(bits) / 64
    with torch.no_grad():
        whole = emulated(input_ids=IDS, use_cache=False).logits
        same = planned(input_ids=IDS, use_cache=False).logits
        kept = planned(input_ids=IDS, use_cache=True)
    assert float((same - whole).abs().max()) < 1e-4 * float(whole.abs().max())
    assert isinstance(kept.cache.layers[0], CodedLayer)


def test_transformers_generates_with_codes_also_in_beams() -> None:
    emulated, planned, _ = planned_models("llama", "int4_token_g32", ("k_cache", "v_cache"))
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    for beams in (1, 3):
        expected = emulated.generate(IDS, attention_mask=mask, num_beams=beams, **settings)
        assert torch.equal(planned.generate(IDS, attention_mask=mask, num_beams=beams, **settings), expected)


def test_values_elsewhere_are_rounded_as_emulated() -> None:
    """Operands of attention with 1/√d applied before the cast, products of packed weights, norms, the stream."""
    model = make_value_model("mixtral")
    scheme_of = {"qk": "fp8_e4m3_token", "pv": "fp8_e4m3_token", "gate_up": "bf16_values", "down": "bf16_values"}
    scheme_of |= {"norm": "bf16_values", "residual": "bf16_values", "act": "bf16_values", "logits": "bf16_values"}
    chosen = [choice(s, scheme_of[s.part]) for s in find_value_sites(model) if s.part in scheme_of]
    assert {c.name.rpartition(":")[2] for c in chosen} == set(scheme_of)
    plan = plan_of([*uniform_plan(find_sites(model), "int8_w").sites, *chosen])
    with torch.no_grad():
        expected = apply(plan, model)(input_ids=IDS, use_cache=False).logits
        found = apply(plan, model, mode="packed", dtype=torch.float32)(input_ids=IDS, use_cache=False).logits
        without = apply(uniform_plan(find_sites(model), "int8_w"), model)(input_ids=IDS, use_cache=False).logits
    assert float((found - expected).abs().mean()) < 0.05 * float((without - expected).abs().mean())


def test_a_layer_of_codes_can_be_cropped_and_reset() -> None:
    layer = CodedLayer(rule_of("int8_token", 2), None, None)
    k, v = torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32)
    layer.update(k, v)
    layer.crop(-4)
    assert layer.get_seq_length() == 5 and layer.get_mask_sizes(1) == (6, 0) and layer.get_max_length() == -1
    all_k, all_v = layer.update(k[:, :, 5:], v[:, :, 5:])
    assert torch.equal(all_v, v)
    assert torch.equal(all_k, round_values(k, VALUE_SCHEMES["int8_token"]))
    layer.batch_select_indices(torch.tensor([1]))
    assert layer.nbytes > 0 and layer.update(k[:1], v[:1])[0].shape == (1, 2, 18, 32)
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.nbytes == 0
    with pytest.raises(ValueError, match="give a negative number"):
        layer.update(k, v)
        layer.crop(3)
