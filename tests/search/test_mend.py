"""Mending against a world whose true KLs are known: every site's true cost is a made-up multiple of its prediction."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_search import problem_of

from bitwright.inference import Counters
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.plan import Budget
from bitwright.search import mend as mend_module
from bitwright.search.bootstrap import kl_estimate
from bitwright.search.compare import TokenEffects
from bitwright.search.mend import MAX_ROUNDS, Mended, mend
from bitwright.search.price import Assignment
from bitwright.search.problem import Problem
from bitwright.search.progress import Silent

TOKENS = 15.0
NUM_SEQUENCES = 64


class World:
    """Measures like `Meter`: KL of an assignment = Σ factor(site) · prediction, spread over sequences."""

    def __init__(self, problem: Problem, factor: Callable[[str], float], ppl_per_kl: float = 1.0) -> None:
        self.problem = problem
        self.factor = factor
        self.ppl_per_kl = ppl_per_kl
        self.reference = SimpleNamespace(text=SimpleNamespace(num_sequences=NUM_SEQUENCES))
        self.num_whole = 0
        self.spread = np.random.default_rng(0).uniform(0.5, 1.5, NUM_SEQUENCES)
        self.spread /= self.spread.mean()

    def true_kl(self, assignment: Assignment) -> float:
        sites = self.problem.prices.sites
        return sum(self.factor(s.name) * self.problem.site_kl(s, assignment[s.name]) for s in sites)

    def effects(
        self, assignment: Assignment, num_sequences: int | None, stage: Any, counters: Counters | None = None
    ) -> TokenEffects:
        self.num_whole += 1
        if counters is not None:
            counters |= self.counted(assignment)
        kl = TOKENS * self.true_kl(assignment) * self.spread
        tokens = np.full(NUM_SEQUENCES, TOKENS)
        return TokenEffects(
            num_scored=tokens,
            kl=kl,
            nll_reference=3 * tokens,
            nll_plan=3 * tokens + self.ppl_per_kl * kl,
            num_agreeing=tokens,
        )

    def kl(self, assignment: Assignment, num_sequences: int, stage: Any) -> float:
        return self.true_kl(assignment)

    def counted(self, assignment: Assignment) -> Counters:
        return {}


@pytest.fixture
def problem(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Problem:
    loaded: LoadedModel = from_memory(make_tiny_model("llama"), tiny_tokenizer, name="tiny")
    return problem_of(loaded)


def run(problem: Problem, world: World, budget: Budget, objective: str = "memory") -> Mended:
    target = None if budget.max_kl is None else 0.9 * budget.max_kl
    return mend(
        problem,
        world,
        budget=budget,
        objective=objective,
        max_total_kl=target,
        seed=0,
        progress=Silent(),  # type: ignore[arg-type]
    )


def upper(mended: Mended) -> float:
    return kl_estimate(mended.effects, 0).high


@pytest.mark.parametrize("factor", [0.02, 0.3, 0.95, 1.0, 1.1, 3.0, 20.0])
def test_a_wrong_scale_of_all_predictions_is_mended(problem: Problem, factor: float) -> None:
    """The limit is kept with the upper end of its interval, and not by giving all bytes away."""
    world = World(problem, lambda _: factor)
    mended = run(problem, world, Budget(max_kl=0.01))
    assert upper(mended) <= 0.01
    assert world.num_whole <= MAX_ROUNDS
    assert mended.effects.mean_kl == pytest.approx(world.true_kl(mended.assignment))
    # what an all-knowing solver would pay with a third of the limit
    frugal, _ = problem.solve(Budget(max_kl=0.01), "memory", 0.01 / 3 / factor)
    bytes_of = problem.prices.model_bytes
    assert bytes_of(mended.assignment) <= bytes_of(problem.assignment(frugal))


@pytest.mark.parametrize("seed", range(12))
def test_sites_that_are_wrong_each_in_its_own_way_are_mended(problem: Problem, seed: int) -> None:
    """Factors between a fifth and five, site by site: what is kept at any time is kept in the end."""
    draw = random.Random(seed)
    factors = {site.name: 5 ** draw.uniform(-1, 1) for site in problem.prices.sites}
    world = World(problem, factors.__getitem__)
    mended = run(problem, world, Budget(max_kl=0.01))
    assert upper(mended) <= 0.01
    assert set(mended.assignment) == set(factors)


def test_blame_finds_the_culprit(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """One site costs more than was predicted, which puts the plan a little over: that site is raised, and said so."""
    monkeypatch.setattr(mend_module, "FAR", 10.0)
    budget = Budget(max_kl=0.01)
    solution, _ = problem.solve(budget, "memory", 0.008)
    assignment = problem.assignment(solution)
    raisable = [s for s in problem.prices.sites if assignment[s.name].scheme == "int4_g32"]
    culprit = max(raisable, key=lambda s: problem.site_kl(s, assignment[s.name]))
    excess = 0.004 / problem.site_kl(culprit, assignment[culprit.name])
    world = World(problem, lambda name: 1.0 + excess if name == culprit.name else 1.0)
    mended = mend(
        problem,
        world,
        budget=budget,
        objective="memory",
        max_total_kl=0.008,
        seed=0,
        progress=Silent(),  # type: ignore[arg-type]
    )
    assert upper(mended) <= 0.01
    assert mended.repairs[0].site == culprit.name
    repair = mended.repairs[0]
    assert repair.from_scheme == "int4_g32" and repair.to_scheme == mended.assignment[culprit.name].scheme
    assert repair.measured_kl_after is not None and repair.measured_kl_after < repair.measured_kl_before


def test_repairs_stay_within_the_size(problem: Problem) -> None:
    budget = Budget(effective_bits=5.0, max_kl=0.005)
    mended = run(problem, World(problem, lambda _: 5.0), budget, "kl")
    assert problem.prices.effective_bits(mended.assignment) <= 5.0
    assert upper(mended) > 0.005


def test_a_size_alone_is_measured_once(problem: Problem) -> None:
    world = World(problem, lambda _: 7.0)
    mended = run(problem, world, Budget(effective_bits=6.0), "kl")
    assert world.num_whole == 1 and mended.repairs == () and mended.notes == ()


@pytest.mark.parametrize("ppl_per_kl", [-0.5, 0.0, 0.2, 1.0, 2.0])
def test_perplexity_limits_hold_however_perplexity_moves(problem: Problem, ppl_per_kl: float) -> None:
    """Perplexity may move less than KL, not at all, or fall: the search goes on in steps and never aims below zero."""
    world = World(problem, lambda _: 1.0, ppl_per_kl)
    budget = Budget(max_ppl_increase=0.01)
    solution, _ = problem.solve(budget, "memory", 0.009)
    mended = mend(
        problem,
        world,
        budget=budget,
        objective="memory",
        max_total_kl=0.009,
        seed=0,
        progress=Silent(),  # type: ignore[arg-type]
    )
    first = problem.prices.model_bytes(problem.assignment(solution))
    found = problem.prices.model_bytes(mended.assignment)
    assert np.exp(ppl_per_kl * mended.effects.mean_kl) - 1 <= 0.01
    if ppl_per_kl < 1:
        assert found < first
    if ppl_per_kl > 1:
        assert found > first


def test_a_plan_without_any_error_is_left_alone(problem: Problem) -> None:
    world = World(problem, lambda _: 0.0)
    mended = run(problem, world, Budget(max_kl=0.01))
    assert world.num_whole == 1
    assert mended.effects.mean_kl == 0


def test_what_kept_the_limit_is_not_given_up(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two rounds only, the second overshoots: the first plan, which kept the limit, stands."""
    monkeypatch.setattr(mend_module, "MAX_ROUNDS", 2)
    first, _ = problem.solve(Budget(max_kl=0.01), "memory", 0.009)
    first_bytes = problem.prices.model_bytes(problem.assignment(first))

    class Cliff(World):
        def true_kl(self, assignment: Assignment) -> float:
            smaller = self.problem.prices.model_bytes(assignment) < first_bytes
            return super().true_kl(assignment) * (50.0 if smaller else 0.3)

    mended = run(problem, Cliff(problem, lambda _: 1.0), Budget(max_kl=0.01))
    assert upper(mended) <= 0.01
    assert mended.assignment == problem.assignment(first)
    assert "an earlier plan stands" in mended.notes[-1]
