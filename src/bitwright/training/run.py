"""A model and its optimizer under a policy: what happens between the last backward pass of a step and the next step.

    settle       gradients are unscaled, checked and clipped (`step_gradients.py`); if they are not finite, there is no
                 update, and the result says why
    update       the optimizer, by the policy's update rule; then the scheduler
    scale        the loss scale moves, skipped step or not; delayed scales of products roll on

So a skipped step leaves parameters, moments, counters of the optimizer and the learning rate as they were. A run that
has skipped `patience` steps in a row is over: it looks alive and learns nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.custody import Custody
from bitwright.training.describe import describe_run
from bitwright.training.forward.named_islands import NamedIsland
from bitwright.training.loss_scale import LossScaler
from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.swallowed import Swallowed
from bitwright.training.parameter_watch import ParameterWatch
from bitwright.training.policy import Policy
from bitwright.training.processes.ranks import Ranks
from bitwright.training.products.policy_layers import PolicyLayers
from bitwright.training.run_settings import Removable, RunCounters, RunSettings, Scheduler
from bitwright.training.step import Step, StepResult
from bitwright.training.step_gradients import Settled, StepGradients

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingRun:
    """A model under a policy; made by `prepare`. `step` is all that a loop needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    policy: Policy
    #: Why it is this policy.
    reason: str
    #: What was decided on the way here, in sentences.
    notes: tuple[str, ...]
    settings: RunSettings
    scheduler: Scheduler | None
    device_type: str
    #: Whether fp32 operands of products are rounded to the policy's compute format, since the device does not.
    emulates: bool
    ranks: Ranks
    #: Its hold on both.
    custody: Custody
    #: Steps the optimizer, and stores what it gives.
    update: Update
    #: Linear layers that multiply codes; None without them.
    products: PolicyLayers | None
    #: Modules that run in fp32 by what they are.
    islands: tuple[NamedIsland, ...]
    #: What `close` takes back.
    changes: tuple[Removable, ...]
    counters: RunCounters = field(default_factory=RunCounters)
    #: Result of the last step that was due.
    last: StepResult | None = None
    scaler: LossScaler | None = None
    _step: Step | None = None

    def __post_init__(self) -> None:
        if self.policy.loss_scale is not None:
            self.scaler = LossScaler(self.policy.loss_scale)
        self._set_in_step(False)
        self._watch = ParameterWatch(
            self.model, self.optimizer, stored=self.policy.parameters, world_size=self.ranks.world_size
        )
        self._gradients = StepGradients(
            self._watch,
            self.custody,
            self.ranks,
            accumulate=self.accumulate,
            max_grad_norm=self.settings.max_grad_norm,
        )

    # --- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Return the block of one optimizer step, or of a part of one."""
        return Step(self)

    @property
    def accumulate(self) -> int:
        """Micro-batches that make a step."""
        return self.settings.accumulate

    @property
    def pending(self) -> int:
        """Micro-batches whose gradients are there, and wait for others of their step."""
        return self._gradients.pending

    @property
    def is_complete(self) -> bool:
        """Whether all micro-batches of a step have been differentiated."""
        return self.pending >= self.accumulate

    @property
    def scale(self) -> float | None:
        """What the next loss is multiplied by; None under policies without a loss scale."""
        return None if self.scaler is None else self.scaler.scale

    def _open(self, step: Step) -> None:
        if not self.custody.is_open:
            raise TrainingError("the run is closed; a step needs a run of its own: prepare the model again")
        if self._step is not None:
            raise TrainingError("a step was opened inside another one; end the first block before the second begins")
        self._watch.raise_if_changed(self.counters.steps)
        self._step = step
        self._set_in_step(True)

    def _close(self) -> None:
        self._step = None
        self._set_in_step(False)

    def _set_in_step(self, is_in_step: bool) -> None:
        """Products learn from what is computed inside a step."""
        if self.products is not None:
            self.products.set_in_step(is_in_step)

    def _announce_micro_batch(self) -> None:
        """Before a forward pass: only the last micro-batch of a step exchanges gradients between ranks."""
        if self.ranks.world_size > 1 and self.accumulate > 1:
            from bitwright.training.processes.distributed import exchange_gradients

            exchange_gradients(self.model, self.pending + 1 >= self.accumulate)

    def _add(self, loss: Tensor) -> None:
        self._gradients.add(loss, self.scale)
        self.counters.micro_batches += 1

    def _add_share(self, loss: Tensor) -> None:
        self._gradients.add_share(loss, self.scale)
        self.counters.micro_batches += 1

    def _drop(self) -> None:
        """Forget the gradients that are there."""
        if self.products is not None:
            self.products.restart_step()
        self._gradients.drop()
        self.optimizer.zero_grad(set_to_none=True)

    # --- the end of a step ------------------------------------------------------------------------------------------

    def _settle(self) -> Settled:
        """Unscale, check and clip, once in a step."""
        return self._gradients.settle(self.scale)

    def _finish(self) -> StepResult:
        settled = self._settle()
        if settled.skipped is None:
            with self.custody.updating():
                self.update.step()
            if self.scheduler is not None:
                self.scheduler.step()
        result = StepResult(
            loss=settled.loss,
            grad_norm=settled.check.norm,
            skipped=self._scaled(settled.skipped),
            scale=settled.scale,
            level=self.policy.level,
            index=self.counters.steps,
        )
        self.last = result
        self._count(result)
        self.counters.clipped += settled.is_clipped
        self.custody.has_gradients = False
        if self.settings.monitor is not None:
            self.settings.monitor(result)
        self._drop()
        self._raise_if_hopeless()
        return result

    def _scaled(self, skipped: str | None) -> str | None:
        """Let scales take note of the step; returns why it was skipped, and what that did to the loss scale."""
        if self.products is not None:
            self.products.end_step()
        if self.scaler is None:
            return skipped
        change = self.scaler.update(skipped is not None)
        return None if skipped is None else f"{skipped}; {change.reason}"

    def _count(self, result: StepResult) -> None:
        counters = self.counters
        counters.steps += 1
        if result.skipped is None:
            counters.updates += 1
            counters.skipped_in_a_row = 0
            return
        counters.skipped += 1
        counters.skipped_in_a_row += 1
        _LOG.warning("step %d was skipped: %s", result.index, result.skipped)

    def _raise_if_hopeless(self) -> None:
        in_a_row = self.counters.skipped_in_a_row
        if in_a_row >= self.settings.patience and self.last is not None:
            raise TrainingError(
                f"{in_a_row} steps in a row were skipped, so nothing is learned; the last one because "
                f"{self.last.skipped}; look at the data of that step, or lower the learning rate and go on from the "
                "last checkpoint"
            )

    # --- what it is, and what is kept of it -------------------------------------------------------------------------

    def describe(self) -> str:
        """Return what runs where, and why, as lines of text."""
        return "\n".join(describe_run(self))

    @property
    def swallowed(self) -> dict[str, Swallowed]:
        """Updates, decay and moments that rounding swallowed so far; empty unless `prepare` was asked to count."""
        return self.update.swallowed

    def close(self) -> None:
        """Give the model its own forward passes back; parameters keep their values and their dtype.

        Gradients of a step that was not finished are dropped, and a warning says so.
        """
        waiting = self._gradients.waiting
        if waiting:
            _LOG.warning(
                "the run was closed with %s of an unfinished step: their gradients are dropped, and changed no weight; "
                "a step needs accumulate=%d, so fill up an uneven last one, or leave it out",
                f"{waiting} micro-batch{'' if waiting == 1 else 'es'}",
                self.accumulate,
            )
            self._drop()
        self.update.close()
        for change in self.changes:
            change.remove()
        self.changes = ()

    def raise_if_not_between_steps(self, doing: str) -> None:
        """Raise TrainingError where a checkpoint has no sense: while a step is open, and once the run is closed.

        Args:
            doing: "saved" or "loaded".
        """
        if not self.custody.is_open:
            saves = doing == "saved"
            raise TrainingError(
                f"the run is closed, and a checkpoint cannot be {doing} {'from' if saves else 'into'} it; "
                f"{'save before run.close()' if saves else 'prepare the model again'}"
            )
        if self._step is not None:
            raise TrainingError(f"a checkpoint cannot be {doing} inside a step; do it after the block of run.step()")

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on beside model and optimizer.

        Raises:
            TrainingError: some micro-batches of a step are done and others are not.
        """
        if self.pending:
            raise TrainingError(
                f"{self.pending} of {self.accumulate} micro-batches of a step are done, and their gradients are part "
                "of no checkpoint; save when run.pending is 0"
            )
        return {"counters": asdict(self.counters), **{name: part.state_dict() for name, part in self._parts()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off.

        Raises:
            TrainingError: a part is missing, or one is there that this policy has not. Nothing has changed then.
        """
        parts = dict(self._parts())
        differing = sorted({*parts, "counters"} ^ set(state))
        if differing:
            raise TrainingError(
                f"the state is of another policy or run: {', '.join(differing)} is on one side only; prepare the run "
                "with the policy and the scheduler that it was saved with"
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.counters = RunCounters(**state["counters"])
        self._drop()

    def _parts(self) -> Iterator[tuple[str, Any]]:
        named = {
            "loss_scale": self.scaler,
            "products": self.products,
            "update": self.update,
            "scheduler": self.scheduler,
        }
        return ((name, part) for name, part in named.items() if part is not None)
