"""Recipes as records: what shares codes, what is refused, and what the libraries' recipes are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright.errors import SchemeError, UnknownName
from bitwright.quantize import Scaling, TensorScheme, block, group
from bitwright.quantize.granularity import ROW, TENSOR
from bitwright.training.product_recipe import Delay, OperandRule, ProductRecipe
from bitwright.training.recipes import FP8_BLOCK, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4


def rule(granularity: object, **facts: object) -> OperandRule:
    scaling = Scaling(granularity=granularity, scale_format="fp32")  # type: ignore[arg-type]
    return OperandRule(scheme=TensorScheme(format="fp8_e4m3", scaling=scaling), **facts)  # type: ignore[arg-type]


def test_what_is_the_same_from_both_sides() -> None:
    assert rule(TENSOR).is_same_from_both_sides
    assert rule(block(16, 16)).is_same_from_both_sides
    for other in (ROW, group(128), block(16, 32), block(1, 128)):
        assert not rule(other).is_same_from_both_sides
    assert not rule(TENSOR, rotation=16).is_same_from_both_sides
    assert rule(TENSOR).shares_codes(rule(TENSOR))
    assert not rule(TENSOR).shares_codes(rule(TENSOR, delay=Delay()))


def test_operands_that_are_left_open_are_as_before() -> None:
    recipe = ProductRecipe(forward_x=rule(TENSOR), forward_w=rule(block(8, 8)), dgrad_g=rule(group(32)))
    assert recipe.operands["wgrad_x"] == recipe.forward_x
    assert recipe.operands["dgrad_w"] == recipe.forward_w
    assert recipe.operands["wgrad_g"] == recipe.dgrad_g
    assert recipe.products["wgrad"] == (recipe.dgrad_g, recipe.forward_x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OperandRule(scheme=TensorScheme(format="bf16")), "no offsets"),
        (lambda: rule(group(32), delay=Delay()), "make the granularity TENSOR"),
        (lambda: rule(TENSOR, delay=Delay(), rounding="stochastic"), "leave out the delay"),
        (lambda: rule(TENSOR, rotation=12), "Hadamard"),
        (lambda: rule(TENSOR, rotation=1), "Hadamard"),
        (lambda: Delay(history=0), "at least 1"),
        (lambda: Delay(margin=-1), "0 or more"),
        (lambda: Delay(amax="mean"), "most_recent"),  # type: ignore[arg-type]
        (
            lambda: ProductRecipe(
                forward_x=rule(TENSOR),
                forward_w=rule(TENSOR),
                dgrad_g=rule(TENSOR),
                wgrad_g=rule(TENSOR, rotation=16),
            ),
            "make them equal",
        ),
    ],
)
def test_what_is_refused(make: object, said: str) -> None:
    with pytest.raises(SchemeError, match=said):
        make()  # type: ignore[operator]
    with pytest.raises(UnknownName, match="stochastic"):
        rule(TENSOR, rounding="stochastc")


def test_recipes_are_what_their_sources_say() -> None:
    """Formats, sizes and rules as the libraries document them; not one of them is computed here."""
    for recipe in (FP8_DELAYED, FP8_CURRENT):
        formats = {name: operand.scheme.format for name, operand in recipe.operands.items()}
        assert {formats[name] for name in ("forward_x", "forward_w", "dgrad_w", "wgrad_x")} == {"fp8_e4m3"}
        assert formats["dgrad_g"] == formats["wgrad_g"] == "fp8_e5m2"
    assert FP8_DELAYED.forward_x.delay == Delay(history=1024, margin=0, amax="max")
    assert FP8_CURRENT.forward_x.delay is None
    assert "group(128)" in str(FP8_BLOCK.operands["wgrad_g"]) and "block(128, 128)" in str(FP8_BLOCK.forward_w)
    assert all("e8m0" in str(operand) for operand in MXFP8.operands.values())
    assert all(operand.scheme.scaling.rule == "round_up" for operand in MXFP8.operands.values())  # type: ignore[union-attr]
    stochastic = {name for name, operand in NVFP4.operands.items() if operand.is_stochastic}
    rotated = {name: operand.rotation for name, operand in NVFP4.operands.items() if operand.rotation}
    assert stochastic == {"dgrad_g", "wgrad_g"} and rotated == {"wgrad_g": 16, "wgrad_x": 16}
    assert "block(16, 16)" in str(NVFP4.forward_w) and NVFP4.operands["dgrad_w"] == NVFP4.forward_w
    assert NVFP4.is_stochastic and not MXFP8.is_stochastic
    assert replace(NVFP4.forward_w).shares_codes(NVFP4.operands["dgrad_w"])
