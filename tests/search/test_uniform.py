"""Rivals of equal size by hand, and verdicts that follow from where the difference truly lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_mend import World
from tiny_search import problem_of

from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.plan import Budget, Interval, verdict_of
from bitwright.search.bootstrap import bootstrap
from bitwright.search.compare import TokenEffects
from bitwright.search.compare_plans import kl_difference
from bitwright.search.mend import mend
from bitwright.search.problem import Problem, build_problem
from bitwright.search.progress import Silent
from bitwright.search.uniform import (
    compare_with_uniform,
    prefer_uniform,
    rivals_of,
    uniform_solutions,
    why_no_rival,
)


@pytest.fixture
def problem(make_tiny_model: Any, tiny_tokenizer: Any) -> Problem:
    loaded: LoadedModel = from_memory(make_tiny_model("llama"), tiny_tokenizer, name="tiny")
    return problem_of(loaded)


def test_uniform_solutions_have_one_scheme_and_its_size(problem: Problem) -> None:
    solutions = uniform_solutions(problem)
    assert set(solutions) == {"int4_g32", "int8_w", "bf16"}
    for scheme, bits in (("int4_g32", 4.5), ("bf16", 16.0)):
        assignment = problem.assignment(solutions[scheme])
        assert {assignment[site.name].scheme for site in problem.prices.decoder_sites} == {scheme}
        assert problem.prices.effective_bits(assignment) == bits


def test_rivals_are_the_nearest_in_size(problem: Problem) -> None:
    sizes = {s: problem.prices.model_bytes(problem.assignment(x)) for s, x in uniform_solutions(problem).items()}
    assert rivals_of(problem, sizes["int8_w"]) == ("int8_w",)
    assert rivals_of(problem, round(sizes["int8_w"] / 1.005)) == ("int8_w",)
    assert rivals_of(problem, round(sizes["int8_w"] / 1.05)) == ("int8_w", "int4_g32")
    assert rivals_of(problem, sizes["bf16"] + 1) == ("bf16",)
    assert rivals_of(problem, sizes["int4_g32"] - 1) == ("int4_g32",)


def test_a_gain_is_measured_against_both_neighbours(problem: Problem) -> None:
    world: Any = World(problem, lambda _: 1.0)
    mended = mend(
        problem,
        world,
        budget=Budget(effective_bits=5.5),
        objective="kl",
        max_total_kl=None,
        seed=0,
        progress=Silent(),
    )
    found = {c.scheme: c for c in compare_with_uniform(mended, world, 0, Silent())}
    assert set(found) == {"int4_g32", "int8_w"}
    for scheme, comparison in found.items():
        uniform = problem.assignment(uniform_solutions(problem)[scheme])
        truth = world.true_kl(mended.assignment) - world.true_kl(uniform)
        assert comparison.difference.mean == pytest.approx(truth, rel=0.5)
        assert comparison.verdict == ("better" if truth < 0 else "worse")


def misjudged(problem: Problem) -> Problem:
    """The same problem, in which int8 is predicted to be hardly better than int4."""
    scores = {
        name: {
            choice: 0.95 * max(of_site.values()) if choice.scheme == "int8_w" else kl for choice, kl in of_site.items()
        }
        for name, of_site in problem.scores.items()
    }
    return build_problem(problem.prices, scores, problem.correction, include_head=False)


@pytest.mark.parametrize(
    ("objective", "budget", "is_taken"), [("kl", 9.0, True), ("kl", 8.4, False), ("memory", 9.0, False)]
)
def test_a_uniform_plan_that_fits_and_is_better_is_taken(
    problem: Problem, objective: str, budget: float, is_taken: bool
) -> None:
    """int8 everywhere takes 8.47 bits: a limit below rules it out, and so does memory that is to be small."""
    world: Any = World(problem, lambda _: 1.0)
    limits = Budget(effective_bits=budget)
    mended = mend(
        misjudged(problem), world, budget=limits, objective=objective, max_total_kl=None, seed=0, progress=Silent()
    )
    compared = compare_with_uniform(mended, world, 0, Silent())
    found = prefer_uniform(mended, compared, world, budget=limits, objective=objective, seed=0, progress=Silent())
    int8 = problem.assignment(uniform_solutions(problem)["int8_w"])
    assert world.true_kl(mended.assignment) > world.true_kl(int8)
    assert (found is not mended) == is_taken
    if is_taken:
        assert found.assignment == int8 and found.effects.mean_kl == pytest.approx(world.true_kl(int8))
        assert "int8_w everywhere keeps the limits" in found.notes[-1]


def mended_of(problem: Problem, limits: Budget) -> tuple[Any, Any]:
    world: Any = World(problem, lambda _: 1.0)
    return world, mend(problem, world, budget=limits, objective="kl", max_total_kl=None, seed=0, progress=Silent())


def test_a_plan_without_a_rival_says_so(problem: Problem) -> None:
    """Schemes that miss one site each; a plan that is uniform itself; and one that has its rivals."""
    names = [site.name for site in problem.prices.decoder_sites]
    missing = {"bf16": names[0], "int8_w": names[0], "int4_g32": names[-1]}
    scores = {
        name: {choice: kl for choice, kl in of_site.items() if missing[choice.scheme] != name}
        for name, of_site in problem.scores.items()
    }
    ragged = build_problem(problem.prices, scores, problem.correction, include_head=False)
    world, mended = mended_of(ragged, Budget(effective_bits=9.0))
    assert compare_with_uniform(mended, world, 0, Silent()) == ()
    (note,) = why_no_rival(mended, ())
    assert "no scheme is possible at every site" in note and f"is not at 1 of {len(names)}, such as model." in note
    world, mended = mended_of(problem, Budget(effective_bits=16.0))
    assert compare_with_uniform(mended, world, 0, Silent()) == ()
    assert why_no_rival(mended, ()) == (
        "the plan has one scheme for all weights in question: there is no uniform plan to hold it against",
    )
    world, mended = mended_of(problem, Budget(effective_bits=5.5))
    assert why_no_rival(mended, compare_with_uniform(mended, world, 0, Silent())) == ()


def effects_of(kl: np.ndarray) -> TokenEffects:
    scored = np.full(len(kl), 10.0)
    return TokenEffects(num_scored=scored, kl=kl, nll_reference=scored, nll_plan=scored, num_agreeing=scored)


def test_noise_is_not_a_gain_and_pairing_finds_what_intervals_hide() -> None:
    """Two plans that differ by chance alone; and two that differ by a hundredth of what the sequences do."""
    draw = np.random.default_rng(0)
    hard = draw.uniform(1, 5, 64)
    same = effects_of(hard), effects_of(hard + draw.normal(0, 0.3, 64))
    assert verdict_of(kl_difference(*same, 0).interval) == "within the noise"
    shifted = effects_of(hard), effects_of(hard - 0.03)
    difference = kl_difference(*shifted, 0)
    assert difference.mean == pytest.approx(-0.003) and verdict_of(difference.interval) == "better"
    alone = bootstrap(lambda i: float(hard[i].sum() / (10 * len(i))), 64, 0)
    assert alone.high - alone.low > 10 * abs(difference.mean)


@pytest.mark.parametrize(("low", "high", "verdict"), [(-2, -1, "better"), (-1, 1, "within the noise"), (1, 2, "worse")])
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert verdict_of(Interval(mean=(low + high) / 2, low=low, high=high)) == verdict
