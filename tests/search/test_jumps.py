"""A mixture of experts, searched: predictions of small errors, which swap experts, against measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tiny_search import NoStage, search_options

from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget
from bitwright.search.jumps import Jumps
from bitwright.search.learn_choices import learn_scores
from bitwright.search.measure import Meter
from bitwright.search.optimize import open_meter
from bitwright.search.probe import probe
from bitwright.search.problem import Problem
from bitwright.search.progress import Silent
from bitwright.search.settings import settle
from bitwright.search.subject import known_reference, open_subject


def searched(loaded: LoadedModel, text: Path) -> tuple[Problem, Meter]:
    """A problem after its probes, and a meter of text that they did not see."""
    options = search_options(text, tokens=2048, evaluation_tokens=2048, sequence_length=32, task="text", seed=0)
    cache = options.pop("cache")
    options["schemes"] = ["int3_g64", "int4_g32", "int8_w", "bf16"]
    settings = settle(Budget(max_kl=0.02), roundings=["rtn"], **options)
    subject = open_subject(loaded, settings, cache=cache, allow_pickle=False, progress=Silent())
    learned, values = learn_scores(subject, settings, Silent())
    meter = open_meter(subject, learned, values, Silent())
    problem, _ = probe(subject, settings, learned, meter, Silent())
    return problem, replace(meter, reference=known_reference(subject, subject.splits.final, Silent()))


def errors(problem: Problem, meter: Meter) -> list[float]:
    """|log(predicted / measured)| of whole assignments along the front, by falling KL."""
    found = []
    for point in problem.front():
        assignment = problem.assignment(point)
        measured = meter.kl(assignment, 64, NoStage())
        found.append(abs(math.log(problem.total_kl(assignment) / measured)))
    return found


def test_small_errors_of_a_mixture_are_predicted_by_the_law_that_probes_fit(
    load_tiny: Callable[..., LoadedModel], prose: Path
) -> None:
    problem, meter = searched(load_tiny("mixtral"), prose)
    assert problem.correction.jumps.c > 0.01
    told = errors(problem, meter)
    without = replace(problem, correction=replace(problem.correction, jumps=Jumps()))
    plain = errors(without, meter)
    assert max(told) < math.log(5) < math.log(10) < max(plain)
    assert sum(told) < 0.6 * sum(plain)


def test_a_model_without_experts_has_no_jumps(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    problem, _ = searched(load_tiny("llama"), prose)
    assert problem.correction.jumps == Jumps()
