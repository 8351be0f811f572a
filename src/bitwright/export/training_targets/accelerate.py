"""Accelerate: the precision part of `accelerate launch --config_file`, as YAML.

    mixed_precision   no, fp16, bf16 or fp8
    fp8_config        backend TE: format, history, margin of delayed scales; backend AO: scales of the tensor itself

Keys of fp8_config are the options `--fp8_…` of `accelerate launch` without their prefix. Layers cannot be told apart:
Transformer Engine's backend converts every linear layer, torchao's all but the first and the last.

Source: accelerate 1.15, accelerate/commands/launch.py (fp8_ arguments, and how a file's keys reach them),
accelerate/commands/config/config_args.py (ClusterConfig), accelerate/utils/ao.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.export.training_recipes import EngineRecipe, engine_recipe, main_recipe, other_recipes
from bitwright.export.training_target import Written
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import PlannedPolicy

_FILE = "accelerate.yaml"
#: Policy's compute format → what Accelerate calls it.
_MIXED = {"fp32": "no", "tf32": "no", "fp16": "fp16", "bf16": "bf16"}


class Accelerate:
    """Writes accelerate.yaml."""

    name = "accelerate"
    description = "accelerate.yaml for accelerate launch --config_file: mixed_precision and fp8_config"
    source = "accelerate 1.15, commands/launch.py, commands/config/config_args.py"

    def why_not(self, plan: TrainingPlan, planned: PlannedPolicy) -> str | None:
        """Everything but products has a place; products that have none are told in notes."""
        return None

    def write(self, plan: TrainingPlan, planned: PlannedPolicy) -> Written:
        """The file, and what Accelerate is not told."""
        policy = planned.policy
        notes = []
        config: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO" if plan.gpus == 1 else "FSDP" if plan.memory.zero == 3 else "MULTI_GPU",
            "num_machines": 1,
            "num_processes": plan.gpus,
            "mixed_precision": _MIXED[policy.compute],
        }
        if config["distributed_type"] == "FSDP":
            config["fsdp_config"] = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
        main = main_recipe(planned)
        backend = None if main is None else _backend(engine_recipe(main[0]))
        if main is not None and backend is None:
            notes.append(f"{len(main[1])} layers run in {policy.compute}: Accelerate has no backend for their recipe")
        if main is not None and backend is not None:
            config |= {"mixed_precision": "fp8", "fp8_config": backend}
            others = len(planned.high) + other_recipes(planned)
            if others:
                notes.append(
                    f"{others} layers are planned otherwise than most, and Accelerate cannot tell layers apart: its "
                    "backend converts them too (torchao's leaves the first and the last alone)"
                )
        if policy.compute == "tf32":
            notes.append("tf32 is torch.backends.cuda.matmul.allow_tf32 and no key of Accelerate; set it in the script")
        if policy.loss_scale is not None:
            notes.append(
                "the loss scale is torch's GradScaler, which has no floor; pass a GradScalerKwargs to change it"
            )
        if policy.parameters != "fp32":
            notes.append("bf16 parameters and their rounding are the script's own: Accelerate keeps what it is given")
        return Written(files={_FILE: _yaml(config)}, notes=tuple(notes))


def _backend(recipe: EngineRecipe | None) -> dict[str, Any] | None:
    """fp8_config of a recipe; None where Accelerate has none."""
    if recipe is None or "fp8_format" not in recipe.fields:
        return None
    number = str(recipe.fields["fp8_format"]).partition(".")[2]
    if "amax_history_len" in recipe.fields:
        return {
            "backend": "TE",
            "fp8_format": number,
            "amax_history_len": recipe.fields["amax_history_len"],
            "amax_compute_algo": recipe.fields["amax_compute_algo"],
            "margin": recipe.fields["margin"],
            "interval": 1,
            "override_linear_precision": "false,false,false",
            "use_autocast_during_eval": False,
        }
    if recipe.class_name == "Float8CurrentScaling":
        return {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}
    return None


def _yaml(config: Mapping[str, Any], indent: str = "") -> str:
    """Mappings of words, numbers and truth values, in YAML."""
    lines = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            text = str(value).lower() if isinstance(value, bool) else value
            # a bare `no` is a truth value to YAML
            lines.append(
                f"{indent}{key}: " + (f"'{text}'\n" if value in ("no", "NO") or "," in str(text) else f"{text}\n")
            )
    return "".join(lines)


TRAINING_TARGETS = (Accelerate(),)
