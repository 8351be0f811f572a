"""A plan on its model: what its tensors hold is what runs, and a plan for another model is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_plans import choice, plan_of

from bitwright.errors import PlanError, UnknownName
from bitwright.inference import SiteRule, emulate, emulate_plan, input_tensors_of, site_rules, tensors_of
from bitwright.models.sites import Site, find_sites, site_weight
from bitwright.plan import Plan, load_plan, write_plan
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS, QTensor, fake_quantize
from bitwright.quantize.seen import Seen as SeenInputs
from bitwright.quantize.static_scales import find_static_scale

IDS = torch.arange(22).reshape(2, 11) * 7 % 260
CLIPPED = ["int4_g32", "int4_g64_zp", "int4_g128_min", "int3_g64"]


def clipped(model: Any, site: Site, scheme_name: str) -> QTensor:
    weights = SCHEMES[scheme_name].weights
    assert weights is not None
    x = torch.randn(200, site.shape[1], generator=torch.Generator().manual_seed(site.shape[1])).square()
    return ROUNDINGS["clip"].quantize(site_weight(model, site).contiguous(), weights, SeenInputs(x_TK=x))


def decoder(model: Any) -> list[Site]:
    return [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("scheme", CLIPPED)
def test_codes_found_with_data_come_back_from_the_plan_bit_for_bit(
    make_tiny_model: Callable[..., Any], tmp_path: Path, architecture: str, scheme: str
) -> None:
    model = make_tiny_model(architecture)
    sites = decoder(model)
    found = {site.name: clipped(model, site, scheme) for site in sites}
    tensors = {part: array for name, q in found.items() for part, array in tensors_of(name, q).items()}
    write_plan(plan_of([choice(site, scheme, "clip") for site in sites], tensors), tmp_path / "plan")
    plan = load_plan(tmp_path / "plan")
    with emulate_plan(plan, model, find_sites(model)):
        for site in sites:
            inside = site_weight(model, site)
            assert torch.equal(inside.view(torch.int32), found[site.name].dequantize().view(torch.int32)), site.name
    nearest = SCHEMES[scheme].weights
    assert nearest is not None
    first = site_weight(model, sites[0]).contiguous()
    assert not torch.equal(found[sites[0].name].dequantize(), fake_quantize(first, nearest)), "clip found nothing"


@pytest.mark.parametrize("scheme", CLIPPED)
def test_a_plan_stores_scales_as_the_scheme_does(make_tiny_model: Callable[..., Any], scheme: str) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[-1]
    q = clipped(model, site, scheme)
    weights = SCHEMES[scheme].weights
    assert weights is not None and weights.scaling is not None
    tensors = tensors_of(site.name, q)
    expected = {"scales": np.float16}
    if weights.scaling.symmetry != "symmetric":
        expected["offsets"] = np.uint8 if weights.scaling.symmetry == "zero_point" else np.float16  # type: ignore[assignment]
    assert {name.rpartition("/")[2]: array.dtype for name, array in tensors.items()} == expected
    shape = (site.shape[0], weights.scaling.granularity.num_groups(site.shape[1]))
    assert {array.shape for array in tensors.values()} == {shape}
    assert q.scales_NG is not None
    assert np.array_equal(tensors[f"{site.name}/scales"].astype(np.float32), q.scales_NG.numpy())
    if q.offsets_NG is not None:
        assert np.array_equal(tensors[f"{site.name}/offsets"].astype(np.float32), q.offsets_NG.numpy())


def test_scales_of_a_two_level_scheme_keep_their_tensor_scale() -> None:
    weights = SCHEMES["nvfp4"].weights
    assert weights is not None
    q = ROUNDINGS["rtn"].quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), weights, None)
    tensors = tensors_of("site", q)
    assert q.tensor_scale is not None
    assert tensors["site/tensor_scale"].shape == () and tensors["site/tensor_scale"] == q.tensor_scale.numpy()


def test_choices_that_need_no_data_follow_from_the_weights(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    sites = decoder(model)
    names = ["int8", "mxfp4", "as_loaded", "fp16", "nvfp4", "int4_g64_zp", "fp32"] * 2
    before = {site.name: site_weight(model, site).clone() for site in sites}
    plan = plan_of([choice(site, scheme) for site, scheme in zip(sites, names, strict=True)])
    with torch.no_grad(), emulate_plan(plan, model, find_sites(model)) as emulated:
        assert torch.isfinite(emulated(IDS).logits).all()
        for site, scheme in zip(sites, names, strict=True):
            weights = SCHEMES[scheme].weights
            expected = before[site.name] if weights is None else fake_quantize(before[site.name], weights)
            assert torch.equal(site_weight(model, site), expected), site.name
    assert all(torch.equal(site_weight(model, site), before[site.name]) for site in sites)


def test_a_site_that_stays_as_loaded_has_no_rule(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    first, second = decoder(model)[:2]
    rules = site_rules(plan_of([choice(first, "as_loaded"), choice(second, "int8")]), find_sites(model))
    assert set(rules) == {second.name}
    assert rules[second.name].activations == SCHEMES["int8"].activations


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(plan: Plan, model: Any) -> str:
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(PlanError) as raised, emulate_plan(plan, model, find_sites(model)):
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(raised.value)


def test_a_plan_for_another_architecture_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    plan = plan_of([choice(site, "int8") for site in decoder(make_tiny_model("llama"))])
    message = refusal(plan, make_tiny_model("gpt2"))
    assert "'model.layers.0.self_attn.q_proj' (14 such sites)" in message and "load the model" in message


def test_a_plan_for_another_size_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[0]
    message = refusal(plan_of([choice(site, "int8", shape=(128, 128))]), model)
    assert "[128, 128]" in message and "[64, 64]" in message


@pytest.mark.parametrize("scheme", CLIPPED)
def test_missing_tensors_are_refused(make_tiny_model: Callable[..., Any], scheme: str) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[0]
    tensors = tensors_of(site.name, clipped(model, site, scheme))
    assert "no scales" in refusal(plan_of([choice(site, scheme, "clip")]), model)
    for part in tensors:
        rest = {name: array for name, array in tensors.items() if name != part}
        message = refusal(plan_of([choice(site, scheme, "clip")], rest), model)
        assert f"no {part.rpartition('/')[2]} for '{site.name}'" in message


def test_tensors_of_another_scheme_are_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[0]
    tensors = tensors_of(site.name, clipped(model, site, "int4_g32"))
    message = refusal(plan_of([choice(site, "int4_g64", "clip")], tensors), model)
    assert "scales of shape [64, 2] instead of [64, 1]" in message


@pytest.mark.parametrize(("scheme", "rounding"), [("int5_g64", "rtn"), ("int4_g64", "dreamt")])
def test_a_choice_from_a_newer_program_is_an_unknown_name(
    make_tiny_model: Callable[..., Any], scheme: str, rounding: str
) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[0]
    with pytest.raises(UnknownName):
        site_rules(plan_of([choice(site, scheme, rounding)]), find_sites(model))


def test_a_transform_from_a_newer_program_is_not_skipped(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[0]
    with pytest.raises(UnknownName, match="unheard_of"):
        site_rules(plan_of([choice(site, "int4_g64", transform="unheard_of")]), find_sites(model))


class Seen:
    """Inputs with a few large columns, as transforms look at them."""

    def __init__(self, columns: int) -> None:
        self.x_TK = torch.randn(60, columns, generator=torch.Generator().manual_seed(columns))
        self.x_TK[:, ::13] *= 40
        self.token_weights_T = None


@pytest.mark.parametrize(
    ("scheme_name", "transform_name"),
    [("int8_static", "smoothquant"), ("fp8_static", "none"), ("int4_g32", "awq"), ("int4_g32", "hadamard")],
)
def test_transforms_and_static_scales_come_back_from_the_plan_bit_for_bit(
    make_tiny_model: Callable[..., Any], tmp_path: Path, scheme_name: str, transform_name: str
) -> None:
    model = make_tiny_model("llama")
    sites, scheme = find_sites(model), SCHEMES[scheme_name]
    weights = scheme.weights
    assert weights is not None
    tensors: dict[str, np.ndarray] = {}
    rules = {}
    for site in decoder(model):
        seen = Seen(site.shape[1])
        fitted = TRANSFORMS[transform_name].fit(site_weight(model, site).contiguous(), scheme, seen)
        scale = None
        if scheme.static_activations:
            assert scheme.activations is not None
            scale = find_static_scale(fitted.input(seen.x_TK), scheme.activations)
        tensors |= input_tensors_of(site.name, fitted, scale)
        rules[site.name] = SiteRule(
            quantize_weight=lambda w, fitted=fitted: fake_quantize(fitted.weight(w), weights),  # type: ignore[misc]
            activations=scheme.activations,
            transform=fitted,
            input_scale=scale,
        )
    chosen = [choice(site, scheme_name, transform=transform_name) for site in decoder(model)]
    write_plan(plan_of(chosen, tensors), tmp_path / "plan")
    with emulate(model, sites, rules):
        expected = model(IDS).logits
    for in_place in (True, False):
        with emulate_plan(load_plan(tmp_path / "plan"), model, sites, in_place=in_place):
            assert torch.equal(model(IDS).logits, expected)
    assert not torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(
    ("scheme", "transform", "part", "because"),
    [
        ("int8_static", "smoothquant", "column_scales", "transform 'smoothquant' needs them"),
        ("int8_static", "smoothquant", "input_scale", "scheme 'int8_static' has static activations"),
        ("int4_g32", "hadamard", "signs", "transform 'hadamard' needs them"),
    ],
)
def test_missing_transforms_and_static_scales_are_refused(
    make_tiny_model: Callable[..., Any], scheme: str, transform: str, part: str, because: str
) -> None:
    model = make_tiny_model("llama")
    site = decoder(model)[0]
    fitted = TRANSFORMS[transform].fit(site_weight(model, site), SCHEMES[scheme], Seen(site.shape[1]))
    tensors = input_tensors_of(site.name, fitted, torch.tensor(0.1))
    chosen = [choice(site, scheme, transform=transform)]
    assert site_rules(plan_of(chosen, tensors), find_sites(model))
    key = f"{site.name}/{part}"
    message = refusal(plan_of(chosen, {k: v for k, v in tensors.items() if k != key}), model)
    assert f"no {part} for '{site.name}'" in message and because in message
    message = refusal(plan_of(chosen, tensors | {key: np.ones(3, dtype=np.float32)}), model)
    assert f"{part} of shape [3] instead of" in message
