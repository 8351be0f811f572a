"""The main job, measured: time, memory, how far predictions can be trusted, and what the search gains.

    python benchmarks/optimize.py time            one whole search, a second budget, one further scheme
    python benchmarks/optimize.py predictions     single changes of all roles and whole fronts, predicted and measured
    python benchmarks/optimize.py quality         4.8 bits against random assignments of equal size; int8_w alone
    python benchmarks/optimize.py all

Results go to benchmarks/results/optimize-<part>.json, with machine and versions; figures in the docs name these
files. Run it on an otherwise idle machine. Everything uses the built-in model and text: 4,096 calibration and 64 × 128
evaluation tokens. Searches that are timed run in processes of their own, so that peak memory and start-up are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import load_average, machine, now

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "numpy", "transformers", "highspy")


def write(part: str, content: dict[str, Any]) -> None:
    """Write one result file and print it."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(_PACKAGES), "date": now(), **content}, indent=1) + "\n"
    (RESULTS / f"optimize-{part}.json").write_text(text, encoding="utf-8")
    print(text)


# --- time and memory -------------------------------------------------------------------------------------------------

_TIMED = """
import json, sys, time
from contextlib import contextmanager
from pathlib import Path
import bitwright
from bitwright.search.progress import Silent

class Stopwatch(Silent):
    seconds = {}
    @contextmanager
    def stage(self, name, total):
        begin = time.process_time()
        with super().stage(name, total) as stage:
            yield stage
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin

arguments, stopwatch = json.loads(sys.argv[1]), Stopwatch()
plan = bitwright.optimize(
    arguments["model"], budget=bitwright.Budget(**arguments["budget"]), schemes=arguments["schemes"],
    cache=Path(arguments["cache"]), progress=stopwatch,
)
print(json.dumps({
    "timings_s": dict(plan.run.timings), "processor_s": stopwatch.seconds,
    "peak_memory_gib": plan.run.peak_memory_bytes / 2**30,
    "kl": plan.measured.kl.mean, "effective_bits": plan.summary.effective_bits, "met": plan.met,
}))
"""
#: Planning, from loading to a solved plan with its codes. What measures on text of its own (probes, repair, proof) is
#: not among them: further schemes leave it as it is, so that it would hide what they cost.
PLANNING = ("load", "read the text", "calibrate", "score", "solve")


def timed(cache: str, budget: dict[str, float], schemes: list[str] | None) -> dict[str, Any]:
    """One search in a fresh process: wall seconds with start-up, its own timings, those of planning, peak memory."""
    arguments = {"model": "demo-dithered", "budget": budget, "schemes": schemes, "cache": cache}
    begin = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", _TIMED, json.dumps(arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    wall_s, found = time.perf_counter() - begin, json.loads(run.stdout.splitlines()[-1])
    planning = {kind: sum(found[kind].get(stage, 0.0) for stage in PLANNING) for kind in ("timings_s", "processor_s")}
    return {
        "wall_s": wall_s,
        "planning_s": planning["timings_s"],
        "planning_processor_s": planning["processor_s"],
        **found,
    }


#: What one further scheme is added to, and one of each kind: rounded to nearest alone (as what has no scales is), and
#: with error feedback too; and the share of planning that each may cost.
_FEW_SCHEMES = ("int4_g128", "int4_g64", "int8_w", "bf16")
_FURTHER = {"round_to_nearest": ("fp16", 0.10), "error_feedback": ("int3_g64", 0.25)}
_TIMES = ("planning_s", "planning_processor_s", "wall_s")


