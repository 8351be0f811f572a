"""Lightning: the `trainer` section of a LightningCLI configuration, as YAML.

    precision   "bf16-mixed", "16-mixed", "32-true", "bf16-true"
    plugins     TransformerEnginePrecision with its recipe, where products are in FP8 under delayed scales

Lightning converts every linear layer with `replace_layers`; layers cannot be told apart.

Source: lightning 2.6, lightning/fabric/connector.py (names of precisions), lightning/fabric/plugins/precision/
transformer_engine.py (arguments; a recipe given as a mapping becomes a DelayedScaling).
"""

from __future__ import annotations

from typing import Any

from bitwright.export.training_recipes import engine_recipe, main_recipe, other_recipes
from bitwright.export.training_target import Written
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import PlannedPolicy

_FILE = "lightning.yaml"
_PLUGIN = "lightning.pytorch.plugins.precision.TransformerEnginePrecision"
#: (compute, format of the parameters) → name of the precision.
_PRECISIONS = {
    ("fp32", "fp32"): "32-true",
    ("tf32", "fp32"): "32-true",
    ("fp16", "fp32"): "16-mixed",
    ("bf16", "fp32"): "bf16-mixed",
    ("bf16", "bf16"): "bf16-true",
}


class Lightning:
    """Writes lightning.yaml."""

    name = "lightning"
    description = "lightning.yaml, the trainer section of LightningCLI: precision, or the plugin for FP8"
    source = "lightning 2.6, fabric/connector.py, fabric/plugins/precision/transformer_engine.py"

    def why_not(self, plan: TrainingPlan, planned: PlannedPolicy) -> str | None:
        """A combination of compute and parameters that has no name there."""
        policy = planned.policy
        if (policy.compute, policy.parameters) in _PRECISIONS:
            return None
        return f"Lightning has no precision with {policy.parameters} parameters that computes in {policy.compute}"

    def write(self, plan: TrainingPlan, planned: PlannedPolicy) -> Written:
        """The file, and what Lightning is not told."""
        policy = planned.policy
        notes = []
        lines = ["trainer:"]
        main = main_recipe(planned)
        recipe = None if main is None else engine_recipe(main[0])
        is_delayed = recipe is not None and "amax_history_len" in recipe.fields
        if main is not None and not is_delayed:
            notes.append(
                f"{len(main[1])} layers run in {policy.compute}: Lightning's plugin knows delayed scales alone; "
                "bitwright's own plugin runs the plan as it is"
            )
        if recipe is not None and is_delayed:
            lines += _plugin(recipe.fields, policy.compute)
            others = len(planned.high) + other_recipes(planned)
            if others:
                notes.append(
                    f"{others} layers are planned otherwise than most, and Lightning's plugin replaces every linear "
                    "layer; bitwright's own plugin runs the plan as it is"
                )
            notes.append("the plugin keeps weights in fp32 here, as masters, and converts them in every layer's call")
        else:
            lines.append(f'  precision: "{_PRECISIONS[policy.compute, policy.parameters]}"')
        if policy.compute == "tf32":
            notes.append('tf32 is torch.set_float32_matmul_precision("high"); call it in the script')
        if policy.parameters != "fp32":
            notes.append(
                "bf16-true rounds updates to nearest, which swallows small ones; the plan rounds stochastically"
            )
        if policy.loss_scale is not None:
            notes.append(
                "the loss scale is torch's GradScaler, which has no floor; pass one to MixedPrecision to change it"
            )
        return Written(files={_FILE: "\n".join(lines) + "\n"}, notes=tuple(notes))


def _plugin(fields: Any, compute: str) -> list[str]:
    dtypes = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    values = {key: str(value).removeprefix("Format.") for key, value in fields.items()}
    return [
        "  plugins:",
        f"    - class_path: {_PLUGIN}",
        "      init_args:",
        "        weights_dtype: torch.float32",
        f"        fallback_compute_dtype: {dtypes[compute]}",
        "        replace_layers: true",
        "        recipe:",
        *(f"          {key}: {value}" for key, value in values.items()),
    ]


TRAINING_TARGETS = (Lightning(),)
