"""Value sites of nine architectures: what is found, what each value is, and that watching changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from value_models import ARCHITECTURES, make_value_model, output_of

from bitwright.models.attention_calls import AttentionCalls, eager_attention
from bitwright.models.value_calls import ValueCalls
from bitwright.models.value_sites import find_value_sites, values_left_out

IDS = torch.arange(40).reshape(2, 20) * 7 % 256
#: The first sequence begins with four tokens of padding.
MASK = (torch.arange(40) >= 4).long().reshape(2, 20)

ATTENTION = {
    "k_cache": ("kv_cache", "state", (2, 16)),
    "v_cache": ("kv_cache", "state", (2, 16)),
    "qk": ("attn.qk", "activation", (4, 16)),
    "softmax": ("attn.softmax", "activation", (4, 1)),
    "softmax_sum": ("attn.softmax_sum", "activation", (4, 1)),
    "pv": ("attn.pv", "activation", (4, 16)),
    "output": ("attn.output", "activation", (4, 16)),
}
#: What the first layer of a model has outside attention, read off the modelling files of transformers 5.24.
OTHERS = {
    "llama": {"mlp:gate": 96, "mlp:up": 96, "mlp:act": 96, "mlp:down": 64},
    "gpt2": {"mlp:up": 256, "mlp:act": 256, "mlp:down": 64},
    "phi3": {"mlp:gate_up": 192, "mlp:act": 96, "mlp:down": 64},
    "mixtral": {"mlp.gate:logits": 4, "mlp.experts:gate_up": 192, "mlp.experts:act": 96, "mlp.experts:down": 64},
    "bert": {"intermediate:up": 96, "intermediate:act": 96, "output:down": 64},
}
OTHERS |= {name: OTHERS["llama"] for name in ("qwen3", "gemma2", "gemma3")}
OTHERS["gpt_oss"] = {"mlp.router:logits": 4}
NORMS = {
    "gpt2": {"ln_1": 64, "ln_2": 64},
    "bert": {"attention.output.LayerNorm": 64, "output.LayerNorm": 64},
}
PRE_NORMS = {"input_layernorm": 64, "post_attention_layernorm": 64}
NORMS |= {name: PRE_NORMS for name in ("llama", "mixtral", "gpt_oss", "phi3")}
NORMS["qwen3"] = NORMS["llama"] | {"self_attn.q_norm": 16, "self_attn.k_norm": 16}
NORMS["gemma2"] = NORMS["llama"] | {"pre_feedforward_layernorm": 64, "post_feedforward_layernorm": 64}
NORMS["gemma3"] = NORMS["gemma2"] | {"self_attn.q_norm": 16, "self_attn.k_norm": 16}
STEM = {"gpt2": "transformer.h.0", "bert": "encoder.layer.0"}
ATTENTION_MODULE = {"gpt2": "attn", "bert": "attention.self"}


def keep(name: str, operand: str, value: Tensor) -> Tensor:
    return value


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sites_of_a_layer(architecture: str) -> None:
    sites = {site.name: site for site in find_value_sites(make_value_model(architecture)) if site.layer == 0}
    stem, module = STEM.get(architecture, "model.layers.0"), ATTENTION_MODULE.get(architecture, "self_attn")
    expected: dict[str, Any] = {f"{stem}:residual": ("residual", "activation", (1, 64))}
    for part, (role, kind, shape) in ATTENTION.items():
        heads = 4 if architecture in ("gpt2", "bert") else shape[0]
        if not (architecture == "bert" and role == "kv_cache"):  # an encoder keeps nothing
            expected[f"{stem}.{module}:{part}"] = (role, kind, (heads, shape[1]))
    roles = {"gate": "mlp.up", "up": "mlp.up", "gate_up": "mlp.up", "act": "mlp.act", "down": "mlp.down"}
    for name, width in OTHERS[architecture].items():
        expected[f"{stem}.{name}"] = (roles.get(name.split(":")[1], "router"), "activation", (1, width))
    for name, width in NORMS[architecture].items():
        expected[f"{stem}.{name}:norm"] = ("norm", "activation", (1, width))
    found = {name: (site.role, site.kind, site.shape) for name, site in sites.items()}
    assert {name: found.get(name) for name in expected} == expected
    if architecture != "gpt_oss":  # whose experts' products are found or not by the version of transformers
        assert set(found) == set(expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_watching_gives_the_outputs_of_eager_attention(architecture: str) -> None:
    model = make_value_model(architecture)
    model.set_attn_implementation("eager")
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    expected = output_of(model, **inputs)
    with ValueCalls(model, keep):
        found = output_of(model, **inputs)
    real = MASK.bool()
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    assert torch.equal(output_of(model, **inputs), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_is_eager_for_the_time_of_a_block(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same outputs, without one call of torch's fused function; other implementations stay as they are."""
    model = make_value_model(architecture)
    asked = model.config._attn_implementation
    expected = output_of(model, input_ids=IDS)
    fused: list[int] = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: (fused.append(1), original(*args, **kwargs))[1]
    )
    with eager_attention(model):
        found = output_of(model, input_ids=IDS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not fused and model.config._attn_implementation == asked
    output_of(model, input_ids=IDS)
    assert bool(fused) == (asked == "sdpa")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "phi3", "bert"])