def measure_time() -> None:
    """A whole search with every default scheme, a second budget, and the price of one further scheme of each kind."""
    from bitwright.search.settings import default_schemes

    load = load_average()
    with tempfile.TemporaryDirectory() as cache:
        whole = timed(cache, {"effective_bits": 4.8}, None)
        second = timed(cache, {"effective_bits": 5.2}, None)
    few = _timed_alone(list(_FEW_SCHEMES))
    further = {kind: _timed_alone([*_FEW_SCHEMES, scheme]) for kind, (scheme, _) in _FURTHER.items()}
    again = _timed_alone(list(_FEW_SCHEMES))
    base = {name: (few[name] + again[name]) / 2 for name in _TIMES}
    write(
        "time",
        {
            "what": "demo-dithered, 4096 calibration tokens, 64 x 128 repair and 64 x 128 final tokens; second budget: "
            "from the cache of the first; one further scheme beside the mean of two searches without it",
            "load_average_before": load,
            "default_schemes": default_schemes(),
            "whole_search": whole,
            "second_budget": second,
            "few_schemes": few,
            "few_schemes_again": again,
            "planning_stages": PLANNING,
            "further_scheme": {
                kind: {
                    "scheme": _FURTHER[kind][0],
                    "wanted": f"planning at most {1 + _FURTHER[kind][1]:g} times as long",
                    "ratio_of": {name: run[name] / base[name] for name in _TIMES},
                    **run,
                }
                for kind, run in further.items()
            },
        },
    )


def _timed_alone(schemes: list[str]) -> dict[str, Any]:
    """A search in a fresh cache."""
    with tempfile.TemporaryDirectory() as cache:
        return timed(cache, {"effective_bits": 4.8}, schemes)


# --- predictions -----------------------------------------------------------------------------------------------------

#: Schemes of weights, and of values, that single changes are told of.
_WEIGHT_SCHEMES = ("int3_g64", "int4_g128", "fp8")
_VALUE_SCHEMES = ("int8_token", "fp8_e4m3_token", "bf16_values")
_CHANGES_PER_ROLE_AND_SCHEME = 3
#: What is wanted: of single changes (all of them; and in each scheme) and of whole plans.
_WANTED = {"correlation_of_logarithms": 0.985, "share_within_1.6": 0.9, "worst_deviation": 0.2}
#: Final sequences that a prediction, or one of many random assignments, is measured on.
_NUM_SEQUENCES = 24


def open_search(schemes: list[str], model: str = "demo-dithered", values: str = "none") -> Any:
    """What a search knows before it solves, and a meter of the final text."""
    from bitwright.plan import Budget
    from bitwright.search.learn_choices import learn_scores
    from bitwright.search.optimize import open_meter
    from bitwright.search.probe import probe
    from bitwright.search.progress import Silent
    from bitwright.search.settings import settle
    from bitwright.search.subject import known_reference, open_subject

    silent = Silent()
    settings = settle(
        Budget(max_kl=0.02),
        task="text",
        calibration="docs",
        evaluation="docs",
        schemes=schemes,
        values=values,
        tokens=4096,
        evaluation_tokens=None,
        sequence_length=128,
        seed=0,
    )
    subject = open_subject(model, settings, cache="default", allow_pickle=False, progress=silent)
    learned, of_values = learn_scores(subject, settings, silent)
    meter = open_meter(subject, learned, of_values, silent)
    problem, _ = probe(subject, settings, learned, meter, silent)
    final = replace(meter, reference=known_reference(subject, subject.splits.final, silent))
    return subject, settings, learned, problem, final


class _Quiet:
    def advance(self, steps: int = 1) -> None:
        pass


def draw_changes(subject: Any, learned: Any) -> list[tuple[Any, Any]]:
    """A few sites of every role of weights and values under every scheme, each with the best choice of that scheme."""
    from bitwright.search.correct import label_of

    generator = random.Random(0)
    by_role: dict[str, list[Any]] = {}
    for site in (*subject.prices.decoder_sites, *subject.value_sites):
        by_role.setdefault(label_of(site), []).append(site)
    drawn = []
    for sites in by_role.values():
        for scheme in _WEIGHT_SCHEMES if sites[0].kind == "weight" else _VALUE_SCHEMES:
            choices = {
                site.name: [
                    c for c in learned.scores.get(site.name, ()) if c.scheme == scheme and ".layers." in site.name
                ]
                for site in sites
            }
            able = [site for site in sites if choices[site.name]]
            for site in generator.sample(able, min(len(able), _CHANGES_PER_ROLE_AND_SCHEME)):
                drawn.append((site, min(choices[site.name], key=learned.scores[site.name].__getitem__)))
    return drawn


