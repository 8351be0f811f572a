"""Train in low precision: one call sets up what runs in which format, and keeps it safe.

run = training.prepare(model, optimizer, policy="bf16-mixed")      # or "auto", a Policy, a training plan
for batch in batches:
    with run.step() as step:
        step.backward(model(**batch).loss)                         # scaling, clipping, skipping inside
print(run.describe())

Importing this page loads no torch: each name is fetched when it is first used, and policies are read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from bitwright.training.choose import Chosen, choose_policy, why_not
    from bitwright.training.data.batch_check import checked_batches
    from bitwright.training.data.batches import Batches
    from bitwright.training.data.token_rows import TokenRows, read_token_rows
    from bitwright.training.fine_tuning.config import TrainConfig, read_config
    from bitwright.training.fine_tuning.trainer import train
    from bitwright.training.forward.forward_region import forward_region
    from bitwright.training.forward.operation_table import operation_table
    from bitwright.training.held_parameters import cast_parameters
    from bitwright.training.lora import LoraSettings, add_lora, lora_sizes
    from bitwright.training.loss_scale import LossScaler, LossScaleRule
    from bitwright.training.optimizer.update import UPDATES
    from bitwright.training.planning.planned_policy import PlannedPolicy, policy_of_plan
    from bitwright.training.planning.training_plan import PlanRequest, make_training_plan
    from bitwright.training.policy import POLICIES, Policy, policy_named
    from bitwright.training.prepare import find_policy, prepare
    from bitwright.training.run import TrainingRun
    from bitwright.training.run_settings import RunCounters
    from bitwright.training.step import StepResult

_HOMES = {
    "Batches": "bitwright.training.data.batches",
    "Chosen": "bitwright.training.choose",
    "LoraSettings": "bitwright.training.lora",
    "LossScaleRule": "bitwright.training.loss_scale",
    "LossScaler": "bitwright.training.loss_scale",
    "POLICIES": "bitwright.training.policy",
    "PlanRequest": "bitwright.training.planning.training_plan",
    "PlannedPolicy": "bitwright.training.planning.planned_policy",
    "Policy": "bitwright.training.policy",
    "RunCounters": "bitwright.training.run_settings",
    "StepResult": "bitwright.training.step",
    "TokenRows": "bitwright.training.data.token_rows",
    "TrainConfig": "bitwright.training.fine_tuning.config",
    "TrainingRun": "bitwright.training.run",
    "UPDATES": "bitwright.training.optimizer.update",
    "add_lora": "bitwright.training.lora",
    "cast_parameters": "bitwright.training.held_parameters",
    "checked_batches": "bitwright.training.data.batch_check",
    "choose_policy": "bitwright.training.choose",
    "find_policy": "bitwright.training.prepare",
    "forward_region": "bitwright.training.forward.forward_region",
    "load_checkpoint": "bitwright.training.checkpoints.checkpoint",
    "lora_sizes": "bitwright.training.lora",
    "make_training_plan": "bitwright.training.planning.training_plan",
    "operation_table": "bitwright.training.forward.operation_table",
    "policy_named": "bitwright.training.policy",
    "policy_of_plan": "bitwright.training.planning.planned_policy",
    "prepare": "bitwright.training.prepare",
    "read_config": "bitwright.training.fine_tuning.config",
    "read_token_rows": "bitwright.training.data.token_rows",
    "save_checkpoint": "bitwright.training.checkpoints.checkpoint",
    "train": "bitwright.training.fine_tuning.trainer",
    "why_not": "bitwright.training.choose",
}

__all__ = [
    "POLICIES",
    "UPDATES",
    "Batches",
    "Chosen",
    "LoraSettings",
    "LossScaleRule",
    "LossScaler",
    "PlanRequest",
    "PlannedPolicy",
    "Policy",
    "RunCounters",
    "StepResult",
    "TokenRows",
    "TrainConfig",
    "TrainingRun",
    "add_lora",
    "cast_parameters",
    "checked_batches",
    "choose_policy",
    "find_policy",
    "forward_region",
    "load_checkpoint",
    "lora_sizes",
    "make_training_plan",
    "operation_table",
    "policy_named",
    "policy_of_plan",
    "prepare",
    "read_config",
    "read_token_rows",
    "save_checkpoint",
    "train",
    "why_not",
]

open_lazily(__name__, _HOMES)
