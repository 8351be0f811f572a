"""The front against its laws: nothing on it is beaten, its ends are the ends, and what is measured is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_search import search_options

from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, ParetoPoint, Plan, Workload, load_plan, write_plan
from bitwright.search.optimize import optimize
from bitwright.search.pareto import VISIBLE, _Candidate, beats, spread, undominated_rows

figures = st.tuples(*[st.sampled_from([0.1, 1.0, 2.0, 10.0])] * 3)


@given(st.lists(figures, min_size=1, max_size=12, unique=True))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_is_what_nothing_beats(rows: list[tuple[float, ...]]) -> None:
    items = [_Candidate({}, row) for row in rows]
    kept = {item.figures for item in undominated_rows(items, rows)}
    for row in rows:
        better = [o for o in rows if o != row and all(a <= b for a, b in zip(o, row, strict=True))]
        assert (row in kept) == (not better)


def test_spreading_keeps_the_first_and_the_ends() -> None:
    items = [_Candidate({"i": i}, (10.0 ** -(i / 9), 10.0 ** (i / 9))) for i in range(10)]
    for count in (3, 5, 9):
        taken = spread([items[4], *items[:4], *items[5:]], count)
        assert len(taken) == count and taken[0] is items[4]
        assert items[0] in taken and items[9] in taken
    assert spread(items, 20) == items


@pytest.fixture(scope="module")
def plan(load_tiny: Callable[..., LoadedModel], prose: Path) -> Plan:
    """Static FP8 has overflows, dynamic FP8 has none; each has another time than weights alone."""
    return optimize(
        load_tiny("llama"),
        budget=Budget(max_kl=0.02),
        workload=Workload(context=128, batch=2),
        pareto_points=8,
        robustness=True,
        **search_options(
            prose, schemes=["int4_g32", "int8_w", "fp8", "fp8_static", "bf16"], hardware="h100", tokens=1024
        ),
    )


def axes_of(point: ParetoPoint) -> tuple[float, ...]:
    assert point.device_bytes is not None
    return (
        point.kl.mean,
        point.device_bytes,
        point.decode_s_per_token,
        point.prefill_s,
        point.overflows,
        point.fallback_rate,
    )


def test_the_measured_front(plan: Plan) -> None:
    points = plan.pareto
    assert 3 <= len(points) <= 8 and sum(point.chosen for point in points) == 1
    for left, right in itertools.permutations(points, 2):
        assert right.chosen or not beats(axes_of(left), axes_of(right), VISIBLE)
    for point in points:
        assert 0 < point.kl.low <= point.kl.mean <= point.kl.high
        assert point.latency_status == "predicted"
    (own,) = [point for point in points if point.chosen]
    assert own.weight_bytes == plan.summary.weight_bytes
    assert plan.device_memory is not None and own.device_bytes == plan.device_memory.total
    assert plan.latency is not None and own.decode_s_per_token == plan.latency.decode_s_per_token


def test_an_overflow_limit_is_measured(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    """Per million of all values that pass the model, counted before the cast while the final text ran."""
    options = search_options(prose, schemes=["fp8_static", "int8_w"], hardware="h100", tokens=256)
    loose = optimize(load_tiny("llama"), budget=Budget(effective_bits=8.5, max_overflow_risk=1e5), **options)
    (limit,) = [limit for limit in loose.limits if limit.name == "max_overflow_risk"]
    assert limit.status == "measured" and loose.measured is not None
    assert 0 <= limit.value <= (loose.measured.overflows or 0.0)
    calm = optimize(load_tiny("llama"), budget=Budget(effective_bits=8.5, max_overflow_risk=0.0), **options)
    assert calm.met and {site.scheme for site in calm.sites} == {"int8_w", "as_loaded"}


def test_robustness(plan: Plan) -> None:
    """Another seed and another set of text; the plan on texts of twice and four times the length."""
    found = plan.robustness
    assert found is not None and found.notes == ()
    assert found.others[0].what == "seed 1"
    for other in found.others:
        assert 0 <= other.same_choice <= other.same_scheme <= 1
        assert other.difference.mean == pytest.approx(other.kl.mean - other.plan_kl, rel=1e-6, abs=1e-9)
    assert [context.sequence_length for context in found.contexts] == [32, 64]
    for context in found.contexts:
        assert context.tokens == context.sequences * (context.sequence_length - 1)
        assert 0 < context.kl.low <= context.kl.mean <= context.kl.high


def test_it_is_all_in_the_folder(plan: Plan, tmp_path: Path) -> None:
    assert load_plan(write_plan(plan, tmp_path / "plan")) == plan