def measure_single_changes(subject: Any, learned: Any, problem: Any, final: Any) -> list[dict[str, Any]]:
    """Single changes, predicted before and after probes and measured on the final text."""
    from single_changes import SingleChanges, layer_of, mean_and_error

    from bitwright.inference import emulate
    from bitwright.search.correct import label_of

    runs = SingleChanges(subject.loaded.model, subject.splits.final.first(_NUM_SEQUENCES).input_ids)
    changes = []
    for site, choice in draw_changes(subject, learned):
        is_weight = site.kind == "weight"
        rules = learned.quantizer.rules({site.name: choice}) if is_weight else {}
        values = None if is_weight else final.values.rules([site], {site.name: choice})
        with emulate(subject.loaded.model, subject.sites, rules, values=values):
            measured, error = mean_and_error(runs.token_kl(layer_of(site.name)))
        changes.append(
            {
                "site": site.name,
                "role": label_of(site),
                "choice": str(choice),
                "scheme": choice.scheme,
                "raw": learned.scores[site.name][choice],
                "predicted": problem.site_kl(site, choice),
                "measured": measured,
                "relative_error": error,
            }
        )
        print(f"{changes[-1]['predicted'] / measured:6.2f}  {site.name} {choice}", file=sys.stderr)
    return changes


def agreement(changes: list[dict[str, Any]], told: str) -> dict[str, Any]:
    """How well what is told under a name agrees with what was measured."""
    import numpy as np

    ratios = [change[told] / change["measured"] for change in changes]
    logs = np.log([[change[told], change["measured"]] for change in changes])
    return {
        "changes": len(changes),
        "correlation_of_logarithms": float(np.corrcoef(logs.T)[0, 1]),
        "median_ratio": statistics.median(ratios),
        "share_within_1.6": sum(1 / 1.6 <= ratio <= 1.6 for ratio in ratios) / len(ratios),
    }


def measure_front(subject: Any, problem: Any, final: Any, schemes: tuple[str, ...]) -> dict[str, Any]:
    """Every point of the front of some schemes of weights, predicted and measured on the final text."""
    from bitwright.search.solve import front

    points = []
    of_weights = [group for group in problem.groups if group.sites[0].kind == "weight"]
    for solution in front([[o for o in group.options if o.key in schemes] for group in of_weights], 14, "weight_bytes"):
        assignment = replace(problem, groups=tuple(of_weights)).assignment(solution)
        points.append(
            {
                "effective_bits": subject.prices.effective_bits(assignment),
                "predicted": problem.total_kl(assignment),
                "measured": final.kl(assignment, _NUM_SEQUENCES, _Quiet()),
            }
        )
        print(points[-1], file=sys.stderr)
    off = [abs(p["predicted"] / p["measured"] - 1) for p in points if p["measured"] > 0]
    return {
        "worst_deviation": max(off),
        "share_within_wanted": sum(o <= _WANTED["worst_deviation"] for o in off) / len(off),
        "points": points,
    }


def measure_predictions() -> None:
    """Single changes of all roles of weights and values, and every point of two fronts, on the final text."""
    from bitwright.search.settings import default_schemes

    subject, _, learned, problem, final = open_search([*default_schemes(), "fp8"], values="all")
    changes = measure_single_changes(subject, learned, problem, final)
    schemes = dict.fromkeys(change["scheme"] for change in changes)
    write(
        "predictions",
        {
            "what": "demo-dithered; predicted from 4096 calibration tokens, measured on 24 x 128 final tokens; values "
            "(attention, caches, norms, ...) and decoder weights, raw: before probes, predicted: after them",
            "wanted": _WANTED,
            "single": {told: agreement(changes, told) for told in ("raw", "predicted")},
            "by_scheme": {
                scheme: agreement([c for c in changes if c["scheme"] == scheme], "predicted") for scheme in schemes
            },
            "fronts": {
                "int4_g128, int8_w, bf16": measure_front(subject, problem, final, ("int4_g128", "int8_w", "bf16")),
                "default": measure_front(subject, problem, final, default_schemes()),
            },
            "single_changes": changes,
        },
    )


