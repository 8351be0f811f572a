"""Emulation against models changed by hand: weights replaced, inputs rounded by plain forward hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import SchemeError
from bitwright.inference import SiteRule, emulate
from bitwright.models.sites import Site, find_sites
from bitwright.quantize import SCHEMES, fake_quantize

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")
IDS = torch.arange(22).reshape(2, 11) * 7 % 260


def rule(scheme_name: str) -> SiteRule:
    scheme = SCHEMES[scheme_name]
    weights = scheme.weights
    assert weights is not None
    return SiteRule(quantize_weight=lambda w: fake_quantize(w, weights), activations=scheme.activations)


def decoder(sites: tuple[Site, ...]) -> list[Site]:
    return [site for site in sites if site.role not in ("embedding", "lm_head")]


def bits_of(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Storage address and bytes of every parameter."""
    return {name: (p.data_ptr(), p.detach().numpy().tobytes()) for name, p in model.named_parameters()}


def changed_by_hand(model: nn.Module, scheme_name: str) -> nn.Module:
    """A copy whose decoder weights are quantised in place, module by module, without looking at sites."""
    scheme = SCHEMES[scheme_name].weights
    assert scheme is not None
    other = copy.deepcopy(model)
    embedding, head = other.get_input_embeddings(), other.get_output_embeddings()
    for name, module in other.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.data = fake_quantize(module.weight.data, scheme)
        elif kind == "Conv1D":
            module.weight.data = fake_quantize(module.weight.data.T.contiguous(), scheme).T.contiguous()
        elif name.endswith("experts"):
            for parameter in module.parameters(recurse=False):
                parameter.data = torch.stack([fake_quantize(expert, scheme) for expert in parameter.data])
        elif kind.endswith("Router"):
            module.weight.data = fake_quantize(module.weight.data, scheme)
    assert embedding is not None
    return other


def logits_of(model: nn.Module) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scheme", ["int8_w", "fp8_w", "int4_g32_min"])
def test_weights_run_as_their_quantised_values(
    make_tiny_model: Callable[..., Any], architecture: str, scheme: str
) -> None:
    """Also where q, k and v are quantised apart: rows and groups of a fused matrix do not see each other."""
    model = make_tiny_model(architecture)
    before, reference = bits_of(model), logits_of(model)
    sites = find_sites(model)
    with emulate(model, sites, {site.name: rule(scheme) for site in decoder(sites)}) as emulated:
        found = logits_of(emulated)
    assert torch.equal(found, logits_of(changed_by_hand(model, scheme)))
    assert not torch.equal(found, reference)
    assert bits_of(model) == before
    assert torch.equal(logits_of(model), reference)


