"""Swallowed updates: what rounding does to weights, decay, averages and moments that are kept in bf16.

    python benchmarks/training/swallowed_updates.py

    gpt2       a small GPT-2 from random weights, three seeds: bf16-pure (nearest), -sr, -kahan, against masters in fp32
    smollm2    fine-tuning SmolLM2 at a learning rate of 5e-5, where an update is a thousandth of its weight
    decay      weights without a gradient under AdamW's decay, lr · λ = 1e-4, against (1 − lr · λ)^n
    average    an exponential average with β = 0.999 of a weight that has moved from 1 to 1.5
    moment     AdamW's second moment (β₂ = 0.999) after a burst of ten large gradients, and how far the weight gets then

An update is swallowed if in fp32 it would have moved a weight, and the stored weight did not move. Results go to
benchmarks/results/training-swallowed.json, the plot to training-swallowed.svg.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import drawing
import torch
from points import Points, arguments_of
from small_runs import Setup, train
from torch import Tensor

from bitwright.quantize import TensorScheme, fake_quantize
from bitwright.training.optimizer.stand_ins import make_update
from bitwright.training.policy import Policy, policy_named

POLICIES = ("fp32", "bf16-mixed", "bf16-pure", "bf16-pure-sr", "bf16-pure-kahan")
SEEDS = 3
SETUPS = {
    "gpt2": Setup(model="gpt2", steps=400, learning_rate=3e-4),
    "smollm2": Setup(
        model="smollm2", steps=24, batch=2, length=128, learning_rate=5e-5, warm_up=2, validation=16, weight_decay=0.0
    ),
}
#: Steps of the three small experiments, and how often a number is noted.
STEPS, EVERY = 5000, 100
_NUMBERS = 4096


def run(model: str, policy: str, seed: int, setup: Setup) -> dict[str, Any]:
    """One run, and how many updates were swallowed so far at each note."""
    return train(setup, policy, seed, count_swallowed=True)


# --- decay, averages, moments -----------------------------------------------------------------------------------------


def decay(policy: str, steps: int) -> dict[str, Any]:
    """The mean of weights that only decay, over what it should be."""
    weight = torch.nn.Parameter(torch.linspace(1, 2, _NUMBERS + 1)[:-1].to(_dtype(policy)))
    start = weight.detach().double()
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
    update = make_update(optimizer, policy_named(policy), counts=True)

    def step(number: int) -> float:
        weight.grad = torch.zeros_like(weight)
        update.step()
        return float((weight.detach().double() / start).mean())

    noted = _noted(steps, step)
    exact = [(1 - 1e-4) ** n for n in noted["steps"]]
    swallowed = update.swallowed["weights"]
    # of fp32 weights those with a gradient are counted, and here none has one
    share = swallowed.share if swallowed.due else None
    return {**noted, "exact": exact, "final": noted["values"][-1], "share_swallowed": share}


def average(rounding: str | None, steps: int) -> dict[str, Any]:
    """An exponential average of a weight that has moved, kept in fp32 (None) or in bf16 under a rounding."""
    kept, value = torch.ones(_NUMBERS), torch.tensor(1.5)

    def step(number: int) -> float:
        kept.lerp_(value, 1e-3)
        if rounding is not None:
            fake_quantize(kept, TensorScheme(format="bf16"), rounding=rounding, seed=number, out=kept)
        return float(kept.double().mean())

    noted = _noted(steps, step)
    exact = [1.5 - 0.5 * 0.999**n for n in noted["steps"]]
    return {**noted, "exact": exact, "final": noted["values"][-1]}


#: Name → how moments are kept: a policy, and their format.
MOMENTS: dict[str, Policy] = {
    "fp32": policy_named("bf16-pure-sr"),
    "bf16, nearest": dataclasses.replace(policy_named("bf16-pure"), update="nearest"),
    "bf16, stochastic": dataclasses.replace(policy_named("bf16-pure-sr"), moments="bf16"),
    "fp16, scaled, stochastic": dataclasses.replace(policy_named("bf16-pure-sr"), moments="fp16"),
}


def moment(kept: str, steps: int) -> dict[str, Any]:
    """A second moment after a burst, and how far weights have moved."""
    weight = torch.nn.Parameter(torch.zeros(_NUMBERS))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    # fp32 weights in every case: only the moments differ
    policy = dataclasses.replace(MOMENTS[kept], parameters="fp32", update="fp32") if kept == "fp32" else MOMENTS[kept]
    update = make_update(optimizer, policy, counts=True)

    def step(number: int) -> float:
        weight.grad = torch.full_like(weight, 10.0 if number < 10 else 0.01)
        update.step()
        return float(_widened(optimizer, weight, "exp_avg_sq").double().mean())

    noted = _noted(steps, step)
    swallowed = update.swallowed.get("exp_avg_sq")
    return {
        **noted,
        "final": noted["values"][-1],
        "moved": float(-weight.detach().double().mean()),
        "share_swallowed": swallowed.share if swallowed else 0.0,
    }


def _widened(optimizer: torch.optim.Optimizer, weight: Tensor, key: str) -> Tensor:
    state = optimizer.state[weight]
    return state[key].float() * state.get(f"{key}_scale", torch.ones(1))


def _noted(steps: int, step: Callable[[int], float]) -> dict[str, Any]:
    noted, values = [], []
    for number in range(steps):
        value = step(number)
        if (number + 1) % EVERY == 0 or number + 1 == steps:
            noted.append(number + 1)
            values.append(value)
    return {"steps": noted, "values": values}


def _dtype(policy: str) -> torch.dtype:
    return torch.float32 if policy_named(policy).parameters == "fp32" else torch.bfloat16


# --- results ----------------------------------------------------------------------------------------------------------


def summary(points: Points) -> list[dict[str, Any]]:
    """A row for every model and policy: share of updates that rounded to nothing, and what the run came to."""
    rows = []
    for model in SETUPS:
        for policy in POLICIES:
            found = [point for _, point in points.named(model, policy)]
            if not found:
                continue
            last = [point["swallowed"][-1] for point in found]
            shares = {
                name: sum(note[name]["lost"] for note in last) / max(sum(note[name]["due"] for note in last), 1)
                for name in last[0]
                if name != "step"
            }
            losses = [point["validation_loss"] for point in found]
            rows.append(
                {
                    "model": model,
                    "policy": policy,
                    "runs": len(found),
                    "validation_loss": statistics.fmean(losses) if None not in losses else None,
                    "swallowed": shares,
                }
            )
    return rows


def swallowed_along(notes: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, per cent of the updates swallowed since the note before) for every note."""
    whole = [{"step": 0, "weights": {"lost": 0, "due": 0}}, *notes]
    return [
        (after["step"], 100 * _more(before, after, "lost") / max(_more(before, after, "due"), 1))
        for before, after in pairwise(whole)
    ]


