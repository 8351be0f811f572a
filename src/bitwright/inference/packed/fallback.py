"""Tokens whose inputs overflow: computed again in the model's own dtype, before anything is lost.

Under a static scale, or in fp16, an input may lie beyond the format. That is counted before the cast
(`quantize/static_scales.py`), so before the product: a token is a row of inputs, and

    no row overflows                     all of them are rounded and multiplied
    up to `max_fallbacks_per_batch`      those rows are multiplied unrounded instead, in the model's own dtype
    more                                 the whole batch is, once

Codes of the weights are the same either way. A second pass over the weights for a few rows costs as much as a pass for
all of them where memory is the limit, so that a matrix which overflows often is faster in the wide format alone.
`Hysteresis` decides that: it holds a matrix wide when `enter` of its last `window` calls overflowed, and lets go after
`leave` calls in a row without. Between two switches to wide lie at least `leave` calls, so nothing flaps.

How often may a call overflow before rounding inputs stops to pay? With t the times of a call,

    (1 − f) · t_narrow + f · (t_narrow + t_few) = t_wide        f* = (t_wide − t_narrow) / t_few

`measure_break_even` measures the three and gives f*.

A GPU would have to wait for the host to look at a count. Where a decode loop says so (`OverflowWatch.late`), a call
only marks that something overflowed; the loop reads the mark one step late and runs that step again, wide
(`generation/generate.py`).
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.inference.counters import FallbackCounts
from bitwright.inference.overflow_watch import OverflowWatch

if TYPE_CHECKING:
    from bitwright.inference.packed.weight import PackedWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackSettings:
    """How much falls back, and when.

    Raises:
        SchemeError: counts that are not positive, or more calls to enter than the window has.
    """

    #: Rows of one call that are computed again by themselves; more send all rows of it to the wide format.
    max_fallbacks_per_batch: int = 3
    #: Calls that are remembered.
    window: int = 16
    #: So many of them with an overflow, and the matrix stays wide.
    enter: int = 8
    #: So many calls in a row without one, and it is rounded again.
    leave: int = 16

    def __post_init__(self) -> None:
        if self.max_fallbacks_per_batch < 0 or self.enter < 1 or self.leave < 1 or self.window < self.enter:
            raise SchemeError(
                f"fallback settings {self.max_fallbacks_per_batch}, enter {self.enter} of {self.window}, leave "
                f"{self.leave} contradict each other; give at least 0 fallbacks, 1 ≤ enter ≤ window and leave ≥ 1"
            )


#: What `apply` does unless it is told.
DEFAULT_FALLBACK = FallbackSettings()


class Action(enum.Enum):
    """What happens to a call."""

    NARROW = "rounded"
    TOKENS = "some rows again"
    WIDE = "all rows wide"


@dataclass(kw_only=True, slots=True)
class Hysteresis:
    """Whether a matrix is held wide: a state machine over calls."""

    settings: FallbackSettings
    is_wide: bool = False
    num_calm: int = 0
    recent: deque[bool] = field(default_factory=deque)

    def step(self, overflowed: bool) -> bool:
        """Take in one call; return whether the next one is held wide."""
        if self.is_wide:
            self.num_calm = 0 if overflowed else self.num_calm + 1
            if self.num_calm >= self.settings.leave:
                self.is_wide = False
                self.recent.clear()
            return self.is_wide
        self.recent.append(overflowed)
        if len(self.recent) > self.settings.window:
            self.recent.popleft()
        if sum(self.recent) >= self.settings.enter:
            self.is_wide, self.num_calm = True, 0
        return self.is_wide


@dataclass(kw_only=True, slots=True, eq=False)
class Fallback:
    """Decides call by call for one matrix, and counts."""

    settings: FallbackSettings
    watch: OverflowWatch
    counts: FallbackCounts
    hysteresis: Hysteresis

    def decide(self, beyond_MK: Tensor, overflowed_M: Tensor) -> Action:
        """What happens to the rows of a call.

        Args:
            beyond_MK: which inputs overflow, bool.
            overflowed_M: in which rows any does.
        """
        if self.watch.late and not self.watch.wide:
            self.watch.mark(overflowed_M)
            return Action.NARROW
        if self.watch.wide:
            self.counts.add(calls=1, tokens=overflowed_M.shape[0], held_calls=1)
            return Action.WIDE
        num_overflowed = _count(overflowed_M)
        was_wide = self.hysteresis.is_wide
        is_wide = self.hysteresis.step(num_overflowed > 0)
        action = self._action(num_overflowed, was_wide)
        self.counts.add(
            calls=1,
            tokens=overflowed_M.shape[0],
            overflows=_count(beyond_MK) if num_overflowed else 0,
            overflowed_tokens=num_overflowed,
            token_fallbacks=num_overflowed if action is Action.TOKENS else 0,
            batch_fallbacks=int(action is Action.WIDE and not was_wide),
            held_calls=int(was_wide),
            switches=int(is_wide != was_wide),
        )
        return action

    def _action(self, num_overflowed: int, was_wide: bool) -> Action:
        if was_wide or num_overflowed > self.settings.max_fallbacks_per_batch:
            return Action.WIDE
        return Action.TOKENS if num_overflowed else Action.NARROW


def places_of(flags_M: Tensor) -> Tensor:
    """Where flags are set, int64."""
    if flags_M.device.type == "cpu":  # memory that the host has already
        return torch.from_numpy(np.flatnonzero(flags_M.numpy()))
    return flags_M.nonzero().squeeze(-1)


def _count(flags: Tensor) -> int:
    return int(flags.numpy().sum()) if flags.device.type == "cpu" else int(flags.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Medians of interleaved measurements of one matrix, and the rate that follows."""

    #: Tokens of a call.
    num_tokens: int
    #: All rows rounded; all rows wide; the few rows that fall back.
    narrow_s: float
    wide_s: float
    few_s: float

    @property
    def rate(self) -> float:
        """Share of calls with an overflow at which rounding inputs stops to pay, 0 … 1; 0: it never pays."""
        return min(1.0, max(0.0, (self.wide_s - self.narrow_s) / self.few_s))


def measure_break_even(weight: PackedWeight, num_tokens: int, *, repeats: int = 9, seed: int = 0) -> BreakEven:
    """Time a matrix that rounds its inputs, with and without the rounding.

    Args:
        weight: of a model that runs under a plan.
        num_tokens: rows of a call.
        repeats: calls of each kind, one after the other in turn.
        seed: of the inputs.

    Raises:
        SchemeError: it does not round its inputs.
    """
    inputs = weight.inputs
    if inputs is None or inputs.activations is None:
        raise SchemeError("this matrix does not round its inputs, so nothing falls back; measure one that does")
    device = next(weight.buffers()).device
    generator = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(num_tokens, weight.shape[1], generator=generator).to(device)
    few = min(num_tokens, 3 if weight.fallback is None else max(1, weight.fallback.settings.max_fallbacks_per_batch))
    calls: dict[str, Callable[[], Tensor]] = {
        "narrow": lambda: weight.narrow(inputs.change(x_MK)),
        "wide": lambda: weight.wide(inputs.change(x_MK)),
        "few": lambda: weight.wide(inputs.change(x_MK[:few])),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            seconds[name].append(_seconds(call, device))
    medians = {name: median(found[1:]) for name, found in seconds.items()}
    return BreakEven(num_tokens=num_tokens, narrow_s=medians["narrow"], wide_s=medians["wide"], few_s=medians["few"])


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    started_s = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started_s
