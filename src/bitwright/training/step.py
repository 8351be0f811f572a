"""One optimizer step: some micro-batches forward and backward, then one update or a reason why not.

    with run.step() as step:
        for batch in micro_batches:
            step.backward(model(**batch).loss)
    step.result

Between `backward` calls the code inside runs under the policy; `backward` leaves that region, differentiates the loss
(divided by the number of micro-batches, multiplied by the loss scale), and enters it again if more micro-batches are
due. When all are there the block's end checks, clips and updates (`run.py`). A block with fewer only adds them up, so a
loop may as well open one block per micro-batch; `result` is then None in all but every n-th.

A block that is left by an exception takes no step, and drops the gradients it has. A step is entered once.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from bitwright.errors import TrainingError
from bitwright.training.forward.forward_region import autocast_region, step_region

if TYPE_CHECKING:
    from bitwright.training.gradients import GradientCheck
    from bitwright.training.run import TrainingRun


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What became of one optimizer step."""

    #: Mean of the losses of its micro-batches on this rank; weighted by their tokens where the loop does so.
    loss: float
    #: Length of the gradient before clipping; None where it is not finite.
    grad_norm: float | None
    #: Why nothing was updated; None where something was.
    skipped: str | None
    #: What the loss was multiplied by in this step; None under policies without a loss scale.
    scale: float | None
    #: What most products were computed in: "bf16", "fp8_e4m3/fp8_e5m2".
    level: str
    #: Steps before this one, skipped ones included.
    index: int


class Step:
    """The block of one step; made by `TrainingRun.step`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._whole = ExitStack()
        self._forward: ExitStack | None = None
        self._num_backwards = 0
        self._was_entered = self._is_open = False
        #: None until the block has ended, and if it only added up gradients.
        self.result: StepResult | None = None

    def __enter__(self) -> Self:
        run = self._run
        if self._was_entered:
            raise TrainingError("a step was entered again, and its block takes one step; call run.step() for the next")
        run._open(self)
        self._was_entered = self._is_open = True
        self._whole.enter_context(step_region(run.policy.compute, run.device_type, emulates=run.emulates))
        self._enter_forward()
        return self

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss of one micro-batch, and add its gradients to those of the others.

        Args:
            loss: one number, the mean over the micro-batch; of any floating dtype.

        Raises:
            TrainingError: no differentiable number, one micro-batch more than a step has, or no block around the call.
        """
        run = self._run
        self._raise_if_outside("backward")
        _raise_if_no_loss(loss)
        if self._forward is None:
            raise TrainingError(
                f"backward was called {self._num_backwards + 1} times in a step that has its "
                f"{run.accumulate} micro-batches; pass accumulate={run.accumulate + 1} to prepare, or open a new step"
            )
        self._leave_forward()
        run._add(loss)
        self._num_backwards += 1
        if not run.is_complete:
            self._enter_forward()

    def settle(self) -> GradientCheck:
        """Unscale, check and clip the gradients now, not at the block's end; for who looks at them before the update.

        Returns:
            Their length before clipping, and why the step will be skipped, as far as gradients say.

        Raises:
            TrainingError: some of the step's micro-batches are not there yet, or there is no block around the call.
        """
        self._raise_if_outside("settle")
        if not self._run.is_complete:
            raise TrainingError(
                f"{self._run.pending} of {self._run.accumulate} micro-batches are done; settle a step after its last "
                "backward pass"
            )
        return self._run._settle().check

    def _raise_if_outside(self, method: str) -> None:
        if not self._is_open:
            raise TrainingError(
                f"{method} was called outside its block; call step.{method} inside `with run.step() as step:`"
            )

    def _enter_forward(self) -> None:
        run = self._run
        run._announce_micro_batch()
        self._forward = ExitStack()
        casts_once = run.policy.uses == "compute"
        self._forward.enter_context(autocast_region(run.policy.compute, run.device_type, casts_once=casts_once))

    def _leave_forward(self) -> None:
        if self._forward is not None:
            forward, self._forward = self._forward, None
            forward.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave_forward()
        self._whole.close()
        self._is_open = False
        run = self._run
        try:
            if kind is not None:
                run._drop()
            elif self._num_backwards == 0:
                raise TrainingError(
                    "a step ended without a backward pass; call step.backward(loss) inside the block, not "
                    "loss.backward()"
                )
            elif run.is_complete:
                self.result = run._finish()
        except BaseException:
            run._drop()
            raise
        finally:
            run._close()


def _raise_if_no_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TrainingError(
            f"backward was given {type(loss).__name__}, not the loss; a model without labels gives none: pass labels, "
            "and step.backward(model(**batch).loss)"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise TrainingError(
            f"the loss has shape {list(loss.shape)} and dtype {loss.dtype}; a step needs one number: take its mean"
        )
    if not loss.requires_grad:
        raise TrainingError(
            "the loss does not depend on anything that is trained; is the forward pass inside torch.no_grad(), or "
            "every parameter frozen?"
        )
