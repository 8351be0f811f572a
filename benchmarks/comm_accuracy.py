"""Predictions against measurements that others published, by source, beside what a simpler model would say.

    python benchmarks/comm_accuracy.py [training|training-per-source|gemm|decode|prefill|memory …] [--rows] [--left-out]

Each group (a source on one device in one kind of format) is calibrated on at most three of its rows, chosen by a rule
that looks at no result: the smallest, median and largest number of GPUs (products: of operations). Errors are over all
other rows. Beside them: a constant share of the peak, calibrated on the same rows ("mean"), and the best that there is
for all rows of the group, results in hand ("best"); and a roofline that is not calibrated. Every row that is not
predicted is counted and named with its reason.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from comm_rows.read import LeftOut, Prediction

Part = Callable[[], tuple[list[Prediction], list[LeftOut]]]


def parts() -> dict[str, Part]:
    """Return what can be asked for."""
    from comm_rows.gemm import predict_gemm
    from comm_rows.memory import predict_memory
    from comm_rows.serving import predict_decode, predict_prefill
    from comm_rows.training import predict_per_source, predict_training

    return {
        "training": predict_training,
        "training-per-source": predict_per_source,
        "gemm": predict_gemm,
        "decode": predict_decode,
        "prefill": predict_prefill,
        "memory": predict_memory,
    }


def main(arguments: Sequence[str]) -> None:
    """Run the parts that are asked for, or all."""
    known = parts()
    asked = [name for name in arguments if not name.startswith("--")] or list(known)
    results = {}
    for name in asked:
        print(f"\n{name}")
        predictions, left = known[name]()
        results[name] = report(predictions, left, show_rows="--rows" in arguments, show_left="--left-out" in arguments)
    if "--json" in arguments:
        path = Path(__file__).parent / "results" / "comm-accuracy.json"
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


def report(
    predictions: list[Prediction], left: list[LeftOut], *, show_rows: bool, show_left: bool
) -> dict[str, object]:
    """Print errors by group and altogether; return them."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[prediction.group].append(prediction)
    print(f"  {'group':44} rows  predicted: mean  median   worst │ constant: mean    best │ roofline: mean   skill")
    lines = [line_of(group, rows) for group, rows in sorted(groups.items())]
    lines.append(line_of("all", predictions))
    apart = [row for row in predictions if not row.is_fitted]
    if len(apart) < len(predictions):
        lines.append(line_of("all, sweeps of the devices' figures left out", apart))
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


def line_of(group: str, rows: list[Prediction]) -> dict[str, object]:
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


def text_of(line: dict[str, object]) -> str:
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
