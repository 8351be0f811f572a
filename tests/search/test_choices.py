"""What is ruled out, where, and what follows; limits on time and memory through the whole job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_search import search_options

from bitwright import hardware
from bitwright.errors import BudgetError, HardwareError, PlanError, SchemeError, UnknownName
from bitwright.inference import apply
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Budget, Plan, Workload
from bitwright.plan.rules import get_engine
from bitwright.search.candidate import Candidate
from bitwright.search.choices import find_choices
from bitwright.search.compare_plans import compare_plans
from bitwright.search.optimize import optimize
from bitwright.search.price import AS_LOADED
from bitwright.search.settings import settle
from bitwright.search.verify import verify

W4, W8, FP8 = (Candidate(scheme=name) for name in ("int4_g64", "int8_w", "fp8"))


def test_what_a_device_lacks_is_ruled_out_with_its_reason(load_tiny: Callable[..., LoadedModel]) -> None:
    """An A100 has no FP8 unit; weights alone are widened on any device."""
    sites = [site for site in find_sites(load_tiny("llama").model) if site.role.startswith("mlp")]
    found = find_choices(sites, (), [W4, FP8], (), device=hardware.get("a100"), engine=None, sequence_length=16)
    assert set(found.candidates) == {site.name for site in sites}
    assert all(left == (W4,) for left in found.candidates.values())
    (out,) = found.ruled_out
    assert out.scheme == "fp8" and out.sites == len(sites) and "no matrix unit for fp8_e4m3" in out.reason


def test_groups_that_divide_some_matrices_only(load_tiny: Callable[..., LoadedModel]) -> None:
    """vLLM takes no ragged groups: in_features 64 is a multiple of 64 and the down projections' 96 is not."""
    sites = [site for site in find_sites(load_tiny("llama").model) if site.role.startswith("mlp")]
    found = find_choices(
        sites, (), [W4, Candidate(scheme="bf16")], (), device=None, engine=get_engine("vllm"), sequence_length=16
    )
    for site in sites:
        assert (W4 in found.candidates[site.name]) == (site.shape[1] % 64 == 0)
    assert {found.ties[site.name] for site in sites if site.role == "mlp.gate"} == {
        found.ties[site.name] for site in sites if site.role == "mlp.up"
    }
    scores = {site.name: {W4: 0.1, Candidate(scheme="bf16"): 0.0, AS_LOADED: 0.0} for site in sites}
    for name, left in found.allowed(scores).items():
        assert set(left) == {*found.candidates[name], AS_LOADED}


def test_nothing_left_is_refused(load_tiny: Callable[..., LoadedModel]) -> None:
    sites = find_sites(load_tiny("llama").model)[:2]
    with pytest.raises(SchemeError, match=r"ruled out at every site, as fp8: .*no matrix unit"):
        find_choices(sites, (), [FP8], (), device=hardware.get("a100"), engine=None, sequence_length=16)


def test_groups_of_tokens_longer_than_the_text_say_nothing(load_tiny: Callable[..., LoadedModel]) -> None:
    """Keys are rounded when 32 tokens are full: texts of 16 would show no error at all."""
    keys = [site for site in find_value_sites(load_tiny("llama").model) if site.part == "k_cache"]
    for length, left in ((16, False), (32, True)):
        found = find_choices((), keys, (), ["int4_channel_g32"], device=None, engine=None, sequence_length=length)
        assert (keys[0].name in found.candidates) == left
        assert left or "never fill" in found.ruled_out[0].reason


@pytest.mark.parametrize(
    ("engine", "asked", "rules"),
    [
        ("vllm", None, True),  # it runs on the processor at hand, so that its kernels there count
        ("tensorrt-llm", None, False),  # it does not: the plan is for another machine
        ("tensorrt-llm", "x86-amx", True),  # unless that was asked for
    ],
)
def test_whose_kernels_count(monkeypatch: pytest.MonkeyPatch, engine: str, asked: str | None, rules: bool) -> None:
    found = (hardware.get("x86-avx512-bf16"), "the processor at hand")
    monkeypatch.setattr("bitwright.search.settings.hardware_catalog.detect", lambda: found)
    settings = settle(
        Budget(),
        hardware=asked,
        engine=engine,
        task="text",
        calibration="docs",
        evaluation="docs",
        tokens=64,
        evaluation_tokens=None,
        sequence_length=16,
        seed=0,
    )
    assert (settings.kernel_device is not None) == rules
    assert (settings.ruling_device is None) == (asked is None)
    assert ("name the device" in str(settings.kernel_note)) == (not rules)


