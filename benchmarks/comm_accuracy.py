"""Predictions against measurements that others published, by source, beside what a simpler model would say.

    python benchmarks/comm_accuracy.py [PART …] [--rows] [--left-out] [--json]        # seconds for all parts

A part has one of two rules of calibration. Both calibrate each group on at most three of its rows, chosen without
looking at any result: the smallest, median and largest number of GPUs (products: of operations).

    training, gemm, …                         a group is a source on one device, and in one kind of format
    training-per-source, gemm-per-source, …   a group is all that a source has

Errors are over all other rows, and judged against `TARGETS`; sweeps that figures of devices were fitted to do not count
there. Beside them: a constant share of the peak, calibrated on the same rows ("mean"), and the best that there is for
all rows of the group, results in hand ("best"); and a roofline that is not calibrated. Every row that is not predicted
is counted and named with its reason.

`out-of-memory`: runs that ran out of memory, and whether that is said. `overlap`: work beside collectives, nothing
calibrated (`comm_rows/overlap.py`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comm_rows.read import LeftOut, Prediction

Part = Callable[[], tuple[list[Prediction], list[LeftOut]]]
#: Part, under both rules → (error that is judged, the most that is wanted).
TARGETS = {
    "training": ("median", 0.10),
    "gemm": ("mean", 0.10),
    "decode": ("mean", 0.12),
    "memory": ("mean", 0.10),
}
#: Sweeps of training with real spread, on which a constant share of the peak has to be beaten.
SWEEPS = ("BLOOM", "nanotron")
#: Of runs that ran out of memory, the least share that must be named.
LEAST_NAMED = 0.90
OUT_OF_MEMORY = "out-of-memory"
ALL, APART = "all", "all, sweeps of the devices' figures left out"


def parts() -> dict[str, Part]:
    """Return what can be predicted, by name."""
    from comm_rows.gemm import predict_gemm
    from comm_rows.memory import predict_memory
    from comm_rows.overlap import predict_overlap
    from comm_rows.serving import predict_decode, predict_prefill
    from comm_rows.training import predict_training

    found: dict[str, Part] = {}
    for name, predict in (
        ("training", predict_training),
        ("gemm", predict_gemm),
        ("decode", predict_decode),
        ("prefill", predict_prefill),
        ("memory", predict_memory),
    ):
        found[name] = predict
        found[f"{name}-per-source"] = partial(predict, per_source=True)
    return found | {"overlap": predict_overlap}


def main(arguments: Sequence[str]) -> None:
    """Run the parts that are asked for, or all."""
    known = parts()
    asked = [name for name in arguments if not name.startswith("--")] or [*known, OUT_OF_MEMORY]
    results: dict[str, dict[str, Any]] = {}
    for name in asked:
        print(f"\n{name}")
        if name == OUT_OF_MEMORY:
            results[name] = report_out_of_memory()
            continue
        predictions, left = known[name]()
        results[name] = report(predictions, left, show_rows="--rows" in arguments, show_left="--left-out" in arguments)
        results[name]["verdicts"] = verdicts_of(name, results[name]["groups"])
    print()
    for name, found in results.items():
        for verdict in found["verdicts"]:
            print(f"{'met   ' if verdict['is_met'] else 'MISSED'} {name}: {verdict['what']}: {verdict['found']}")
    if "--json" in arguments:
        path = Path(__file__).parent / "results" / "comm-accuracy.json"
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


def judged_line(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The line that is judged: of all rows that no figure of a device was fitted to."""
    return next((line for line in lines if line["group"] == APART), None) or lines[-1]