def _more(before: dict[str, Any], after: dict[str, Any], count: str) -> int:
    return int(after["weights"][count] - before["weights"][count])


def plot(points: Points) -> None:
    """Losses of fine-tuning, swallowed updates along a run, and the three small experiments."""
    figure, axes = drawing.figure("swallowed", 2, 3, (10.5, 6.2))
    for policy in POLICIES:
        colour = drawing.COLOURS[policy]
        for axis, model in zip(axes[0], SETUPS, strict=False):
            point = next((point for _, point in points.named(model, policy)), None)
            if point is not None:
                steps, losses = drawing.smooth(point["losses"], 8 if model == "gpt2" else 2)
                axis.plot(steps, losses, color=colour, label=policy, linewidth=1.2)
                axis.set(xlabel="step", ylabel="loss", title=f"{model}, lr {SETUPS[model].learning_rate:g}")
        point = next((point for _, point in points.named("gpt2", policy)), None)
        if point is not None:
            shares = swallowed_along(point["swallowed"])
            axes[0, 2].plot(*zip(*shares, strict=True), color=colour, label=policy, linewidth=1.2)
    axes[0, 2].set(xlabel="step", ylabel="updates swallowed (%)", title="gpt2", ylim=(-3, 103))
    axes[0, 0].legend()
    labels = {"decay": "mean of decaying weights", "average": "average", "moment": "second moment"}
    for axis, (part, label) in zip(axes[1], labels.items(), strict=True):
        for name, point in points.named(part):
            axis.plot(point["steps"], point["values"], label=name, linewidth=1.2)
        axis.set(xlabel="step", ylabel=label)
        axis.legend(fontsize=7)
    axes[1, 2].set_yscale("log")
    drawing.save(figure, points.path.with_suffix(".svg"))


def main() -> None:
    """Command line."""
    arguments = arguments_of(__doc__)
    setups = {name: setup.quick() if arguments.quick else setup for name, setup in SETUPS.items()}
    seeds, steps = (1, 200) if arguments.quick else (SEEDS, STEPS)
    settings = {"setups": {name: dataclasses.asdict(setup) for name, setup in setups.items()}, "small": steps}
    points = Points("swallowed", "runs and small experiments with weights in bf16", settings, arguments)
    if not arguments.plot:
        for policy in POLICIES:
            points.measure(f"decay {policy}", lambda policy=policy: decay(policy, steps))
        for name, rounding in {"fp32": None, "bf16, nearest": "nearest_even", "bf16, stochastic": "stochastic"}.items():
            points.measure(f"average {name}", lambda rounding=rounding: average(rounding, steps))
        for name in MOMENTS:
            points.measure(f"moment {name}", lambda name=name: moment(name, steps))
        for model, setup in setups.items():
            for seed in range(seeds if model == "gpt2" else 1):
                for policy in POLICIES:
                    points.measure(
                        f"{model} {policy} {seed}",
                        lambda model=model, policy=policy, seed=seed, setup=setup: run(model, policy, seed, setup),
                    )
    points.write(summary=summary(points))
    plot(points)


if __name__ == "__main__":
    main()
