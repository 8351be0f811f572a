"""What overflowed, told to a loop that may not wait for the device.

Where `late` is set nobody looks at a count when it is taken: it stays on the device as a `Mark`, and the loop brings
the counts of a whole step to the host with the step's token. An overflow that was saturated meanwhile makes the loop
run that step again, with `exact`: rounded and unrounded are both computed then, and the device chooses between them,
token by token, by the rule that a host would have followed (`fallback.py`).

Steps that have to be run again often are exact at once, as `steps` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitwright.inference.hysteresis import DEFAULT_FALLBACK, Hysteresis


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mark:
    """One call of which the host has not heard."""

    #: Tokens that overflowed, and numbers of them that did: int64 [2] on the device.
    counts: Tensor
    #: Counts the call: told the two numbers.
    hear: Callable[[int, int], None]
    #: Whether what overflowed was saturated unless the step was exact.
    saturates: bool


@dataclass(kw_only=True, slots=True, eq=False)
class OverflowWatch:
    """What all that rounds in one model shares, for loops that may not wait for the device."""

    #: Only mark overflows: whoever sets it takes the marks.
    late: bool = False
    #: Rounded and unrounded are both computed, and the device chooses.
    exact: bool = False
    #: Whether steps are exact at once.
    steps: Hysteresis = field(default_factory=lambda: Hysteresis(settings=DEFAULT_FALLBACK))
    marks: list[Mark] = field(default_factory=list)

    def take(self) -> tuple[Mark, ...]:
        """The marks since they were taken, and forget them."""
        taken, self.marks = tuple(self.marks), []
        return taken


def counts_of(marks: Sequence[Mark]) -> Tensor | None:
    """All counts of some marks, int64 [2 · marks] on the device; None of none."""
    return torch.cat([mark.counts for mark in marks]) if marks else None
