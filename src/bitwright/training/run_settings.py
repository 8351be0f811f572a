"""What a run is asked for beside its policy, what it counts, and what it expects of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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
        if self.accumulate < 1:
            raise TrainingError(f"accumulate is {self.accumulate}; a step has at least one micro-batch: give 1 or more")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise TrainingError(
                f"max_grad_norm is {self.max_grad_norm}; give a positive number, or None to clip nothing"
            )
        if self.patience < 1:
            raise TrainingError(
                f"patience is {self.patience}; give the number of skipped steps in a row that end a run"
            )
