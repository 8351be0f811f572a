"""Updates that rounding swallows: a number was to move, and is stored as what it was.

bf16 numbers of [1, 2) are 2⁻⁷ apart, so that 1 + 0.003 is 1. Nothing fails; the weight only never moves. The same
happens to whatever is a small step on a large number:

    weights   p ← p + Δ                    |Δ| below half a step of p, 2⁻⁹ to 2⁻⁸ of it
    decay     p ← p − lr · λ · p           lr · λ below 2⁻⁹: as a step of its own it never happens
    averages  a ← a + (1 − β)(p − a)       β = 0.999 moves a by a thousandth of the difference
    moments   v ← v + (1 − β₂)(g² − v)     with β₂ = 0.999 a large v never decays: 0.001 < 2⁻⁹

Counted is what was to move in the arithmetic at hand, and of it what is stored as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Swallowed:
    """How many numbers were to move, and how many of them did not."""

    due: int = 0
    lost: int = 0

    @property
    def share(self) -> float:
        """Lost of those that were due; 0 where none was."""
        return self.lost / self.due if self.due else 0.0

    def __add__(self, other: Swallowed) -> Swallowed:
        return Swallowed(due=self.due + other.due, lost=self.lost + other.lost)


@torch.no_grad()
def count_swallowed(before: Tensor, exact: Tensor, after: Tensor) -> Swallowed:
    """Count elements that were to move and did not.

    Args:
        before: as stored, any float dtype.
        exact: what it was to become, before rounding; wider, same shape.
        after: what it has become, in the dtype of `before`.
    """
    due = before.to(exact.dtype) != exact
    return Swallowed(due=int(due.sum()), lost=int((due & (before == after)).sum()))


@torch.no_grad()
def count_swallowed_average(averages: Iterable[Tensor], values: Iterable[Tensor], decay: float) -> Swallowed:
    """Count what one step of an exponential average would lose, stored in its dtype and rounded to nearest.

        a ← a + (1 − decay) · (value − a)

    Args:
        averages: a, of weights (an EMA) or of squared gradients (a second moment).
        values: what is averaged, of the same shapes.
        decay: β.
    """
    total = Swallowed()
    for average, value in zip(averages, values, strict=True):
        exact = torch.lerp(average.double(), value.double(), 1 - decay)
        total += count_swallowed(average, exact, exact.to(average.dtype))
    return total


@torch.no_grad()
def count_swallowed_decay(parameter: Tensor, factor: float) -> Swallowed:
    """Count what a decay by itself, p ← p − factor · p, would lose in the parameter's dtype, rounded to nearest.

    Args:
        parameter: any float dtype.
        factor: learning rate times weight decay.
    """
    exact = parameter.double() * (1 - factor)
    return count_swallowed(parameter, exact, exact.to(parameter.dtype))
