"""Static scales from prompts: against torch over all tokens at once, and what a check finds where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor
from value_models import make_value_model

from bitwright.errors import DataError, PlanError
from bitwright.export.source import open_source
from bitwright.inference import apply
from bitwright.inference.static.calibration import calibrate_static
from bitwright.inference.static.drift import DriftLimits, check_static
from bitwright.inference.static.magnitudes import Magnitudes
from bitwright.models import LoadedModel, find_sites, find_value_sites, from_memory
from bitwright.plan import Plan, load_plan, write_plan

GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(0, 256, (2, length), generator=GENERATOR) for length in (9, 30, 17)]
HELD_OUT = [torch.randint(0, 256, (2, 24), generator=GENERATOR)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return from_memory(make_value_model("llama"), None, name="tiny")


def static_plan(loaded: LoadedModel, part: str | None = None) -> Plan:
    weights = uniform_plan(find_sites(loaded.model), "fp8_static", part)
    caches = [s for s in find_value_sites(loaded.model) if s.part in ("k_cache", "v_cache", "qk")]
    return plan_of([*weights.sites, *(choice(s, "fp8_e4m3_head") for s in caches)], weights.tensors)


def inputs_of(model: Any, module: Any) -> Tensor:
    """All inputs of a module on the prompts, token by token."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for ids in PROMPTS:
            model(input_ids=ids, use_cache=False)
    handle.remove()
    return torch.cat(seen)


def keys_of(model: Any) -> Tensor:
    """[H, tokens of all prompts, D] of layer 0."""
    with torch.no_grad():
        found = [model(input_ids=ids, use_cache=True).cache.layers[0].keys for ids in PROMPTS]
    return torch.cat([keys.transpose(0, 1).flatten(1, 2) for keys in found], dim=1)


def test_min_max_is_over_all_tokens(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = static_plan(loaded)
    found = calibrate_static(plan, loaded, PROMPTS)
    layer = loaded.model.model.layers[0]  # type: ignore[union-attr, index]
    for name, module in (("self_attn.q_proj", layer.self_attn.q_proj), ("mlp.down_proj", layer.mlp.down_proj)):
        amax = inputs_of(loaded.model, module).abs().max()
        assert float(found.tensors[f"model.layers.0.{name}/input_scale"]) == float(amax / 448)
    per_head = keys_of(loaded.model).abs().amax((1, 2)) / 448
    np.testing.assert_array_equal(found.tensors["model.layers.0.self_attn:k_cache/scale"], per_head.numpy())
    assert found.content_hash != plan.content_hash and found.tensors_hash != plan.tensors_hash
    assert found.sites == plan.sites and "over 112 tokens of 3 prompts" in found.notes[-1]
    write_plan(found, tmp_path / "plan")
    again = load_plan(tmp_path / "plan")
    assert again == found
    ids = PROMPTS[0]
    with torch.no_grad():
        expected = apply(again, loaded)(input_ids=ids, use_cache=False).logits
        packed = apply(again, loaded, mode="packed", dtype=torch.float32)(input_ids=ids, use_cache=False).logits
    assert float((packed - expected).abs().max()) < 0.05 * float(expected.abs().max())
    assert len(calibrate_static(found, loaded, PROMPTS[:1]).notes) == len(found.notes)


def test_inputs_are_looked_at_after_their_transform(loaded: LoadedModel) -> None:
    plan = static_plan(loaded, "column_scales")
    found = calibrate_static(plan, loaded, PROMPTS)
    name = "model.layers.1.mlp.up_proj"
    factors = torch.from_numpy(plan.tensors[f"{name}/column_scales"].copy())
    x = inputs_of(loaded.model, loaded.model.get_submodule(name))
    assert float(found.tensors[f"{name}/input_scale"]) == pytest.approx(
        float((x / factors).abs().max() / 448), rel=1e-6
    )


@pytest.mark.parametrize("percent", [50.0, 99.0, 99.9, 100.0])
def test_a_percentile_is_that_of_all_values(percent: float) -> None:
    x = torch.randn(3, 4000, 20, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 7.0, 0.01]).view(
        3, 1, 1
    )
    seen = Magnitudes.of(3)
    for part in x.split(700, dim=1):
        seen.add(part)
    exact = torch.quantile(x.abs().flatten(1), percent / 100, dim=1)
    torch.testing.assert_close(seen.percentile(percent), exact, rtol=0.012, atol=0)
    assert torch.equal(seen.percentile(100), x.abs().amax((1, 2))) and seen.num_tokens == 4000
    empty = Magnitudes.of(2)
    empty.add(torch.zeros(2, 5, 4))
    assert empty.percentile(99).tolist() == [0.0, 0.0] and empty.numbers(0)[0].numel() == 0