def test_what_an_engine_has_no_kernel_for_on_this_device_is_ruled_out(load_tiny: Callable[..., LoadedModel]) -> None:
    sites = [site for site in find_sites(load_tiny("llama").model) if site.role.startswith("mlp")]
    cpu = hardware.get("x86-avx512-bf16")
    asked = [Candidate(scheme="int4_g32"), W8, Candidate(scheme="fp8_w")]
    found = find_choices(
        sites, (), asked, (), device=None, engine=get_engine("vllm"), sequence_length=16, kernels_on=cpu
    )
    assert all(left == (asked[0],) for left in found.candidates.values())
    assert [out.scheme for out in found.ruled_out] == ["int8_w", "fp8_w"]
    assert all("no kernel for" in out.reason and "on a CPU (x86-avx512-bf16)" in out.reason for out in found.ruled_out)


# --- through the whole job -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(load_tiny: Callable[..., LoadedModel], prose: Path) -> Plan:
    """Memory made small with a cache as large as the weights."""
    return optimize(
        load_tiny("llama"),
        budget=Budget(max_kl=0.02),
        workload=Workload(context=512, batch=4),
        **search_options(prose),
    )


def test_the_cache_is_chosen_with_the_weights(served: Plan) -> None:
    """2 layers · 2 caches · 4 · 512 tokens · 2 heads · 16 numbers, at the bits of its scheme."""
    caches = [site for site in served.sites if site.kind == "state"]
    assert len(caches) == 4 and {site.role for site in caches} == {"kv_cache"}
    assert any(site.scheme != "as_loaded" and site.bits < 16 for site in caches)
    assert served.device_memory is not None
    assert served.device_memory.kv_cache == sum(site.bytes for site in caches)
    for site in caches:
        assert site.bytes == 4 * 512 * 2 * 16 * site.bits / 8
    assert served.device_memory.weights == served.summary.weight_bytes
    assert served.met and served.measured is not None and served.measured.kl.mean <= 0.02
    role = next(p for p in served.predictions if p.kind == "plan_role" and p.role == "kv_cache")
    assert role.measured_kl > 0 and 0.3 < role.predicted_kl / role.measured_kl < 3


def test_device_memory_is_kept_to_the_byte(load_tiny: Callable[..., LoadedModel], prose: Path, served: Plan) -> None:
    assert served.device_memory is not None
    limit = served.device_memory.total + 5000
    plan = optimize(
        load_tiny("llama"),
        budget=Budget(device_memory_bytes=limit),
        workload=served.workload,
        **search_options(prose),
    )
    assert plan.device_memory is not None and plan.device_memory.total <= limit
    assert plan.device_memory.total > limit - 2500
    assert [(found.name, found.status) for found in plan.limits] == [("device_memory_bytes", "predicted")]
    # 32 MiB of it are assumed for the workspace of products, whatever the plan
    assert plan.device_memory.workspace >= 32 * 2**20


