"""The choice, measured: every policy on the same twenty runs, and what it takes, loses and comes to.

    python benchmarks/training/choice.py

Twenty runs a policy, five seeds of each of

    gpt2             a small GPT-2 from random weights
    gpt2, outlier    the same with a rare token beyond fp16's range (`outlier.py`)
    llama            a small Llama
    llama, hot       the same at ten times the learning rate, without warm-up

A run has failed if its loss ended as NaN, if it was given up, or if its validation loss is more than 10 % above that of
fp32 on the same weights and text: at ten times the learning rate, runs that differ in the last bit alone come out up to
4 % apart. Told of each policy besides:

    memory      bytes per parameter with AdamW: weights, gradients, moments, and copies that products read
                (`hardware/memory`; predicted)
    range       largest and smallest number of the formats that products read
    lost        share of the gradients of outputs that its gradient format flushes to zero (`lost_gradients.py`)
    loss        mean validation loss of the runs of gpt2 and llama that have not failed
    speed here  CPU seconds of a step over fp32's; low-precision products are emulated on a processor
    peak        stated dense rate of the narrowest products, from `hardware/devices`

Results go to benchmarks/results/training-choice.json, the plot to training-choice.svg.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import drawing
from lost_gradients import LostGradients
from points import Points, arguments_of
from small_runs import UNGUARDED, Setup, train

from bitwright import formats, hardware
from bitwright.training.choose import why_not
from bitwright.training.policy import policy_named
from bitwright.training.policy_bits import state_bits

REFERENCE = "fp32"
POLICIES = (
    "fp32", "tf32", UNGUARDED, "fp16-mixed", "bf16-mixed", "bf16-pure", "bf16-pure-sr", "fp8-hybrid", "fp8-block",
    "mxfp8", "nvfp4",
)  # fmt: skip
_SMALL = Setup(model="gpt2", steps=100, layers=2, width=64, length=32, validation=128)
SETUPS = {
    "gpt2": _SMALL,
    "gpt2, outlier": dataclasses.replace(_SMALL, outlier_steps=(34, 56, 78)),
    "llama": dataclasses.replace(_SMALL, model="llama"),
    "llama, hot": dataclasses.replace(_SMALL, model="llama", learning_rate=1e-2, warm_up=1),
}
#: Whose losses are told.
PLAIN = ("gpt2", "llama")
SEEDS = 5
#: A run has failed above so many times the loss of fp32.
FAILED_ABOVE = 1.1
DEVICES = ("v100-sxm2", "a100-sxm", "h100-sxm", "mi300x", "b200")


def run(policy: str, setup: Setup, seed: int) -> dict[str, Any]:
    """One run; of fp32 also what other policies would lose of its gradients."""
    if policy != REFERENCE:
        return _short(train(setup, policy, seed))
    lost = LostGradients(POLICIES)
    found = train(setup, policy, seed, watch=lost)
    return {**_short(found), "lost": lost.shares}


def _short(found: dict[str, Any]) -> dict[str, Any]:
    losses = found.pop("losses")
    return {**found, "last_loss": losses[-1] if losses else None}


def has_failed(point: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Whether a run has ended badly, judged by fp32 on the same weights and text."""
    loss, best = point["validation_loss"], reference["validation_loss"]
    return loss is None or (best is not None and loss > FAILED_ABOVE * best)


