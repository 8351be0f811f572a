"""The roofline's floor by hand, bytes over bandwidth and operations over rate; and what happens just above it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_search import search_options

from bitwright import hardware
from bitwright.errors import BudgetError
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Budget, Workload
from bitwright.search.choices import Choices
from bitwright.search.floor import floors
from bitwright.search.optimize import optimize
from bitwright.search.price import AS_LOADED, price_model

H100 = hardware.get("h100")


def weights_of(loaded: LoadedModel) -> tuple[int, int]:
    """Decoder weights, and those of the head."""
    sites = find_sites(loaded.model)
    decoder = sum(site.num_weights for site in sites if site.role not in ("embedding", "lm_head"))
    return decoder, sum(site.num_weights for site in sites if site.role == "lm_head")


def test_a_time_below_the_floor_is_refused_before_any_work(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """int4 in groups of 32 takes four and a half bits; the head stays in fp32. All of it once at 3350 GB/s."""
    loaded = load_tiny("llama")
    decoder, head = weights_of(loaded)
    floor_s = (decoder * 4.5 / 8 + head * 4) / 3350e9
    options = search_options(prose, hardware="h100")
    with pytest.raises(BudgetError, match=r"latency_sla_s of .* is out of reach: the roofline's floor") as refused:
        optimize(loaded, budget=Budget(latency_sla_s=0.99 * floor_s), **options)
    stated, at_best = re.findall(r"floor of a step is (\S+) s .* is (\S+) at best", str(refused.value))[0]
    assert float(stated) == pytest.approx(floor_s, rel=1e-3) and at_best == stated
    assert "h100-sxm" in str(refused.value) and "at 3350 GB/s" in str(refused.value)
    with pytest.raises(BudgetError, match=r"min_tokens_per_s of .* is out of reach") as refused:
        optimize(loaded, budget=Budget(min_tokens_per_s=2.02 / floor_s), workload=Workload(batch=2), **options)
    assert float(re.findall(r"is (\S+) at best", str(refused.value))[0]) == pytest.approx(2 / floor_s, rel=1e-3)


def test_between_the_floor_and_the_rates_the_search_goes_on(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """Inputs and outputs are moved too, which the floor leaves out: nothing keeps one percent above it."""
    loaded = load_tiny("llama")
    decoder, head = weights_of(loaded)
    limit = 1.01 * (decoder * 4.5 / 8 + head * 4) / 3350e9
    plan = optimize(loaded, budget=Budget(latency_sla_s=limit), **search_options(prose, hardware="h100"))
    assert not plan.met and [found.status for found in plan.limits] == ["missed"]
    (note,) = [note for note in plan.notes if "is not met at the rates that were measured on h100-sxm" in note]
    assert plan.latency is not None
    fastest, floor_s = re.findall(r"comes to (\S+); .* floor, (\S+), could", note)[0]
    assert float(fastest) == pytest.approx(plan.latency.decode_s_per_token, rel=1e-3)
    assert float(floor_s) == pytest.approx(limit / 1.01, rel=1e-3) and float(fastest) > limit


def test_the_floor_with_a_context(load_tiny: Callable[..., LoadedModel]) -> None:
    """As loaded: fp32 weights, and 2 layers · 2 caches · 4 sequences · 256 tokens · 2 heads · 16 numbers in 16 bits.

    A prompt of 256 tokens multiplies each of them with the decoder, its last with the head, and q·k and p·v of 4 heads
    over 256 · 257 / 2 pairs.
    """
    loaded = load_tiny("llama")
    decoder, head = weights_of(loaded)
    prices = price_model(
        loaded,
        find_sites(loaded.model),
        value_sites=find_value_sites(loaded.model),
        device=H100,
        workload=Workload(context=256, batch=4),
    )
    found = floors(prices, Choices(candidates={}))
    moved_bytes = 4 * (decoder + head) + 2 * 2 * 4 * 256 * 2 * 16 * 2
    assert found["decode_s"].bound == "memory"
    assert found["decode_s"].seconds == pytest.approx(moved_bytes / 3350e9)
    operations = 2 * 4 * (256 * decoder + head) + 2 * 2 * 2 * 4 * 4 * 16 * 256 * 257 / 2
    fastest = max(H100.matmul_tflops.values()) * 1e12
    assert found["prefill_s"].seconds == pytest.approx(max(operations / fastest, moved_bytes / 3350e9))


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_no_choice_is_predicted_to_be_below_it(load_tiny: Callable[..., LoadedModel], architecture: str) -> None:
    """With everything as loaded there is one choice, on devices with measured rates and without."""
    loaded = load_tiny(architecture)
    for device in hardware.devices():
        for workload in (Workload(), Workload(context=512, batch=64)):
            prices = price_model(
                loaded,
                find_sites(loaded.model),
                value_sites=find_value_sites(loaded.model),
                device=device,
                workload=workload,
            )
            for quantity, floor in floors(prices, Choices(candidates={})).items():
                only = prices.totals(dict.fromkeys((site.name for site in prices.all_sites), AS_LOADED))[quantity]
                assert floor.seconds <= only * (1 + 1e-9), (device.name, quantity)
