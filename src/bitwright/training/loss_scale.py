"""Loss scaling: a state machine that looks for the largest scale under which gradients do not overflow.

fp16 gradients below 2⁻²⁴ are zero. The loss is therefore multiplied by a scale before it is differentiated, and the
gradients are divided by it afterwards:

    bad step    gradients are not finite: the step is skipped; once the tolerated bad steps are used up,
                scale ← max(scale · backoff, floor)
    good step   after `interval` of them in a row: scale ← scale · growth, if that is finite and within the cap

The scale is an fp32 number, rounded after every change as torch's is, so that trajectories are torch's bit for bit.

What torch lacks is the *floor*. Bad steps that have another cause than the scale (a NaN in the data) halve torch's
scale for ever: after 144 of them 1/scale is Inf, after 166 the scale is 0, and the next good step, whose scaled
gradients are finite, multiplies every weight's gradient by Inf. With a floor of 1 the scale never makes gradients
smaller than they are, and the run goes on with the first good batch.

`hysteresis` bad steps are needed before the scale falls. Libraries differ in when that patience comes back, which is
data here: at growth (DeepSpeed's default and Megatron, whose text says "consecutive" and whose code does not), or with
each good step (DeepSpeed's `consecutive_hysteresis`). They also differ in which good step grows: the one that completes
the interval (torch, Megatron), or the one after it (DeepSpeed: `growth_delay` 1).

Source: torch 2.13, `amp_update_scale_cuda_kernel`; DeepSpeed, `DynamicLossScaler.update_scale`; Megatron-LM,
`DynamicGradScaler.update`; Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, §3.2.
Rejected: a scale per layer, which needs gradients to be rescaled between layers, and bf16 or FP8 with their own scales
do without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bitwright.errors import TrainingError

#: What a step did to the scale.
ChangeKind = Literal["kept", "grew", "tolerated", "backed off", "at floor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleRule:
    """How a scale moves. Checked where it is made."""

    #: The first scale.
    initial: float = 2.0**16
    #: Factor after `interval` good steps in a row.
    growth: float = 2.0
    #: Factor after a bad step.
    backoff: float = 0.5
    #: Good steps in a row before the scale grows.
    interval: int = 2000
    #: The scale never falls below it; 0 is torch, which has none.
    floor: float = 1.0
    #: The scale never grows above it; None: as long as fp32 holds it.
    cap: float | None = None
    #: Bad steps until the scale falls: 1 = at once.
    hysteresis: int = 1
    #: When tolerated bad steps count anew: once the scale grows, or after each good step.
    refilled_by: Literal["growth", "good step"] = "growth"
    #: Good steps beyond `interval` before the first growth after a bad step.
    growth_delay: int = 0
    #: A bad step at the floor ends the run, as in DeepSpeed.
    raises_at_floor: bool = False

    def __post_init__(self) -> None:
        broken = [text for holds, text in self._demands() if not holds]
        if broken:
            raise TrainingError(f"no loss scale can follow this rule: {'; '.join(broken)}")

    def _demands(self) -> list[tuple[bool, str]]:
        cap = math.inf if self.cap is None else self.cap
        return [
            (self.growth >= 1 and math.isfinite(self.growth), f"growth is {self.growth}, give 1 or more"),
            (0 < self.backoff < 1, f"backoff is {self.backoff}, give a number between 0 and 1"),
            (self.interval >= 1, f"interval is {self.interval}, give at least one step"),
            (self.hysteresis >= 1, f"hysteresis is {self.hysteresis}, give at least one step"),
            (self.growth_delay >= 0, f"growth_delay is {self.growth_delay}, give 0 or more"),
            (0 <= self.floor < math.inf, f"floor is {self.floor}, give 0 (none) or more"),
            (
                0 < self.initial < math.inf and self.floor <= self.initial <= cap,
                f"initial is {self.initial}, give a number from the floor {self.floor} to the cap {self.cap}",
            ),
        ]


#: torch.amp.GradScaler as it is by default.
TORCH_RULE = LossScaleRule(floor=0.0)
#: DeepSpeed's fp16 section as it is by default (`loss_scale: 0`, `initial_scale_power: 16`, `hysteresis: 2`).
DEEPSPEED_RULE = LossScaleRule(interval=1000, floor=1.0, hysteresis=2, growth_delay=1, raises_at_floor=True)
#: Megatron-LM as it is by default.
MEGATRON_RULE = LossScaleRule(initial=2.0**32, interval=1000, floor=1.0, hysteresis=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What one step did to the scale."""

    kind: ChangeKind
    before: float
    after: float

    @property
    def reason(self) -> str:
        """In words."""
        match self.kind:
            case "kept":
                return f"the loss scale stays {self.after:g}"
            case "grew":
                return f"the loss scale grew from {self.before:g} to {self.after:g}"
            case "tolerated":
                return f"the loss scale stays {self.after:g}: a bad step is tolerated"
            case "backed off":
                return f"the loss scale fell from {self.before:g} to {self.after:g}"
            case "at floor":
                return f"the loss scale is at its floor, {self.after:g}: what is not finite is so without it"


