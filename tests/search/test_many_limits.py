"""Five limits of five kinds at once, through the whole job: each recounted from the plan's own choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_search import search_options

from bitwright import hardware
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, Plan, Workload
from bitwright.quantize import SCHEMES
from bitwright.search.optimize import optimize

LOAD = Workload(context=256, batch=4)
H100 = hardware.get("h100")
#: int4 is small, static FP8 fast where many tokens are multiplied, int8 good, bf16 the largest.
OPTIONS = {"schemes": ["int4_g32", "int8_w", "fp8_static", "bf16"], "hardware": "h100"}


def decoder(plan: Plan) -> list:
    return [site for site in plan.sites if site.kind == "weight" and site.role not in ("embedding", "lm_head")]


def bits_of(plan: Plan) -> float:
    """Stored bytes as the schemes say them, by hand."""
    stored = sum(SCHEMES[s.scheme].weights.stored_bytes(*s.shape) for s in decoder(plan))  # type: ignore[union-attr]
    return 8 * stored / sum(math.prod(site.shape) for site in decoder(plan))


def device_bytes_of(plan: Plan) -> int:
    """Weights (norms are 5 · 64 numbers of fp32), caches of 2 layers · 2 heads · 16 numbers, and what runs them."""
    assert plan.device_memory is not None
    caches = [site for site in plan.sites if site.kind == "state"]
    kept = sum(round(4 * 256 * 2 * 16 * site.bits / 8) for site in caches)
    weights = sum(site.bytes for site in plan.sites if site.kind == "weight") + 4 * 5 * 64
    return weights + kept + plan.device_memory.activations + plan.device_memory.workspace


@pytest.fixture(scope="module")
def free(load_tiny: Callable[..., LoadedModel], prose: Path) -> Plan:
    """The best quality: what nothing limits but a size that everything keeps."""
    return optimize(
        load_tiny("llama"), budget=Budget(effective_bits=32), workload=LOAD, **search_options(prose, **OPTIONS)
    )


@pytest.fixture(scope="module")
def small(load_tiny: Callable[..., LoadedModel], prose: Path) -> Plan:
    return optimize(
        load_tiny("llama"),
        budget=Budget(max_kl=0.05),
        objective="memory",
        workload=LOAD,
        **search_options(prose, **OPTIONS),
    )


def test_all_are_kept_and_each_is_what_it_says(
    load_tiny: Callable[..., LoadedModel], prose: Path, free: Plan, small: Plan
) -> None:
    """Between the smallest plan and the best one, a part of the way in every quantity."""
    assert free.device_memory is not None and small.device_memory is not None
    assert free.latency is not None and small.latency is not None
    assert free.measured is not None and small.measured is not None
    slow, fast = free.latency.decode_s_per_token, small.latency.decode_s_per_token
    limits = {
        "max_kl": 0.9 * small.measured.kl.mean,
        "effective_bits": 0.5 * (bits_of(free) + bits_of(small)),
        "device_memory_bytes": small.device_memory.total + (free.device_memory.total - small.device_memory.total) // 3,
        "latency_sla_s": fast + 0.6 * (slow - fast),
        "max_overflow_risk": 50.0,
    }
    plan = optimize(load_tiny("llama"), budget=Budget(**limits), workload=LOAD, **search_options(prose, **OPTIONS))
    assert plan.objective == "kl" and plan.met and plan.measured is not None and plan.latency is not None
    found = {limit.name: limit for limit in plan.limits}
    assert {name: (limit.limit, limit.status) for name, limit in found.items()} == {
        name: (pytest.approx(value), "predicted" if name in ("device_memory_bytes", "latency_sla_s") else "measured")
        for name, value in limits.items()
    }
    assert found["effective_bits"].value == pytest.approx(bits_of(plan))
    assert found["device_memory_bytes"].value == device_bytes_of(plan)
    assert found["latency_sla_s"].value == plan.latency.decode_s_per_token
    assert found["max_kl"].value == plan.measured.kl.mean
    assert found["max_overflow_risk"].value <= (plan.measured.overflows or 0.0)
    assert [study.name for study in plan.limit_studies] == list(Budget(**limits).limits)
    # something gave way to the limits, and a better plan than the smallest was found within them
    assert small.measured.kl.mean > plan.measured.kl.mean > free.measured.kl.mean
    assert any(study.binds for study in plan.limit_studies)
