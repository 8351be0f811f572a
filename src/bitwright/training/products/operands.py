"""The operands of a model's layers, written by their rules: rotated, scaled now or by what was seen, rounded.

A layer asks for an operand by its name in the recipe ("forward_x", …) and hands over the matrix [rows, what is summed
over]. Which of the six are written at all follows from the recipe: "dgrad_w" under the rule of "forward_w" is the same
codes seen from the other side, where scales allow it, and so are the two of gradients and of inputs.

What is drawn depends on the run's seed, the step, layer and operand, the rank, and how many backward passes of the step
the layer has done: a forward pass that is computed again for its backward pass draws what it drew before.

Legend: R rows, S what is summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bitwright.quantize.granularity import spread
from bitwright.quantize.operand import Operand
from bitwright.quantize.quantize import quantize
from bitwright.training.optimizer.draws import Draws
from bitwright.training.product_recipe import OperandRule, ProductRecipe
from bitwright.training.products.delayed_scales import DelayedScales
from bitwright.training.products.lost_numbers import LostNumbers, count_lost
from bitwright.training.products.rotation import rotate

#: Operands that may be others seen from the other side.
_SEEN_BEFORE = {"dgrad_w": "forward_w", "wgrad_g": "dgrad_g", "wgrad_x": "forward_x"}


class Products(Protocol):
    """What writes codes and multiplies them: emulated, or native to a GPU. Operands are its own records."""

    @property
    def name(self) -> str:
        """As tables call it."""
        ...

    def operand(self, x_RS: Tensor, rule: OperandRule, seed: int | None) -> Any:
        """Codes of a matrix whose scales are found on it."""
        ...

    def scaled(self, found: Operand, rule: OperandRule) -> Any:
        """Codes under a scale that was known."""
        ...

    def transposed(self, operand: Any) -> Any:
        """The same codes from the other side."""
        ...

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [R, S] · bᵀ of b [Q, S], plus a bias [Q]: [R, Q], rounded once to `dtype`."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Layer:
    """A linear layer, as far as operands are concerned."""

    name: str
    #: Backward passes that it did in this step.
    num_backward: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Written:
    """An operand, and what was seen while it was written."""

    layer: Layer
    operand: Any
    #: Its largest magnitude, where scales are delayed.
    amax: Tensor | None = None
    lost: LostNumbers | None = None


class Operands:
    """Writes the operands of layers.

    Args:
        recipe: the rules.
        names: of the layers.
        products: what multiplies codes.
        seed: of all that is drawn.
        rank: so that ranks round their gradients by different random bits.
        counts_lost: count what rounding flushes to zero or saturates: one more pass over every operand.
        reduce_amax: see `DelayedScaling`.
        device: where histories are kept.
    """

    def __init__(
        self,
        recipe: ProductRecipe,
        names: Iterable[str],
        products: Products,
        *,
        seed: int = 0,
        rank: int = 0,
        counts_lost: bool = False,
        reduce_amax: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.products = products
        #: Whether a step is open: scales and draws take note of what is computed in steps alone.
        self.is_in_step = True
        self.draws = Draws(seed)
        self.lost: dict[tuple[str, str], LostNumbers] = {}
        self._rules = recipe.operands
        self._seen_before = {
            later: earlier
            for later, earlier in _SEEN_BEFORE.items()
            if self._rules[earlier].shares_codes(self._rules[later])
        }
        self._rank = rank
        self._counts_lost = counts_lost
        self.delayed = DelayedScales(
            {
                _key(name, operand): rule
                for name in names
                for operand, rule in self._rules.items()
                if rule.delay is not None and operand not in self._seen_before
            },
            reduce_amax=reduce_amax,
            device=device,
        )

    def is_seen_before(self, operand: str) -> bool:
        """Whether an operand is an earlier one from the other side."""
        return operand in self._seen_before

    def write(
        self, layer: Layer, operand: str, x_RS: Tensor, *, records: bool = True, is_again: bool = False
    ) -> Written:
        """Round a matrix by the rule of an operand.

        Args:
            layer: whose operand it is.
            operand: its name in the recipe.
            x_RS: fp32, bf16 or fp16 [R, S], any strides.
            records: whether a delayed scale learns from it.
            is_again: it was written in this step already, and is not counted again.
        """
        rule = self._rules[operand]
        records = records and self.is_in_step and not is_again
        counts = self._counts_lost and not is_again
        lies_transposed = not x_RS.is_contiguous() and x_RS.t().is_contiguous()
        if lies_transposed and rule.is_same_from_both_sides and not rule.is_stochastic:
            written = self._write(layer, operand, rule, x_RS.t(), records, counts)
            return Written(
                layer=layer,
                operand=self.products.transposed(written.operand),
                amax=written.amax,
                lost=written.lost,
            )
        return self._write(layer, operand, rule, x_RS, records, counts)

    def write_again(self, layer: Layer, operand: str, before: Written, *, records: bool = True) -> Any | None:
        """The operand of another layer with the same matrix, where it is the same; None where it is not.

        Counts and records as `write` does.
        """
        rule = self._rules[operand]
        if rule.is_stochastic:
            return None
        if rule.delay is not None:
            name, other = _key(layer.name, operand), _key(before.layer.name, operand)
            if not self.delayed.agree(name, other):
                return None
            if records and self.is_in_step and before.amax is not None:
                self.delayed.record(name, before.amax)
        if before.lost is not None:
            self._count(layer, operand, before.lost)
        return before.operand

    def end_step(self) -> None:
        """Move delayed scales and draws on."""
        self.delayed.end_step()
        self.draws.advance()

    def restart_step(self) -> None:
        """Forget what delayed scales have seen in a step that is given up."""
        self.delayed.restart_step()

    def _write(
        self, layer: Layer, operand: str, rule: OperandRule, x_RS: Tensor, records: bool, counts: bool
    ) -> Written:
        x_RS = rotate(x_RS, rule.rotation) if rule.rotation else x_RS
        seed = self._seed(layer, operand) if rule.is_stochastic else None
        if rule.delay is None:
            lost = self._lost(x_RS, rule, seed) if counts else None
            written = Written(layer=layer, operand=self.products.operand(x_RS, rule, seed), lost=lost)
        else:
            found, amax = self.delayed.quantize(_key(layer.name, operand), x_RS, records=records)
            lost = count_lost(x_RS, found.numbers, found.scale, rule.scheme.format) if counts else None
            written = Written(layer=layer, operand=self.products.scaled(found, rule), amax=amax, lost=lost)
        if lost is not None:
            self._count(layer, operand, lost)
        return written

    def _count(self, layer: Layer, operand: str, lost: LostNumbers) -> None:
        key = (layer.name, operand)
        self.lost[key] = self.lost.get(key, LostNumbers()) + lost

    def _seed(self, layer: Layer, operand: str) -> int:
        return self.draws.seed_of(f"{_key(layer.name, operand)} of rank {self._rank}", layer.num_backward)

    @staticmethod
    def _lost(x_RS: Tensor, rule: OperandRule, seed: int | None) -> LostNumbers:
        """What rounding under scales that are found on the matrix loses."""
        q = quantize(x_RS, rule.scheme, rounding=rule.rounding, seed=seed)
        assert q.scales_NG is not None and rule.scheme.scaling is not None
        scales = q.scales_NG if q.tensor_scale is None else q.scales_NG * q.tensor_scale
        rows, columns = x_RS.shape
        scale_RS = spread(scales, rows, columns, rule.scheme.scaling.granularity)
        return count_lost(x_RS, q.codes_NK, scale_RS, rule.scheme.format)


def _key(name: str, operand: str) -> str:
    return f"{name}.{operand}"
