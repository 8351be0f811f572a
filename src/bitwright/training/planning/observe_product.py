"""One linear layer of a model that is looked at: ranges of its operands, and what recipes would do to its products.

Inputs x and gradients g of the outputs are counted, octave by octave (`quantize/statistics.py`), and some tokens of
both are multiplied again under each recipe in question:

    error of an output    ‖rounded − exact‖ / ‖exact‖ of its column, over all batches
    error of a product    what nine of ten columns stay within, of y = x Wᵀ, dx = g W and dW = gᵀ x

A norm of all columns together would not see what one outlier does: it rounds everything beside it to nothing, and its
own column outweighs all others. Operands are rounded as the recipe says, sums are fp32. Scales are those of the tensors
at hand: a run of a few steps has no history of amaxes, so a delayed scale is taken at its best.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitwright.quantize.operand import quantize_operand
from bitwright.quantize.statistics import TensorStatistics, empty_statistics, measure_statistics
from bitwright.training.product_recipe import OperandRule, ProductRecipe
from bitwright.training.products.rotation import rotate

#: Tokens of a batch whose products are computed again under every recipe: as many as the widest group of scales has.
SAMPLED_TOKENS = 128
#: Share of columns that stay within the error of a product.
_USUAL = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductError:
    """Relative errors of the three products of a linear layer."""

    forward: float
    dgrad: float
    wgrad: float

    @property
    def largest(self) -> float:
        """Of the three."""
        return max(self.forward, self.dgrad, self.wgrad)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObservedProduct:
    """What was seen at one linear layer."""

    name: str
    #: [N, K].
    shape: tuple[int, int]
    #: "x", "w", "g".
    operands: Mapping[str, TensorStatistics]
    #: Recipe → errors; under "bf16" those of operands in bf16.
    errors: Mapping[str, ProductError]


@dataclass(kw_only=True, eq=False)
class _Sums:
    """Squared errors and squares of every column of the three products, in their order."""

    wrong: list[Tensor | float] = field(default_factory=lambda: [0.0] * 3)
    exact: list[Tensor | float] = field(default_factory=lambda: [0.0] * 3)

    def add(self, product: int, rounded: Tensor, exact: Tensor) -> None:
        self.wrong[product] += (rounded - exact).double().square().sum(dim=0)
        self.exact[product] += exact.double().square().sum(dim=0)

    def error(self) -> ProductError:
        forward, dgrad, wgrad = map(_usual_error, self.wrong, self.exact)
        return ProductError(forward=forward, dgrad=dgrad, wgrad=wgrad)


def _usual_error(wrong: Tensor | float, exact: Tensor | float) -> float:
    """What nine of ten columns stay within; columns of zeros say nothing."""
    if not isinstance(wrong, Tensor) or not isinstance(exact, Tensor):
        return 0.0
    ratios = (wrong / exact)[exact > 0].sqrt().sort().values
    return float(ratios[math.ceil(_USUAL * len(ratios)) - 1]) if len(ratios) else 0.0


@dataclass(kw_only=True, eq=False)
class WatchedProduct:
    """A linear layer whose operands are counted, and whose products are computed again while a model runs."""

    name: str
    recipes: Mapping[str, ProductRecipe]
    seed: int
    x: TensorStatistics = field(default_factory=empty_statistics)
    g: TensorStatistics = field(default_factory=empty_statistics)
    sums: dict[str, _Sums] = field(default_factory=dict)

    def see(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """Count the inputs, and wait for the gradient of the output."""
        x_MK = x.detach().reshape(-1, x.shape[-1])
        self.x = self.x + measure_statistics(x_MK)
        chosen = _spread_tokens(x_MK.shape[0])
        sample = x_MK[chosen].contiguous()

        def see_gradient(gradient: Tensor) -> None:
            g_MN = gradient.detach().reshape(-1, gradient.shape[-1])
            self.g = self.g + measure_statistics(g_MN)
            self._measure(sample, weight_of(module), g_MN[chosen].contiguous())

        y.register_hook(see_gradient)

    def _measure(self, x_MK: Tensor, w_NK: Tensor, g_MN: Tensor) -> None:
        """The three products under every recipe, and in bf16."""
        pairs = ((x_MK, w_NK), (g_MN, w_NK.t()), (g_MN.t(), x_MK.t()))
        exact = [a @ b.t() for a, b in pairs]
        for name, recipe in self.recipes.items():
            sums = self.sums.setdefault(name, _Sums())
            for index, ((a, b), rules) in enumerate(zip(pairs, recipe.products.values(), strict=True)):
                sums.add(index, multiply(a.contiguous(), b.contiguous(), rules, self.seed), exact[index])
        sums = self.sums.setdefault("bf16", _Sums())
        for index, (a, b) in enumerate(pairs):
            sums.add(index, a.bfloat16().float() @ b.bfloat16().float().t(), exact[index])

    def observed(self, model: nn.Module) -> ObservedProduct:
        """What was seen, with the weight that the model has."""
        weight = weight_of(model.get_submodule(self.name))
        rows, columns = weight.shape
        return ObservedProduct(
            name=self.name,
            shape=(rows, columns),
            operands={"x": self.x, "w": measure_statistics(weight), "g": self.g},
            errors={name: sums.error() for name, sums in self.sums.items()},
        )


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear layer as [N, K]; transformers' Conv1D stores the other way round."""
    weight = module.get_parameter("weight").detach()
    return weight if isinstance(module, nn.Linear) else weight.t()


def _spread_tokens(num_tokens: int) -> Tensor:
    """Indices of tokens over the whole batch."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, SAMPLED_TOKENS)).round().long()


def multiply(a_RS: Tensor, b_QS: Tensor, rules: tuple[OperandRule, OperandRule], seed: int) -> Tensor:
    """Return a · bᵀ in fp32 with both operands rounded by their rules, fp32 [R, Q]."""
    a, b = (_rounded(x, rule, seed + side) for side, (x, rule) in enumerate(zip((a_RS, b_QS), rules, strict=True)))
    return a @ b.t()


def _rounded(x_RS: Tensor, rule: OperandRule, seed: int) -> Tensor:
    turned = rotate(x_RS, rule.rotation) if rule.rotation else x_RS
    drawn = seed if rule.is_stochastic else None
    return quantize_operand(turned.contiguous(), rule.scheme, rounding=rule.rounding, seed=drawn).values()
