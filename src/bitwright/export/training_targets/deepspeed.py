"""DeepSpeed: `ds_config.json`, the keys that say what is computed, kept, added up and sent in which format.

DeepSpeed keeps 16-bit parameters and fp32 masters in its optimizer: the same numbers as fp32 parameters under autocast,
and as many bytes. Its configuration knows nothing of FP8.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/precision_config.py (bf16, fp16 and their fields) and
deepspeed/runtime/constants.py (communication_data_type, data_types.grad_accum_dtype).
"""

from __future__ import annotations

import json
import math
from typing import Any

from bitwright.export.training_target import Written
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import PlannedPolicy

_FILE = "ds_config.json"


class DeepSpeed:
    """Writes ds_config.json."""

    name = "deepspeed"
    description = "ds_config.json: bf16 or fp16, loss scale, gradients' formats, ZeRO stage"
    source = "deepspeedai/DeepSpeed, deepspeed/runtime/precision_config.py, constants.py"

    def why_not(self, plan: TrainingPlan, planned: PlannedPolicy) -> str | None:
        """fp32 is the absence of a configuration, and can be written too."""
        return None

    def write(self, plan: TrainingPlan, planned: PlannedPolicy) -> Written:
        """The file, and what DeepSpeed is not told."""
        policy = planned.policy
        config: dict[str, Any] = {
            "bf16": {"enabled": policy.compute == "bf16"},
            "fp16": {"enabled": policy.compute == "fp16"},
            "data_types": {"grad_accum_dtype": policy.gradients},
            "zero_optimization": {"stage": plan.memory.zero},
        }
        if policy.compute == "bf16":
            # an Inf in one bf16 gradient makes every master NaN, and the check is off by default
            config["bf16"]["check_grad_overflow"] = True
        if policy.loss_scale is not None:
            rule = policy.loss_scale
            config["fp16"] |= {
                "loss_scale": 0,
                "initial_scale_power": round(math.log2(rule.initial)),
                "loss_scale_window": rule.interval,
                "hysteresis": rule.hysteresis,
                "min_loss_scale": max(1, round(rule.floor)),
            }
        sent = next((site.choice for site in plan.sites if site.kind == "comm.grad"), None)
        if sent is not None:
            config["communication_data_type"] = sent
        return Written(files={_FILE: json.dumps(config, indent=2) + "\n"}, notes=tuple(_notes(planned)))


def _notes(planned: PlannedPolicy) -> list[str]:
    notes = []
    if planned.recipes:
        notes.append(
            f"{len(planned.recipes)} layers are planned with products in fewer bits, for which DeepSpeed has no key: "
            "they run in 16 bits unless the model itself has Transformer Engine's layers (--to transformer-engine)"
        )
    if planned.policy.compute == "tf32":
        notes.append("tf32 is torch.backends.cuda.matmul.allow_tf32 and no key of DeepSpeed; set it in the script")
    if planned.policy.parameters != "fp32":
        notes.append(
            "bf16 parameters without masters are not written: DeepSpeed's bf16_master_weights_and_grads rounds to "
            "nearest, which swallows updates; it keeps fp32 masters here"
        )
    return notes


TRAINING_TARGETS = (DeepSpeed(),)
