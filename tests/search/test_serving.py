"""Bytes and times under a context, by hand; quantities of a solution are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_search import ROUNDINGS, SCHEMES, made_up_scores

from bitwright import hardware
from bitwright.errors import BudgetError
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Budget, Workload
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.correct import Correction
from bitwright.search.limits import largest_sums
from bitwright.search.price import AS_LOADED, Prices, price_model
from bitwright.search.problem import Problem, build_problem
from bitwright.search.serving import decoder_shape, value_amounts

H100 = hardware.get("h100")
#: Bytes per second (nobody measured other than the peak), and bf16 operations per second, as achieved.
BANDWIDTH = H100.memory_gb_per_s * 1e9
BF16 = H100.achieved_matmul_tflops["bf16"] * 1e12
LOAD = Workload(context=256, batch=4)


def site_of(loaded: LoadedModel, part: str) -> ValueSite:
    return next(site for site in find_value_sites(loaded.model) if site.part == part)


def test_a_cache_is_read_once_a_step(load_tiny: Callable[..., LoadedModel]) -> None:
    """4 sequences · 256 tokens · 2 heads · 16 numbers; int8 has one fp32 scale per token and head."""
    keys = site_of(load_tiny("llama"), "k_cache")
    assert (keys.num_heads, keys.head_dim) == (2, 16)
    for choice, bits in ((AS_LOADED, 16), (Candidate(scheme="int8_token"), 8 + 32 / 16)):
        found = value_amounts(keys, choice, H100, LOAD)
        assert found["device_bytes"] == 4 * 256 * 2 * 16 * bits / 8
        assert found["decode_s"] == pytest.approx(found["device_bytes"] / BANDWIDTH)
    assert value_amounts(keys, AS_LOADED, H100, Workload()) == {}


def test_a_sliding_window_bounds_the_cache(load_tiny: Callable[..., LoadedModel]) -> None:
    import dataclasses

    keys = dataclasses.replace(site_of(load_tiny("llama"), "k_cache"), window=64)
    assert value_amounts(keys, AS_LOADED, H100, LOAD)["device_bytes"] == 4 * 64 * 2 * 16 * 2


def test_products_of_attention_run_at_the_rate_of_their_format(load_tiny: Callable[..., LoadedModel]) -> None:
    """Causal prefill of n tokens has n(n + 1)/2 pairs of query and key; FP8 has its own rate."""
    products = site_of(load_tiny("llama"), "qk")
    plain = value_amounts(products, AS_LOADED, H100, LOAD)
    assert plain["prefill_s"] == pytest.approx(2 * 4 * 4 * 16 * 256 * 257 / 2 / BF16)
    assert plain["decode_s"] == pytest.approx(2 * 4 * 4 * 16 * 256 / BF16)
    fp8 = value_amounts(products, Candidate(scheme="fp8_e4m3_token"), H100, LOAD)
    assert fp8["prefill_s"] / plain["prefill_s"] == pytest.approx(
        H100.achieved_matmul_tflops["bf16"] / H100.achieved_matmul_tflops["fp8_e4m3"]
    )


def test_scores_stay_on_the_chip(load_tiny: Callable[..., LoadedModel]) -> None:
    assert value_amounts(site_of(load_tiny("llama"), "softmax"), AS_LOADED, H100, LOAD) == {}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma", "phi3", "mixtral"])
def test_shapes_are_read_from_any_config(load_tiny: Callable[..., LoadedModel], architecture: str) -> None:
    loaded = load_tiny(architecture)
    shape = decoder_shape(loaded, find_sites(loaded.model))
    assert shape is not None
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size) == (2, 64, 4, 260)
    assert shape.head_dim == 16 and shape.num_kv_heads == (4 if architecture == "gpt2" else 2)


def test_a_config_without_sizes_says_so(load_tiny: Callable[..., LoadedModel], monkeypatch: Any) -> None:
    loaded = load_tiny("llama")
    sites = find_sites(loaded.model)
    monkeypatch.setattr(type(loaded.model), "config", None, raising=False)
    object.__setattr__(loaded.model, "config", None)
    with pytest.raises(BudgetError, match="does not tell layers"):
        price_model(loaded, sites, device=H100, workload=LOAD)


def served(loaded: LoadedModel, **workload: int) -> Prices:
    return price_model(
        loaded,
        find_sites(loaded.model),
        value_sites=find_value_sites(loaded.model),
        device=H100,
        workload=Workload(**workload),
    )


def test_a_longer_context_costs_its_cache(load_tiny: Callable[..., LoadedModel]) -> None:
    """Twice the tokens: another 2 layers · 2 caches · 2 heads · 16 numbers · 2 bytes for each of them."""
    loaded = load_tiny("llama")
    long, short = served(loaded, context=4096 // 16), served(loaded, context=2048 // 16)
    stay = dict.fromkeys((site.name for site in long.all_sites), AS_LOADED)
    per_token = 2 * 2 * 2 * 16 * 2
    caches = [sum(p.amounts(s, AS_LOADED).get("device_bytes", 0) for s in p.value_sites) for p in (long, short)]
    assert caches[0] - caches[1] == 128 * per_token
    assert long.totals(stay)["decode_s"] - short.totals(stay)["decode_s"] > 128 * per_token / BANDWIDTH * 0.99


def test_experts_are_read_as_often_as_tokens_need_them(load_tiny: Callable[..., LoadedModel]) -> None:
    """Two of four experts a token: one step of one token reads half of them; of many tokens all."""
    loaded = load_tiny("mixtral")
    choice = Candidate(scheme="bf16")
    for batch, share in ((1, 0.5), (2, 0.75), (64, 1.0)):
        prices = price_model(loaded, find_sites(loaded.model), device=H100, workload=Workload(batch=batch))
        expert = next(site for site in prices.sites if site.role == "expert.down")
        read_s = expert.num_weights * 2 / BANDWIDTH
        found = prices.amounts(expert, choice)["decode_s"]
        assert share * read_s <= found * (1 + 1e-9)
        moved = max(1, round(batch * 0.5 / share)) * 2 * sum(expert.shape) / BANDWIDTH
        assert found <= share * (read_s + moved) * (1 + 1e-9)


def test_of_a_prompt_only_the_last_logits_are_formed(load_tiny: Callable[..., LoadedModel]) -> None:
    prices = served(load_tiny("llama"))
    head = next(site for site in prices.sites if site.role == "lm_head")
    found = prices.amounts(head, Candidate(scheme="bf16"))
    assert found["prefill_s"] == found["decode_s"]


# --- problems over values --------------------------------------------------------------------------------------------


@pytest.fixture
def problem(load_tiny: Callable[..., LoadedModel]) -> Problem:
    """Weights and caches in question; static FP8 keys expect overflows, K and V of a layer are tied."""
    prices = served(load_tiny("llama"), context=256, batch=4)
    scores = made_up_scores(prices.sites, candidates_of(SCHEMES, roundings=ROUNDINGS))
    caches = [site for site in prices.value_sites if site.kind == "state"]
    int8, fp8 = Candidate(scheme="int8_token"), Candidate(scheme="fp8_e4m3_tensor")
    for index, site in enumerate(caches):
        scores[site.name] = {AS_LOADED: 0.0, int8: 1e-4 * (1 + index), fp8: 5e-5}
    return build_problem(
        prices,
        scores,
        Correction(role_factors={}),
        include_head=False,
        ties={site.name: f"layer {site.layer}" for site in caches},
        overflows={site.name: {fp8: 0.01} for site in caches},
    )


def test_sums_with_values(problem: Problem) -> None:
    solution, unreachable = problem.solve(Budget(effective_bits=6.0), "kl", None)
    assignment = problem.assignment(solution)
    assert unreachable == () and set(assignment) == {site.name for site in problem.prices.all_sites}
    totals = problem.totals(assignment)
    for quantity in ("weight_bytes", "device_bytes", "decode_s", "prefill_s", "overflow"):
        assert solution.amount(quantity) + problem.fixed.get(quantity, 0) == pytest.approx(totals[quantity])
    assert isinstance(totals["device_bytes"], int)


def test_outside_ties_hold(problem: Problem) -> None:
    least, _ = problem.solve(Budget(max_kl=1.0), "memory", 1.0)
    assignment = problem.assignment(least)
    caches = [site for site in problem.prices.value_sites if site.kind == "state"]
    for layer in (0, 1):
        assert len({assignment[site.name].scheme for site in caches if site.layer == layer}) == 1
    assert all(assignment[site.name] != AS_LOADED for site in caches)


def test_an_overflow_limit_leaves_out_what_overflows(problem: Problem) -> None:
    """One overflow a hundred tokens at each of four caches, per million values that pass the model."""
    smallest, _ = problem.solve(Budget(max_kl=1.0), "memory", 1.0)
    overflowing = problem.totals(problem.assignment(smallest))["overflow"]
    assert overflowing == pytest.approx(4 * 0.01 * 1e6 / problem.prices.num_values)
    calm, unreachable = problem.solve(Budget(max_kl=1.0, max_overflow_risk=0.0), "memory", 1.0)
    assert unreachable == () and problem.totals(problem.assignment(calm))["overflow"] == 0
    schemes = {problem.assignment(calm)[s.name].scheme for s in problem.prices.value_sites if s.kind == "state"}
    assert schemes == {"int8_token"}
    half, _ = problem.solve(Budget(max_kl=1.0, max_overflow_risk=0.51 * overflowing), "memory", 1.0)
    assert 0 < problem.totals(problem.assignment(half))["overflow"] <= 0.51 * overflowing


def test_the_stricter_of_two_limits_on_one_quantity_counts(load_tiny: Callable[..., LoadedModel]) -> None:
    prices = served(load_tiny("llama"), context=64, batch=4)
    assert largest_sums(Budget(latency_sla_s=0.1, min_tokens_per_s=100), prices)["decode_s"] == 0.04
    assert largest_sums(Budget(latency_sla_s=0.01, min_tokens_per_s=100), prices)["decode_s"] == 0.01