def test_watching_gives_the_outputs_of_sdpa(architecture: str) -> None:
    model = make_value_model(architecture)
    model.set_attn_implementation("sdpa")
    expected = output_of(model, input_ids=IDS)
    with ValueCalls(model, keep):
        found = output_of(model, input_ids=IDS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_generation_with_a_cache_is_what_it_was(architecture: str) -> None:
    model = make_value_model(architecture)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    expected = model.generate(IDS[:1, :9], **options)
    with ValueCalls(model, keep):
        found = model.generate(IDS[:1, :9], **options)
    assert torch.equal(found, expected)


def test_values_are_what_attention_computes() -> None:
    model = make_value_model("llama")
    attention = model.model.layers[0].self_attn
    seen: dict[tuple[str, str], Tensor] = {}
    projected: dict[str, Tensor] = {}

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        seen.setdefault((name.removeprefix("model.layers.0.self_attn:"), operand), value)
        return value

    for name in ("v_proj", "o_proj"):
        module = attention.get_submodule(name)
        module.register_forward_hook(
            lambda _, args, y, name=name: projected.update({name: args[0] if name == "o_proj" else y})
        )
    with ValueCalls(model, note):
        model(input_ids=IDS)
    v = projected["v_proj"].unflatten(-1, (2, 16)).transpose(1, 2)
    assert torch.equal(seen["v_cache", "v"], v)
    assert torch.equal(seen["pv", "v"], v)
    # q already holds the scaling, so that the softmax of q·k is the one of the layer
    scores = seen["qk", "q"] @ seen["qk", "k"].repeat_interleave(2, dim=1).transpose(-1, -2)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    p = F.softmax(scores.masked_fill(~causal, -torch.inf), dim=-1)
    e, total = seen["softmax", "p"], seen["softmax_sum", "sum"]
    torch.testing.assert_close(e / total, p)
    assert torch.equal(e.amax(-1), torch.ones(2, 4, 20))
    o = p @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(seen["output", "o"], o)
    torch.testing.assert_close(projected["o_proj"], o.transpose(1, 2).flatten(2))


def test_what_is_offered_in_place_is_used() -> None:
    model = make_value_model("llama")
    nothing = {"model.layers.0.self_attn:v_cache", "model.layers.1.self_attn:output", "model.layers.0.mlp:act"}
    outputs: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, y: outputs.append(y))
        layer.mlp.down_proj.register_forward_hook(lambda _, __, y: outputs.append(y))
    with ValueCalls(model, lambda name, _, value: value * 0 if name in nothing else value, names=nothing):
        model(input_ids=IDS)
    is_zero = [bool((y == 0).all()) for y in outputs]
    assert is_zero == [True, True, True, False]  # attention 0, mlp 0, attention 1, mlp 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_residual_stream_is_what_each_layer_ends_with(architecture: str) -> None:
    model = make_value_model(architecture)
    stem = STEM.get(architecture, "model.layers.0").rpartition(".")[0]
    ends: list[Tensor] = []
    stream: dict[str, list[Tensor]] = {}
    for layer in model.get_submodule(stem):
        layer.register_forward_hook(lambda _, __, y: ends.append(y[0] if isinstance(y, tuple) else y))

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        stream.setdefault(name, []).append(value)
        return value

    with ValueCalls(model, note, names={f"{stem}.{i}:residual" for i in range(2)}):
        model(input_ids=IDS)
    for index, end in enumerate(ends):
        values = stream[f"{stem}.{index}:residual"]
        assert len(values) == 2 and torch.equal(values[-1], end)


def test_sums_of_the_softmax_are_offered_by_blocks() -> None:
    model = make_value_model("llama")
    seen: list[Tensor] = []

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        if name == "model.layers.0.self_attn:softmax_sum":
            seen.append(value)
        return value

    with AttentionCalls(model, note):
        model(input_ids=torch.arange(150).reshape(1, 150))
    assert len(seen) == 3  # 64 + 64 + 22 keys
    assert bool((seen[0] <= seen[1]).all() and (seen[1] <= seen[2]).all())


def test_what_cannot_be_reached_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.attention = Attention()
            self.norm = nn.LayerNorm(8)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.norm(self.attention(self.embedding(input_ids)))

    model = Model().eval()
    assert [site.name for site in find_value_sites(model)] == ["norm:norm"]
    attention, residual = values_left_out(model)
    assert attention.startswith("attention: its attention does not go through")
    assert residual.startswith("the residual stream: ")
    assert values_left_out(model, {"kv_cache"}) == (attention,)
    assert values_left_out(model, {"norm", "mlp.act"}) == () == values_left_out(model, ())
    assert values_left_out(make_value_model("llama")) == ()
    (sentence,) = values_left_out(nn.Sequential(nn.Linear(8, 8)))
    assert sentence == "Sequential takes no input_ids, so that it cannot be run to see its values"


def test_the_configs_and_the_cache_are_what_they_were_after_an_error() -> None:
    from transformers import Cache

    model = make_value_model("llama")
    update = Cache.update

    def fail(name: str, operand: str, value: Tensor) -> Tensor:
        raise KeyError(name)

    with pytest.raises(KeyError), ValueCalls(model, fail):
        model(input_ids=IDS)
    assert model.config._attn_implementation == "sdpa"
    assert Cache.update is update
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_caches_of_sliding_attention_say_how_much_they_hold() -> None:
    sites = find_value_sites(make_value_model("gemma3"))
    assert {site.layer: site.window for site in sites if site.kind == "state"} == {0: 7, 1: None}
    assert {site.window for site in sites if site.kind == "activation"} == {None}
