"""The main job, measured: time, memory, how far predictions can be trusted, and what the search gains.

    python benchmarks/optimize.py time            one whole search, a second budget, one further scheme
    python benchmarks/optimize.py predictions     single sites and whole fronts, predicted against measured
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
import json, sys
from pathlib import Path
import bitwright
arguments = json.loads(sys.argv[1])
plan = bitwright.optimize(
    arguments["model"], budget=bitwright.Budget(**arguments["budget"]), schemes=arguments["schemes"],
    cache=Path(arguments["cache"]),
)
print(json.dumps({
    "timings_s": dict(plan.run.timings), "peak_memory_gib": plan.run.peak_memory_bytes / 2**30,
    "kl": plan.measured.kl.mean, "effective_bits": plan.summary.effective_bits, "met": plan.met,
}))
"""


def timed(cache: str, budget: dict[str, float], schemes: list[str] | None) -> dict[str, Any]:
    """One search in a fresh process: wall seconds with start-up, its own timings, peak memory."""
    arguments = {"model": "demo-dithered", "budget": budget, "schemes": schemes, "cache": cache}
    begin = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", _TIMED, json.dumps(arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    return {"wall_s": time.perf_counter() - begin, **json.loads(run.stdout.splitlines()[-1])}


#: What one further scheme is added to, and one of each kind: rounded to nearest alone, and with error feedback too.
_FEW_SCHEMES = ("int4_g128", "int4_g64", "int8_w", "bf16")
_FURTHER = {"round_to_nearest": "fp8_w", "error_feedback": "int3_g64"}


def measure_time() -> None:
    """A whole search with every default scheme, a second budget, and the price of one further scheme of each kind."""
    from bitwright.search.settings import default_schemes

    load = load_average()
    with tempfile.TemporaryDirectory() as cache:
        whole = timed(cache, {"effective_bits": 4.8}, None)
        second = timed(cache, {"effective_bits": 5.2}, None)
    few = _timed_alone(list(_FEW_SCHEMES))
    further = {kind: _timed_alone([*_FEW_SCHEMES, scheme]) for kind, scheme in _FURTHER.items()}
    again = _timed_alone(list(_FEW_SCHEMES))
    base_s = (few["wall_s"] + again["wall_s"]) / 2
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
            "further_scheme": {
                kind: {"scheme": _FURTHER[kind], "ratio": run["wall_s"] / base_s, **run}
                for kind, run in further.items()
            },
        },
    )


def _timed_alone(schemes: list[str]) -> dict[str, Any]:
    """A search in a fresh cache."""
    with tempfile.TemporaryDirectory() as cache:
        return timed(cache, {"effective_bits": 4.8}, schemes)


# --- predictions -----------------------------------------------------------------------------------------------------

_PAIR_SCHEMES = ("int3_g64", "int4_g128", "fp8")
_PAIRS_PER_ROLE_AND_SCHEME = 3
#: Final sequences that a prediction, or one of many random assignments, is measured on.
_NUM_SEQUENCES = 24


def open_search(schemes: list[str], model: str = "demo-dithered") -> Any:
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
        tokens=4096,
        evaluation_tokens=None,
        sequence_length=128,
        seed=0,
    )
    subject = open_subject(model, settings, cache="default", allow_pickle=False, progress=silent)
    learned, values = learn_scores(subject, settings, silent)
    meter = open_meter(subject, learned, values, silent)
    problem, _ = probe(subject, settings, learned, meter, silent)
    final = replace(meter, reference=known_reference(subject, subject.splits.final, silent))
    return subject, settings, learned, problem, final


class _Quiet:
    def advance(self, steps: int = 1) -> None:
        pass


def measure_predictions() -> None:
    """Single changes of all roles under three schemes, and every point of two fronts, on the final text."""
    import numpy as np

    from bitwright.search.settings import default_schemes
    from bitwright.search.solve import front

    subject, _, learned, problem, final = open_search([*default_schemes(), "fp8"])
    generator = random.Random(0)
    roles = list(dict.fromkeys(site.role for site in subject.prices.decoder_sites))
    pairs = []
    for role in roles:
        sites = [site for site in subject.prices.decoder_sites if site.role == role]
        for scheme in _PAIR_SCHEMES:
            for site in generator.sample(sites, _PAIRS_PER_ROLE_AND_SCHEME):
                scores = learned.scores[site.name]
                choice = min((c for c in scores if c.scheme == scheme), key=scores.__getitem__)
                measured = final.kl({site.name: choice}, _NUM_SEQUENCES, _Quiet())
                pairs.append(
                    {
                        "site": site.name,
                        "role": role,
                        "choice": str(choice),
                        "scheme": scheme,
                        "raw": learned.scores[site.name][choice],
                        "predicted": problem.site_kl(site, choice),
                        "measured": measured,
                    }
                )
                print(f"{pairs[-1]['predicted'] / measured:6.2f}  {site.name} {choice}", file=sys.stderr)
    log_p = np.log([pair["predicted"] for pair in pairs])
    log_m = np.log([pair["measured"] for pair in pairs])
    by_scheme = {}
    for scheme in _PAIR_SCHEMES:
        ratios = [pair["predicted"] / pair["measured"] for pair in pairs if pair["scheme"] == scheme]
        by_scheme[scheme] = {
            "pairs": len(ratios),
            "median_ratio": statistics.median(ratios),
            "share_within_factor_2": sum(0.5 <= r <= 2 for r in ratios) / len(ratios),
        }
    fronts = {}
    for name, schemes in (
        ("int4_g128, int8_w, bf16", ("int4_g128", "int8_w", "bf16")),
        ("default", default_schemes()),
    ):
        points = []
        options = [[o for o in group.options if o.key in schemes] for group in problem.groups]
        for solution in front(options, 14, "weight_bytes"):
            assignment = problem.assignment(solution)
            measured = final.kl(assignment, _NUM_SEQUENCES, _Quiet())
            points.append(
                {
                    "effective_bits": subject.prices.effective_bits(assignment),
                    "predicted": problem.total_kl(assignment),
                    "measured": measured,
                }
            )
            print(points[-1], file=sys.stderr)
        fronts[name] = {
            "points": points,
            "worst_deviation": max(abs(p["predicted"] / p["measured"] - 1) for p in points if p["measured"] > 0),
        }
    write(
        "predictions",
        {
            "what": "demo-dithered; predicted from 4096 calibration tokens, measured on 24 x 128 final tokens",
            "pairs": len(pairs),
            "correlation_of_logarithms": float(np.corrcoef(log_p, log_m)[0, 1]),
            "by_scheme": by_scheme,
            "fronts": fronts,
            "single_changes": pairs,
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