def test_a_limit_on_time_is_predicted_and_binds(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    fast = optimize(load_tiny("llama"), budget=Budget(max_kl=0.05), objective="latency", **search_options(prose))
    assert fast.latency is not None
    limit = 1.02 * fast.latency.decode_s_per_token
    plan = optimize(load_tiny("llama"), budget=Budget(latency_sla_s=limit), **search_options(prose))
    assert plan.latency is not None and plan.latency.decode_s_per_token <= limit
    assert plan.limits[0].status == "predicted" and plan.met
    assert plan.limit_studies[0].binds
    rate = optimize(load_tiny("llama"), budget=Budget(min_tokens_per_s=1 / limit), **search_options(prose))
    assert [site.scheme for site in rate.sites] == [site.scheme for site in plan.sites]


def test_an_engine_leaves_its_reasons_in_the_plan(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    plan = optimize(
        load_tiny("llama"),
        budget=Budget(effective_bits=8.0),
        engine="vllm",
        **search_options(prose, schemes=["int4_g32", "int4_g64", "bf16"]),
    )
    assert plan.options is not None and plan.options.engine == "vllm"
    assert {out.scheme for out in plan.ruled_out} == {"int4_g64"}
    schemes = {site.name: site.scheme for site in plan.sites}
    for layer in ("model.layers.0", "model.layers.1"):
        assert len({schemes[f"{layer}.self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert schemes[f"{layer}.mlp.gate_proj"] == schemes[f"{layer}.mlp.up_proj"]


@pytest.mark.parametrize(("device", "kept_bits"), [("h100", 14), ("b200", None)])
def test_a_narrow_accumulator_is_told(
    load_tiny: Callable[..., LoadedModel], prose: Path, device: str, kept_bits: int | None
) -> None:
    """Hopper keeps 14 bits of a sum of FP8 products; that rules nothing out, and is no secret either."""
    plan = optimize(
        load_tiny("llama"), budget=Budget(effective_bits=9.0), **search_options(prose, schemes=["fp8"], hardware=device)
    )
    told = [note for note in plan.notes if "significant bits of a sum of fp8_e4m3 products" in note]
    assert len(told) == (kept_bits is not None) and all(f"keeps {kept_bits} significant" in note for note in told)


def test_sites_that_a_file_names_are_the_ones_that_are_verified(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path
) -> None:
    names = tmp_path / "sites.toml"
    names.write_text('[[site]]\nmodule = "model.layers.*.mlp.up_proj"\nrole = "mlp.up"\n', encoding="utf-8")
    loaded = load_tiny("llama")
    plan = optimize(loaded, budget=Budget(effective_bits=8.5), site_file=names, **search_options(prose))
    assert [site.name for site in plan.sites] == [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)]
    assert plan.measured is not None and verify(plan, model=loaded).kl == plan.measured.kl
    whole = optimize(loaded, budget=Budget(effective_bits=8.5), **search_options(prose))
    for first, second in ((plan, whole), (whole, plan)):
        found = compare_plans(first, second, model=loaded)
        assert found.num_sites == len(whole.sites) and found.second_kl.mean == pytest.approx(
            verify(second, model=loaded).kl.mean
        )
    run = apply(plan, loaded)
    assert isinstance(run, torch.nn.Module)  # with the sites of its file
    with pytest.raises(PlanError, match=rf"not among the sites .*find_sites\(model, '{names}'\)"):
        apply(plan, loaded, sites=find_sites(loaded.model)[:1])
    names.unlink()
    for use in (lambda: verify(plan, model=loaded), lambda: apply(plan, loaded)):
        with pytest.raises(PlanError, match="put it back: it names the sites"):
            use()


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"engine": "vlm"}, UnknownName, "did you mean 'vllm'"),
        ({"workload": Workload(context=513)}, BudgetError, "context of 513 tokens is longer than the 512 positions"),
        ({"device_file": "x.toml"}, HardwareError, "asked for twice"),
        ({"budget": Budget(device_memory_bytes=1e9)}, BudgetError, "add context"),
        ({"values": "some"}, SchemeError, "unknown choice of values 'some'"),
        ({"effort": "low"}, SchemeError, "unknown effort 'low'"),
        ({"roundings": ["stochastic"]}, UnknownName, "unknown rounding"),
        ({"transforms": ["hadamrd"]}, UnknownName, "did you mean 'hadamard'"),
    ],
)
def test_bad_input(
    load_tiny: Callable[..., LoadedModel], prose: Path, changes: dict, kind: type[Exception], sentence: str
) -> None:
    asked = {"budget": Budget(effective_bits=6.0)} | search_options(prose) | changes
    with pytest.raises(kind, match=sentence):
        optimize(load_tiny("llama"), **asked)


@pytest.mark.parametrize(("found", "ruled_out"), [("a100", {"fp8"}), ("cpu-generic", set())])
def test_rules_of_an_accelerator_at_hand_count_too(
    load_tiny: Callable[..., LoadedModel], prose: Path, monkeypatch: pytest.MonkeyPatch, found: str, ruled_out: set[str]
) -> None:
    """A100s have no FP8 unit; a CPU at hand is where plans for other machines are made."""
    monkeypatch.setattr("bitwright.hardware.detect", lambda: (hardware.get(found), "found"))
    options = {**search_options(prose, schemes=["fp8", "int8_w"]), "hardware": None}
    plan = optimize(load_tiny("llama"), budget=Budget(effective_bits=9.0), **options)
    assert {out.scheme.split()[0] for out in plan.ruled_out} == ruled_out
