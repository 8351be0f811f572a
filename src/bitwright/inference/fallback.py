"""Tokens that overflow: computed again in the model's own dtype, before anything is lost.

Under a static scale, or in fp16, a number may lie beyond the format. That is counted before the cast
(`quantize/static_scales.py`), so before the product: a token is a row of inputs, and

    no row overflows                     all of them are rounded and multiplied
    up to `max_fallbacks_per_batch`      those rows are multiplied unrounded instead, in the model's own dtype
    more                                 the whole batch is, once
    overflows come often                 the whole batch is, until they stop (`hysteresis.py`)

Codes of the weights are the same either way. Values that are rounded on their way (operands of attention, what a
cache keeps, norms, …) follow the same rule token by token: what overflows goes on as it is (`rescue`).

A GPU would have to wait for the host to look at a count. Where a decode loop says so (`OverflowWatch.late`), a call
only marks its counts, and the loop hears of them one step late: they are counted then, and the hysteresis takes its
step. Where something was saturated that should not have been, the loop runs the step again, exactly
(`generation/generate.py`): `rescued` is the rule as the device follows it. Where rounded and unrounded are both at
hand, the device follows it at once, and nothing is run again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bitwright.inference.counters import FallbackCounts
from bitwright.inference.hysteresis import DEFAULT_FALLBACK, FallbackSettings, Hysteresis
from bitwright.inference.overflow_watch import Mark, OverflowWatch


class Action(enum.Enum):
    """What happens to a call."""

    NARROW = "rounded"
    TOKENS = "some rows again"
    WIDE = "all rows wide"
    BOTH = "rounded and wide, and the device chooses"


@dataclass(kw_only=True, slots=True, eq=False)
class Fallback:
    """Decides call by call for one matrix, or one kind of value, and counts."""

    #: None: what overflows saturates, and is only counted.
    settings: FallbackSettings | None
    watch: OverflowWatch
    counts: FallbackCounts
    hysteresis: Hysteresis

    @staticmethod
    def new(settings: FallbackSettings | None, watch: OverflowWatch, counts: FallbackCounts) -> Fallback:
        """One that has seen nothing yet."""
        hysteresis = Hysteresis(settings=settings or DEFAULT_FALLBACK)
        return Fallback(settings=settings, watch=watch, counts=counts, hysteresis=hysteresis)

    def rescue(self, x: Tensor, beyond: Tensor, overflowed: Tensor, rounded: Callable[[], Tensor]) -> Tensor:
        """Numbers after rounding, but those of tokens that fall back, which stay as they are.

        Args:
            x: of any shape.
            beyond: which of them overflow, bool in that shape.
            overflowed: in which tokens any does, in a shape that spreads over x.
            rounded: gives x after rounding.
        """
        match self.decide(beyond, overflowed.flatten(), has_both=True):
            case Action.NARROW:
                return rounded()
            case Action.WIDE:
                return x
            case Action.TOKENS:
                return torch.where(overflowed, x, rounded())
            case Action.BOTH:
                return torch.where(self.rescued(overflowed), x, rounded())

    def decide(self, beyond_MK: Tensor, overflowed_M: Tensor, *, has_both: bool = False) -> Action:
        """What happens to the rows of a call.

        Args:
            beyond_MK: which inputs overflow, bool.
            overflowed_M: in which rows any does.
            has_both: the device chooses in any case, since that costs nothing.
        """
        saturates = self.settings is None
        is_held, num_tokens = self.hysteresis.is_wide and not saturates, overflowed_M.shape[0]
        if self.watch.late:
            self.watch.marks.append(
                Mark(
                    counts=torch.stack((overflowed_M.sum(), beyond_MK.sum())),
                    hear=partial(self._hear, is_held, num_tokens),
                    saturates=not (is_held or has_both or saturates),
                )
            )
            if is_held or saturates:
                return Action.WIDE if is_held else Action.NARROW
            return Action.BOTH if self.watch.exact or has_both else Action.NARROW
        num_overflowed = _count(overflowed_M)
        self._hear(is_held, num_tokens, num_overflowed, _count(beyond_MK) if num_overflowed else 0)
        return self._action(is_held, num_overflowed)

    def rescued(self, overflowed_M: Tensor) -> Tensor:
        """Which rows are multiplied unrounded, bool in any shape: found where they are, for `Action.BOTH`."""
        assert self.settings is not None
        return overflowed_M | (overflowed_M.sum() > self.settings.max_fallbacks_per_batch)

    def _hear(self, is_held: bool, num_tokens: int, num_overflowed: int, num_overflows: int) -> None:
        """Count a call, and let the hysteresis take its step."""
        was_wide = is_wide = self.hysteresis.is_wide
        if self.settings is not None:
            is_wide = self.hysteresis.step(num_overflowed > 0)
        action = self._action(is_held, num_overflowed)
        self.counts.add(
            calls=1,
            tokens=num_tokens,
            overflows=num_overflows,
            overflowed_tokens=num_overflowed,
            token_fallbacks=num_overflowed if action is Action.TOKENS else 0,
            batch_fallbacks=int(action is Action.WIDE and not is_held),
            held_calls=int(is_held),
            switches=int(is_wide != was_wide),
        )

    def _action(self, is_held: bool, num_overflowed: int) -> Action:
        if self.settings is None:
            return Action.NARROW
        if is_held or num_overflowed > self.settings.max_fallbacks_per_batch:
            return Action.WIDE
        return Action.TOKENS if num_overflowed else Action.NARROW


def places_of(flags_M: Tensor) -> Tensor:
    """Where flags are set, int64."""
    if flags_M.device.type == "cpu":  # memory that the host has already
        return torch.from_numpy(np.flatnonzero(flags_M.numpy()))
    return flags_M.nonzero().squeeze(-1)


def _count(flags: Tensor) -> int:
    return int(flags.numpy().sum()) if flags.device.type == "cpu" else int(flags.sum())
