"""A training plan by hand, for tests of what reads one."""

from __future__ import annotations

from typing import Any

from bitwright.plan.schema import ModelInfo, TextInfo
from bitwright.plan.training_plan import MemoryNeed, ProductErrors, RangeEvidence, TrainingPlan, TrainingSite

LAYERS = tuple(f"model.layers.{i}.{name}" for i in (0, 11) for name in ("self_attn.q_proj", "mlp.down_proj"))


def product(name: str, choice: str) -> TrainingSite:
    return TrainingSite(
        name=name,
        kind="matmul",
        role="mlp.down",
        choice=choice,
        reason="measured",
        shape=(64, 64),
        ranges=(
            RangeEvidence(operand="x", format="fp8_e4m3", scaled=True, amax=3.0, flushed=0.01, clipped=0.0),
            RangeEvidence(operand="g", format="fp16", scaled=False, amax=1e-4, flushed=0.2, clipped=0.0),
        ),
        errors=(ProductErrors(recipe=choice, forward=0.03, dgrad=0.05, wgrad=0.04),),
    )


def once(name: str, kind: Any, choice: str) -> TrainingSite:
    return TrainingSite(name=name, kind=kind, role=str(kind), choice=choice, reason="measured")


def training_plan(
    policy: str = "fp8-hybrid", low: str | None = "fp8-hybrid", high: str = "bf16", gpus: int = 8, **changes: Any
) -> TrainingPlan:
    """A plan under a policy: all layers but one under `low`, that one and the head in `high`."""
    choices = [high if low is None else low] * (len(LAYERS) - 1) + [high]
    sites = [product(name, choice) for name, choice in zip(LAYERS, choices, strict=True)]
    sites.append(product("lm_head", high))
    others = [("norms", "norm", "fp32"), ("softmax", "softmax", "fp32"), ("loss", "loss", "fp32")]
    others += [("gradients", "grad", "fp32"), ("masters", "master", "fp32")]
    others += [("first moments", "optim.m", "fp32"), ("second moments", "optim.v", "fp32")]
    if gpus > 1:
        others += [("gradients between GPUs", "comm.grad", "fp32"), ("weights between GPUs", "comm.param", high)]
    fields: dict[str, Any] = {
        "model": ModelInfo(name="tiny", hash="0" * 64, params=1000),
        "hardware": "h100-sxm",
        "gpus": gpus,
        "policy": policy,
        "policy_reason": "measured",
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "max_error": 0.1,
        "seed": 0,
        "text": TextInfo(source="docs", tokens=100, sequences=4, hash="1" * 64),
        "loss": 2.0,
        "sites": (*sites, *(once(*entry) for entry in others)),
        "memory": MemoryNeed(peak_bytes=1, device_bytes=2, batch=1, sequence=8, zero=3, recompute="none"),
    }
    return TrainingPlan(**{**fields, **changes})
