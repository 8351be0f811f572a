"""What binds and what loosening buys, held against enumeration of every assignment of a small problem."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from tiny_search import problem_of

from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.plan import Budget, LimitStudy
from bitwright.search.binding import LOOSENED_BY, study_limits
from bitwright.search.limits import judge
from bitwright.search.problem import Problem
from bitwright.search.solve import Solution


@pytest.fixture(scope="module")
def problem(make_tiny_model: Any, tiny_tokenizer: Any) -> Problem:
    """Three groups of the tiny model in question, so that every assignment can be tried."""
    loaded: LoadedModel = from_memory(make_tiny_model("llama"), tiny_tokenizer, name="tiny")
    whole = problem_of(loaded)
    few = {site.name: whole.scores[site.name] for site in whole.prices.decoder_sites[:4]}
    return problem_of(loaded, scores=few)


def every(problem: Problem) -> list[Solution]:
    return [Solution(options=options) for options in itertools.product(*(group.options for group in problem.groups))]


def least_kl(problem: Problem, max_bytes: float) -> float:
    fitting = [
        s for s in every(problem) if s.amount("weight_bytes") + problem.fixed["weight_bytes"] <= max_bytes + 1e-6
    ]
    return min(s.kl for s in fitting)


def test_loosening_buys_what_enumeration_says(problem: Problem) -> None:
    smallest = min(s.amount("weight_bytes") for s in every(problem)) + problem.fixed["weight_bytes"]
    limit = round(smallest * 1.004)
    (study,) = study_limits(problem, Budget(max_memory_bytes=limit), "kl", None)
    assert study.binds and study.objective == "kl"
    assert study.before == pytest.approx(least_kl(problem, limit))
    assert [step.by for step in study.loosened] == list(LOOSENED_BY)
    for step in study.loosened:
        assert step.value == pytest.approx(least_kl(problem, limit * (1 + step.by)))
    assert study.loosened[-1].value < study.before


def test_a_limit_that_changes_nothing_does_not_bind(problem: Problem) -> None:
    """Beside a tight size, a time ten times as long as any choice takes."""
    slow = 10 * problem.totals(problem.assignment(max(every(problem), key=lambda s: s.amount("decode_s"))))["decode_s"]
    smallest = min(s.amount("weight_bytes") for s in every(problem)) + problem.fixed["weight_bytes"]
    budget = Budget(max_memory_bytes=smallest * 1.004, latency_sla_s=slow)
    studies = {study.name: study for study in study_limits(problem, budget, "kl", None)}
    assert studies["max_memory_bytes"].binds
    assert not studies["latency_sla_s"].binds and studies["latency_sla_s"].loosened == ()


def test_a_quality_limit_is_loosened_too(problem: Problem) -> None:
    """More KL saves bytes: as many as enumeration finds."""
    kls = sorted(s.kl for s in every(problem))
    limit = kls[len(kls) // 2]
    (study,) = study_limits(problem, Budget(max_kl=limit), "memory", limit)
    for kl, figure in ((limit, study.before), *((limit * (1 + step.by), step.value) for step in study.loosened)):
        keeping = [s.amount("weight_bytes") for s in every(problem) if s.kl <= kl * (1 + 1e-12)]
        assert figure == min(keeping) + problem.fixed["weight_bytes"]


def test_out_of_reach_says_how_near_each_limit_can_be_brought(problem: Problem) -> None:
    solutions = every(problem)
    smallest = min(s.amount("weight_bytes") for s in solutions) + problem.fixed["weight_bytes"]
    best = min(s.kl for s in solutions)
    budget = Budget(max_memory_bytes=smallest, max_kl=best)
    assert max(s.kl for s in solutions) > 2 * best
    studies = {study.name: study for study in study_limits(problem, budget, "kl", best)}
    memory, quality = studies["max_memory_bytes"], studies["max_kl"]
    assert memory.before is None and quality.before is None
    assert memory.alone == smallest and quality.alone == pytest.approx(best)
    cheapest_of_best = min(s.amount("weight_bytes") for s in solutions if s.kl <= best * (1 + 1e-9))
    assert memory.given_others == cheapest_of_best + problem.fixed["weight_bytes"]
    assert quality.given_others == pytest.approx(least_kl(problem, smallest))


def test_limits_that_contradict_each_other_without_this_one(problem: Problem) -> None:
    budget = Budget(max_memory_bytes=1.0, effective_bits=0.001, max_kl=1.0)
    studies: dict[str, LimitStudy] = {s.name: s for s in study_limits(problem, budget, "kl", 1.0)}
    assert studies["max_kl"].given_others is None
    assert studies["max_memory_bytes"].given_others is None


def test_statuses() -> None:
    """Bytes are counted, times are predicted, and a lower limit is kept from above."""
    limits = {"max_memory_bytes": 10.0, "latency_sla_s": 1.0, "min_tokens_per_s": 5.0, "max_kl": 0.1}
    kept = judge(limits, {"max_memory_bytes": 10.0, "latency_sla_s": 1.0, "min_tokens_per_s": 5.0, "max_kl": 0.1})
    assert [limit.status for limit in kept] == ["measured", "predicted", "predicted", "measured"]
    broken = {name: math.nextafter(value, 0 if name.startswith("min") else 99) for name, value in limits.items()}
    assert {limit.status for limit in judge(limits, broken)} == {"missed"}
