"""Two plans of one model: where they differ, by hand; and what a measurement of both says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_search import search_options

from bitwright.errors import PlanError
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, Plan, diff_sites
from bitwright.search.compare_plans import compare_plans
from bitwright.search.optimize import optimize
from bitwright.search.verify import verify


@pytest.fixture(scope="module")
def plans(load_tiny: Callable[..., LoadedModel], prose: Path) -> tuple[Plan, Plan]:
    """Four and a half bits everywhere, and eight."""
    loaded = load_tiny("llama")
    low, high = (
        optimize(loaded, budget=Budget(effective_bits=bits), **search_options(prose, schemes=[scheme]))
        for bits, scheme in ((4.5, "int4_g32"), (8.5, "int8_w"))
    )
    return low, high


def test_the_difference_is_that_of_the_two_measurements(
    plans: tuple[Plan, Plan], load_tiny: Callable[..., LoadedModel]
) -> None:
    low, high = plans
    loaded = load_tiny("llama")
    found = compare_plans(low, high, model=loaded)
    assert found.verdict == "better" and found.difference.high < 0
    measured = [verify(plan, model=loaded).kl.mean for plan in plans]
    assert found.first_kl.mean == measured[0] and found.second_kl.mean == measured[1]
    assert found.difference.mean == pytest.approx(measured[1] - measured[0], rel=1e-6)
    assert {site.name for site in found.sites} == {s.name for s in low.sites if s.scheme != "as_loaded"}
    assert sum(site.bytes for site in found.sites) == found.second_bytes - found.first_bytes > 0
    assert compare_plans(high, low, model=loaded).verdict == "worse"


def test_a_plan_against_itself(plans: tuple[Plan, Plan], load_tiny: Callable[..., LoadedModel]) -> None:
    found = compare_plans(plans[0], plans[0], model=load_tiny("llama"))
    assert found.sites == () and found.verdict == "within the noise"
    assert (found.difference.low, found.difference.mean, found.difference.high) == (0, 0, 0)


def test_plans_of_different_weights(plans: tuple[Plan, Plan]) -> None:
    other = plans[1].replace(model=plans[1].model.model_copy(update={"hash": "0" * 64}))
    with pytest.raises(PlanError, match="different weights"):
        diff_sites(plans[0], other)


def test_a_site_that_only_one_plan_has_differs(plans: tuple[Plan, Plan]) -> None:
    low = plans[0]
    less = low.replace(sites=low.sites[1:])
    (site,) = diff_sites(low, less)
    assert (site.name, site.second) == (low.sites[0].name, None)
    assert site.bytes == -low.sites[0].bytes