# --- quality ---------------------------------------------------------------------------------------------------------


def random_assignment(problem: Any, budget_bytes: float, seed: int) -> dict[str, Any]:
    """A random assignment of the same schemes that is as large as the limit lets it be."""
    generator = random.Random(seed)
    order = list(range(len(problem.groups)))
    generator.shuffle(order)
    chosen = {
        index: min(group.options, key=lambda o: o.amount("decoder_bytes")) for index, group in enumerate(problem.groups)
    }
    size = {index: option.amount("decoder_bytes") for index, option in chosen.items()}
    for index in order:
        larger = [o for o in problem.groups[index].options if o.amount("decoder_bytes") > size[index]]
        option = generator.choice(larger)
        if sum(size.values()) + option.amount("decoder_bytes") - size[index] <= budget_bytes:
            size[index] = option.amount("decoder_bytes")
            chosen[index] = option
    from bitwright.search.solve import Solution

    return problem.assignment(Solution(options=tuple(chosen[i] for i in range(len(problem.groups)))))


def measure_quality() -> None:
    """The solved plan at 4.8 effective bits against 20 random ones of equal size, and int8_w everywhere."""
    from bitwright.plan import Budget
    from bitwright.search.candidate import Candidate

    results = {}
    for model in ("demo-dithered", "demo"):
        subject, settings, learned, problem, final = open_search(["int4_g128", "int8_w", "bf16"], model)
        budget = Budget(effective_bits=4.8)
        solution, _ = problem.solve(budget, "kl", None)
        assignment = problem.assignment(solution)
        solved = final.kl(assignment, 64, _Quiet())
        limit = problem.limits(budget, None)["decoder_bytes"]
        randoms = []
        for seed in range(20):
            other = random_assignment(problem, limit, seed)
            randoms.append(
                {
                    "effective_bits": subject.prices.effective_bits(other),
                    "kl": final.kl(other, _NUM_SEQUENCES, _Quiet()),
                }
            )
            print(model, randoms[-1], file=sys.stderr)
        names = [site.name for site in subject.prices.decoder_sites]
        results[model] = {
            "effective_bits": subject.prices.effective_bits(assignment),
            "kl": solved,
            "kl_on_the_sequences_of_the_random_ones": final.kl(assignment, _NUM_SEQUENCES, _Quiet()),
            "random_best_kl": min(r["kl"] for r in randoms),
            "random_median_kl": statistics.median(r["kl"] for r in randoms),
            "random": randoms,
            "uniform_int4_g128_kl": final.kl(
                dict.fromkeys(
                    names,
                    min(
                        (c for c in settings.candidates if c.scheme == "int4_g128"),
                        key=lambda c: math.fsum(learned.scores[n][c] for n in names),
                    ),
                ),
                64,
                _Quiet(),
            ),
            "int8_w_kl": final.kl(dict.fromkeys(names, Candidate(scheme="int8_w")), 64, _Quiet()),
        }
    write(
        "quality",
        {
            "what": "64 x 128 final tokens of docs (random assignments: 24 x 128); schemes int4_g128, int8_w, bf16",
            **results,
        },
    )


if __name__ == "__main__":
    parts = {"time": measure_time, "predictions": measure_predictions, "quality": measure_quality}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*parts, "all"])
    wanted = parser.parse_args().part
    for name in parts if wanted == "all" else [wanted]:
        parts[name]()
