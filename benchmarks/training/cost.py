"""Cost: what a policy adds to a step on this processor.

    python benchmarks/training/cost.py

    autocast    bf16-mixed through `prepare`, monitoring off, against a plain loop around torch.autocast: the losses
                have to be equal bit for bit, and the CPU seconds at most 1 % more
    noise       two such plain loops against each other: what the measurement itself takes for a difference
    fp8         an emulated fp8-hybrid step against one of bf16-mixed: at most 2.5 times the CPU seconds

Two copies of one model train on the same batches, a step of each in turn, the order changing from pair to pair; CPU
seconds are those of all threads of the process. A block of steps is one pair: its ratio is the sum over one side
divided by the sum over the other, and the interval is that of the mean of ratios, by Student's t. Tokens per step are
fixed. Every model is timed in a process of its own. Run it on an otherwise idle machine.

Results go to benchmarks/results/training-cost.json, the plot to training-cost.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import drawing
import torch
from intervals import t_interval
from points import Points, arguments_of
from small_runs import Setup, batches, build, optimizer_of
from torch import Tensor

from bitwright.training.prepare import prepare

#: Most CPU seconds over those of plain autocast, and most times those of bf16-mixed.
OVERHEAD, FP8_RATIO = 0.01, 2.5
#: Name → (setup, steps of a pair, pairs).
SETUPS = {
    "gpt2, 4 layers of 256, 2,048 tokens": (
        Setup(model="gpt2", steps=124, batch=16, length=128, width=256), 4, 30
    ),
    "llama, 4 layers of 256, 2,048 tokens": (
        Setup(model="llama", steps=124, batch=16, length=128, width=256), 4, 30
    ),
    "smollm2, 256 tokens": (
        Setup(model="smollm2", steps=44, batch=2, length=128, learning_rate=5e-5), 1, 40
    ),
}  # fmt: skip
FP8_PAIRS = 10
_WARM_UP = 4

Stepper = Callable[[Tensor], Tensor | float]


def plain(setup: Setup, seed: int) -> Stepper:
    """A loop as one writes it by hand."""
    model = build(setup, seed)
    optimizer = optimizer_of(model, setup)

    def take_step(ids: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return take_step


def prepared(policy: str, setup: Setup, seed: int) -> Stepper:
    """The same through `prepare`."""
    model = build(setup, seed)
    run = prepare(
        model, optimizer_of(model, setup), policy=policy, max_grad_norm=setup.max_grad_norm, seed=seed, emulate=True
    )

    def take_step(ids: Tensor) -> float:
        with run.step() as step:
            step.backward(model(input_ids=ids, labels=ids).loss)
        assert step.result is not None
        return step.result.loss

    return take_step


def pairs_of(first: Stepper, second: Stepper, setup: Setup, per_pair: int, num_pairs: int) -> dict[str, Any]:
    """Take steps of both in turn; CPU seconds of the second over those of the first, pair by pair."""
    own = dataclasses.replace(setup, steps=_WARM_UP + per_pair * num_pairs)
    sides = (first, second)
    seconds: tuple[list[float], list[float]] = ([], [])
    wall: tuple[list[float], list[float]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for number, ids in enumerate(batches(own, 0)):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            begin, begin_wall = time.process_time(), time.perf_counter()
            losses[side].append(float(sides[side](ids)))
            end_wall, end = time.perf_counter(), time.process_time()
            if number >= _WARM_UP:
                seconds[side].append(end - begin)
                wall[side].append(end_wall - begin_wall)
        if number % 8 == 7:
            gc.collect()
    blocks = [slice(start, start + per_pair) for start in range(0, per_pair * num_pairs, per_pair)]
    ratios = [sum(seconds[1][block]) / sum(seconds[0][block]) for block in blocks]
    mean, low, high = t_interval(ratios)
    return {
        "losses_equal": losses[0] == losses[1],
        "steps": len(losses[0]),
        "pairs": num_pairs,
        "ratio": mean,
        "interval": [low, high],
        "median_ratio": statistics.median(ratios),
        "ratio_of_medians": statistics.median(seconds[1]) / statistics.median(seconds[0]),
        "ratio_of_wall_medians": statistics.median(wall[1]) / statistics.median(wall[0]),
        "first_step_cpu_s": statistics.median(seconds[0]),
        "second_step_cpu_s": statistics.median(seconds[1]),
        "ratios": ratios,
    }


def measure(part: str, setup: Setup, per_pair: int, num_pairs: int) -> dict[str, Any]:
    """One comparison."""
    if part == "autocast":
        return pairs_of(plain(setup, 0), prepared("bf16-mixed", setup, 0), setup, per_pair, num_pairs)
    if part == "noise":
        return pairs_of(plain(setup, 0), plain(setup, 0), setup, per_pair, num_pairs)
    first, second = prepared("bf16-mixed", setup, 0), prepared("fp8-hybrid", setup, 0)
    return pairs_of(first, second, setup, per_pair, num_pairs)


def in_a_process(part: str, setup: Setup, per_pair: int, num_pairs: int) -> dict[str, Any]:
    """The same in a fresh process."""
    asked = json.dumps([part, dataclasses.asdict(setup), per_pair, num_pairs])
    done = subprocess.run([sys.executable, __file__, "--one", asked], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(points: Points) -> list[dict[str, Any]]:
    """Judge every comparison."""
    rows = []
    for key, point in points.points.items():
        part, _, name = key.partition(" ")
        row = {name: value for name, value in point.items() if name != "ratios"} | {"part": part, "setup": name}
        if part == "autocast":
            row["limit"] = 1 + OVERHEAD
            row["is_met"] = point["losses_equal"] and point["interval"][1] <= 1 + OVERHEAD
        elif part == "fp8":
            row["limit"] = FP8_RATIO
            row["is_met"] = point["interval"][1] <= FP8_RATIO
        rows.append(row)
    return rows


def plot(points: Points, rows: list[dict[str, Any]]) -> None:
    """Intervals of all ratios beside their limits."""
    figure, axes = drawing.figure("cost", 1, 2, (10, 2.8))
    for axis, parts in zip(axes, (("noise", "autocast"), ("fp8",)), strict=True):
        own = [row for row in rows if row["part"] in parts]
        colours = {"noise": "#7d828c", "autocast": drawing.COLOURS["bf16-mixed"], "fp8": drawing.COLOURS["fp8-hybrid"]}
        for place, row in enumerate(reversed(own)):
            colour = colours[row["part"]]
            axis.plot(row["interval"], [place, place], color=colour, linewidth=2)
            axis.plot(row["ratio"], place, "o", color=colour, markersize=5)
        labels = [f"{row['setup'].split(',')[0]}, {row['part']}" for row in reversed(own)]
        axis.set_yticks(range(len(own)), labels)
        axis.set_ylim(-0.6, len(own) - 0.4)
    axes[0].axvline(1 + OVERHEAD, color="#A50026", linestyle="--", linewidth=1)
    axes[0].axvline(1, color="#7d828c", linewidth=0.8)
    axes[0].set(xlabel="CPU seconds over those of plain autocast")
    axes[1].axvline(FP8_RATIO, color="#A50026", linestyle="--", linewidth=1)
    axes[1].set(xlabel="CPU seconds of fp8-hybrid over bf16-mixed's", xlim=(0.9, None))
    drawing.save(figure, points.path.with_suffix(".svg"))


def main() -> None:
    """Command line."""
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--one", help=argparse.SUPPRESS)
    known, rest = one.parse_known_args()
    if known.one:
        part, setup, per_pair, num_pairs = json.loads(known.one)
        print(json.dumps(measure(part, Setup(**{**setup, "outlier_steps": ()}), per_pair, num_pairs)))
        return
    sys.argv[1:] = rest
    arguments = arguments_of(__doc__)
    setups = {}
    for name, (setup, per_pair, num_pairs) in SETUPS.items():
        setups[name] = (setup.quick(), 1, 3) if arguments.quick else (setup, per_pair, num_pairs)
    settings = {name: [dataclasses.asdict(setup), *rest] for name, (setup, *rest) in setups.items()}
    points = Points("cost", "CPU seconds of training steps, in turn", settings, arguments)
    if not arguments.plot:
        for name, (setup, per_pair, num_pairs) in setups.items():
            for part in ("autocast", "noise", "fp8"):
                pairs = {"autocast": num_pairs, "noise": max(num_pairs // 2, 2), "fp8": min(num_pairs, FP8_PAIRS)}[part]
                points.measure(
                    f"{part} {name}",
                    lambda part=part, setup=setup, per_pair=per_pair, pairs=pairs: in_a_process(
                        part, setup, per_pair, pairs
                    ),
                )
    rows = summary(points)
    points.write(summary=rows)
    for row in rows:
        low, high = row["interval"]
        print(f"{row['part']:9} {row['setup']:38} {row['ratio']:.4f} [{low:.4f}, {high:.4f}] {row.get('is_met', '')}")
    plot(points, rows)


if __name__ == "__main__":
    main()
