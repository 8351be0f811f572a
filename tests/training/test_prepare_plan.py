"""A training plan runs: each product under the recipe that the plan gives it, everything else as its policy says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwright.errors import TrainingError
from bitwright.plan.schema import ModelInfo, TextInfo
from bitwright.plan.training_folder import write_training_plan
from bitwright.plan.training_plan import MemoryNeed, TrainingPlan, TrainingSite
from bitwright.training.prepare import find_policy, prepare


def plan(choices: dict[str, str], policy: str = "fp8-hybrid") -> TrainingPlan:
    """A plan for a tiny Llama: choices of its products, and fp32 for the rest."""
    products = tuple(
        TrainingSite(
            name=name, kind="matmul", role="attn.q", choice=choice, reason=f"{choice} was chosen", shape=(64, 64)
        )
        for name, choice in choices.items()
    )
    rest = TrainingSite(name="masters", kind="master", role="master", choice="fp32", reason="they fit")
    return TrainingPlan(
        model=ModelInfo(name="tiny", hash="0" * 64, params=1),
        hardware="h100-sxm",
        policy=policy,
        policy_reason="most weights are under it",
        optimizer="adamw",
        learning_rate=1e-4,
        max_error=0.1,
        seed=0,
        text=TextInfo(source="docs", tokens=1, sequences=1, hash="0" * 64),
        loss=1.0,
        sites=(*products, rest),
        memory=MemoryNeed(peak_bytes=1, device_bytes=2, batch=1, sequence=1, zero=0, recompute="none"),
    )


def test_each_product_has_its_recipe(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tiny_model("llama").requires_grad_(True).train()
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    choices = dict.fromkeys(linear, "bf16")
    choices |= {name: "fp8-hybrid" for name in linear if name.endswith(("q_proj", "k_proj"))}
    choices |= {name: "mxfp8" for name in linear if name.endswith("up_proj")}
    folder = write_training_plan(plan(choices), tmp_path / "plan")
    for given in (folder, str(folder), plan(choices)):
        run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=given)
        assert "the plan" in run.reason and "most weights are under it" in run.reason
        assert run.products is not None
        rows = {row.module: row for row in run.products.table()}
        assert {name for name, row in rows.items() if row.kernel == "emulated"} == {
            name for name, choice in choices.items() if choice != "bf16"
        }
        assert rows["model.layers.0.mlp.down_proj"].reason == "bf16 was chosen"
        assert len(run.products.installed) == 2
        ids = torch.arange(64).reshape(2, 32)
        with run.step() as step:
            step.backward(model(input_ids=ids, labels=ids).loss)
        assert step.result is not None and step.result.skipped is None
        run.close()


def test_a_plan_without_low_products_installs_none(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tiny_model("llama").requires_grad_(True)
    folder = write_training_plan(plan({"lm_head": "bf16"}, policy="bf16-mixed"), tmp_path / "plan")
    run = prepare(model, torch.optim.AdamW(model.parameters()), policy=folder)
    assert run.products is None and run.policy.name == "bf16-mixed"
    run.close()


def test_a_folder_that_is_no_plan(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tiny_model("llama").requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("no plan")
    for name in ("", "nowhere", "plan", "notes.txt"):
        with pytest.raises(TrainingError, match="give the folder that `bitwright train plan` wrote"):
            prepare(model, optimizer, policy=tmp_path / name)
    with pytest.raises(TrainingError, match="give the folder that `bitwright train plan` wrote"):
        prepare(model, optimizer, policy=str(tmp_path / "plan"))


@pytest.mark.parametrize("given", ["./nothere-plan", "../nothere-plan", "plans/nothere", ".hidden"])
def test_a_path_that_does_not_exist_is_no_name(given: str) -> None:
    """Neither as text nor as a Path."""
    for policy in (given, Path(given)):
        with pytest.raises(TrainingError, match=r"there is no such folder.*plan\.json.*`bitwright train plan` wrote"):
            find_policy(policy, torch.device("cpu"))
    with pytest.raises(TrainingError, match=re.escape(f"policy is the path '{given}'")):
        find_policy(given, torch.device("cpu"))


def test_a_folder_without_a_plan_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"has no plan\.json; give the folder that `bitwright train plan` wrote"):
        find_policy(str(tmp_path), torch.device("cpu"))
