"""What a plan with refined codes says it measured is of those codes: measured again here, from what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_search import search_options
from torch import Tensor

from bitwright.inference import emulate_plan
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, Plan, Prediction
from bitwright.search.optimize import optimize
from bitwright.search.text import split_text

TOKENS, EVALUATION_TOKENS, LENGTH = 1024, 64 * 16, 16
OPTIONS = {"schemes": ("int4_g32", "int8_w"), "tokens": TOKENS, "values": "none"}


@pytest.fixture(scope="module")
def loaded(load_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return load_tiny("llama")


@pytest.fixture(scope="module")
def chosen(loaded: LoadedModel, prose: Path) -> Plan:
    """The same search without refinement."""
    return optimize(loaded, budget=Budget(effective_bits=6.0), **search_options(prose, **OPTIONS))


@pytest.fixture(scope="module")
def plan(loaded: LoadedModel, prose: Path, chosen: Plan) -> Plan:
    found = optimize(
        loaded,
        budget=Budget(effective_bits=6.0),
        pareto_points=3,
        robustness=True,
        **search_options(prose, effort="high", **OPTIONS),
    )
    assert any("were refined" in note for note in found.notes)
    assert [site.scheme for site in found.sites] == [site.scheme for site in chosen.sites]
    return found


def repair_text(loaded: LoadedModel, prose: Path, length: int, calibration: int, evaluation: int) -> tuple[Any, Tensor]:
    """The text that a search with these amounts measures on while it mends, and which tokens of it are predicted."""
    splits = split_text(
        loaded.tokenizer,
        task="text",
        calibration=prose,
        evaluation=prose,
        calibration_tokens=calibration,
        evaluation_tokens=evaluation,
        sequence_length=length,
        seed=0,
        vocabulary_size=260,
    )
    return splits.repair, splits.repair.scored[:, 1:]


def kl_of(loaded: LoadedModel, plan: Plan, ids: Tensor, scored: Tensor, only: Iterable[str] | None = None) -> float:
    """Mean KL(reference ‖ plan) of the predicted tokens, nats; `only` the named sites are as the plan has them."""
    sites = tuple(choice for choice in plan.sites if only is None or choice.name in only)
    names = {choice.name for choice in sites}
    tensors = {key: array for key, array in plan.tensors.items() if key.rpartition("/")[0] in names}
    part = plan.attach(tensors={}).replace(sites=sites).attach(tensors=tensors)
    with torch.no_grad():
        reference = loaded.model(ids).logits[:, :-1].double().log_softmax(-1)
        with emulate_plan(part, loaded.model, find_sites(loaded.model)) as model:
            changed = model(ids).logits[:, :-1].double().log_softmax(-1)
    return float((reference.exp() * (reference - changed)).sum(-1)[scored].mean())


def close_to(value: float) -> Any:
    return pytest.approx(value, rel=1e-4)


def test_figures_on_the_repair_text(loaded: LoadedModel, prose: Path, plan: Plan, chosen: Plan) -> None:
    text, scored = repair_text(loaded, prose, LENGTH, TOKENS, EVALUATION_TOKENS)
    assert plan.repair is not None and text.hash == plan.repair.hash
    first_16 = kl_of(loaded, plan, text.input_ids[:16], scored[:16])
    before = kl_of(loaded, chosen, text.input_ids[:16], scored[:16])
    assert abs(first_16 / before - 1) > 0.01, "a figure of the wrong codes would be seen"
    (own,) = (point for point in plan.pareto if point.chosen)
    assert own.kl.mean == close_to(first_16)
    assert plan.uniform
    for comparison in plan.uniform:
        assert comparison.plan_kl == close_to(first_16)
        assert comparison.difference.mean == pytest.approx(comparison.plan_kl - comparison.uniform_kl, abs=1e-9)
    assert plan.robustness is not None
    for other in plan.robustness.others:
        assert other.plan_kl == close_to(kl_of(loaded, plan, text.input_ids[:32], scored[:32]))


def test_a_longer_context(loaded: LoadedModel, prose: Path, plan: Plan) -> None:
    assert plan.robustness is not None
    found = plan.robustness.contexts[0]
    text, scored = repair_text(loaded, prose, found.sequence_length, found.sequence_length, 64 * found.sequence_length)
    count = found.sequences
    assert found.kl.mean == close_to(kl_of(loaded, plan, text.input_ids[:count], scored[:count]))


def test_predictions_stay_those_of_what_was_scored(loaded: LoadedModel, prose: Path, plan: Plan, chosen: Plan) -> None:
    """And say so beside what is measured with the codes of now."""
    text, scored = repair_text(loaded, prose, LENGTH, TOKENS, EVALUATION_TOKENS)
    refined_roles = {site.role for site in plan.sites if site.rounding == "learned"}

    def roles(of: Plan) -> dict[str | None, Prediction]:
        return {p.role: p for p in of.predictions if p.kind == "plan_role"}

    assert refined_roles and refined_roles <= roles(plan).keys()
    for role in refined_roles:
        point = roles(plan)[role]
        assert point.what == f"{role} as planned, predicted before its codes were refined"
        names = [site.name for site in plan.sites if site.role == role]
        again, before = (kl_of(loaded, of, text.input_ids[:8], scored[:8], names) for of in (plan, chosen))
        assert point.measured_kl == pytest.approx(again, rel=5e-3)  # KLs of 1e-5, of fp32 logits
        assert abs(again / before - 1) > 0.02, "a figure of the wrong codes would be seen"
        assert point.predicted_kl == roles(chosen)[role].predicted_kl
    assert plan.summary.predicted_kl == chosen.summary.predicted_kl
    assert [site.predicted_kl for site in plan.sites] == [site.predicted_kl for site in chosen.sites]
    assert plan.measured is not None
    total = plan.predictions[-1]
    assert total.what == "the plan, on the final text, predicted before its codes were refined"
    assert (total.predicted_kl, total.measured_kl) == (plan.summary.predicted_kl, plan.measured.kl.mean)
    assert any("only this plan's codes were refined" in note for note in plan.notes)
