"""The one door: a planned copy runs as emulation does, generates, and leaves the model alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_models import IDS, tiny_gpt
from small_plans import choice, plan_of, uniform_plan

from bitwright.errors import PlanError
from bitwright.inference import apply, emulate_plan
from bitwright.models import find_sites, find_value_sites, plain_model


def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("architecture", "scheme", "part"),
    [("llama", "int4_g32", None), ("gpt2", "fp8", "signs"), ("mixtral", "int8_static", None)],
)
def test_a_planned_copy_runs_as_emulation_does(
    make_tiny_model: Callable[..., Any], architecture: str, scheme: str, part: str | None
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    before, reference = copy.deepcopy(model.state_dict()), logits_of(model)
    plan = uniform_plan(sites, scheme, part, ends=architecture == "gpt2")
    with emulate_plan(plan, model, sites):
        expected = logits_of(model)
    planned = apply(plan, model)
    assert type(planned) is type(model)
    assert torch.equal(logits_of(planned), expected)
    assert torch.equal(logits_of(copy.deepcopy(planned)), expected)
    assert not torch.equal(expected, reference) and torch.equal(logits_of(model), reference)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    if scheme == "int4_g32":
        assert not planned._forward_pre_hooks and not planned._forward_hooks


def test_a_planned_copy_generates_with_its_cache(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    plan = uniform_plan(find_sites(model), "fp8")
    planned: Any = apply(plan, model)
    ids = IDS[:1, :5]
    with emulate_plan(plan, model, find_sites(model)):
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(planned.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert expected.shape == (1, 11)


def test_an_error_in_a_forward_ends_the_rounding(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    planned = apply(uniform_plan(find_sites(model), "fp8"), model)
    expected, reference = logits_of(planned), logits_of(model)
    with pytest.raises(IndexError):
        planned(input_ids=torch.tensor([[10_000]]))
    assert torch.equal(logits_of(model), reference)
    assert torch.equal(logits_of(planned), expected)


def test_values_are_rounded_in_every_forward(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    caches = [site for site in find_value_sites(model) if site.role == "kv_cache"]
    plan = plan_of([choice(site, "int8_token") for site in caches])
    with emulate_plan(plan, model, find_sites(model)):
        expected = logits_of(model)
    assert torch.equal(logits_of(apply(plan, model)), expected)
    assert not torch.equal(expected, logits_of(model))


def test_a_plain_module_is_planned_by_what_wraps_it() -> None:
    loaded = plain_model(tiny_gpt())
    sites = find_sites(loaded.model)
    plan = uniform_plan(sites, "fp8", ends=True)
    with emulate_plan(plan, loaded.model, sites):
        expected = logits_of(loaded.model)
    assert torch.equal(logits_of(apply(plan, loaded)), expected)
    planned = apply(plan, loaded.model.wrapped, sites=sites)  # type: ignore[arg-type]
    assert torch.equal(planned(IDS), expected)
    program = torch.export.export(loaded.model.wrapped, (IDS,), strict=False)  # type: ignore[arg-type]
    assert torch.equal(apply(plan, program).module()(IDS), expected)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"not to str; load the model first"):
        apply(uniform_plan((), "fp8"), "demo")  # type: ignore[call-overload]
