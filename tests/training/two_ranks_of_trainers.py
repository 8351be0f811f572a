"""What each of two processes does for `test_trainers_in_processes.py`, under torchrun: python FILE FOLDER.

Every scenario trains the same tiny model by the loop of another library; what it came to goes to
FOLDER/<scenario>.rank-<rank>.json, and the weights to FOLDER/<scenario>.safetensors.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import safetensors.torch
import torch
import transformers
from training_runs import random_rows
from two_ranks import digest, tiny_model, whole_weights

from bitwright.training.data.batches import Batches
from bitwright.training.integrations.lightning import PolicyPrecision
from bitwright.training.integrations.transformers_trainer import PolicyCallback
from bitwright.training.processes.distributed import start, stop
from bitwright.training.processes.ranks import Ranks
from bitwright.training.run import TrainingRun

STEPS, ACCUMULATE, GLOBAL_BATCH = 4, 2, 4

#: Scenario → (library, policy): of either library one with DDP, and one with what takes its place.
SCENARIOS = {
    "trainer-bf16-mixed": ("trainer", "bf16-mixed"),
    "trainer-bf16-pure-sr": ("trainer", "bf16-pure-sr"),
    "lightning-fp16-mixed": ("lightning", "fp16-mixed"),
    "lightning-bf16-pure-sr": ("lightning", "bf16-pure-sr"),
}
#: The one that goes on from a checkpoint, too.
RESUMED = "trainer-bf16-pure-sr"


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of random ids."""

    def __init__(self) -> None:
        self.rows = random_rows(STEPS * ACCUMULATE * GLOBAL_BATCH)

    def __len__(self) -> int:
        return self.rows.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows.input_ids[index].long(), "labels": self.rows.labels[index].long()}


def by_trainer(policy: str, folder: Path, ranks: Ranks, resume_from: Path | None = None) -> tuple[TrainingRun, Any]:
    """transformers' Trainer: the run, and the losses that it has logged."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // ranks.world_size,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps" if resume_from is None else "no",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    model = tiny_model(0 if resume_from is None else 9)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.remove_callback(transformers.PrinterCallback)
    callback = PolicyCallback(trainer, policy=policy)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    assert callback.run is not None
    return callback.run, [line["loss"] for line in trainer.state.log_history if "loss" in line]


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The model with AdamW; remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)


def by_lightning(policy: str, folder: Path, ranks: Ranks) -> tuple[TrainingRun, Any]:
    """Lightning's Trainer: the run, and the mean losses of its steps."""
    module = Module()
    trainer = lightning.Trainer(
        plugins=[PolicyPrecision(policy)],
        strategy="ddp" if ranks.world_size > 1 else "auto",
        use_distributed_sampler=False,
        accelerator="cpu",
        devices=ranks.world_size,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
    )
    share = GLOBAL_BATCH // ranks.world_size
    batches = Batches(random_rows(), batch=share, rank=ranks.rank, world_size=ranks.world_size)
    data = torch.utils.data.DataLoader(list(itertools.islice(batches, STEPS * ACCUMULATE)), batch_size=None)
    trainer.fit(module, data)
    sums = ranks.sum_of(torch.tensor(module.losses).view(-1, ACCUMULATE).mean(dim=1)) / ranks.world_size
    return trainer.precision_plugin.run, sums.tolist()


LIBRARIES = {"trainer": by_trainer, "lightning": by_lightning}


def run_scenario(name: str, ranks: Ranks, folder: Path) -> None:
    """Train; then go on from what was saved half-way, by the Trainer."""
    library, policy = SCENARIOS[name]
    run, losses = LIBRARIES[library](policy, folder / name, ranks)
    weights = whole_weights(run)
    report: dict[str, Any] = {
        "losses": losses,
        "weights": digest(weights),
        "run": digest(run.state_dict()),
        "wrapped": type(run.model).__name__,
        "counters": [run.counters.updates, run.counters.skipped, run.counters.micro_batches],
    }
    if name == RESUMED:
        again, _ = by_trainer(policy, folder / name, ranks, folder / name / "checkpoint-2")
        report["resumed"] = digest(whole_weights(again))
    (folder / f"{name}.rank-{ranks.rank}.json").write_text(json.dumps(report))
    if ranks.is_first:
        safetensors.torch.save_file(weights, folder / f"{name}.safetensors")


def main() -> None:
    """Run all scenarios, or those that are named."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    ranks, _ = start("cpu")
    for name in sys.argv[2:] or SCENARIOS:
        run_scenario(name, ranks, folder)
    stop()


if __name__ == "__main__":
    main()
