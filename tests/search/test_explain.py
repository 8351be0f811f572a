"""Reasons: what the neighbouring choices would have cost, in the unit of what is limited; repairs; what was kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_search import SCHEMES, made_up_scores

from bitwright import hardware
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, Repair
from bitwright.search.candidate import candidates_of
from bitwright.search.correct import Correction
from bitwright.search.explain import reason_for, why_kept
from bitwright.search.mend import Mended
from bitwright.search.price import price_model
from bitwright.search.problem import Problem, build_problem


@pytest.fixture
def problem(load_tiny: Callable[..., LoadedModel]) -> Problem:
    """Gate and up of a layer tied from outside."""
    loaded = load_tiny("llama")
    sites = find_sites(loaded.model)
    ties = {s.name: s.module.rpartition(".")[0] for s in sites if s.role in ("mlp.gate", "mlp.up")}
    return build_problem(
        price_model(loaded, sites, device=hardware.get("h100")),
        made_up_scores(sites, candidates_of(SCHEMES, roundings=("rtn",))),
        Correction(role_factors={}),
        include_head=False,
        ties=ties,
    )


def mended_of(problem: Problem, budget: Budget, *repairs: Repair) -> Mended:
    solution, _ = problem.solve(budget, "kl", None)
    effects: Any = SimpleNamespace()
    return Mended(assignment=problem.assignment(solution), problem=problem, effects=effects, repairs=repairs, notes=())


@pytest.mark.parametrize(("budget", "unit"), [(Budget(effective_bits=6.0), "KiB"), (Budget(latency_sla_s=6e-8), "µs")])
def test_neighbours_are_told_in_what_is_limited(problem: Problem, budget: Budget, unit: str) -> None:
    mended = mended_of(problem, budget)
    for site in problem.prices.decoder_sites:
        choice = mended.assignment[site.name]
        reason = reason_for(site, choice, mended, asked=(budget, "kl"), why_kept="")
        assert reason.startswith("part of the least KL within the limits: ")
        assert ("save" in reason) and unit in reason
        if site.role in ("mlp.gate", "mlp.up"):
            assert reason.endswith("(2 fused layers decide together)")


def test_a_repair_is_the_reason_of_all_that_decide_together(problem: Problem) -> None:
    gate = next(s for s in problem.prices.sites if s.role == "mlp.gate")
    up = next(s for s in problem.prices.sites if s.role == "mlp.up")
    repair = Repair(
        from_scheme="int4_g32", to_scheme="int8_w", site=gate.name, why="it was to blame", measured_kl_before=0.1
    )
    budget = Budget(effective_bits=6.0)
    mended = mended_of(problem, budget, repair)
    for site in (gate, up):
        reason = reason_for(site, mended.assignment[site.name], mended, asked=(budget, "kl"), why_kept="")
        assert reason == "raised from int4_g32: it was to blame (2 fused layers decide together)"


def test_why_a_site_was_kept(problem: Problem) -> None:
    up = next(s for s in problem.prices.sites if s.role == "mlp.up")
    head = next(s for s in problem.prices.sites if s.role == "lm_head")
    kept = why_kept(head, "fp32", include_head=False, reached=None, ruled_out="x")
    assert kept == "kept in its loaded format (fp32): --include-head makes it a choice"
    assert "only 7 calibration tokens" in why_kept(up, "fp32", include_head=False, reached=7, ruled_out=None)
    assert "no calibration token" in why_kept(up, "fp32", include_head=False, reached=0, ruled_out=None)
    assert "ruled out here, no unit" in why_kept(up, "fp32", include_head=False, reached=7, ruled_out="no unit")