def test_least_squares_is_as_good_as_the_best_of_a_fine_search(loaded: LoadedModel) -> None:
    plan = plan_of(uniform_plan(find_sites(loaded.model), "int8_static").sites)
    found = calibrate_static(plan, loaded, PROMPTS, rule="mse")
    name = "model.layers.0.mlp.down_proj"
    x = inputs_of(loaded.model, loaded.model.get_submodule(name))

    def error(scale: float) -> float:
        return float((((x / scale).round().clamp(-128, 127) * scale - x) ** 2).sum())

    amax = float(x.abs().max())
    best = min(error(amax * share / 1000 / 127) for share in range(100, 1001))
    assert error(float(found.tensors[f"{name}/input_scale"])) <= 1.03 * best


def test_scales_that_fit_are_found_to(loaded: LoadedModel) -> None:
    plan = calibrate_static(static_plan(loaded), loaded, PROMPTS)
    check = check_static(plan, loaded, HELD_OUT, prompts=PROMPTS, limits=DriftLimits(max_beyond=0.01))
    assert check.findings == () and check.num_tokens == 48
    assert check.num_sites == 14 + 6
    check.raise_if_any()


def kinds(plan: Plan, loaded: LoadedModel, **arguments: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    # so few tokens leave more beyond the range of others than many do
    limits = DriftLimits(max_beyond=0.01)
    for finding in check_static(plan, loaded, HELD_OUT, limits=limits, **arguments).findings:
        found.setdefault(finding.what, set()).add(finding.site)
    return found


def test_scales_that_do_not_fit_are_found(loaded: LoadedModel) -> None:
    plan = calibrate_static(static_plan(loaded), loaded, PROMPTS)
    site, cache = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn:v_cache"

    def changed(**parts: float) -> Plan:
        tensors = dict(plan.tensors)
        tensors[f"{site}/input_scale"] = np.asarray(tensors[f"{site}/input_scale"] * parts.get("site", 1), np.float32)
        tensors[f"{cache}/scale"] = tensors[f"{cache}/scale"] * np.float32(parts.get("cache", 1))
        return plan.attach(tensors=tensors)

    beyond = kinds(changed(site=0.02, cache=0.1), loaded)
    assert beyond == {"beyond the range": {site, cache}}
    ones = dict(plan.tensors)
    ones |= {f"{site}/input_scale": np.ones((), np.float32), f"{cache}/scale": np.ones(2, np.float32)}
    assert kinds(plan.attach(tensors=ones), loaded) == {"never set": {site, cache}}
    other = from_memory(make_value_model("llama"), None, name="other")
    with torch.no_grad():
        other.model.get_parameter("model.norm.weight").mul_(1.01)
    other = from_memory(other.model, None, name="other")
    assert set(kinds(plan, other)) == {"other weights"}
    assert set(kinds(plan, loaded, prompts=HELD_OUT)) == {"other prompts"}
    assert set(kinds(static_plan(loaded), loaded, prompts=PROMPTS)) >= {"unknown origin"}
    with pytest.raises(PlanError, match=r"of 2 of 20 sites do not fit \(never set\): .*its scale is 1.0"):
        check_static(plan.attach(tensors=ones), loaded, HELD_OUT).raise_if_any()


def with_ones(plan: Plan, *names: str) -> Plan:
    """Scales of 1.0 at some sites."""
    ones = {name: np.ones_like(plan.tensors[name]) for name in names}
    return plan.attach(tensors={**plan.tensors, **ones})


@pytest.mark.parametrize("mode", ["emulate", "packed"])
def test_nothing_runs_under_scales_that_were_never_set(loaded: LoadedModel, mode: str) -> None:
    """1.0 is what engines take where nobody calibrated; a scale of 1.0 that was found is one like any other."""
    plan = calibrate_static(static_plan(loaded), loaded, PROMPTS)
    site, cache = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn:v_cache"
    unset = with_ones(plan, f"{site}/input_scale", f"{cache}/scale")
    told = (
        rf"the static scales of 2 of 20 sites do not fit \(never set\): {site}: its scale is 1.0, and the largest "
        r"magnitude that was met is .*bitwright verify PLAN --static PROMPTS --rule min_max --out NEW-PLAN"
    )
    with pytest.raises(PlanError, match=told):
        apply(unset, loaded, mode=mode)
    with pytest.raises(PlanError, match=told):
        apply(unset.replace(model=plan.model.model_copy(update={"hash": loaded.hash})), loaded.model, mode=mode)
    found = {f"{site}/calibrated_amax": np.array([448.0], np.float32), f"{cache}/calibrated_amax": np.zeros(2, "f4")}
    apply(unset.attach(tensors={**unset.tensors, **found}), loaded, mode=mode)
    nobody = with_ones(static_plan(loaded), f"{site}/input_scale")
    with pytest.raises(
        PlanError, match=r"of 1 of 14 sites .*up_proj: its scale is 1.0, and nothing says that it was f"
    ):
        apply(nobody, loaded, mode=mode)


def test_nothing_runs_under_scales_of_other_weights(loaded: LoadedModel) -> None:
    plan = calibrate_static(static_plan(loaded), loaded, PROMPTS)
    other = make_value_model("llama")
    with torch.no_grad():
        other.get_parameter("model.norm.weight").mul_(1.01)
    changed = from_memory(other, None, name="changed")
    told = rf"of 20 of 20 sites do not fit \(other weights\): .*found with weights {loaded.hash[:12]}, and these are"
    for model, hash_ in ((changed, changed.hash), (changed.model, "ab" * 6)):
        with pytest.raises(PlanError, match=f"{told} {hash_[:12]}"):
            apply(plan, model)
    own = plan.replace(model=plan.model.model_copy(update={"hash": changed.hash}))
    with pytest.raises(PlanError, match=told):
        open_source(own, changed)
    apply(calibrate_static(plan, changed, PROMPTS), changed)


def test_scales_from_other_data_are_found(loaded: LoadedModel) -> None:
    """Found where values are ten times as large: most of their range is never used."""
    plan = plan_of(uniform_plan(find_sites(loaded.model), "fp8_static").sites)
    tensors = dict(calibrate_static(plan, loaded, PROMPTS).tensors)
    names = [c.name for c in plan.sites]
    for name in names:
        for part in ("input_scale", "calibrated_amax"):
            tensors[f"{name}/{part}"] = np.asarray(tensors[f"{name}/{part}"] * 10, np.float32)
    assert kinds(plan.attach(tensors=tensors), loaded) == {"other range": set(names)}


def test_of_two_levels_the_second_is_found(loaded: LoadedModel) -> None:
    plan = uniform_plan(find_sites(loaded.model), "nvfp4_static")
    found = calibrate_static(plan, loaded, PROMPTS)
    layer = loaded.model.model.layers[0]  # type: ignore[union-attr, index]
    expected = float(inputs_of(loaded.model, layer.mlp.up_proj).abs().max()) / (448 * 6)
    assert float(found.tensors["model.layers.0.mlp.up_proj/input_scale"]) == pytest.approx(expected)
    assert not check_static(found, loaded, HELD_OUT, limits=DriftLimits(max_beyond=0.1)).findings
    scale = "model.layers.0.mlp.up_proj/input_scale"
    small = found.attach(tensors={**found.tensors, scale: np.array(found.tensors[scale] / 100)})
    assert "beyond the range" in {finding.what for finding in check_static(small, loaded, HELD_OUT).findings}
    with pytest.raises(DataError, match=r"those of 'model.layers.0.self_attn.q_proj' have one a group besides"):
        calibrate_static(plan, loaded, PROMPTS, rule="mse")


def test_what_cannot_be_calibrated_is_refused(loaded: LoadedModel) -> None:
    plan = static_plan(loaded)
    with pytest.raises(DataError, match="no rule 'max' for static scales; use one of min_max, percentile, mse"):
        calibrate_static(plan, loaded, PROMPTS, rule="max")
    with pytest.raises(DataError, match="percentile is 0"):
        calibrate_static(plan, loaded, PROMPTS, rule="percentile", percentile=0)
    for nothing in ([], [torch.zeros(1, 0, dtype=torch.int64)]):
        with pytest.raises(DataError, match="there are no prompts"):
            calibrate_static(plan, loaded, nothing)
    with pytest.raises(PlanError, match="the plan has no static scales"):
        calibrate_static(uniform_plan(find_sites(loaded.model), "fp8"), loaded, PROMPTS)


def test_experts_that_no_token_reached_are_named() -> None:
    loaded = from_memory(make_value_model("mixtral"), None, name="experts")
    plan = uniform_plan(find_sites(loaded.model), "int8_static")
    with pytest.raises(DataError, match=r"no token of the prompts reached 'model.layers.*experts"):
        calibrate_static(plan, loaded, [torch.tensor([[5]])])


def test_a_percentile_saturates_what_it_says(loaded: LoadedModel) -> None:
    plan = calibrate_static(static_plan(loaded), loaded, PROMPTS, rule="percentile", percentile=98.0)
    found = check_static(plan, loaded, PROMPTS, limits=DriftLimits(max_beyond=0.0)).findings
    shares = [float(f.sentence.split(" %")[0]) for f in found if f.what == "beyond the range"]
    # beyond a percentile of magnitudes lie 2 %, a little less beyond what rounds to the last code
    assert len(shares) == 20 and 0.5 < min(shares) and max(shares) < 2.5
