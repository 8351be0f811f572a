"""Parity: how far the validation loss of each policy lies from fp32's, over paired seeds.

    python benchmarks/training/parity.py

Three models: small ones of GPT-2's and Llama's kind from random weights, and SmolLM2, fine-tuned. The same seed has the
same weights, batches and order under every policy, so what is compared is the difference of a pair: the validation
loss over that of fp32, minus one. Quoted are its mean over the seeds and the two-sided 95 % interval by Student's t; a
policy is at parity if the interval's upper end is at most

    0.5 %    bf16-mixed, bf16-pure-sr, bf16-pure-kahan, fp8-block
    1 %      fp8-hybrid, mxfp8

bf16-pure and nvfp4 are told besides, with no limit. Results go to benchmarks/results/training-parity.json, the plot to
training-parity.svg.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import drawing
from intervals import t_interval
from points import Points, arguments_of
from small_runs import Setup, train

REFERENCE = "fp32"
#: Policy → the largest upper end that is parity; None: told besides.
LIMITS: dict[str, float | None] = {
    "bf16-mixed": 0.005,
    "bf16-pure-sr": 0.005,
    "bf16-pure-kahan": 0.005,
    "fp8-block": 0.005,
    "fp8-hybrid": 0.01,
    "mxfp8": 0.01,
    "bf16-pure": None,
    "nvfp4": None,
}
#: Model → (its setup, seeds).
SETUPS = {
    "gpt2": (Setup(model="gpt2", steps=300, learning_rate=2e-3, validation=256), 5),
    "llama": (Setup(model="llama", steps=300, validation=256), 11),
    "smollm2": (
        Setup(model="smollm2", steps=12, batch=2, length=128, learning_rate=1e-4, warm_up=2, validation=16), 5
    ),
}  # fmt: skip


def summary(points: Points) -> list[dict[str, Any]]:
    """A row for every model and policy that has at least two pairs."""
    rows = []
    for model in SETUPS:
        reference = dict(points.named(model, REFERENCE))
        for policy, limit in LIMITS.items():
            own = dict(points.named(model, policy))
            pairs = {seed: (own[seed], reference[seed]) for seed in own if seed in reference}
            for run, fp32 in pairs.values():
                assert run["text"] == fp32["text"], "a pair of runs on different text"
            if any(run["validation_loss"] is None for run, _ in pairs.values()):
                rows.append({"model": model, "policy": policy, "limit": limit, "pairs": len(pairs), "died": True})
                continue
            differences = [run["validation_loss"] / fp32["validation_loss"] - 1 for run, fp32 in pairs.values()]
            if len(differences) < 2:
                continue
            mean, low, high = t_interval(differences)
            rows.append(
                {
                    "model": model,
                    "policy": policy,
                    "pairs": len(pairs),
                    "differences": differences,
                    "mean": mean,
                    "interval": [low, high],
                    "limit": limit,
                    "is_met": None if limit is None else high <= limit,
                }
            )
    return rows


def plot(points: Points, rows: list[dict[str, Any]]) -> None:
    """Every pair, every interval, and the limits."""
    figure, axes = drawing.figure("parity", 1, len(SETUPS), (10.5, 3.6), sharey=True)
    names = list(LIMITS)
    for axis, model in zip(axes, SETUPS, strict=True):
        for row in rows:
            if row["model"] != model or row.get("died"):
                continue
            place = len(names) - 1 - names.index(row["policy"])
            colour = drawing.COLOURS[row["policy"]]
            low, high = (100 * end for end in row["interval"])
            axis.plot([low, high], [place, place], color=colour, linewidth=2)
            axis.plot(
                [100 * x for x in row["differences"]],
                [place] * row["pairs"],
                "o",
                color=colour,
                markersize=3,
                alpha=0.6,
            )
            axis.plot(100 * row["mean"], place, "|", color=colour, markersize=12, markeredgewidth=2)
            if row["limit"] is not None:
                axis.plot(100 * row["limit"], place, ">", color="#A50026", markersize=5)
        axis.axvline(0, color="#7d828c", linewidth=0.8)
        axis.set(title=model, xlabel="validation loss over fp32's (%)")
        axis.set_yticks(range(len(names)), names[::-1])
    drawing.save(figure, points.path.with_suffix(".svg"))


def main() -> None:
    """Command line."""
    arguments = arguments_of(__doc__)
    setups = {name: (setup.quick() if arguments.quick else setup, seeds) for name, (setup, seeds) in SETUPS.items()}
    settings = {name: dataclasses.asdict(setup) for name, (setup, _) in setups.items()}
    points = Points("parity", "validation loss in fp32 after equal runs", settings, arguments)
    if not arguments.plot:
        for model, (setup, seeds) in setups.items():
            for seed in range(2 if arguments.quick else seeds):
                for policy in (REFERENCE, *LIMITS):
                    points.measure(
                        f"{model} {policy} {seed}",
                        lambda policy=policy, seed=seed, setup=setup: train(setup, policy, seed),
                    )
    rows = summary(points)
    points.write(summary=rows)
    for row in rows:
        if "mean" in row:
            low, high = row["interval"]
            print(f"{row['model']:8} {row['policy']:16} {row['mean']:+.3%} [{low:+.3%}, {high:+.3%}] of {row['limit']}")
    plot(points, rows)


if __name__ == "__main__":
    main()
