"""What emulated products of codes cost: whole training steps on the built-in model, against bf16 in the same minutes.

    python benchmarks/training/products.py                    every recipe
    python benchmarks/training/products.py --recipes fp8-hybrid
    python benchmarks/training/products.py --quick            short sequences, two turns: whether it runs; nothing filed

A step is forward pass, loss, backward pass of SmolLM2-135M under torch.autocast in bf16 with fp32 weights, and AdamW:
`bf16` is that and nothing else; a recipe has its products installed in all linear layers but the head, and ends its
step. Every recipe runs on one and the same model, installed before its turn and removed after it, outside its time. The
turns of all of them go round (`timing.in_turn` explains why). Seconds are those of the clock; the ratio of processor
seconds is filed beside it, which others that are at work disturb less.

Besides: bytes that a step keeps for its backward pass, and how much longer the backward pass takes than the forward
pass. Results go to benchmarks/results/training-products.json, with machine and versions. Run it on an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import load_average, machine, now, why_not_quiet

from bitwright.models.load import load
from bitwright.training.product_recipe import ProductRecipe
from bitwright.training.products.low_precision_linear import InstalledProducts, install
from bitwright.training.recipes import FP8_BLOCK, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4

RESULTS = Path(__file__).parents[1] / "results" / "training-products.json"
RECIPES: dict[str, ProductRecipe | None] = {
    "bf16": None,
    "fp8-hybrid": FP8_DELAYED,
    "fp8-hybrid, current": FP8_CURRENT,
    "fp8-block": FP8_BLOCK,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}
#: What an emulated step of FP8 may cost, in steps of bf16.
LIMIT = 2.5
SEQUENCES, LENGTH, TURNS = 4, 256, 7


class Step:
    """Training steps of one model on fixed tokens."""

    def __init__(self, sequences: int, length: int) -> None:
        self.model: Any = load("demo").model.train().requires_grad_(True)
        vocabulary = self.model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (sequences, length), generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.kept_bytes = 0

    def sites(self) -> dict[str, str]:
        """Every linear layer but the head."""
        head = self.model.get_output_embeddings()
        return {
            name: "linear"
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }

    def run(self, installed: InstalledProducts | None) -> tuple[float, float, float, float]:
        """Seconds of forward pass, backward pass and optimizer, and processor seconds of all."""
        started, processor = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if installed is not None:
            installed.end_step()
        ended = time.perf_counter()
        return forward - started, backward - forward, ended - backward, time.process_time() - processor

    def count_kept(self) -> int:
        """Bytes of tensors that a forward pass keeps for the backward pass, parameters left out; each storage once."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        kept = sum(seen.values())
        del loss
        return kept


@contextmanager
def products(step: Step, recipe: ProductRecipe | None, state: dict[str, Any]) -> Iterator[InstalledProducts | None]:
    """A recipe's products in the model, with the state that they had at their last turn."""
    if recipe is None:
        yield None
        return
    installed = install(step.model, recipe, step.sites())
    if state:
        installed.load_state_dict(state)
    try:
        yield installed
    finally:
        state.update(installed.state_dict())
        installed.remove()


def measure(names: list[str], sequences: int, length: int, turns: int) -> dict[str, Any]:
    """Medians over the turns, and their ratios to bf16."""
    step = Step(sequences, length)
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    kept: dict[str, int] = {}
    for turn in range(-2, turns):
        for name in names:
            with products(step, RECIPES[name], states[name]) as installed:
                if turn == -2:
                    kept[name] = step.count_kept()
                taken = step.run(installed)
            if turn >= 0:
                times[name].append(taken)
            print(f"{turn:3} {name:22} {sum(taken[:3]):7.3f} s, {taken[3]:7.3f} processor s", flush=True)
    found = {}
    for name in names:
        totals = [sum(taken[:3]) for taken in times[name]]
        ratios = [total / sum(bf16[:3]) for total, bf16 in zip(totals, times["bf16"], strict=True)]
        of_processor = [taken[3] / bf16[3] for taken, bf16 in zip(times[name], times["bf16"], strict=True)]
        forward, backward, update, processor = (statistics.median(part) for part in zip(*times[name], strict=True))
        found[name] = {
            "step_s": statistics.median(totals),
            "min_s": min(totals),
            "max_s": max(totals),
            "forward_s": forward,
            "backward_s": backward,
            "update_s": update,
            "processor_s": processor,
            "processor_ratio_to_bf16": statistics.median(of_processor),
            "ratio_to_bf16": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "kept_bytes": kept[name],
        }
    return found


def main() -> None:
    """Measure, print and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", choices=[name for name in RECIPES if name != "bf16"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    names = ["bf16", *(options.recipes or [name for name in RECIPES if name != "bf16"])]
    load_before = load_average()
    if (disturbed := why_not_quiet(load_before)) and not options.quick:
        print(disturbed, file=sys.stderr)
    sizes = (1, 64, 2) if options.quick else (options.sequences, options.length, options.turns)
    found = measure(names, *sizes)
    for name, row in found.items():
        limit = f"  (limit {LIMIT})" if name.startswith("fp8-hybrid") else ""
        print(
            f"{name:22} {row['step_s']:7.3f} s  ×{row['ratio_to_bf16']:.2f} of bf16 "
            f"[{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]{limit}, CPU ×{row['processor_ratio_to_bf16']:.2f}  "
            f"forward {row['forward_s']:.3f} "
            f"backward {row['backward_s']:.3f}  keeps {row['kept_bytes'] / 2**20:.0f} MiB"
        )
    if options.quick:
        return
    facts = {
        "date": now(),
        "machine": machine(("torch", "transformers", "numba")),
        "threads": torch.get_num_threads(),
        "load_average": load_before,
        "sequences": sizes[0],
        "length": sizes[1],
        "turns": sizes[2],
        "limit": LIMIT,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**facts, "recipes": found}, indent=1) + "\n", encoding="utf-8")
    print(f"filed in {RESULTS}")


if __name__ == "__main__":
    main()
