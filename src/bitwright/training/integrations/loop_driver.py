"""A run whose loop belongs to somebody else: forward here, backward there, the update when they say so.

    with driver.forward(): loss = …          as often as a step has micro-batches
    driver.backward(loss, is_last=…)
    driver.settle()                          after the last one: unscale, check, clip
    driver.finish()                          update or skip

The library divides the loss by its number of micro-batches itself (some count tokens, and the last step of an epoch may
have fewer), so what it hands over are shares of a step's loss, which are only added up here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from bitwright.training.forward.forward_region import forward_region, step_region
from bitwright.training.gradients import GradientCheck
from bitwright.training.processes.replicated import Replicated
from bitwright.training.run import TrainingRun
from bitwright.training.step import Step, StepResult


class LoopDriver:
    """Lets a library's loop drive a run.

    Args:
        run: prepared with `accumulate=1`.
    """

    def __init__(self, run: TrainingRun) -> None:
        assert run.accumulate == 1
        self.run = run
        self._step: Step | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The region of a forward pass, of training (with gradients) or evaluation (without)."""
        run, policy = self.run, self.run.policy
        region = forward_region(
            policy.compute, run.device_type, emulates=run.emulates, casts_once=policy.uses == "compute"
        )
        with self._in_step(), region:
            yield

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add up the gradients of one micro-batch.

        Args:
            loss: divided by the number of micro-batches already.
            is_last: whether the update comes next.
        """
        if isinstance(self.run.model, Replicated):  # libraries know DDP's switch only
            self.run.model.exchanges = is_last
        if is_last:
            self._step = self.run.step()
            self._step.__enter__()
            self._step.backward(loss)
            return
        run = self.run
        with self._in_step(), step_region(run.policy.compute, run.device_type, emulates=run.emulates):
            run._add_share(loss)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A part of a step that the run knows of once its last micro-batch is there."""
        self.run._set_in_step(True)
        try:
            yield
        finally:
            self.run._set_in_step(self._step is not None)

    def settle(self) -> GradientCheck | None:
        """Unscale, check and clip the gradients of the step that `backward` completed; None: there was none."""
        return None if self._step is None else self._step.settle()

    def finish(self) -> StepResult | None:
        """End the step that `backward` completed; None: there was none."""
        step, self._step = self._step, None
        if step is None:  # of a step's last micro-batch there is no loss: its others are not a step
            self.run._drop()
            return None
        step.__exit__(None, None, None)
        return step.result