@pytest.mark.parametrize(
    ("architecture", "scheme_name"),
    [
        *((a, s) for a in ("llama", "gpt2", "qwen2", "gemma", "phi3") for s in ("int8", "mxfp4", "bf16")),
        *((a, "nvfp4") for a in ("llama", "qwen2", "gemma")),  # where fused, each site has its own tensor scale
    ],
)
def test_inputs_are_rounded_as_by_a_hook_on_every_linear(
    make_tiny_model: Callable[..., Any], architecture: str, scheme_name: str
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    with emulate(model, sites, {site.name: rule(scheme_name) for site in decoder(sites)}):
        found = logits_of(model)
    by_hand = changed_by_hand(model, scheme_name)
    weights_only = logits_of(by_hand)
    activations = SCHEMES[scheme_name].activations
    assert activations is not None
    for module in by_hand.modules():
        if type(module).__name__ in ("Linear", "Conv1D") and module is not by_hand.get_output_embeddings():
            module.register_forward_pre_hook(lambda _, args: (fake_quantize(args[0], activations),))
    assert torch.equal(found, logits_of(by_hand))
    assert not torch.equal(found, weights_only), "inputs were not rounded"


@pytest.mark.parametrize("scheme_name", ["int8", "mxfp4"])
def test_inputs_of_experts_and_router_are_rounded(make_tiny_model: Callable[..., Any], scheme_name: str) -> None:
    """By hand: Mixtral's block computed expert by expert, token by token."""
    model = make_tiny_model("mixtral")
    sites = find_sites(model)
    scheme = SCHEMES[scheme_name].activations
    weights = SCHEMES[scheme_name].weights
    assert scheme is not None and weights is not None
    block = model.model.layers[0].mlp
    inside = [site for site in sites if site.name.startswith("model.layers.0.mlp")]
    assert {site.role for site in inside} == {"router", "expert.gate", "expert.up", "expert.down"}
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(5))
    with emulate(model, sites, {site.name: rule(scheme_name) for site in inside}):
        found = block(x)
    found = found[0] if isinstance(found, tuple) else found

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return fake_quantize(x, scheme) @ fake_quantize(weight, weights).T

    expected = torch.zeros(7, 64)
    for token in range(7):
        row = x[0, token : token + 1]
        shares = linear(row, block.gate.weight).softmax(-1)[0]
        top = shares.topk(2)
        for share, expert in zip(top.values / top.values.sum(), top.indices, strict=True):
            gate, up = linear(row, block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            expected[token] += share * linear(nn.functional.silu(gate) * up, block.experts.down_proj[expert])[0]
    assert torch.allclose(found[0], expected, atol=1e-5)
    with emulate(model, sites, {s.name: SiteRule(quantize_weight=rule(scheme_name).quantize_weight) for s in inside}):
        weights_only = block(x)
    weights_only = weights_only[0] if isinstance(weights_only, tuple) else weights_only
    assert (weights_only[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_model_is_restored_when_the_block_raises(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    before, reference = bits_of(model), logits_of(model)
    sites = find_sites(model)
    with pytest.raises(RuntimeError, match="stop"), emulate(model, sites, {site.name: rule("fp8") for site in sites}):
        assert bits_of(model) != before
        raise RuntimeError("stop")
    assert bits_of(model) == before
    assert torch.equal(logits_of(model), reference)


def test_the_model_is_restored_when_a_quantiser_raises(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    before = bits_of(model)
    sites = decoder(find_sites(model))

    def fail(weight: Tensor) -> Tensor:
        raise ValueError("no codes")

    rules = {site.name: rule("int8_w") for site in sites[:5]} | {sites[5].name: SiteRule(quantize_weight=fail)}
    with pytest.raises(ValueError, match="no codes"), emulate(model, sites, rules):
        pass
    assert bits_of(model) == before


@pytest.mark.parametrize("architecture", ["phi3", "gpt2"])
def test_rows_of_a_fused_matrix_cannot_round_their_one_input_differently(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    before = bits_of(model)
    sites = find_sites(model)
    q = next(site for site in sites if site.role == "attn.q")
    assert q.tied_group is not None
    with pytest.raises(SchemeError, match="share one input but round it differently"):
        with emulate(model, sites, {q.name: rule("fp8")}):
            pass
    fused = [site for site in sites if site.tied_group == q.tied_group]
    mixed = {site.name: rule("fp8" if site is q else "mxfp8") for site in fused}
    with pytest.raises(SchemeError, match="give all rows of a fused matrix one scheme"):
        with emulate(model, sites, mixed):
            pass
    assert bits_of(model) == before
    with emulate(model, sites, {site.name: rule("fp8") for site in fused}):
        assert torch.isfinite(logits_of(model)).all()


@pytest.mark.parametrize("architecture", ["phi3", "gpt2"])
def test_weight_only_schemes_may_differ_within_a_fused_matrix(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    q = next(site for site in sites if site.role == "attn.q")
    assert q.rows is not None
    original = model.get_parameter(q.parameter).detach().clone()
    with emulate(model, sites, {q.name: rule("int4_g32")}):
        inside = model.get_parameter(q.parameter).detach().clone()
    matrix, quantised = (original.T, inside.T) if q.transposed else (original, inside)
    first, last = q.rows
    scheme = SCHEMES["int4_g32"].weights
    assert scheme is not None
    assert torch.equal(quantised[first:last], fake_quantize(matrix[first:last].contiguous(), scheme))
    assert torch.equal(quantised[last:], matrix[last:]) and torch.equal(quantised[:first], matrix[:first])


def test_each_site_of_a_fused_matrix_has_its_own_tensor_scale(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("phi3")
    sites = find_sites(model)
    fused = [site for site in sites if site.parameter == "model.layers.0.self_attn.qkv_proj.weight"]
    model.get_parameter(fused[0].parameter).data[-1] *= 50  # the last row of v: a scale of all rows would ruin q and k
    original = model.get_parameter(fused[0].parameter).detach().clone()
    scheme = SCHEMES["nvfp4"].weights
    assert scheme is not None
    with emulate(model, sites, {site.name: rule("nvfp4") for site in fused}):
        inside = model.get_parameter(fused[0].parameter).detach().clone()
    expected = [fake_quantize(original[slice(*site.rows)], scheme) for site in fused if site.rows is not None]
    assert torch.equal(inside, torch.cat(expected))


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "gpt2"])
def test_a_tied_weight_changes_embedding_and_head(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    (head,) = [site for site in sites if site.role == "lm_head"]
    assert len(head.uses) == 2 and not any(site.role == "embedding" for site in sites)
    scheme = SCHEMES["int8_w"].weights
    assert scheme is not None
    by_hand = copy.deepcopy(model)
    tied = by_hand.get_input_embeddings().weight
    tied.data = fake_quantize(tied.data, scheme)
    assert by_hand.get_output_embeddings().weight is tied
    with emulate(model, sites, {head.name: rule("int8_w")}):
        assert torch.equal(logits_of(model), logits_of(by_hand))
    # with rounded activations: the head's input is rounded, the embedding's ids are not
    activations = SCHEMES["int8"].activations
    assert activations is not None
    by_hand.get_output_embeddings().register_forward_pre_hook(lambda _, args: (fake_quantize(args[0], activations),))
    with emulate(model, sites, {head.name: rule("int8")}):
        assert torch.equal(logits_of(model), logits_of(by_hand))


def test_no_rules_change_nothing(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    before, reference = bits_of(model), logits_of(model)
    with emulate(model, find_sites(model), {}):
        assert bits_of(model) == before
        assert torch.equal(logits_of(model), reference)


def test_an_identity_rule_keeps_every_logit(make_tiny_model: Callable[..., Any]) -> None:
    for architecture in ARCHITECTURES:
        model = make_tiny_model(architecture)
        reference = logits_of(model)
        sites = find_sites(model)
        with emulate(model, sites, {site.name: rule("fp32") for site in sites}):
            assert torch.equal(logits_of(model), reference), architecture


def test_blocks_nest_and_unwind(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    before = bits_of(model)
    sites = find_sites(model)
    first, second = decoder(sites)[:2]
    with emulate(model, sites, {first.name: rule("int8")}):
        alone = logits_of(model)
        with emulate(model, sites, {second.name: rule("int8")}):
            both = logits_of(model)
        assert torch.equal(logits_of(model), alone)
    with emulate(model, sites, {first.name: rule("int8"), second.name: rule("int8")}):
        assert torch.equal(logits_of(model), both)
    assert bits_of(model) == before


def test_a_site_that_the_model_lacks_is_our_own_mistake(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    with pytest.raises(AssertionError, match="no such sites"):
        with emulate(model, find_sites(model), {"nowhere": rule("int8")}):
            pass
