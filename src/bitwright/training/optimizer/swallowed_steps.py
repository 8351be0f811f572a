"""What the steps of an optimizer lost to rounding, counted batch by batch (`stand_ins.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitwright.training.optimizer.moment_store import COMPENSATION
from bitwright.training.optimizer.pieces import Piece
from bitwright.training.optimizer.swallowed import Swallowed, count_swallowed_decay


class BatchBefore:
    """What a batch was before its step, where swallowed updates are counted."""

    def __init__(self, batch: list[Piece], stand_ins: list[Tensor], optimizer: Any) -> None:
        self._batch, self._optimizer = batch, optimizer
        self._wide = [stand_in.clone().reshape(-1) for stand_in in stand_ins]
        self._stored = [piece.stored.clone() for piece in batch]
        self._compensation = [self._compensation_of(piece) for piece in batch]
        self.decay = sum(
            (_decay_of(piece.stored, optimizer.param_groups[piece.group]) for piece in batch), start=Swallowed()
        )

    def _compensation_of(self, piece: Piece) -> Tensor:
        kept = self._optimizer.state.get(piece.parameter, {}).get(COMPENSATION)
        return torch.zeros_like(piece.stored) if kept is None else piece.part_of(kept).clone()

    def weights(self, exact: Mapping[int, Tensor]) -> Swallowed:
        """Count, once the step is stored.

        Args:
            exact: the stand-ins after the step, before they were rounded, by `id` of their piece.
        """
        total = Swallowed()
        for piece, wide, stored, compensation in zip(
            self._batch, self._wide, self._stored, self._compensation, strict=True
        ):
            due = exact[id(piece)] != wide if piece.is_narrow else piece.gradient().reshape(-1) != 0
            is_kept = (piece.stored == stored) & (self._compensation_of(piece) == compensation)
            total += Swallowed(due=int(due.sum()), lost=int((due & is_kept).sum()))
        return total


def count_decay(groups: list[dict[str, Any]]) -> Swallowed:
    """Count what decays by themselves would lose, over all parameters that have a gradient."""
    return sum(
        (_decay_of(p.detach(), group) for group in groups for p in group["params"] if p.grad is not None),
        start=Swallowed(),
    )


def _decay_of(parameter: Tensor, group: Mapping[str, Any]) -> Swallowed:
    factor = float(group.get("lr", 0.0)) * float(group.get("weight_decay", 0.0) or 0.0)
    return count_swallowed_decay(parameter, factor) if factor else Swallowed()
