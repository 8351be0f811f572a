"""Fine-tuning a causal language model on text, from one configuration to a trained model.

    check       names of optimizer, schedule and policy; the folder of the run
    set up      the model (fp32, or with adapters), rows of its text, optimizer, the run under its policy
    resume      the newest checkpoint, where the run is gone on with
    step        draw `accumulate` batches; forward and backward; one update, or the reason why not
    now and     measure the loss on validation text; save
    then
    end         measure, save, and write the model

The same function runs alone and on every process of torchrun. Of many, the first writes the metrics, and all write
checkpoints (`checkpoints/`). What is printed is somebody else's business (`training_progress.py`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from bitwright.training.data.loss_weights import loss_weights
from bitwright.training.fine_tuning.config import TrainConfig
from bitwright.training.fine_tuning.metrics_file import MetricsFile
from bitwright.training.fine_tuning.run_folder import RunFolder, find_run_folder, open_run_folder
from bitwright.training.fine_tuning.schedules import raise_if_unknown_schedule
from bitwright.training.fine_tuning.train_setup import Prepared, set_up
from bitwright.training.fine_tuning.trained_model import save_trained_model
from bitwright.training.fine_tuning.training_progress import Unwatched, Watcher
from bitwright.training.fine_tuning.training_summary import TrainingSummary
from bitwright.training.fine_tuning.validation import ValidationLoss, measure_validation_loss
from bitwright.training.forward.forward_region import forward_region
from bitwright.training.optimizer.optimizers import raise_if_unusable_optimizer
from bitwright.training.processes.distributed import joined
from bitwright.training.processes.ranks import Ranks
from bitwright.training.run import TrainingRun


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    watcher: Watcher | None = None,
) -> TrainingSummary:
    """Run a configuration to its end.

    Args:
        config: what is asked (`config.py`).
        resume: go on with the run in `config.out`; where none is there, begin it.
        checkpoint: go on from this checkpoint of that run, not from its newest; later ones are deleted.
        watcher: is told how far it is; of many processes, on the first.

    Raises:
        UnknownName, TrainingError, ModelError, DataError, MissingExtra, …: what is asked cannot be done; before any
            step wherever that can be known. Steps that are skipped for ever end a run too; its checkpoints stand.
    """
    raise_if_unusable_optimizer(config.optimizer.name, config.optimizer.options)
    raise_if_unknown_schedule(config.schedule.kind)
    with joined(config.device) as (ranks, device):
        folder = _open_folder(config, ranks, resume=resume, checkpoint=None if checkpoint is None else Path(checkpoint))
        try:
            job = _Job(
                config=config,
                folder=folder,
                ranks=ranks,
                device=device,
                prepared=set_up(config, ranks, device),
                watcher=watcher if watcher is not None and ranks.is_first else Unwatched(),
            )
            return job.run_to_the_end()
        except BaseException:
            if ranks.is_first:
                folder.drop_if_unused()
            raise


def _open_folder(config: TrainConfig, ranks: Ranks, *, resume: bool, checkpoint: Path | None) -> RunFolder:
    """The first process looks and makes, and the others are told."""
    opened: RunFolder | None = None
    failure: TrainingError | None = None
    if ranks.is_first:
        try:
            opened = open_run_folder(config.out, config.decisive, resume=resume, checkpoint=checkpoint)
        except TrainingError as error:
            failure = error
    answer, failure = ranks.gather((None if opened is None else opened.resume_from, failure))[0]
    if failure is not None:
        raise failure
    return find_run_folder(config.out, answer)


@dataclass(kw_only=True)
class _Job:
    config: TrainConfig
    folder: RunFolder
    ranks: Ranks
    device: torch.device
    prepared: Prepared
    watcher: Watcher
    step: int = 0
    tokens: int = 0
    metrics: MetricsFile | None = None
    validation: ValidationLoss | None = None
    recent: list[float] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def run(self) -> TrainingRun:
        return self.prepared.run

    def run_to_the_end(self) -> TrainingSummary:
        config = self.config
        self._resume()
        if self.ranks.is_first:
            self.metrics = MetricsFile(self.folder.metrics, after_step=self.step)
        self.watcher.began(self._facts())
        began_s = time.perf_counter()
        saved_at = self.step if self.folder.checkpoint(self.step).is_dir() else -1
        while self.step < config.steps:
            self._take_step()
            if _is_due(self.step, config.evaluation.every_steps) and self.step < config.steps:
                self._measure()
            if _is_due(self.step, config.checkpoint.every_steps):
                saved_at = self._save()
        seconds = time.perf_counter() - began_s
        self._measure()
        if saved_at != self.step:
            self._save()
        model = save_trained_model(self.run.model, self.prepared.tokenizer, self.folder.model, self.ranks)
        return TrainingSummary(
            steps=self.step,
            skipped=self.run.counters.skipped,
            policy=self.run.policy.name,
            reason=self.run.reason,
            loss=math.fsum(self.recent) / len(self.recent) if self.recent else math.nan,
            validation=self.validation,
            tokens=self.tokens,
            seconds=seconds,
            model=model,
            checkpoint=self.folder.checkpoint(self.step),
            notes=self.notes,
        )

    def _resume(self) -> None:
        self.notes = (*self.prepared.notes, *self.run.notes)
        if self.folder.resume_from is None:
            return
        resumed = load_checkpoint(
            self.folder.resume_from,
            self.run,
            data=self.prepared.batches,
            exchange=self.prepared.exchange,
            ranks=self.ranks,
            allow_other_world_size=self.config.allow_other_world_size,
        )
        self.step = resumed.step
        self.recent = [float(loss) for loss in resumed.extra["recent"]]
        self.notes = (*self.notes, *resumed.notes)
        dropped = self.folder.drop_checkpoints_after(self.step) if self.ranks.is_first else ()
        if dropped:
            self.notes = (
                *self.notes,
                f"gone on after step {self.step}, so later checkpoints went: {', '.join(dropped)}",
            )

    def _facts(self) -> dict[str, Any]:
        trained = [parameter for parameter in self.run.model.parameters() if parameter.requires_grad]
        return {
            "policy": self.run.policy.name,
            "level": self.run.policy.level,
            "reason": self.run.reason,
            "device": str(self.device),
            "processes": self.ranks.world_size,
            "steps": self.config.steps,
            "first_step": self.step,
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "rows": self.prepared.batches.rows.num_rows,
            "validation_rows": 0 if self.prepared.validation is None else self.prepared.validation.num_rows,
            "notes": self.notes,
        }

    def _take_step(self) -> None:
        run, began_s, rate = self.run, time.perf_counter(), self.prepared.learning_rate
        batches = [next(self.prepared.batches) for _ in range(self.config.accumulate)]
        weights = loss_weights(batches, self.ranks, self.device)
        with run.step() as step:
            for batch, weight in zip(batches, weights, strict=True):
                loss = run.model(**{name: value.to(self.device) for name, value in batch.items()}, use_cache=False).loss
                step.backward(loss if weight == 1.0 else loss * weight)
        assert step.result is not None
        result = step.result
        mean = self.ranks.sum_of(torch.tensor(result.loss, dtype=torch.float64, device=self.device))
        loss_of_all = float(mean) / self.ranks.world_size
        num_tokens = sum(batch["input_ids"].numel() for batch in batches) * self.ranks.world_size
        seconds = time.perf_counter() - began_s
        self.step += 1
        self.tokens += num_tokens
        if result.skipped is None:
            self.recent = [*self.recent[-9:], loss_of_all]
        self._tell(
            self.watcher.stepped,
            {
                "kind": "step",
                "step": self.step,
                "loss": loss_of_all,
                "grad_norm": result.grad_norm,
                "lr": rate,
                "skipped": result.skipped,
                "scale": result.scale,
                "level": result.level,
                "epoch": self.prepared.batches.epoch,
                "tokens_per_s": num_tokens / seconds,
            },
        )

    def _measure(self) -> None:
        rows = self.prepared.validation
        if rows is None:
            return
        run = self.run
        found = measure_validation_loss(
            run.model,
            rows,
            batch=self.config.evaluation.batch or self.config.batch,
            device=self.device,
            forward=lambda: forward_region(run.policy.compute, run.device_type, emulates=run.emulates),
            ranks=self.ranks,
        )
        self.validation = found
        self._tell(
            self.watcher.measured,
            {
                "kind": "validation",
                "step": self.step,
                "loss": found.loss,
                "error": found.error,
                "tokens": found.num_tokens,
            },
        )

    def _save(self) -> int:
        place = save_checkpoint(
            self.folder.checkpoint(self.step),
            self.run,
            step=self.step,
            data=self.prepared.batches,
            exchange=self.prepared.exchange,
            extra={"recent": self.recent},
            ranks=self.ranks,
        )
        if self.ranks.is_first:
            self.folder.drop_old_checkpoints(self.config.checkpoint.keep)
        self.watcher.saved(place, self.step)
        return self.step

    def _tell(self, listener: Any, record: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.add(record)
        listener(record)


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
