"""What a run is asked for beside its policy, what it counts, and what it expects of others."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bitwright.errors import TrainingError
from bitwright.training.step import StepResult


class Scheduler(Protocol):
    """What moves the learning rate: any of torch's schedulers."""

    def step(self) -> None:
        """One update was made."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there again."""


class Removable(Protocol):
    """Something that was changed about a model, and can be taken back."""

    def remove(self) -> None:
        """Take it back."""


@dataclass(kw_only=True, slots=True)
class RunCounters:
    """Plain counts of a run; they grow."""

    #: Optimizer steps that were due, skipped ones included.
    steps: int = 0
    #: Steps that changed the parameters.
    updates: int = 0
    skipped: int = 0
    #: Skipped steps since the last update.
    skipped_in_a_row: int = 0
    micro_batches: int = 0
    #: Steps whose gradient was clipped.
    clipped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What a run was asked for beside its policy."""

    accumulate: int
    max_grad_norm: float | None
    #: Skipped steps in a row after which the run is over.
    patience: int
    seed: int
    count_swallowed: bool = False
    count_lost: bool = False
    #: Called with each result while its gradients are still there; see `prepare`.
    monitor: Callable[[StepResult], None] | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.accumulate):
            raise TrainingError(
                f"accumulate is {self.accumulate!r}; a step has a whole number of micro-batches: give 1 or more"
            )
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise TrainingError(
                f"max_grad_norm is {self.max_grad_norm!r}; give a positive number, or None to clip nothing"
            )
        if not _is_count(self.patience):
            raise TrainingError(
                f"patience is {self.patience!r}; give the number of skipped steps in a row that end a run"
            )
        if not _is_whole(self.seed) or not 0 <= self.seed < 2**64:
            raise TrainingError(f"seed is {self.seed!r}; give a whole number, 0 to 2^64 - 1")
        for name in ("count_swallowed", "count_lost"):
            if not isinstance(getattr(self, name), bool):
                raise TrainingError(f"{name} is {getattr(self, name)!r}; give True or False")
        if self.monitor is not None and not callable(self.monitor):
            raise TrainingError(f"monitor is {self.monitor!r}; give a function that takes the result of a step")


def raise_if_no_switch(emulate: object) -> None:
    """Raise TrainingError for what says neither whether formats are to be emulated nor that nobody said so."""
    if emulate is not None and not isinstance(emulate, bool):
        raise TrainingError(f"emulate is {emulate!r}; give True, False or None")


def raise_if_no_scheduler(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    """Raise TrainingError for what a run cannot step after each of its updates."""
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
        raise TrainingError(
            f"scheduler is {scheduler!r}; give one of torch.optim.lr_scheduler, made from the optimizer"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TrainingError(
            f"scheduler is a {name}, which asks for a validation loss, and the run steps it after each update; leave "
            "it out, and call its step(loss) yourself after each measurement"
        )
    # a wrapper around an optimizer shows the groups of the one inside
    if getattr(scheduler, "optimizer", optimizer).param_groups is not optimizer.param_groups:
        raise TrainingError(
            f"the scheduler ({name}) moves the learning rate of another optimizer; make it from the one that is passed"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_whole(value) and value >= 1  # type: ignore[operator]


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
