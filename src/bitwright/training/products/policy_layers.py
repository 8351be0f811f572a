"""The linear layers of a model that multiply codes under a policy or a plan: each under its recipe, as one thing.

A policy has one recipe, a plan may have several. Each recipe's layers are installed together
(`low_precision_linear.py`); here they are one object to a run: one end of a step, one state, one table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.product_recipe import ProductRecipe
from bitwright.training.products.lost_numbers import LostNumbers
from bitwright.training.products.low_precision_linear import InstalledProducts, ProductRow, install

#: A recipe and its layers: name → role.
Assignment = tuple[ProductRecipe, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLayers:
    """Layers that multiply codes, and those that were left alone."""

    installed: tuple[InstalledProducts, ...]
    #: Name of a linear layer that multiplies in the compute format → why.
    high: Mapping[str, str]

    def table(self) -> tuple[ProductRow, ...]:
        """A row for every linear layer."""
        low = (row for installed in self.installed for row in installed.table())
        left = (
            ProductRow(module=name, role="", kernel="compute dtype", reason=reason)
            for name, reason in self.high.items()
        )
        return (*low, *left)

    def say(self, compute: str) -> tuple[str, ...]:
        """How many layers are multiplied by what, and why, in lines.

        Args:
            compute: format of the products that are left alone.
        """
        low = Counter(row.reason for installed in self.installed for row in installed.table())
        high = Counter(self.high.values())
        return (
            *(f"{_layers(number)} {reason}" for reason, number in low.items()),
            *(f"{_layers(number)} in {compute}: {reason}" for reason, number in high.items()),
        )

    def set_in_step(self, is_in_step: bool) -> None:
        """Say whether what comes is part of a step; see `InstalledProducts`."""
        for installed in self.installed:
            installed.set_in_step(is_in_step)

    def end_step(self) -> None:
        """End an optimizer step, updated or skipped."""
        for installed in self.installed:
            installed.end_step()

    def restart_step(self) -> None:
        """Forget a step that was given up."""
        for installed in self.installed:
            installed.restart_step()

    def counters(self) -> dict[tuple[str, str], LostNumbers]:
        """(layer, operand) → what rounding lost; empty unless counting was asked for."""
        return {key: lost for installed in self.installed for key, lost in installed.counters().items()}

    def remove(self) -> None:
        """Give every layer its own forward back."""
        for installed in self.installed:
            installed.remove()

    def state_dict(self) -> dict[str, Any]:
        """Histories, scales and draws of every recipe."""
        return {str(index): installed.state_dict() for index, installed in enumerate(self.installed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off.

        Raises:
            TrainingError: it is of other recipes or layers.
        """
        if set(state) != {str(index) for index in range(len(self.installed))}:
            raise TrainingError(
                f"the state is of {len(state)} recipes of products, and this run has {len(self.installed)}; resume "
                "with the policy or plan that it was saved with"
            )
        for index, installed in enumerate(self.installed):
            installed.load_state_dict(state[str(index)])


def _layers(number: int) -> str:
    return "1 linear layer" if number == 1 else f"{number} linear layers"


def install_layers(
    model: nn.Module,
    assignments: Sequence[Assignment],
    high: Mapping[str, str],
    *,
    place: torch.device,
    emulate: bool,
    seed: int,
    rank: int,
    reduce_amax: Callable[[Tensor], Tensor] | None,
    counts_lost: bool = False,
) -> PolicyLayers:
    """Let layers multiply codes, each under its recipe; all of them or none.

    Args:
        model: has the layers.
        assignments: every recipe with its layers.
        high: layers that were left alone, and why.
        place, emulate, seed, rank, reduce_amax, counts_lost: as `low_precision_linear.install` takes them.
    """
    done: list[InstalledProducts] = []
    try:
        for recipe, sites in assignments:
            done.append(
                install(
                    model,
                    recipe,
                    sites,
                    device=place,
                    emulate=emulate,
                    seed=seed,
                    rank=rank,
                    reduce_amax=reduce_amax,
                    counts_lost=counts_lost,
                )
            )
    except BaseException:
        for installed in done:
            installed.remove()
        raise
    return PolicyLayers(installed=tuple(done), high=high)
