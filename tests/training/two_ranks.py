"""What each of two processes does for `test_distributed.py`, under torchrun: python two_ranks.py FOLDER.

Every scenario trains the same tiny model; losses, norms, reasons, scales and a digest of what a rank holds go to
FOLDER/<scenario>.rank-<rank>.json, whole weights to FOLDER/<scenario>.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from training_runs import random_rows

from bitwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from bitwright.training.checkpoints.state_tree import split_state
from bitwright.training.data.batches import Batches
from bitwright.training.fine_tuning.config import read_config
from bitwright.training.fine_tuning.trainer import train
from bitwright.training.held_parameters import cast_parameters
from bitwright.training.policy import policy_named
from bitwright.training.prepare import prepare
from bitwright.training.processes.distributed import spread, start, stop
from bitwright.training.processes.ranks import Ranks, unwrapped
from bitwright.training.run import TrainingRun

STEPS, ACCUMULATE, GLOBAL_BATCH, SPOILED = 4, 2, 4, 2

#: Scenario → (policy, way to spread).
SCENARIOS = {
    f"{parallel}-{policy}": (policy, parallel)
    for parallel in ("ddp", "fsdp2")
    for policy in ("fp32", "bf16-mixed", "fp16-mixed", "fp8-hybrid", "bf16-pure-sr")
}


def tiny_model(seed: int = 0) -> Any:
    """A llama of two layers, drawn anew by its seed."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def new_run(policy: str, parallel: str, ranks: Ranks, seed: int = 0) -> TrainingRun:
    """A run of a model that is spread over all ranks."""
    model = tiny_model(seed)
    cast_parameters(model, policy_named(policy))
    model = spread(model, parallel, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return prepare(model, optimizer, policy=policy, accumulate=ACCUMULATE, max_grad_norm=0.5)


def new_batches(ranks: Ranks) -> Batches:
    """This rank's share of batches of four rows."""
    batch = GLOBAL_BATCH // ranks.world_size
    return Batches(random_rows(), batch=batch, rank=ranks.rank, world_size=ranks.world_size)


def take_steps(run: TrainingRun, batches: Batches, ranks: Ranks, steps: range) -> list[dict[str, Any]]:
    """What every step came to; in step SPOILED the last rank's loss is Inf."""
    found = []
    for number in steps:
        with run.step() as step:
            for _ in range(ACCUMULATE):
                loss = run.model(**next(batches)).loss
                spoil = number == SPOILED and ranks.rank == ranks.world_size - 1
                step.backward(loss * torch.inf if spoil else loss)
        result = step.result
        mean = float(ranks.sum_of(torch.tensor(result.loss))) / ranks.world_size
        found.append(
            {
                "loss": mean,
                "norm": result.grad_norm,
                "skipped": result.skipped,
                "scale": run.scale,
                "level": result.level,
            }
        )
    return found


def whole_weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    """All parameters, put together where they lie in pieces."""
    state = unwrapped(run.model).state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).contiguous().clone()
        for name, value in state.items()
    }


def digest(*states: Any) -> str:
    """Of all bits of some states."""
    found = hashlib.sha256()
    for state in states:
        tree, tensors = split_state(state)
        found.update(json.dumps(tree, sort_keys=True).encode())
        for name in sorted(tensors):
            found.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_scenario(name: str, ranks: Ranks, folder: Path) -> None:
    """Train, save in the middle, go on; then go on from what was saved."""
    policy, parallel = SCENARIOS[name]
    run, batches = new_run(policy, parallel, ranks), new_batches(ranks)
    steps = take_steps(run, batches, ranks, range(3))
    save_checkpoint(folder / f"{name}-saved", run, step=3, data=batches)
    steps += take_steps(run, batches, ranks, range(3, STEPS))
    final = digest(run.model.state_dict(), run.optimizer.state_dict(), run.state_dict())
    weights = whole_weights(run)
    again, data = new_run(policy, parallel, ranks, seed=9), new_batches(ranks)
    load_checkpoint(folder / f"{name}-saved", again, data=data)
    take_steps(again, data, ranks, range(3, STEPS))
    resumed = digest(again.model.state_dict(), again.optimizer.state_dict(), again.state_dict())
    report = {
        "steps": steps,
        "weights": digest(weights),
        "run": digest(run.state_dict()),
        "final": final,
        "resumed": resumed,
        "counters": [run.counters.updates, run.counters.skipped],
    }
    (folder / f"{name}.rank-{ranks.rank}.json").write_text(json.dumps(report))
    if ranks.is_first:
        safetensors.torch.save_file(weights, folder / f"{name}.safetensors")


def main() -> None:
    """Run all scenarios, or those that are named; then FOLDER/*.toml."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    ranks, _ = start("cpu")
    for name in sys.argv[2:] or SCENARIOS:
        run_scenario(name, ranks, folder)
    for file in sorted(folder.glob("*.toml")):
        train(read_config(file))
    stop()


if __name__ == "__main__":
    main()
