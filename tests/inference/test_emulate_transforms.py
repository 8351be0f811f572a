"""Emulation of transforms and static scales against modules changed by hand, and weights computed call by call."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import SchemeError
from bitwright.inference import Counters, Overflows, SiteRule, emulate
from bitwright.models.sites import Site, find_sites, site_weight
from bitwright.quantize import SCHEMES, TRANSFORMS, fake_quantize
from bitwright.quantize.fitted import UNCHANGED, Fitted

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")
IDS = torch.arange(22).reshape(2, 11) * 7 % 260
#: One per kind of change; columns are what `fitted` makes them.
CHANGES = ("factors", "rotation", "both")


def fitted(kind: str, columns: int, seed: int = 0) -> Fitted:
    factors = (torch.randn(columns, generator=torch.Generator().manual_seed(seed)) / 2).exp()
    signs = TRANSFORMS["hadamard"].fit(torch.zeros(1, columns), SCHEMES["int8"], None).signs_K
    return Fitted(column_scales_K=None if kind == "rotation" else factors, signs_K=None if kind == "factors" else signs)


def rule(scheme_name: str, transform: Fitted = UNCHANGED, input_scale: float | None = None) -> SiteRule:
    scheme = SCHEMES[scheme_name]
    weights = scheme.weights
    assert weights is not None
    return SiteRule(
        quantize_weight=lambda w: fake_quantize(transform.weight(w), weights),
        activations=scheme.activations,
        transform=transform,
        input_scale=None if input_scale is None else torch.tensor(input_scale),
    )


def decoder(sites: tuple[Site, ...]) -> list[Site]:
    return [site for site in sites if site.role not in ("embedding", "lm_head")]


def bits_of(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    return {name: (p.data_ptr(), p.detach().numpy().tobytes()) for name, p in model.named_parameters()}


def linears(model: nn.Module) -> list[Any]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D") and m is not head]


def out_in(module: Any) -> Tensor:
    """The module's weight as [out, in]."""
    weight: Tensor = module.weight.data
    return weight.T if type(module).__name__ == "Conv1D" else weight


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "mixtral"])
def test_a_choice_of_weights_alone_runs_the_effective_weight(
    make_tiny_model: Callable[..., Any], architecture: str, kind: str
) -> None:
    """W = d · H Q(H d s W) / s, computed here with dense matrices in fp64."""
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    rules = {site.name: rule("int4_g32", fitted(kind, site.shape[1])) for site in decoder(sites)}
    scheme = SCHEMES["int4_g32"].weights
    assert scheme is not None
    originals = {site.name: site_weight(model, site).clone() for site in sites}
    with emulate(model, sites, rules):
        for site in decoder(sites)[:9]:
            columns = site.shape[1]
            change = fitted(kind, columns)
            inverse = change.input(torch.eye(columns, dtype=torch.float64))  # rows are A e_i: Aᵀ
            codes = fake_quantize(change.weight(originals[site.name]), scheme).double()
            expected = (inverse @ codes.T).T  # Q(W') A
            assert torch.allclose(site_weight(model, site).double(), expected, atol=1e-6), site.name
        assert torch.isfinite(model(IDS).logits).all()


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(("scheme_name", "scale"), [("int8", None), ("mxfp4", None), ("int8_static", 0.05)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3"])
def test_a_choice_that_rounds_inputs_runs_on_the_changed_inputs(
    make_tiny_model: Callable[..., Any], architecture: str, scheme_name: str, scale: float | None, kind: str
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    rules = {site.name: rule(scheme_name, fitted(kind, site.shape[1]), scale) for site in decoder(sites)}
    with emulate(model, sites, rules):
        found = model(IDS).logits
    by_hand = copy.deepcopy(model)
    scheme = SCHEMES[scheme_name]
    assert scheme.weights is not None and scheme.activations is not None
    for module in linears(by_hand):
        change = fitted(kind, out_in(module).shape[1])
        out_in(module).copy_(fake_quantize(change.weight(out_in(module).contiguous()), scheme.weights))

        def round_by_hand(_: nn.Module, args: tuple[Tensor, ...], change: Fitted = change) -> tuple[Tensor]:
            x = change.input(args[0])
            if scale is None:
                return (fake_quantize(x, scheme.activations),)  # type: ignore[arg-type]
            return ((x / scale).round().clamp(-128, 127) * torch.tensor(scale),)

        module.register_forward_pre_hook(round_by_hand)
    assert torch.allclose(found, by_hand(IDS).logits, atol=1e-5)
    with emulate(model, sites, {name: dataclasses.replace(r, transform=UNCHANGED) for name, r in rules.items()}):
        assert not torch.allclose(found, model(IDS).logits, atol=1e-2), "the transform changed nothing"


@pytest.mark.parametrize("scheme_name", ["fp32", "int8"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "gpt2"])
def test_an_embedding_tied_to_a_changed_head_is_read_in_the_original_space(
    make_tiny_model: Callable[..., Any], architecture: str, scheme_name: str
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    (head,) = [site for site in sites if site.role == "lm_head"]
    change = fitted("both", head.shape[1])
    scheme = SCHEMES[scheme_name]
    assert scheme.weights is not None
    by_hand = copy.deepcopy(model)
    changed = fake_quantize(change.weight(site_weight(model, head).contiguous()), scheme.weights)
    by_hand.get_output_embeddings().weight = nn.Parameter(changed, requires_grad=False)
    by_hand.get_input_embeddings().weight = nn.Parameter(change.restore(changed), requires_grad=False)
    activations = scheme.activations or SCHEMES["fp32"].weights
    assert activations is not None
    by_hand.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: (fake_quantize(change.input(args[0]), activations),)
    )
    for in_place in (True, False):
        with emulate(model, sites, {head.name: rule(scheme_name, change)}, in_place=in_place):
            assert torch.allclose(model(IDS).logits, by_hand(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scheme_name", ["int4_g32_min", "int8_static"])
def test_weights_computed_call_by_call_give_the_same_bits(
    make_tiny_model: Callable[..., Any], architecture: str, scheme_name: str
) -> None:
    """Embedding and head too; inside the block no parameter is copied or changed."""
    model = make_tiny_model(architecture)
    before = bits_of(model)
    sites = find_sites(model)
    scale = 0.1 if SCHEMES[scheme_name].static_activations else None
    rules = {site.name: rule(scheme_name, fitted("both", site.shape[1]), scale) for site in decoder(sites)}
    ends = [site for site in sites if site.name not in rules]
    rules |= {site.name: rule("int8_w") for site in ends}
    with emulate(model, sites, rules):
        expected = model(IDS).logits
    with emulate(model, sites, rules, in_place=False):
        assert bits_of(model) == before
        assert torch.equal(model(IDS).logits, expected)
        assert torch.equal(model(IDS).logits, expected), "a second call differs"
    assert bits_of(model) == before
    assert not torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("architecture", ["phi3", "gpt2", "mixtral"])
def test_rows_of_one_matrix_may_be_computed_call_by_call_alone(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    some = [site for site in decoder(sites) if site.rows is not None][::2]
    assert some
    rules = {site.name: rule("int4_g32", fitted("rotation", site.shape[1])) for site in some}
    with emulate(model, sites, rules):
        expected = model(IDS).logits
    with emulate(model, sites, rules, in_place=False):
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("architecture", ["phi3", "gpt2"])
def test_rows_of_one_matrix_agree_on_transform_and_static_scale(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    before = bits_of(model)
    sites = find_sites(model)
    q = next(site for site in sites if site.role == "attn.q")
    fused = [site for site in sites if site.tied_group == q.tied_group]
    columns = q.shape[1]
    same = {site.name: rule("int8_static", fitted("factors", columns), 0.1) for site in fused}
    with emulate(model, sites, same):
        assert torch.isfinite(model(IDS).logits).all()
    for other in (
        rule("int8_static", fitted("factors", columns, seed=1), 0.1),
        rule("int8_static", fitted("both", columns), 0.1),
        rule("int8_static", fitted("factors", columns), 0.2),
        rule("int8", fitted("factors", columns)),
        rule("int8_w", fitted("factors", columns)),
    ):
        with pytest.raises(SchemeError, match="share one input but round it differently") as caught:
            with emulate(model, sites, same | {q.name: other}):
                pass
        assert q.name in str(caught.value) and fused[1].name in str(caught.value)
    assert bits_of(model) == before
    # of weights alone each row may have its own
    each = {site.name: rule("int4_g32", fitted("both", columns, seed=i)) for i, site in enumerate(fused)}
    with emulate(model, sites, each):
        assert torch.isfinite(model(IDS).logits).all()


def test_overflows_are_counted_before_the_cast(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    sites = find_sites(model)
    q, down = (next(site for site in sites if site.role == role) for role in ("attn.q", "mlp.down"))
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(site.module).register_forward_pre_hook(
            lambda _, args, name=site.name: seen.setdefault(name, args[0].detach().clone())
        )
        for site in (q, down)
    ]
    model(IDS)
    for hook in hooks:
        hook.remove()
    scale = float(seen[q.name].abs().max()) / 200
    counters: Counters = {}
    with emulate(model, sites, {q.name: rule("int8_static", input_scale=scale)}, counters=counters):
        for _ in range(2):
            model(IDS)
    (found,) = counters.values()
    units = (seen[q.name] / scale).round()
    beyond = (units > 127) | (units < -128)
    assert 0 < beyond.sum() < beyond.numel()
    assert found == Overflows(
        num_values=2 * 22 * 64,
        num_overflows=2 * int(beyond.sum()),
        num_tokens=2 * 22,
        num_overflowed_tokens=2 * int(beyond.any(-1).sum()),
    )
    assert found.per_million == pytest.approx(1e6 * float(beyond.float().mean()))
    assert found.fallback_rate == pytest.approx(float(beyond.any(-1).float().mean()))


def test_unscaled_numbers_are_counted_and_scales_found_per_call_cover_all(
    make_tiny_model: Callable[..., Any],
) -> None:
    model = make_tiny_model("llama")
    sites = find_sites(model)
    norms = [module for name, module in model.named_modules() if name.endswith("input_layernorm")]
    norms[0].weight.data.mul_(1e6)  # inputs of q, k and v of the first layer leave the range of fp16
    qs = [site for site in sites if site.role == "attn.q"]
    counters: Counters = {}
    with emulate(model, sites, {site.name: rule("fp16") for site in qs}, counters=counters):
        model(IDS)
    first, second = (counters[site.parameter] for site in qs)
    assert first.num_overflows > 0.5 * first.num_values and first.fallback_rate == 1
    assert second.num_overflows == 0 and second.per_million == 0 == second.fallback_rate
    for scheme in ("bf16", "int8", "mxfp4"):
        counters = {}
        with emulate(model, sites, {site.name: rule(scheme) for site in qs}, counters=counters):
            model(IDS)
        total = sum(counters.values(), Overflows())
        assert total == Overflows(num_values=2 * 22 * 64, num_tokens=2 * 22)
    assert Overflows().per_million == 0 == Overflows().fallback_rate


def test_what_is_not_rounded_is_not_counted(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("qwen2")
    sites = find_sites(model)
    counters: Counters = {}
    with emulate(model, sites, {site.name: rule("int4_g32") for site in sites}, counters=counters):
        model(IDS)
    assert counters == {}
