"""Limits, their texts, and what follows from which of them are set."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.errors import BudgetError
from bitwright.plan import (
    Budget,
    Workload,
    default_objective,
    parse_bytes,
    parse_ratio,
    parse_seconds,
    settle_budget,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("90MiB", 94_371_840),
        ("90 mib", 94_371_840),
        ("90MB", 90_000_000),
        ("1.5GB", 1_500_000_000),
        ("1GiB", 1_073_741_824),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("94371840", 94_371_840),
        ("1e6", 1_000_000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "ninety", "-3MiB", "0", "90M", "90Mib/s", "90%", "nan", "inf", "1e999GB"])
def test_sizes_refused(text: str):
    with pytest.raises(BudgetError):
        parse_bytes(text)


def test_an_open_prefix_is_answered_with_both_readings():
    with pytest.raises(BudgetError, match=r"write 90MB \(powers of 1000\) or 90MiB \(powers of 1024\)"):
        parse_bytes("90M")


@given(st.integers(1, 10**9))
def test_kibibytes_are_1024(count: int):
    assert parse_bytes(f"{count}KiB") == 1024 * parse_bytes(f"{count}B")


@pytest.mark.parametrize(("text", "ratio"), [("1%", 0.01), ("0.01", 0.01), ("150 %", 1.5), ("0.5", 0.5)])
def test_ratios(text: str, ratio: float):
    assert parse_ratio(text) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("1.5 s", 1.5), ("800us", 8e-4), ("7µs", 7e-6), ("2", 2)]
)
def test_times(text: str, seconds: float):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "fast", "20m", "-1s", "0", "nan", "1e999s", "3 h"])
def test_times_refused(text: str):
    with pytest.raises(BudgetError):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["", "one", "1.01", "1MiB", "%"])
def test_ratios_refused(text: str):
    with pytest.raises(BudgetError):
        parse_ratio(text)


@pytest.mark.parametrize("name", list(Budget.model_fields))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "4", True])
def test_impossible_limits_name_the_limit(name: str, value: object):
    with pytest.raises(BudgetError, match=name):
        Budget(**{name: value})


def test_only_an_overflow_risk_may_be_zero():
    assert Budget(max_overflow_risk=0).limits == {"max_overflow_risk": 0}
    for name in Budget.model_fields.keys() - {"max_overflow_risk"}:
        with pytest.raises(BudgetError, match=name):
            Budget(**{name: 0})


def test_more_bits_than_any_weight_has():
    with pytest.raises(BudgetError, match="at most 32"):
        Budget(effective_bits=33)


def test_objective_follows_from_the_limits():
    assert default_objective(Budget(max_kl=0.1))[0] == "memory"
    assert default_objective(Budget(max_ppl_increase=0.1))[0] == "memory"
    assert default_objective(Budget(effective_bits=4.8))[0] == "kl"
    assert default_objective(Budget(max_memory_bytes=1e9))[0] == "kl"
    assert default_objective(Budget(max_kl=0.1, effective_bits=4.8))[0] == "kl"
    objective, reason = default_objective(Budget(latency_sla_s=0.01, max_memory_bytes=1e9))
    assert objective == "kl" and reason == "the size and the time are limited: the best quality that fits"


def test_no_limit_becomes_the_stated_one():
    budget, objective, reason = settle_budget(Budget())
    assert (budget, objective) == (Budget(max_kl=0.02), "memory")
    assert "no limit was given" in reason


def test_asked_for_objective_stays():
    assert settle_budget(Budget(max_kl=0.1, effective_bits=5), "memory") == (
        Budget(max_kl=0.1, effective_bits=5),
        "memory",
        "asked for",
    )


@pytest.mark.parametrize(
    ("budget", "objective"),
    [
        (Budget(effective_bits=5), "memory"),
        (Budget(max_kl=0.1), "kl"),
        (Budget(), "kl"),
        (Budget(max_kl=0.1), "speed"),
        (Budget(latency_sla_s=1.0), "latency"),
        (Budget(max_overflow_risk=0.0), "memory"),
    ],
)
def test_contradictions(budget: Budget, objective: str):
    with pytest.raises(BudgetError, match="objective"):
        settle_budget(budget, objective)


def test_device_memory_needs_a_context():
    budget = Budget(device_memory_bytes=2**30)
    with pytest.raises(BudgetError, match="add context"):
        settle_budget(budget)
    assert settle_budget(budget, workload=Workload(context=128)).objective == "kl"


@pytest.mark.parametrize("field", ["context", "batch"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_impossible_workloads_name_the_field(field: str, value: object):
    with pytest.raises(BudgetError, match=f"{field} must be a whole number"):
        Workload(**{field: value})
