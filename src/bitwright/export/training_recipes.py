"""Recipes of products as Transformer Engine has them: a class and its fields, from the facts of the recipe alone.

    one scale a tensor, of earlier steps        DelayedScaling
    one scale a tensor, its own                 Float8CurrentScaling
    groups of 128 under fp32 scales             Float8BlockScaling
    groups of 32 under E8M0                     MXFP8BlockScaling
    groups of 16 under E4M3 and a tensor scale  NVFP4BlockScaling

Source: NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py (classes, fields, defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import PlannedPolicy
from bitwright.training.product_recipe import OperandRule, ProductRecipe

#: (numbers under one scale, format of the scale) → class.
_GROUPED = {
    (128, "fp32"): "Float8BlockScaling",
    (32, "e8m0"): "MXFP8BlockScaling",
    (16, "fp8_e4m3"): "NVFP4BlockScaling",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRecipe:
    """A recipe class of Transformer Engine with its fields."""

    class_name: str
    #: Field → value; what begins with "Format." is a member of that enum.
    fields: Mapping[str, Any]


def engine_recipe(recipe: ProductRecipe) -> EngineRecipe | None:
    """Return the class that computes a recipe; None where there is none."""
    forward, backward = recipe.forward_x, recipe.dgrad_g
    scaling = forward.scheme.scaling
    assert scaling is not None
    if scaling.granularity.scope == "tensor":
        return _per_tensor(forward, backward)
    name = _GROUPED.get((scaling.granularity.group_size or 0, scaling.scale_format))
    if name is None or forward.scheme.format != backward.scheme.format:
        return None
    if scaling.tensor_scale:
        wgrad = recipe.operands["wgrad_g"]
        fields = {"disable_rht": not wgrad.rotation, "disable_stochastic_rounding": not backward.is_stochastic}
        return EngineRecipe(class_name=name, fields=fields)
    return EngineRecipe(class_name=name, fields={"fp8_format": "Format.E4M3"})


def _per_tensor(forward: OperandRule, backward: OperandRule) -> EngineRecipe | None:
    formats = {("fp8_e4m3", "fp8_e5m2"): "Format.HYBRID", ("fp8_e4m3", "fp8_e4m3"): "Format.E4M3"}
    number = formats.get((forward.scheme.format, backward.scheme.format))
    if number is None or forward.delay != backward.delay:
        return None
    delay = forward.delay
    if delay is None:
        return EngineRecipe(class_name="Float8CurrentScaling", fields={"fp8_format": number})
    fields = {
        "margin": delay.margin,
        "fp8_format": number,
        "amax_history_len": delay.history,
        "amax_compute_algo": delay.amax,
    }
    return EngineRecipe(class_name="DelayedScaling", fields=fields)


def main_recipe(planned: PlannedPolicy) -> tuple[ProductRecipe, Mapping[str, str]] | None:
    """Return the recipe that most layers have, with its layers; None where all products are in the compute format."""
    return max(planned.by_recipe, key=lambda entry: len(entry[1]), default=None)


def other_recipes(planned: PlannedPolicy) -> int:
    """Return how many layers have another recipe than most."""
    main = main_recipe(planned)
    return 0 if main is None else len(planned.recipes) - len(main[1])


def kept_high(plan: TrainingPlan, planned: PlannedPolicy) -> tuple[str, ...]:
    """Return the layers that multiply in the compute format, in the order of the plan."""
    return tuple(site.name for site in plan.products if site.name in planned.high)
