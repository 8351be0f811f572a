"""The whole job on tiny random models of six architectures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_search import ARCHITECTURES, BUDGET, SCHEMES, search_options

from bitwright.errors import BitwrightError, BudgetError, DataError, SchemeError, UnknownName
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, Plan, parse_plan
from bitwright.search import learn as learn_module
from bitwright.search.optimize import default_schemes, optimize


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_plan_is_valid_and_meets_its_budget(plan_of: Callable[[str], Plan], architecture: str) -> None:
    plan = plan_of(architecture)
    assert plan.met and plan.summary.effective_bits <= 6.0
    assert plan.measured is not None
    assert 0 < plan.measured.kl.low <= plan.measured.kl.mean <= plan.measured.kl.high < 0.1
    assert plan.measured.sequences == 64 and plan.measured.tokens == 64 * 15
    assert {limit.name: limit.status for limit in plan.limits} == {"effective_bits": "measured"}
    text = plan.to_json()
    assert "NaN" not in text and "Infinity" not in text
    assert parse_plan(text).content_hash == plan.content_hash
    for site in plan.sites:
        assert site.reason and site.bytes > 0
        assert "for 0 KiB" not in site.reason and "save 0 KiB" not in site.reason  # nor of a matrix this small
        kept = site.role in ("embedding", "lm_head", "router")
        assert (site.scheme == "as_loaded") == kept
        assert (f"{site.name}/codes" in plan.tensors) == (site.rounding == "gradient_aware")
        if kept:
            assert ("between experts" if site.role == "router" else "--include-head") in site.reason
    assert not any("(1 sites)" in note for note in plan.notes)
    assert plan.predictions and all(p.measured_kl > 0 for p in plan.predictions)
    fed_back = next(p for p in plan.predictions if p.what == "whole model in int4_g32 gradient_aware")
    assert fed_back.kind == "total" and fed_back.predicted_kl > 0
    total = plan.predictions[-1]
    assert 0.5 < total.predicted_kl / total.measured_kl < 2
    sizes = [point.weight_bytes for point in plan.frontier]
    assert sizes == sorted(sizes) and sum(point.chosen for point in plan.frontier) == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_inputs_give_the_same_bytes(
    plan_of: Callable[[str], Plan],
    load_tiny: Callable[..., LoadedModel],
    prose: Path,
    tmp_path: Path,
    architecture: str,
) -> None:
    """Without a cache, with an empty one, and with a full one; and the model comes out as it went in."""
    expected = plan_of(architecture).to_json()
    for cache in (None, tmp_path, tmp_path):
        loaded = load_tiny(architecture)
        before = {name: p.clone() for name, p in loaded.model.named_parameters()}
        again = optimize(loaded, budget=BUDGET, **search_options(prose, cache=cache))
        assert again.to_json() == expected
        for name, parameter in loaded.model.named_parameters():
            assert torch.equal(parameter, before[name]), name
            assert parameter.grad is None


def test_a_second_budget_runs_on_what_is_known(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tiny("llama")
    optimize(loaded, budget=BUDGET, **search_options(prose, cache=tmp_path))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("calibrated again")

    with monkeypatch.context() as patch:
        patch.setattr(learn_module, "calibrate", never)
        second = optimize(loaded, budget=Budget(effective_bits=5.0), **search_options(prose, cache=tmp_path))
    fresh = optimize(loaded, budget=Budget(effective_bits=5.0), **search_options(prose))
    assert second.to_json() == fresh.to_json()


def test_a_further_scheme_scores_only_itself(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tiny("llama")
    optimize(loaded, budget=BUDGET, **search_options(prose, cache=tmp_path))
    asked: list[set[str]] = []
    original = learn_module.score

    def watch(model: Any, sites: Any, statistics: Any, quantizer: Any, candidates: Any, *rest: Any) -> Any:
        asked.append({candidate.scheme for candidate in candidates})
        return original(model, sites, statistics, quantizer, candidates, *rest)

    monkeypatch.setattr(learn_module, "score", watch)
    more = (*SCHEMES, "fp6_w")
    plan = optimize(loaded, budget=BUDGET, **search_options(prose, cache=tmp_path, schemes=more))
    assert asked == [{"fp6_w"}]
    fresh = optimize(loaded, budget=BUDGET, **search_options(prose, schemes=more))
    assert plan.to_json() == fresh.to_json()


def test_a_damaged_cache_is_made_again(load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path) -> None:
    loaded = load_tiny("llama")
    first = optimize(loaded, budget=BUDGET, **search_options(prose, cache=tmp_path))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    again = optimize(loaded, budget=BUDGET, **search_options(prose, cache=tmp_path))
    assert again.to_json() == first.to_json()


# --- budgets ---------------------------------------------------------------------------------------------------------


def limits_of(plan: Plan) -> dict[str, str]:
    return {limit.name: limit.status for limit in plan.limits}


def test_max_kl(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """A looser limit is never larger; the mean on the final text is within it."""
    sizes = []
    for max_kl in (0.003, 0.008, 0.05):
        plan = optimize(load_tiny("llama"), budget=Budget(max_kl=max_kl), **search_options(prose))
        assert plan.objective == "memory"
        assert plan.measured is not None and plan.met == (plan.measured.kl.mean <= max_kl)
        assert plan.measured.kl.mean <= max_kl * 1.1
        sizes.append(plan.summary.weight_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert {s.scheme for s in plan.sites if s.role not in ("embedding", "lm_head")} == {"int4_g32"}


def test_max_ppl_increase(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    plan = optimize(load_tiny("gpt2"), budget=Budget(max_ppl_increase=0.002), **search_options(prose))
    assert plan.measured is not None
    assert limits_of(plan) == {"max_ppl_increase": "measured" if plan.met else "missed"}
    assert plan.measured.ppl.ratio - 1 <= 0.004
    assert plan.measured.ppl.plan / plan.measured.ppl.base == pytest.approx(plan.measured.ppl.ratio, rel=1e-6)


def test_max_memory_counts_every_weight(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    for budget in (180_000, 200_000):
        plan = optimize(load_tiny("llama"), budget=Budget(max_memory_bytes=budget), **search_options(prose))
        assert plan.met and plan.summary.weight_bytes <= budget
        assert plan.summary.weight_bytes > 0.97 * budget
        sites = sum(site.bytes for site in plan.sites)
        norms = 4 * 5 * 64
        assert plan.summary.weight_bytes == sites + norms


def test_both_a_size_and_a_quality(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    plan = optimize(load_tiny("llama"), budget=Budget(effective_bits=6.0, max_kl=0.02), **search_options(prose))
    assert plan.objective == "kl" and plan.met
    assert limits_of(plan) == {"max_kl": "measured", "effective_bits": "measured"}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_include_head(load_tiny: Callable[..., LoadedModel], prose: Path, architecture: str) -> None:
    """Untied: embedding and head choose apart; tied: one site. Effective bits leave them out either way."""
    budget = Budget(max_kl=0.02)
    plan = optimize(load_tiny(architecture), budget=budget, **search_options(prose, include_head=True))
    ends = [site for site in plan.sites if site.role in ("embedding", "lm_head")]
    assert len(ends) == (2 if architecture == "llama" else 1)
    assert all(site.scheme != "as_loaded" for site in ends)
    without = optimize(load_tiny(architecture), budget=budget, **search_options(prose))
    assert plan.summary.weight_bytes < without.summary.weight_bytes
    assert plan.measured is not None and plan.measured.kl.mean <= 0.022
    assert {p.role for p in plan.predictions if p.kind == "role"} >= {site.role for site in ends}


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (Budget(max_kl=1e-9), "max_kl"),
        (Budget(max_memory_bytes=1000), "max_memory_bytes"),
        (Budget(effective_bits=2.0), "effective_bits"),
        (Budget(effective_bits=4.6, max_kl=1e-4), "max_kl"),
    ],
)
def test_an_unreachable_budget_is_missed_by_name(
    load_tiny: Callable[..., LoadedModel], prose: Path, budget: Budget, limit: str
) -> None:
    plan = optimize(load_tiny("llama"), budget=budget, **search_options(prose))
    assert not plan.met
    missed = [found for found in plan.limits if found.status == "missed"]
    assert [found.name for found in missed] == [limit]
    assert missed[0].value > missed[0].limit
    assert any("no assignment" in note for note in plan.notes)


def test_one_lossless_scheme_under_a_quality_limit(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """Nothing is lost, so there is nothing to predict, to probe or to mend."""
    plan = optimize(load_tiny("llama"), budget=Budget(max_kl=0.01), **search_options(prose, schemes=["fp32"]))
    assert plan.met and plan.measured is not None
    assert plan.measured.kl.mean == plan.measured.kl.high == 0
    assert plan.measured.top1_agreement.mean == 1
    assert plan.summary.predicted_kl == 0
    assert plan.uniform == () and any("the plan has one scheme for all weights in question" in n for n in plan.notes)


def test_a_scheme_that_overflows_is_not_chosen(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """Inputs beyond 65504 at one site: fp16 is no choice there, and elsewhere it is."""
    loaded = load_tiny("llama")
    loaded.model.model.layers[1].mlp.up_proj.weight.mul_(1e6)  # type: ignore[union-attr, index]
    loaded.model.model.layers[1].mlp.down_proj.weight.mul_(1e-6)  # type: ignore[union-attr, index]
    plan = optimize(
        loaded, budget=Budget(effective_bits=32), **search_options(prose, schemes=["fp16", "bf16"], hardware="a100")
    )
    down = plan.site("model.layers.1.mlp.down_proj")
    assert down.scheme == "bf16"
    assert plan.site("model.layers.0.mlp.down_proj").scheme == "fp16"
    assert plan.measured is not None and math.isfinite(plan.measured.kl.mean)


def test_schemes_with_rounded_activations(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    schemes = ["fp8", "int8", "mxfp8", "mxfp4", "nvfp4"]
    for architecture in ("llama", "phi3", "mixtral"):
        plan = optimize(
            load_tiny(architecture),
            budget=Budget(effective_bits=6.5),
            **search_options(prose, schemes=schemes, hardware="b200"),
        )
        assert plan.met and {site.scheme for site in plan.sites} <= {*schemes, "as_loaded"}
        total = plan.predictions[-1]
        assert 0.4 < total.predicted_kl / total.measured_kl < 2.5


def test_sites_that_no_token_reached_keep_their_format(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """One calibration sequence of eight tokens leaves experts idle; they are measured all the same."""
    options = search_options(prose, tokens=1, sequence_length=3, evaluation_tokens=64 * 3)
    plan = optimize(load_tiny("mixtral"), budget=Budget(effective_bits=24.0), **options)
    idle = [site for site in plan.sites if site.role.startswith("expert") and site.scheme == "as_loaded"]
    assert idle
    for site in idle:
        assert "calibration token" in site.reason and "reached it" in site.reason
        assert site.predicted_kl == 0 and site.bits == 32
    assert plan.measured is not None
    assert any(idle[0].name in note and "fewer than 32" in note for note in plan.notes)


def test_chat(load_tiny: Callable[..., LoadedModel], tmp_path: Path) -> None:
    """Only the assistant's tokens are scored, rows are padded, and the plan says how many count."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"It is {i * i}."},
            ]
        }
        for i in range(400)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    options = search_options(path, task="chat", sequence_length=80, tokens=10 * 80, evaluation_tokens=64 * 80)
    plan = optimize(load_tiny("llama"), budget=BUDGET, **options)
    assert plan.met and plan.measured is not None
    assert 64 * 5 < plan.measured.tokens < 64 * 30


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"schemes": ["int4_g31"]}, UnknownName, "did you mean 'int4_g32'"),
        ({"schemes": []}, SchemeError, "no scheme to choose from"),
        ({"schemes": ["as_loaded"]}, SchemeError, "not a choice"),
        ({"task": "poetry"}, UnknownName, "unknown task 'poetry'"),
        ({"hardware": "h1000"}, UnknownName, "h1000"),
        ({"calibration": "no-such-set"}, BitwrightError, "no-such-set"),
        ({"objective": "speed"}, BudgetError, "unknown objective"),
        ({"budget": BUDGET, "objective": "memory"}, BudgetError, "contradicts"),
        ({"sequence_length": 1}, DataError, "--sequence-length is 1"),
        ({"sequence_length": 513}, DataError, "longer than the 512 positions"),
        ({"tokens": 0}, DataError, "--tokens is 0"),
        ({"tokens": 10**7}, DataError, "too short"),
    ],
)
def test_bad_input_says_value_rule_and_next_step(
    load_tiny: Callable[..., LoadedModel], prose: Path, changes: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        optimize(load_tiny("llama"), **({"budget": BUDGET} | search_options(prose, **changes)))


def test_the_default_choices_round_no_activations_below_16_bits() -> None:
    names = default_schemes()
    assert {"fp16", "bf16", "int8_w", "int4_g128", "int4_g32_min", "int3_g64", "fp8_w", "fp6_w"} <= set(names)
    assert not {"as_loaded", "fp32", "fp8", "int8", "mxfp8", "mxfp4", "nvfp4"} & set(names)
