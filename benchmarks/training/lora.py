"""Adapters against full fine-tuning: what a step takes in memory and time, and what is learned.

    python benchmarks/training/lora.py

SmolLM2-135M on the interpreter's documentation, the same batches for all:

    full       every parameter is trained, under bf16-mixed (fp32 masters) and bf16-pure-sr (bf16, stochastic rounding)
    adapters   rank 16 on every linear layer, the rest frozen in fp32, bf16, FP8 codes or int4 codes in groups of 128;
               adapters in fp32 under bf16-mixed, or in bf16 under bf16-pure-sr

Memory is counted, storage by storage: what the model and the optimizer hold, and the peak of what a step allocates
beside that. `predicted` is the same from shapes alone (`bitwright memory`), without a context. Times are CPU seconds of
all threads, the median of the steps, each variant in a process of its own. Validation is the loss of held-out text
before and after, in the arithmetic that was trained in.

Results go to benchmarks/results/training-lora.json. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from live_bytes import LiveBytes
from points import Points, arguments_of
from small_runs import Setup, _text, batches, build
from torch import Tensor, nn

from bitwright.hardware.memory.training import training_memory
from bitwright.models.shape import model_shape
from bitwright.training.lora import add_lora
from bitwright.training.policy import policy_named
from bitwright.training.policy_bits import activation_setup, adapter_bits, adapters_on, state_bits, update_scratch
from bitwright.training.prepare import prepare

SETUP = Setup(model="smollm2", steps=60, batch=2, length=256, learning_rate=2e-4, validation=32)
RANK = 16
#: Full fine-tuning moves every weight, and wants a smaller step.
FULL_LEARNING_RATE = 5e-5
#: Name → (policy, fields of `LoraSettings`, or None for full fine-tuning).
VARIANTS: Mapping[str, tuple[str, dict[str, Any] | None]] = {
    "full, bf16-mixed": ("bf16-mixed", None),
    "full, bf16-pure-sr": ("bf16-pure-sr", None),
    "adapters on fp32": ("bf16-mixed", {"base": "fp32"}),
    "adapters on bf16": ("bf16-mixed", {"base": "bf16"}),
    "adapters on bf16, in bf16": ("bf16-pure-sr", {"base": "bf16", "adapters": "bf16"}),
    "adapters on fp8_w": ("bf16-mixed", {"base": "fp8_w"}),
    "adapters on int4_g128": ("bf16-mixed", {"base": "int4_g128"}),
}


def measure(name: str, setup: Setup) -> dict[str, Any]:
    """One variant."""
    policy, lora = VARIANTS[name]
    model = build(setup, 0)
    shape = model_shape(model, name=setup.model)
    if lora is not None:
        model = add_lora(model, rank=RANK, **lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = setup.learning_rate if lora is not None else FULL_LEARNING_RATE
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    run = prepare(model, optimizer, policy=policy, max_grad_norm=1.0, emulate=True)
    before = loss_of(model, setup, policy)
    seconds, peak, held = [], 0, 0
    for number, ids in enumerate(batches(setup, 0)):
        counted = LiveBytes() if number == 2 else None  # moments and caches are there
        begin = time.process_time()
        if counted is None:
            step_of(run, model, ids)
        else:
            held = held_bytes(model, optimizer)
            with counted:
                step_of(run, model, ids)
            peak = counted.peak
        if number > 2:
            seconds.append(time.process_time() - begin)
    return {
        "trained": sum(parameter.numel() for parameter in trained),
        "held_bytes": held,
        "peak_bytes": held + peak,
        "predicted_peak_bytes": predicted(shape, policy, lora, setup),
        "step_cpu_s": statistics.median(seconds),
        "loss_before": before,
        "loss_after": loss_of(model, setup, policy),
        "skipped": run.counters.skipped,
    }


def step_of(run: Any, model: nn.Module, ids: Tensor) -> None:
    """One step of training."""
    with run.step() as step:
        step.backward(model(input_ids=ids, labels=ids).loss)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what stays from step to step, each storage once."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *states]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def predicted(shape: Any, policy_name: str, lora: dict[str, Any] | None, setup: Setup) -> int:
    """The peak from shapes alone."""
    policy = policy_named(policy_name)
    states, adapters = state_bits(policy), None
    changes: dict[str, Any] = {"is_kv_repeated": True}
    if lora is not None:
        states, adapters = adapter_bits(policy), adapters_on(lora["base"], RANK, policy)
        changes |= {"stream_bits": adapters.other_bits, "casts_each_input": True}
    activations = activation_setup(policy, batch=setup.batch, sequence=setup.length, **changes)
    scratch, elements = update_scratch(policy)
    found = training_memory(
        shape,
        states,
        activations,
        adapters=adapters,
        update_bits=scratch,
        update_elements=elements,
        kind="cpu",
    )
    return found.peak


@torch.no_grad()
def loss_of(model: nn.Module, setup: Setup, policy: str) -> float:
    """Mean loss of held-out text."""
    _, held_out = _text(setup.model)
    rows = held_out[: len(held_out) // setup.length * setup.length].view(-1, setup.length)
    rows = rows[torch.linspace(0, len(rows) - 1, min(setup.validation, len(rows))).long()]
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(input_ids=part, labels=part).loss.item() for part in rows.split(8)]
    model.train()
    return statistics.fmean(losses)


def in_a_process(name: str, setup: Setup) -> dict[str, Any]:
    """The same in a fresh process."""
    asked = json.dumps([name, dataclasses.asdict(setup)])
    done = subprocess.run([sys.executable, __file__, "--one", asked], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Command line."""
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--one", help=argparse.SUPPRESS)
    known, rest = one.parse_known_args()
    if known.one:
        name, fields = json.loads(known.one)
        print(json.dumps(measure(name, Setup(**{**fields, "outlier_steps": ()}))))
        return
    sys.argv[1:] = rest
    arguments = arguments_of(__doc__)
    setup = dataclasses.replace(SETUP, steps=5, length=32, validation=4) if arguments.quick else SETUP
    settings = {"setup": dataclasses.asdict(setup), "rank": RANK, "full_learning_rate": FULL_LEARNING_RATE}
    points = Points("lora", "adapters against full fine-tuning", settings, arguments)
    if not arguments.plot:
        for name in VARIANTS:
            points.measure(name, lambda name=name: in_a_process(name, setup))
    full = points.points.get("full, bf16-mixed")
    table = [
        {
            "variant": name,
            **{field: value for field, value in point.items() if field not in ("date", "load_average_before")},
            "memory_over_full": point["peak_bytes"] / full["peak_bytes"] if full else None,
            "time_over_full": point["step_cpu_s"] / full["step_cpu_s"] if full else None,
        }
        for name, point in points.points.items()
    ]
    points.write(table=table)
    for row in table:
        print(row)


if __name__ == "__main__":
    main()
