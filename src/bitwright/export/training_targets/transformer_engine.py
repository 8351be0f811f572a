"""Transformer Engine: `te_training.py`, the recipes as objects, and which layers run under which.

Transformer Engine has no configuration file: a script makes its layers and opens `autocast` around them. The file has
what that takes and imports nothing else.

    from te_training import autocast_of, replaced
    te.Linear(…) if replaced(name) else nn.Linear(…)
    with autocast_of(name): …

Source: NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py; transformer_engine.pytorch.autocast
(enabled, recipe).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.export.training_recipes import engine_recipe
from bitwright.export.training_target import Written
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import PlannedPolicy

_FILE = "te_training.py"
_OPENING = '''"""Precision of a training run for Transformer Engine: plan {hash} of {model} on {hardware}.

`recipe_of(layer)` is the recipe of a linear layer by its dotted name, None for layers that stay in {compute}.
"""

from transformer_engine.common.recipe import {imports}
from transformer_engine.pytorch import autocast

#: Layers by the recipe that they run under; all others stay as they are.
RECIPES = (
{recipes})


def recipe_of(layer):
    """The recipe of a layer; None where it stays in {compute}."""
    return next((recipe for recipe, layers in RECIPES if layer in layers), None)


def replaced(layer):
    """Whether a layer is to be transformer_engine.pytorch.Linear."""
    return recipe_of(layer) is not None


def autocast_of(layer):
    """What a layer runs in."""
    return autocast(enabled=replaced(layer), recipe=recipe_of(layer))
'''


class TransformerEngine:
    """Writes te_training.py."""

    name = "transformer-engine"
    description = "te_training.py: recipes as objects, and which layers run under which"
    source = "NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py"

    def why_not(self, plan: TrainingPlan, planned: PlannedPolicy) -> str | None:
        """Nothing in fewer than 16 bits, or no class for a recipe."""
        if not planned.recipes:
            return f"all products are in {planned.policy.compute}, and Transformer Engine is for fewer bits"
        if any(engine_recipe(recipe) is None for recipe, _ in planned.by_recipe):
            return "one of its recipes is none of Transformer Engine's"
        return None

    def write(self, plan: TrainingPlan, planned: PlannedPolicy) -> Written:
        """The file, and what the script has to see to."""
        classes: set[str] = set()
        blocks = []
        for recipe, layers in planned.by_recipe:
            found = engine_recipe(recipe)
            assert found is not None
            classes.add(found.class_name)
            names = "".join(f"            {name!r},\n" for name in layers)
            blocks.append(
                f"    (\n        {_call(found.class_name, found.fields)},\n        {{\n{names}        }},\n    ),\n"
            )
        text = _OPENING.format(
            hash=plan.decision_hash[:12],
            model=plan.model.name,
            hardware=plan.hardware,
            compute=planned.policy.compute,
            imports=", ".join(sorted({*classes, *({"Format"} if "Format." in "".join(blocks) else set())})),
            recipes="".join(blocks),
        )
        notes = [
            f"{len(planned.high)} layers stay torch's own and run under torch.autocast in {planned.policy.compute}",
            "masters, moments and loss scale are the script's own: Transformer Engine rounds products alone",
        ]
        return Written(files={_FILE: text}, notes=tuple(notes))


def _call(class_name: str, fields: Mapping[str, Any]) -> str:
    arguments = ", ".join(
        f"{key}={value}" if str(value).startswith("Format.") else f"{key}={value!r}" for key, value in fields.items()
    )
    return f"{class_name}({arguments})"


TRAINING_TARGETS = (TransformerEngine(),)