def verdicts_of(part: str, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is wanted of a part, and whether it is so."""
    name = part.removesuffix("-per-source")
    found = []
    if name in TARGETS:
        figure, most = TARGETS[name]
        value = judged_line(lines)[figure]
        found.append(_verdict(f"{figure} error ≤ {100 * most:g} %", f"{value:.1%}", value <= most))
    if name == "training":
        for line in lines:
            if line["group"].split(",")[0] in SWEEPS and line["fresh"]:
                told = f"{line['mean']:.1%} beside {line['constant_mean']:.1%}"
                wanted = f"{line['group']} nearer than a constant share"
                found.append(_verdict(wanted, told, line["mean"] < line["constant_mean"]))
    return found


def _verdict(what: str, found: str, is_met: bool) -> dict[str, Any]:
    return {"what": what, "found": found, "is_met": is_met}


def report_out_of_memory() -> dict[str, Any]:
    """Print how many runs that ran out of memory are named, and how many that ran are said to fit; return it."""
    from comm_rows.memory import name_out_of_memory

    named, left = name_out_of_memory()
    out, ran = [row for row in named if row.ran_out], [row for row in named if not row.ran_out]
    right, kept = sum(row.is_said_to for row in out), sum(not row.is_said_to for row in ran)
    print(f"  ran out of memory: {right} of {len(out)} named, {len(left)} left out")
    for group in sorted({row.group for row in named}):
        own = [row for row in ran if row.group == group]
        print(f"  {group}: {sum(not row.is_said_to for row in own)} of {len(own)} that ran are said to fit")
    share = right / len(out)
    verdict = _verdict(f"named ≥ {100 * LEAST_NAMED:g} %", f"{right} of {len(out)}, {share:.0%}", share >= LEAST_NAMED)
    return {
        "ran_out": len(out),
        "named": right,
        "share": share,
        "ran": len(ran),
        "said_to_fit": kept,
        "wrong": [row.row for row in named if row.ran_out != row.is_said_to],
        "left_out": [{"row": entry.row, "reason": entry.reason} for entry in left],
        "verdicts": [verdict],
    }


def report(predictions: list[Prediction], left: list[LeftOut], *, show_rows: bool, show_left: bool) -> dict[str, Any]:
    """Print errors by group and altogether; return them."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[prediction.group].append(prediction)
    print(f"  {'group':44} rows  predicted: mean  median   worst │ constant: mean    best │ roofline: mean   skill")
    lines = [line_of(group, rows) for group, rows in sorted(groups.items())]
    lines.append(line_of(ALL, predictions))
    apart = [row for row in predictions if not row.is_fitted]
    if len(apart) < len(predictions):
        lines.append(line_of(APART, apart))
    for line in lines:
        print(text_of(line))
    if show_rows:
        for found in sorted(predictions, key=lambda p: (p.group, p.row)):
            mark = "calibrated" if found.is_calibration else ""
            figures = f"{found.measured:10.4g} {found.predicted:10.4g} {found.error:+7.1%}"
            print(f"    {found.row:12} {found.group:40} {figures} {mark}")
    reasons = Counter(entry.reason for entry in left)
    print(f"  left out: {len(left)}")
    for reason, count in reasons.most_common():
        rows = [entry.row for entry in left if entry.reason == reason]
        print(f"    {count:4} {reason}" + (f": {', '.join(rows)}" if show_left else ""))
    return {"groups": lines, "left_out": [{"row": entry.row, "reason": entry.reason} for entry in left]}


def line_of(group: str, rows: list[Prediction]) -> dict[str, Any]:
    """Return the errors of some rows, those that were calibrated on left out."""
    fresh = [row for row in rows if not row.is_calibration]

    def errors(name: str) -> list[float]:
        values = [(getattr(row, name), row.measured) for row in fresh]
        return [abs(value / measured - 1) for value, measured in values if value is not None]

    ours, constant, roofline = errors("predicted"), errors("constant"), errors("roofline")
    mean = lambda values: statistics.fmean(values) if values else None  # noqa: E731
    median = lambda values: statistics.median(values) if values else None  # noqa: E731
    return {
        "group": group,
        "rows": len(rows),
        "fresh": len(fresh),
        "mean": mean(ours),
        "median": median(ours),
        "worst": max(ours, default=None),
        "constant_mean": mean(constant),
        "constant_best": best_constant([row for row in rows if row.constant is not None]),
        "roofline_mean": mean(roofline),
        "skill": 1 - mean(ours) / mean(constant) if constant and mean(constant) else None,
    }


def best_constant(rows: list[Prediction]) -> float | None:
    """Return the mean error of the constant that is best for these rows, knowing all of them."""
    ratios = [row.constant / row.measured for row in rows if row.constant is not None]
    return min((statistics.fmean(abs(ratio / r - 1) for ratio in ratios) for r in ratios), default=None)


def text_of(line: Mapping[str, Any]) -> str:
    """Return a line of the table."""

    def share(name: str) -> str:
        value = line[name]
        return f"{value:7.1%}" if isinstance(value, float) else "      –"

    return (
        f"  {line['group']:44} {line['fresh']:4}           {share('mean')} {share('median')} {share('worst')} │ "
        f"       {share('constant_mean')} {share('constant_best')} │        {share('roofline_mean')} {share('skill')}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