def row_of(policy: str, points: Points) -> dict[str, Any]:
    """What is known of a policy: measured and stated."""
    pairs = {
        f"{name} {seed}": (
            points.points[f"{name} / {policy} / {seed}"],
            points.points[f"{name} / {REFERENCE} / {seed}"],
        )
        for name in SETUPS
        for seed in range(SEEDS)
        if f"{name} / {policy} / {seed}" in points.points
    }
    failed = [key for key, (run, fp32) in pairs.items() if has_failed(run, fp32)]
    plain = [run for key, (run, _) in pairs.items() if key.rsplit(" ", 1)[0] in PLAIN and key not in failed]
    over = [
        run["validation_loss"] / fp32["validation_loss"] - 1 for key, (run, fp32) in pairs.items() if key not in failed
    ]
    return {
        "policy": policy,
        "runs": len(pairs),
        "failed": len(failed),
        "failed_runs": failed,
        "skipped_steps": sum(run.get("skipped", 0) for run, _ in pairs.values()),
        "validation_loss": statistics.fmean(run["validation_loss"] for run in plain) if plain else None,
        "over_fp32": statistics.fmean(over) if over else None,
        "lost_gradients": statistics.fmean(fp32["lost"][policy] for _, fp32 in pairs.values()),
        "step_over_fp32": statistics.median(run["step_cpu_s"] / fp32["step_cpu_s"] for run, fp32 in pairs.values()),
        "step_cpu_s": statistics.median(run["step_cpu_s"] for run, _ in pairs.values()),
        **facts_of(policy),
    }


def facts_of(policy: str) -> dict[str, Any]:
    """What is stated of a policy: bytes of a parameter, range of its formats, and how fast devices multiply in them."""
    record = policy_named("fp16-mixed" if policy == UNGUARDED else policy)
    bits = state_bits(record)
    read = record.product_formats or (record.compute,)
    known = [formats.FORMATS[name] for name in read]
    peaks = {}
    for name in DEVICES:
        device = hardware.get(name)
        if why_not(record, device) is None:
            peaks[name] = min(device.matmul_tflops[format] for format in read)
    return {
        "bytes_per_parameter": bits.bytes_per_parameter,
        "bytes_of_copies": bits.copies / 8,
        "formats": list(read),
        "largest": [float(number.max) for number in known],
        "smallest": [_smallest(number) for number in known],
        "peak_tflops": peaks,
    }


def _smallest(number: Any) -> float:
    return float(number.min_subnormal if number.min_subnormal is not None else number.min_normal)


def plot(points: Points, rows: list[dict[str, Any]]) -> None:
    """Loss over fp32's against bytes of a parameter; failed runs in the label."""
    figure, (left, right) = drawing.figure("choice", 1, 2, (10, 3.8))
    names = [row["policy"] for row in rows][::-1]
    for place, row in enumerate(reversed(rows)):
        colour = drawing.COLOURS[row["policy"]]
        left.barh(place, row["failed"], color=colour)
        left.annotate(f" {row['failed']} of {row['runs']}", (row["failed"], place), va="center", fontsize=8)
        lost = max(100 * row["lost_gradients"], 1e-4)
        right.plot(lost, place, "o", color=colour)
    left.set_yticks(range(len(names)), names)
    left.set(xlabel="runs that failed", xlim=(0, SEEDS * len(SETUPS)), xticks=range(0, SEEDS * len(SETUPS) + 1, 4))
    right.set_yticks(range(len(names)), [""] * len(names))
    right.set(xlabel="gradients of outputs flushed to zero (%); at the left edge: none", xscale="log", xlim=(8e-5, 100))
    drawing.save(figure, points.path.with_suffix(".svg"))


def main() -> None:
    """Command line."""
    arguments = arguments_of(__doc__)
    setups = {name: setup.quick() if arguments.quick else setup for name, setup in SETUPS.items()}
    settings = {name: dataclasses.asdict(setup) for name, setup in setups.items()}
    points = Points("choice", "every policy on the same runs", settings, arguments)
    if not arguments.plot:
        for seed in range(1 if arguments.quick else SEEDS):
            for name, setup in setups.items():
                for policy in POLICIES:
                    points.measure(
                        f"{name} / {policy} / {seed}",
                        lambda policy=policy, seed=seed, setup=setup: run(policy, setup, seed),
                    )
    rows = [row_of(policy, points) for policy in POLICIES]
    points.write(summary=rows)
    for row in rows:
        print(
            f"{row['policy']:16} {row['failed']:2} of {row['runs']} failed, loss {row['validation_loss']}, lost "
            f"{row['lost_gradients']:.2%}, step {row['step_over_fp32']:.2f} of fp32's, "
            f"{row['bytes_per_parameter']:g} B, peaks {row['peak_tflops']}"
        )
    plot(points, rows)


if __name__ == "__main__":
    main()
