"""transformers' Trainer under a policy: one callback.

    trainer = Trainer(model=model, args=arguments, train_dataset=rows)      # bf16=False, fp16=False: the policy says
    trainer.add_callback(PolicyCallback(trainer, policy="bf16-mixed"))
    trainer.train()

The Trainer keeps its loop, its data, its schedule, its checkpoints. The callback stands where accelerate's mixed
precision would: the context of `compute_loss`, `accelerator.backward`, `accelerator.clip_grad_norm_`, and the
optimizer's step. The norm that the Trainer logs is that of the unscaled gradient before clipping. A skipped step does
not move the learning rate, as with accelerate's own scaler.

    Trainer                                     here
    max_grad_norm, gradient_accumulation_steps  as they are
    save, resume_from_checkpoint                `bitwright.*` beside the Trainer's files: loss scale, histories of amax,
                                                random bits; resumed bit for bit
    log                                         `skipped_steps`, and `loss_scale` under policies that have one
    DistributedDataParallel                     as it is; in its place `Replicated` under policies that train bf16
                                                parameters, whose gradients DDP would round to bf16 on their way

Rejected: a subclass of Trainer, which none of the trainers that people derive from it would inherit from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from bitwright.errors import TrainingError
from bitwright.training.asked_policy import GivenPolicy
from bitwright.training.checkpoints.run_state import load_run_state, save_run_state
from bitwright.training.held_parameters import cast_parameters
from bitwright.training.integrations.loop_driver import LoopDriver
from bitwright.training.optimizer.moment_store import load_exactly
from bitwright.training.prepare import find_policy, prepare
from bitwright.training.processes.distributed import spread
from bitwright.training.processes.ranks import Ranks
from bitwright.training.run import TrainingRun

#: Stem of the files beside the Trainer's own in a checkpoint.
STATE_NAME = "bitwright"


class PolicyCallback(TrainerCallback):  # type: ignore[misc]
    """Makes a Trainer train under a policy. Add it before `train`.

    Args:
        trainer: of transformers, or of a class derived from it; with neither `bf16` nor `fp16` set.
        policy: as `prepare` takes it.
        resume_from: checkpoint of the Trainer whose `bitwright` state is loaded, where it does not lie in the Trainer's
            own `output_dir`.
        options: further arguments of `prepare` (`device`, `emulate`, `patience`).

    Raises:
        TrainingError: the Trainer has a mixed precision of its own, or spreads the model in a way that policies do not
            know; or what `prepare` raises, when training begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        policy: GivenPolicy = "auto",
        resume_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        _raise_if_has_its_own(trainer)
        self.trainer = trainer
        #: The run, once training has begun.
        self.run: TrainingRun | None = None
        self._resume_from = resume_from
        self._wanted = policy
        self._options = options
        # before the optimizer is made, and before the model is spread over ranks
        found = find_policy(policy, trainer.args.device).policy
        cast_parameters(trainer.model, found)
        if found.parameters != "fp32":
            _spread_by_replicated(trainer.accelerator)
        create = trainer.create_optimizer

        def create_and_load_exactly(*arguments: Any, **keywords: Any) -> Any:
            optimizer = create(*arguments, **keywords)
            if not getattr(optimizer, "_is_accelerate_prepared", False):  # that of an earlier `train`
                load_exactly(optimizer)
            return optimizer

        trainer.create_optimizer = create_and_load_exactly

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prepare the run, and take the Trainer's place where precision is decided."""
        trainer = self.trainer
        if state is not trainer.state:
            raise TrainingError(
                "the PolicyCallback was made for another Trainer than the one that it was added to, which would train "
                "in its own precision; make one for each: trainer.add_callback(PolicyCallback(trainer, …))"
            )
        optimizer = trainer.optimizer.optimizer
        optimizer = optimizer.plain if isinstance(optimizer, _Stepped) else optimizer
        if self.run is not None:  # trained before
            self.run.close()
        self.run = run = prepare(
            trainer.model_wrapped,
            optimizer,
            policy=self._wanted,
            max_grad_norm=args.max_grad_norm or None,
            seed=args.seed,
            **self._options,
        )
        if state.global_step:
            place = Path(self._resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
            load_run_state(place, STATE_NAME, run)
        _Wiring(trainer, LoopDriver(run)).connect()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the run's state beside what the Trainer has saved."""
        assert self.run is not None
        if Ranks.of_process_group().is_first:
            save_run_state(Path(args.output_dir) / f"checkpoint-{state.global_step}", STATE_NAME, self.run)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add what a policy counts, for callbacks that come later and in the Trainer's history."""
        if self.run is None or logs is None:
            return
        counted: dict[str, Any] = {"skipped_steps": self.run.counters.skipped}
        if self.run.scale is not None:
            counted["loss_scale"] = self.run.scale
        logs.update(counted)
        state.log_history[-1].update(counted)


def _spread_by_replicated(accelerator: Any) -> None:
    """Let accelerate place a model as before, and leave to `spread` how its gradients are averaged."""
    place = accelerator.prepare_model

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        placed = place(model, device_placement=device_placement, evaluation_mode=True)
        return placed if evaluation_mode else spread(placed, "ddp", Ranks.of_process_group())

    accelerator.prepare_model = prepare_model


class _Stepped:
    """The Trainer's optimizer, but for its step, which is the end of the run's."""

    def __init__(self, optimizer: torch.optim.Optimizer, finish: Callable[[], None]) -> None:
        self.plain = optimizer
        self._finish = finish

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def step(self, closure: Any = None) -> None:
        """Update or skip."""
        self._finish()


class _Wiring:
    """What stands in the Trainer's and accelerate's places."""

    def __init__(self, trainer: Trainer, driver: LoopDriver) -> None:
        self.trainer = trainer
        self.driver = driver

    def connect(self) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        trainer.compute_loss_context_manager = self.forward
        accelerator.backward = self.backward
        accelerator.clip_grad_norm_ = self.settle
        trainer.optimizer.optimizer = _Stepped(self.driver.run.optimizer, self.finish)

    def forward(self) -> AbstractContextManager[object]:
        return self.driver.forward()

    def backward(self, loss: Tensor, **_: Any) -> None:
        self.driver.backward(loss, is_last=self.trainer.accelerator.sync_gradients)

    def settle(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Unscale, check and clip; the norm before clipping, NaN where it is not finite."""
        check = self.driver.settle()
        return torch.tensor(torch.nan if check is None or check.norm is None else check.norm)

    def finish(self) -> None:
        """Update or skip, and let accelerate know."""
        result = self.driver.finish()
        self.trainer.optimizer._is_overflow = result is not None and result.skipped is not None


def _raise_if_has_its_own(trainer: Trainer) -> None:
    if not isinstance(trainer, Trainer):
        raise TrainingError(f"trainer is {trainer!r}; give the transformers.Trainer that the callback is added to")
    precision = trainer.accelerator.mixed_precision
    if precision not in ("no", None):
        raise TrainingError(
            f"the Trainer has mixed precision '{precision}' of its own, and two of them round twice; leave bf16 and "
            "fp16 out of its arguments: the policy decides"
        )
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        if getattr(trainer, name, False):
            engine = name.removeprefix("is_").removesuffix("_enabled")
            raise TrainingError(
                f"the Trainer spreads the model with {engine}, which keeps gradients and masters of its own; leave it "
                'out, or train with bitwright.training (parallel = "fsdp2")'
            )