class LossScaler:
    """A scale and how it came about. One `update` per optimizer step, skipped ones included.

    Args:
        rule: how the scale moves; the default rule unless given.
    """

    def __init__(self, rule: LossScaleRule | None = None) -> None:
        self.rule = rule = LossScaleRule() if rule is None else rule
        #: What the loss is multiplied by; a number of fp32.
        self.scale = _fp32(rule.initial)
        #: Good steps since the last bad one, counted from `growth_delay` on after a growth.
        self.good_steps = 0
        #: Bad steps until the scale falls.
        self.tolerance = rule.hysteresis
        #: Bad steps since the last good one, and in all.
        self.bad_steps_in_a_row = 0
        self.bad_steps = 0

    def update(self, found_nonfinite: bool) -> Change:
        """Take note of one step.

        Args:
            found_nonfinite: the unscaled gradients are not all finite; the step is skipped.

        Raises:
            TrainingError: a bad step at the floor, under a rule that ends the run then.
        """
        before = self.scale
        kind = self._after_bad_step() if found_nonfinite else self._after_good_step()
        return Change(kind=kind, before=before, after=self.scale)

    def _after_bad_step(self) -> ChangeKind:
        rule = self.rule
        self.good_steps = 0
        self.bad_steps += 1
        self.bad_steps_in_a_row += 1
        self.tolerance = max(self.tolerance - 1, 0)
        if self.tolerance:
            return "tolerated"
        if rule.floor and self.scale <= rule.floor:
            if rule.raises_at_floor:
                raise TrainingError(
                    f"gradients are not finite at a loss scale of {self.scale:g}, its floor, after "
                    f"{self.bad_steps_in_a_row} bad steps in a row; look for NaN in the data and for activations that "
                    "overflow, or train with policy='bf16-mixed', which needs no loss scale"
                )
            return "at floor"
        self.scale = _fp32(max(self.scale * rule.backoff, rule.floor))
        return "backed off"

    def _after_good_step(self) -> ChangeKind:
        rule = self.rule
        self.good_steps += 1
        self.bad_steps_in_a_row = 0
        if rule.refilled_by == "good step":
            self.tolerance = rule.hysteresis
        if self.good_steps - rule.growth_delay < rule.interval:
            return "kept"
        self.good_steps = rule.growth_delay
        self.tolerance = rule.hysteresis
        grown = _fp32(self.scale * rule.growth)
        if rule.cap is not None:
            grown = min(grown, _fp32(rule.cap))
        if not math.isfinite(grown) or grown == self.scale:
            return "kept"
        self.scale = grown
        return "grew"

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as plain numbers."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off; one of torch.amp.GradScaler is taken too.

        A scale below this rule's floor, such as torch's 0, is raised to the floor.

        Raises:
            TrainingError: a part is missing.
        """
        if "_growth_tracker" in state:
            state = {
                "scale": float(state["scale"]),
                "good_steps": int(state["_growth_tracker"]),
                "tolerance": self.rule.hysteresis,
                "bad_steps_in_a_row": 0,
                "bad_steps": 0,
            }
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise TrainingError(
                f"the state of a loss scale lacks {', '.join(missing)}; pass what LossScaler.state_dict() gave"
            )
        for name in _STATE:
            setattr(self, name, state[name])
        # a state of torch's may lie where this rule never goes
        self.scale = _fp32(max(self.scale, self.rule.floor))


_STATE = ("scale", "good_steps", "tolerance", "bad_steps_in_a_row", "bad_steps")


def _fp32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))
