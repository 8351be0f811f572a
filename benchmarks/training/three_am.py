"""The 3 a.m. run: one configuration that kills fp16 without a loss scale, and what the policies make of it.

    python benchmarks/training/three_am.py

A small GPT-2 in which one rare token makes an activation beyond fp16's 65,504 (`outlier.py`), as models trained in bf16
have them. The token comes into one sequence of a batch every 40 steps or so. Compared are, on the same batches:

    fp16, no scale    a plain loop around torch.autocast in fp16
    fp16-mixed        skips the steps whose gradients are not finite
    bf16-mixed        has the range, and skips nothing
    fp8-hybrid        multiplies codes under scales; the rest as bf16-mixed
    fp32              for comparison

and, on the bf16-mixed run, the largest outputs of layers, and which share of its gradients each format would flush to
zero or let overflow, per 100 steps (`gradient_ranges.py`). Results go to benchmarks/results/training-three-am.json, the
plot to training-three-am.svg.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import drawing
from gradient_ranges import EVERY, GradientRanges
from points import Points, arguments_of
from small_runs import UNGUARDED, Setup, train

SETUP = Setup(
    model="gpt2", steps=400, layers=3, width=64, length=48, outlier_steps=(118, 157, 201, 223, 262, 290, 331, 352, 388)
)
POLICIES = (UNGUARDED, "fp16-mixed", "bf16-mixed", "fp8-hybrid", "fp32")
LOOKED_AT = "bf16-mixed"
SEED = 0


def run(policy: str, setup: Setup) -> dict[str, Any]:
    """One curve; of one policy also what formats would make of its gradients."""
    if policy != LOOKED_AT:
        return train(setup, policy, SEED)
    ranges = GradientRanges()
    found = train(setup, policy, SEED, watch=ranges)
    return {**found, "ranges": ranges.rows(), "largest_outputs": ranges.largest_outputs}


def plot(points: Points) -> None:
    """Curves, how far they lie from fp32's, and shares of gradients that formats lose."""
    figure, (left, middle, right) = drawing.figure("three-am", 1, 3, (11, 3.6), width_ratios=(4, 3, 3))
    reference = points.points["fp32"]["losses"]
    for policy in reversed(POLICIES):
        found = points.points[policy]
        colour = drawing.COLOURS[policy]
        steps, losses = drawing.smooth(found["losses"])
        label = policy if "skipped" not in found else f"{policy}: {found['skipped']} skipped"
        left.plot(steps, losses, color=colour, label=label, linewidth=4 if policy == "fp32" else 1.2, alpha=0.7)
        over = [None if a is None or b is None else a - b for a, b in zip(found["losses"], reference, strict=False)]
        middle.plot(*drawing.smooth(over), color=colour, linewidth=1.2)
        if found["died_at"] is not None:
            left.plot(steps[-1:], losses[-1:], "X", color=colour, markersize=9)
            text = f"NaN from step {found['died_at']} on"
            left.annotate(text, (steps[-1], losses[-1]), (8, 8), textcoords="offset points")
            middle.plot(steps[-1:], [0], "X", color=colour, markersize=9)
    left.set(xlabel="step", ylabel="loss (mean of 17 steps)")
    middle.set(xlabel="step", ylabel="the same, minus fp32's")
    left.legend(fontsize=7.5)
    rows = [row for row in points.points[LOOKED_AT]["ranges"] if row["gradients_of"] == "outputs"]
    for format in dict.fromkeys(row["format"] for row in rows):
        own = [(row["steps"][1], 100 * row["flushed"]) for row in rows if row["format"] == format]
        drawn = [(step, share) for step, share in own if share > 0]
        label = format if drawn else f"{format}: none"
        right.plot(*zip(*(drawn or [(own[0][0], float("nan"))]), strict=True), "o-", label=label, markersize=3.5)
    right.set(xlabel="step", ylabel="gradients of outputs flushed to zero (%)", yscale="log", ylim=(1e-4, 1e3))
    right.legend(fontsize=7, ncols=2)
    drawing.save(figure, points.path.with_suffix(".svg"))


def main() -> None:
    """Command line."""
    arguments = arguments_of(__doc__)
    setup = SETUP.quick() if arguments.quick else SETUP
    what = f"one run a policy, seed {SEED}; ranges of every {EVERY}th step's gradients"
    points = Points("three-am", what, dataclasses.asdict(setup), arguments)
    if not arguments.plot:
        for policy in POLICIES:
            points.measure(policy, lambda policy=policy: run(policy, setup))
    plot(points)


if __name__ == "__main__":
    main()
