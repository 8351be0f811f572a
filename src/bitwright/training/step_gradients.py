"""The gradients of one optimizer step: micro-batches are added up; then unscaled, checked and clipped, once.

    add      loss / micro-batches · scale is differentiated; its gradients are added to those that are there
    settle   divide by the scale, in fp32; are all finite, after the division? if so, clip
    drop     forget all of it

The loss of a step is the mean of its micro-batches'. A loop of somebody else divides losses itself (some by tokens, and
the last step of an epoch may have fewer micro-batches): what it hands over are *shares* of a step's loss, and their sum
is that loss.

Where many processes share the model, they agree on skipping: one rank's NaN is everybody's. The one wait for the device
in a step is for the gradients' norm, which says whether to skip; losses come with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.training import gradients
from bitwright.training.custody import Custody, raise_if_gradients_are_gone, raise_if_nothing_to_update
from bitwright.training.gradients import GradientCheck, Reduction
from bitwright.training.parameter_watch import ParameterWatch
from bitwright.training.processes.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A complete step, its gradients unscaled, checked and clipped."""

    #: What the loss was multiplied by.
    scale: float | None
    check: GradientCheck
    #: Of the whole step.
    loss: float
    #: Why the step may not be taken.
    skipped: str | None
    is_clipped: bool


class StepGradients:
    """What the micro-batches of a step have come to so far.

    Args:
        watch: knows the parameters that the optimizer holds.
        custody: is told that there are gradients.
        ranks: all that train together.
        accumulate: micro-batches that make a step.
        max_grad_norm: gradients are clipped to this length; None: never.
    """

    def __init__(
        self, watch: ParameterWatch, custody: Custody, ranks: Ranks, *, accumulate: int, max_grad_norm: float | None
    ) -> None:
        self._watch = watch
        self._custody = custody
        self._ranks = ranks
        self._accumulate = accumulate
        self._max_grad_norm = max_grad_norm
        self._reduction = Reduction(sum=ranks.sum_of, max=ranks.max) if watch.is_sharded else None
        #: Losses of micro-batches.
        self._losses: list[Tensor] = []
        #: What a loop of somebody else has handed over before.
        self._shares: list[Tensor] = []
        self._settled: Settled | None = None

    @property
    def pending(self) -> int:
        """Micro-batches whose gradients are there, and wait for others of their step."""
        return len(self._losses)

    @property
    def waiting(self) -> int:
        """The same, and shares of a step that somebody else's loop has not ended."""
        return len(self._losses) + len(self._shares)

    def add(self, loss: Tensor, scale: float | None) -> None:
        """Add up the gradients of one micro-batch, whose loss is the mean over it."""
        if self.pending and not self._watch.is_sharded:  # FSDP keeps those of a micro-batch elsewhere
            raise_if_gradients_are_gone(self._watch.held, self.pending, self._accumulate)
        self._differentiate(loss, scale)
        self._losses.append(loss.detach())

    def add_share(self, loss: Tensor, scale: float | None) -> None:
        """Add up the gradients of one micro-batch, whose loss was divided already."""
        self._differentiate(loss, scale)
        self._shares.append(loss.detach())

    def settle(self, scale: float | None) -> Settled:
        """Unscale, check and clip, once in a step."""
        if self._settled is not None:
            return self._settled
        self._watch.raise_if_regrouped()
        named = self._watch.held
        check = gradients.unscale_and_check(named, scale or 1.0, reduction=self._reduction)
        raise_if_nothing_to_update(check, len(self._losses))
        losses = torch.stack([loss.reshape(()) for loss in (*self._shares, *self._losses)]).tolist()
        skipped = self._why_skip(check, losses)
        factor = 1.0
        if skipped is None and self._max_grad_norm is not None:
            factor = gradients.clip(named, self._max_grad_norm, check)
        self._settled = Settled(
            scale=scale,
            check=check,
            loss=_sum(losses) / self._accumulate,
            skipped=skipped,
            is_clipped=factor < 1.0,
        )
        return self._settled

    def drop(self) -> None:
        """Forget what was added, and the gradients of parameters that the optimizer does not hold."""
        self._losses.clear()
        self._shares.clear()
        self._settled = None
        self._custody.has_gradients = False
        self._watch.drop_others()

    def _differentiate(self, loss: Tensor, scale: float | None) -> None:
        self._custody.expect_gradients(self._watch.held[0][1])
        loss = _as_fp32(loss)
        if self._accumulate > 1:
            loss = loss / self._accumulate
        if scale is not None:
            loss = loss * scale
        torch.autograd.backward(loss)

    def _why_skip(self, check: GradientCheck, losses: list[float]) -> str | None:
        """Why the step may not be taken: the loss of a micro-batch that is not finite, else the gradients."""
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if self._ranks.any(bad is not None, self._watch.held[0][1].device):
            if bad is None:
                return "a loss on another rank is not finite"
            return f"the loss of micro-batch {bad + 1} of {len(losses)} is {losses[bad]}"
        return check.reason


def _sum(losses: list[float]) -> float:
    """Exactly, and NaN of Inf and −Inf."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)


def _as_fp32(loss: Tensor) -> Tensor:
    """The loss in fp32 at least, so that dividing and scaling round nothing."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
