"""In what the three products of a linear layer are multiplied in training: six operands, a rule for each.

    forward    y  = x · Wᵀ       summed over K, the inputs
    dgrad      dx = g · W        summed over N, the outputs
    wgrad      dW = gᵀ · x       summed over M, the tokens

with x [M, K], W [N, K] and g = dL/dy [M, N]. A rule speaks of its operand as the product sees it: a matrix [rows, what
is summed over]. Scales in groups lie along the dimension that is summed over, since only there do they leave the sum;
so x is rounded along K for the forward product and along M for wgrad, and those are different codes. Where the scope is
the same from both sides (one scale a tensor, square blocks) they are the same codes, rounded once (`shares_codes`).

A scale is found on the tensor itself, or, per tensor, known from earlier steps (`Delay`). Rounding is to nearest even,
or stochastic where a mean of many small numbers must not be shifted (gradients in 4 bits). Both operands of a product
may be rotated by a Hadamard matrix along what is summed over: it cancels in the product, and spreads outliers.

Sums are fp32 in all of them; scales multiply the sum, which is rounded once.

Recipes that libraries train with are in `recipes.py`. A recipe is a record: nothing branches on its name, it has none.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bitwright.errors import SchemeError
from bitwright.formats.round import find_mode
from bitwright.quantize.scheme import TensorScheme

AmaxChoice = Literal["max", "most_recent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """A scale from the amaxes of earlier steps (`quantize/delayed_scaling.py`).

    Raises:
        SchemeError: no steps to remember, a negative margin, an unknown choice.
    """

    #: Steps that are remembered.
    history: int = 1024
    #: Binary orders of magnitude kept free above amax.
    margin: int = 0
    #: The largest amax of the history, or its last one.
    amax: AmaxChoice = "max"

    def __post_init__(self) -> None:
        if self.history < 1 or self.margin < 0:
            raise SchemeError(
                f"a delay remembers {self.history} steps with margin {self.margin}; remember at least 1, and leave "
                "0 or more binary orders of magnitude free"
            )
        if self.amax not in get_args(AmaxChoice):
            raise SchemeError(f"a delay looks at amax {self.amax!r}; use one of {', '.join(get_args(AmaxChoice))}")

    def __str__(self) -> str:
        margin = f", margin {self.margin}" if self.margin else ""
        return f"{self.amax.replace('_', ' ')} amax of {self.history} steps{margin}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandRule:
    """How one operand becomes codes.

    Raises:
        SchemeError: no symmetric scaling, a delay of what is not one scale a tensor, an impossible rotation.
        UnknownName: no such rounding.
    """

    #: Format and scaling of the matrix [rows, what is summed over].
    scheme: TensorScheme
    #: None: scales are found on the tensor that they scale.
    delay: Delay | None = None
    #: A name in `formats.ROUNDINGS`.
    rounding: str = "nearest_even"
    #: Consecutive numbers, along what is summed over, that are rotated together; a power of two, 0 for none.
    rotation: int = 0

    def __post_init__(self) -> None:
        find_mode(self.rounding)
        scaling = self.scheme.scaling
        if scaling is None or scaling.symmetry != "symmetric":
            raise SchemeError(
                f"an operand is rounded to {self.scheme}; products of codes need scales and no offsets: give it those"
            )
        if self.delay is not None and (
            scaling.granularity.scope != "tensor" or scaling.tensor_scale or scaling.rule != "amax"
        ):
            raise SchemeError(
                f"a delayed scale of {self.scheme}; scales of earlier steps are one a tensor, by rule 'amax': make the "
                "granularity TENSOR, or leave out the delay"
            )
        if self.delay is not None and self.is_stochastic:
            raise SchemeError(
                f"a delayed scale with {self.rounding} rounding; codes under scales of earlier steps are rounded to "
                "nearest even: leave out the delay"
            )
        if self.rotation < 0 or self.rotation.bit_count() > 1 or self.rotation == 1:
            raise SchemeError(
                f"a rotation of {self.rotation} numbers; Hadamard matrices here have 2, 4, 8, 16 … rows, and 0 is none"
            )

    @property
    def is_stochastic(self) -> bool:
        """Whether random bits are drawn."""
        return find_mode(self.rounding).needs_seed

    @property
    def is_same_from_both_sides(self) -> bool:
        """Whether the codes of a matrix are those of its transpose."""
        scaling = self.scheme.scaling
        assert scaling is not None
        granularity = scaling.granularity
        is_square = granularity.scope == "block" and granularity.block_rows == granularity.group_size
        return not self.rotation and (granularity.scope == "tensor" or is_square)

    def shares_codes(self, other: OperandRule) -> bool:
        """Whether codes under this rule serve the transposed matrix under the other one."""
        return self == other and self.is_same_from_both_sides

    def __str__(self) -> str:
        parts = [str(self.scheme)]
        parts += [str(self.delay)] if self.delay else []
        parts += [f"{self.rounding} rounding"] if self.rounding != "nearest_even" else []
        parts += [f"rotated in {self.rotation}s"] if self.rotation else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRecipe:
    """The six operands. Those of wgrad, and W of dgrad, are as before unless they are given.

    Raises:
        SchemeError: the operands of a product are not rotated alike.
    """

    #: x [M, K] and W [N, K] of y = x · Wᵀ.
    forward_x: OperandRule
    forward_w: OperandRule
    #: g [M, N] and Wᵀ [K, N] of dx = g · W.
    dgrad_g: OperandRule
    dgrad_w: OperandRule | None = None
    #: gᵀ [N, M] and xᵀ [K, M] of dW = gᵀ · x.
    wgrad_g: OperandRule | None = None
    wgrad_x: OperandRule | None = None

    def __post_init__(self) -> None:
        for name, (first, second) in self.products.items():
            if first.rotation != second.rotation:
                raise SchemeError(
                    f"the operands of {name} are rotated in {first.rotation}s and {second.rotation}s; a rotation "
                    "cancels only if both have it: make them equal"
                )

    @property
    def operands(self) -> dict[str, OperandRule]:
        """Every operand by its name, none left open."""
        return {
            "forward_x": self.forward_x,
            "forward_w": self.forward_w,
            "dgrad_g": self.dgrad_g,
            "dgrad_w": self.dgrad_w or self.forward_w,
            "wgrad_g": self.wgrad_g or self.dgrad_g,
            "wgrad_x": self.wgrad_x or self.forward_x,
        }

    @property
    def products(self) -> dict[str, tuple[OperandRule, OperandRule]]:
        """The operands of each product: "forward" (x, W), "dgrad" (g, W), "wgrad" (g, x)."""
        rules = self.operands
        return {
            "forward": (rules["forward_x"], rules["forward_w"]),
            "dgrad": (rules["dgrad_g"], rules["dgrad_w"]),
            "wgrad": (rules["wgrad_g"], rules["wgrad_x"]),
        }

    @property
    def is_stochastic(self) -> bool:
        """Whether any operand draws random bits."""
        return any(rule.is_stochastic for rule in self.operands.values())
