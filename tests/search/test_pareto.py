"""The front against its laws: nothing on it is beaten, its ends are the ends, and what is measured is measured."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_search import search_options
from torch import Tensor, nn

from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, ParetoPoint, Plan, Workload, load_plan, write_plan
from bitwright.search.optimize import optimize
from bitwright.search.pareto import VISIBLE, _Candidate, beats, spread, undominated_rows
from bitwright.search.text import split_text

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


@pytest.fixture(scope="module")
def narrow(load_tiny: Callable[..., LoadedModel], prose: Path) -> tuple[LoadedModel, Plan]:
    """Two schemes, each with one choice a site, so that ends of the front say what every site has there; the plan
    itself is static FP8 everywhere, with scales from so few tokens that others overflow."""
    options = {"schemes": ["fp8_static", "bf16"], "roundings": ["rtn"], "transforms": [], "values": "none"}
    loaded = load_tiny("llama")
    plan = optimize(
        loaded,
        budget=Budget(max_kl=2.0),
        objective="memory",
        pareto_points=4,
        **search_options(prose, hardware="h100", tokens=64, **options),
    )
    assert {site.scheme for site in plan.sites} == {"fp8_static", "as_loaded"}
    return loaded, plan


def fp8(x: Tensor) -> Tensor:
    """Saturated at the largest E4M3 number."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def kl_on_16(loaded: LoadedModel, model: Any, prose: Path) -> float:
    """Mean KL(reference ‖ model) in nats on the first 16 sequences of the repair text, whose first tokens are given."""
    ids = repair_ids(loaded, prose)
    with torch.no_grad():
        p, q = (one(ids).logits[:, :-1].double().log_softmax(-1) for one in (loaded.model, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def repair_ids(loaded: LoadedModel, prose: Path) -> Tensor:
    splits = split_text(
        loaded.tokenizer,
        task="text",
        calibration=prose,
        evaluation=prose,
        calibration_tokens=64,
        evaluation_tokens=64 * 16,
        sequence_length=16,
        seed=0,
        vocabulary_size=260,
    )
    return splits.repair.input_ids[:16]


def test_the_plans_point_run_again(narrow: tuple[LoadedModel, Plan], prose: Path) -> None:
    """FP8 in plain torch, scales of inputs as the plan keeps them: KL, overflows, tokens that would fall back."""
    loaded, plan = narrow
    model = copy.deepcopy(loaded.model)
    inputs, beyond, tokens, rows = 0, 0, 0, 0

    def round_input(scale: Tensor) -> Callable[[Any, tuple[Tensor]], Tensor]:
        def before(_: Any, arguments: tuple[Tensor]) -> Tensor:
            nonlocal beyond, tokens, rows
            (x,) = arguments
            over = (x / scale).abs() > 464  # halfway to what would come after 448, whose even neighbour it is
            beyond += int(over.sum())
            tokens += over[..., 0].numel()
            rows += int(over.any(-1).sum())
            return fp8(x / scale) * scale

        return before

    for choice in plan.sites:
        if choice.scheme == "fp8_static":
            linear = model.get_submodule(choice.module)
            scale = linear.weight.abs().amax(1, keepdim=True) / 448
            linear.weight.copy_(fp8(linear.weight / scale) * scale)
            linear.register_forward_pre_hook(round_input(torch.tensor(plan.tensors[f"{choice.name}/input_scale"])))
            inputs += linear.in_features
    (own,) = [point for point in plan.pareto if point.chosen]
    assert own.kl.mean == pytest.approx(kl_on_16(loaded, model, prose), rel=1e-3)
    assert beyond > 0 and own.overflows == pytest.approx(1e6 * beyond / (16 * 16 * inputs))
    assert own.fallback_rate == pytest.approx(rows / tokens)


def test_another_point_run_again(narrow: tuple[LoadedModel, Plan], prose: Path) -> None:
    """The end where all weights and what they are multiplied with is bf16: nothing overflows."""
    loaded, plan = narrow
    model = copy.deepcopy(loaded.model)
    (point,) = [point for point in plan.pareto if point.counts.keys() == {"bf16"}]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.copy_(module.weight.bfloat16())
            module.register_forward_pre_hook(lambda _, arguments: arguments[0].bfloat16().float())
    assert point.kl.mean == pytest.approx(kl_on_16(loaded, model, prose), rel=2e-2)  # 1e-5, of fp32 logits
    assert (point.overflows, point.fallback_rate) == (0, 0)


def test_it_is_all_in_the_folder(plan: Plan, tmp_path: Path) -> None:
    assert load_plan(write_plan(plan, tmp_path / "plan")) == plan
