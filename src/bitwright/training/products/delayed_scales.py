"""The delayed scales of all operands of a model: one history a format, and one column of it an operand.

An operand is scaled by what was seen in earlier steps (`quantize/delayed_scaling.py`); what is seen now is recorded.
All micro-batches of a step are under the same scales, and their largest amax counts: recording is a maximum, so that a
forward pass that is computed again (activation checkpointing) changes nothing. `end_step` moves all histories on, once
an optimizer step.

An operand that was never seen has no scale yet. It is scaled by its own amax then, where Transformer Engine starts with
the scale 1, under which the first gradients (1e-6 and below) all become zeros in E5M2. An inverse scale of NaN says so.

Inf and NaN are kept out of the scales and in the numbers: the codes of such an operand saturate, but its scale is NaN,
so that the product shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import TrainingError
from bitwright.quantize.delayed_scaling import DelayedScaling, current_inv_scale
from bitwright.quantize.operand import Operand, scale_operand
from bitwright.training.product_recipe import Delay, OperandRule

#: What has a history of its own: a format and a delay.
_Kind = tuple[str, Delay]


@dataclass(frozen=True, slots=True)
class Column:
    """Where one operand is recorded."""

    kind: _Kind
    index: int


class DelayedScales:
    """Histories and scales of a model's operands.

    Args:
        operands: name of every operand with a delay → its rule.
        reduce_amax: see `DelayedScaling`; called once a format and step.
        device: where histories are kept.
    """

    def __init__(
        self,
        operands: Mapping[str, OperandRule],
        *,
        reduce_amax: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._names: dict[_Kind, list[str]] = {}
        self._columns: dict[str, Column] = {}
        for name, rule in operands.items():
            assert rule.delay is not None
            kind = (rule.scheme.format, rule.delay)
            names = self._names.setdefault(kind, [])
            self._columns[name] = Column(kind, len(names))
            names.append(name)
        self._states = {kind: _new_state(kind, len(names), reduce_amax, device) for kind, names in self._names.items()}
        #: Whether anything was recorded in this step.
        self._has_recorded = False
        #: False once every operand was seen: whether it was is not asked any more then.
        self._is_open = True

    def quantize(self, name: str, x: Tensor, *, records: bool = True) -> tuple[Operand, Tensor]:
        """Round an operand under the scale that is known, and record its amax.

        Args:
            name: of the operand.
            x: fp32, bf16 or fp16, a matrix.
            records: False for passes that nothing is learned from (evaluation).

        Returns:
            The operand; and max |x|, fp32 0-d.
        """
        column = self._columns[name]
        format_name = column.kind[0]
        inv_scale = self._state(column, x.device).inv_scale[column.index]
        if self._is_open:
            inv_scale = self._or_current(inv_scale, x, format_name)
        operand, amax = scale_operand(x, format_name, inv_scale)
        if records:
            self.record(name, amax)
        return Operand(numbers=operand.numbers, scale=_shown(operand.scale, amax)), amax

    def record(self, name: str, amax: Tensor) -> None:
        """Let the scales of later steps know the largest magnitude of an operand."""
        column = self._columns[name]
        self._has_recorded = True
        self._state(column, amax.device).record(amax, column.index)

    def agree(self, name: str, other: str) -> bool:
        """Whether two operands have the same scale now; False where to know it would take a wait for a GPU."""
        first, second = self.inv_scale(name), self.inv_scale(other)
        return first.device.type == "cpu" and bool((first == second) | (first.isnan() & second.isnan()))

    def inv_scale(self, name: str) -> Tensor:
        """Inverse scale of an operand, fp32 0-d: NaN where it was never seen."""
        column = self._columns[name]
        return self._states[column.kind].inv_scale[column.index]

    def end_step(self) -> None:
        """Find new scales from what was recorded, and move the histories on."""
        for state in self._states.values():
            state.update()
        self._has_recorded = False
        if self._is_open:
            self._is_open = any(bool(state.inv_scale.isnan().any()) for state in self._states.values())

    def restart_step(self) -> None:
        """Forget what was recorded since the last step."""
        if self._has_recorded:
            for state in self._states.values():
                state.restart_step()
        self._has_recorded = False

    def state_dict(self) -> dict[str, Any]:
        """Histories, scales and the names of their columns."""
        return {
            _spell(kind): {"operands": list(names), **self._states[kind].state_dict()}
            for kind, names in self._names.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off.

        Raises:
            TrainingError: it is of other operands, formats or delays.
        """
        here = {_spell(kind): names for kind, names in self._names.items()}
        for spelled in sorted(here.keys() | state.keys()):
            ours, theirs = here.get(spelled, []), list(state.get(spelled, {}).get("operands", []))
            if ours != theirs:
                raise TrainingError(_difference(spelled, ours, theirs))
        for kind in self._names:
            self._states[kind].load_state_dict(state[_spell(kind)])
        self._is_open, self._has_recorded = True, False

    @staticmethod
    def _or_current(inv_scale: Tensor, x: Tensor, format_name: str) -> Tensor:
        """The scale, or, of an operand that was never seen, its own."""
        if inv_scale.device.type == "cpu" and not bool(inv_scale.isnan()):
            return inv_scale
        amax = x.detach().abs().amax().float() if x.numel() else inv_scale.new_zeros(())
        return torch.where(inv_scale.isnan(), current_inv_scale(amax, format_name), inv_scale)

    def _state(self, column: Column, device: torch.device) -> DelayedScaling:
        """The state of a column; all of them follow the model where it was moved."""
        state = self._states[column.kind]
        if state.history.device != device:
            state.history, state.inv_scale = state.history.to(device), state.inv_scale.to(device)
        return state


def _shown(scale: Tensor, amax: Tensor) -> Tensor:
    """The scale, or NaN where amax is Inf or NaN: an Inf that saturated would be hidden."""
    if amax.device.type == "cpu":
        return scale if math.isfinite(amax.item()) else torch.full_like(scale, torch.nan)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def _new_state(
    kind: _Kind, num_operands: int, reduce_amax: Callable[[Tensor], Tensor] | None, device: torch.device | str
) -> DelayedScaling:
    format_name, delay = kind
    state = DelayedScaling(
        format_name,
        num_operands,
        history_length=delay.history,
        amax_choice=delay.amax,
        margin=delay.margin,
        reduce_amax=reduce_amax,
        device=device,
    )
    state.inv_scale.fill_(torch.nan)
    return state


def _spell(kind: _Kind) -> str:
    format_name, delay = kind
    return f"{format_name}, {delay}"


def _difference(spelled: str, ours: Sequence[str], theirs: Sequence[str]) -> str:
    """What an error says of two lists of operands."""
    for names, words in ((set(theirs) - set(ours), "that are not here"), (set(ours) - set(theirs), "that it lacks")):
        if names:
            some = ", ".join(sorted(names)[:3])
            return (
                f"the saved scales under '{spelled}' have {len(names)} operands {words} ({some}); load them into the "
                "model and recipe that they were saved from"
            )
    return f"the saved scales under '{spelled}' have the operands of this model in another order; build the same model"
