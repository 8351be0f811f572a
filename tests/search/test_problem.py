"""Groups agree, assignments name every site, limits mean what the plan will say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from tiny_search import ARCHITECTURES, ROUNDINGS, SCHEMES, made_up_scores, problem_of

from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.plan import Budget
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.correct import Correction
from bitwright.search.price import AS_LOADED, END_ROLES, price_model
from bitwright.search.problem import build_problem


@pytest.fixture
def load_tiny(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Callable[[str], LoadedModel]:
    return lambda architecture: from_memory(make_tiny_model(architecture), tiny_tokenizer, name=architecture)


@pytest.mark.parametrize("include_head", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_assignment_names_every_site_and_tied_sites_agree(
    load_tiny: Callable[[str], LoadedModel], architecture: str, include_head: bool
) -> None:
    problem = problem_of(load_tiny(architecture), include_head=include_head)
    solution, unreachable = problem.solve(Budget(effective_bits=6.0), "kl", None)
    assignment = problem.assignment(solution)
    sites = problem.prices.sites
    assert unreachable == ()
    assert set(assignment) == {site.name for site in sites}
    schemes_of_group: dict[str, set[str]] = {}
    for site in sites:
        outside = site.role in END_ROLES and not include_head
        assert (assignment[site.name] == AS_LOADED) == outside
        if site.tied_group is not None:
            schemes_of_group.setdefault(site.tied_group, set()).add(assignment[site.name].scheme)
    assert all(len(schemes) == 1 for schemes in schemes_of_group.values())
    assert problem.prices.effective_bits(assignment) <= 6.0
    # clip is made up to be better by a tenth wherever it applies
    assert {c.rounding for c in assignment.values() if c.scheme == "int4_g32"} <= {"clip"}


@pytest.mark.parametrize("include_head", [False, True])
def test_sums_of_a_solution_are_those_of_the_assignment(
    load_tiny: Callable[[str], LoadedModel], include_head: bool
) -> None:
    problem = problem_of(load_tiny("llama"), include_head=include_head)
    solution, _ = problem.solve(Budget(effective_bits=5.5), "kl", None)
    assignment = problem.assignment(solution)
    prices = problem.prices
    assert prices.model_bytes(assignment) == solution.amount("weight_bytes") + problem.fixed["weight_bytes"]
    num_weights = sum(site.num_weights for site in prices.decoder_sites)
    assert prices.effective_bits(assignment) == 8 * solution.amount("decoder_bytes") / num_weights
    assert problem.total_kl(assignment) == pytest.approx(solution.kl)


def test_memory_counts_what_is_not_chosen_too(load_tiny: Callable[[str], LoadedModel]) -> None:
    problem = problem_of(load_tiny("llama"))
    smallest, _ = problem.solve(Budget(max_kl=1e9), "memory", None)
    least = problem.prices.model_bytes(problem.assignment(smallest))
    exact, unreachable = problem.solve(Budget(max_memory_bytes=least), "kl", None)
    assert unreachable == ()
    assert problem.prices.model_bytes(problem.assignment(exact)) == least
    nearest, unreachable = problem.solve(Budget(max_memory_bytes=least - 1), "kl", None)
    assert unreachable == ("max_memory_bytes",)
    assert nearest == smallest


def test_where_size_and_quality_contradict_size_is_kept(load_tiny: Callable[[str], LoadedModel]) -> None:
    problem = problem_of(load_tiny("llama"))
    found, unreachable = problem.solve(Budget(effective_bits=5.0, max_kl=1e-9), "kl", 1e-9)
    assert unreachable == ("max_kl",)
    best, _ = problem.solve(Budget(effective_bits=5.0), "kl", None)
    assert found == best


def test_quality_limits_are_those_of_the_corrected_total(load_tiny: Callable[[str], LoadedModel]) -> None:
    """Measured totals are twice the sum: half the sum is left to spend."""
    problem = problem_of(load_tiny("llama"))
    doubled = dataclasses.replace(problem, correction=problem.correction.with_total(0.01, 0.02))
    limit = 0.01
    plain, _ = problem.solve(Budget(max_kl=limit), "memory", limit / 2)
    found, _ = doubled.solve(Budget(max_kl=limit), "memory", limit)
    assert found == plain
    assert doubled.total_kl(doubled.assignment(found)) <= limit * (1 + 1e-9)


def test_unusable_choices_and_unscored_sites(load_tiny: Callable[[str], LoadedModel]) -> None:
    """A scheme without a finite score at a site is no option there; a site without scores keeps its loaded format."""
    loaded = load_tiny("llama")
    sites = find_sites(loaded.model)
    candidates = candidates_of(SCHEMES, roundings=ROUNDINGS)
    scores = made_up_scores(sites, candidates)
    broken, silent, hopeless = (site.name for site in sites[:3])
    scores[broken][Candidate(scheme="bf16")] = math.nan
    scores[broken][Candidate(scheme="int4_g32")] = math.inf
    del scores[silent]
    scores[hopeless] = dict.fromkeys(candidates, math.nan)
    problem = build_problem(price_model(loaded, sites), scores, Correction(role_factors={}), include_head=False)
    groups = {group.sites[0].name: group for group in problem.groups}
    assert {option.key for option in groups[broken].options} == {"int4_g32", "int8_w"}
    assert groups[broken].choices["int4_g32"] == (Candidate(scheme="int4_g32", rounding="clip"),)
    assert silent not in groups and hopeless not in groups
    solution, _ = problem.solve(Budget(effective_bits=32.0), "kl", None)
    assignment = problem.assignment(solution)
    assert assignment[silent] == assignment[hopeless] == AS_LOADED
    assert assignment[broken].scheme == "int8_w"


def test_a_role_factor_scales_its_sites_only(load_tiny: Callable[[str], LoadedModel]) -> None:
    problem = problem_of(load_tiny("llama"))
    corrected = dataclasses.replace(problem, correction=Correction(role_factors={"attn.q": 3.0}))
    choice = Candidate(scheme="int4_g32")
    for site in problem.prices.sites:
        if site.role not in END_ROLES:
            factor = 3.0 if site.role == "attn.q" else 1.0
            assert corrected.site_kl(site, choice) == pytest.approx(factor * problem.site_kl(site, choice))
        assert corrected.site_kl(site, AS_LOADED) == 0
