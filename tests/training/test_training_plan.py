"""From a model to a training plan: what is chosen where, why, and that `prepare` and the command line run it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwright import hardware
from bitwright.cli import main
from bitwright.errors import TrainingError
from bitwright.models.loaded import from_memory
from bitwright.plan.training_folder import load_training_plan, write_training_plan
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.planning.planned_policy import policy_of_plan
from bitwright.training.planning.training_plan import PlanRequest, make_training_plan
from bitwright.training.policy import POLICIES

QUICK = {"batches": 2, "batch": 2, "sequence": 32}


@pytest.fixture(scope="module")
def h100(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> TrainingPlan:
    loaded = from_memory(make_tiny_model("llama"), tiny_tokenizer, name="tiny")
    return make_training_plan(loaded, PlanRequest(device=hardware.get("h100"), gpus=8, **QUICK))


def plan_for(make: Any, tokenizer: Any, device: Any, **changes: Any) -> TrainingPlan:
    loaded = from_memory(make("llama"), tokenizer, name="tiny")
    return make_training_plan(loaded, PlanRequest(device=device, **{**QUICK, **changes}))


def test_every_product_has_a_choice_and_its_evidence(h100: TrainingPlan) -> None:
    assert len(h100.products) == 15
    for site in h100.products:
        assert site.reason and {entry.operand for entry in site.ranges} == {"x", "w", "g"}
        assert {entry.recipe for entry in site.errors} >= {"bf16", "fp8-hybrid", "fp8-block"}
    assert h100.site("lm_head").choice == "bf16"
    assert h100.site("model.layers.0.mlp.down_proj").choice == "fp8-hybrid"
    kinds = {site.kind for site in h100.sites}
    assert kinds == {
        "matmul", "norm", "softmax", "loss", "grad", "master", "optim.m", "optim.v", "comm.grad", "comm.param",
    }  # fmt: skip
    assert {entry.name for entry in h100.candidates if entry.why_not} == {"mxfp8", "nvfp4"}


def test_a_plan_repeats_itself(h100: TrainingPlan, make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    again = plan_for(make_tiny_model, tiny_tokenizer, hardware.get("h100"), gpus=8)
    assert again.to_json() == h100.to_json()


def test_a_tight_limit_leaves_products_in_bf16(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    plan = plan_for(make_tiny_model, tiny_tokenizer, hardware.get("h100"), max_error=0.001)
    assert {site.choice for site in plan.products} == {"bf16"} and plan.policy == "bf16-mixed"
    assert "no recipe stays within" in plan.site("model.layers.0.mlp.up_proj").reason
    assert "comm.grad" not in {site.kind for site in plan.sites}  # one GPU sends nothing


def test_an_outlier_takes_one_layer_out(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    model = make_tiny_model("llama")
    with torch.no_grad():  # the outlier meets inputs of zero, and so spoils nothing but the scale of its matrix
        model.get_parameter("model.layers.0.post_attention_layernorm.weight")[5] = 0
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 5] = 3e4
    loaded = from_memory(model, tiny_tokenizer, name="tiny")
    plan = make_training_plan(loaded, PlanRequest(device=hardware.get("h100"), **QUICK))
    site = plan.site("model.layers.0.mlp.up_proj")
    assert site.choice == "bf16" and "fp8-hybrid: error" in site.reason
    assert plan.site("model.layers.0.mlp.gate_proj").choice == "fp8-hybrid"


def test_devices_without_fp8(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    v100 = plan_for(make_tiny_model, tiny_tokenizer, hardware.get("v100"))
    assert v100.policy == "fp16-mixed" and {site.choice for site in v100.products} == {"fp16"}
    a100 = plan_for(make_tiny_model, tiny_tokenizer, hardware.get("a100"))
    assert a100.policy == "bf16-mixed"


def test_sizes_that_the_unit_does_not_take(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    # mlp sides are 96: no multiple of 64
    device = hardware.get("h100")
    rules = tuple(
        replace(rule, in_features_multiple=64, out_features_multiple=64) if rule.group_size is None else rule
        for rule in device.matmul_rules
    )
    plan = plan_for(make_tiny_model, tiny_tokenizer, replace(device, matmul_rules=rules))
    assert "its side of 96 is no multiple of 64" in plan.site("model.layers.0.mlp.up_proj").reason


def test_what_does_not_fit(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    device = hardware.get("h100")
    needs = plan_for(make_tiny_model, tiny_tokenizer, device, gpu_sequence=8).memory.peak_bytes
    # 95,040 parameters: masters in fp32 take 16 bytes each, bf16 ones less
    small = replace(device, memory_bytes=needs - 100_000)
    plan = plan_for(make_tiny_model, tiny_tokenizer, small, gpu_sequence=8)
    assert plan.site("masters").choice == "bf16" and "do not fit" in plan.site("masters").reason
    assert policy_of_plan(plan).policy.update == "stochastic"
    tiny = plan_for(make_tiny_model, tiny_tokenizer, replace(device, memory_bytes=1000))
    assert tiny.memory.peak_bytes > 1000 and "does not fit" in tiny.notes[0]


def test_prepare_runs_a_plan(h100: TrainingPlan, make_tiny_model: Any, tmp_path: Path) -> None:
    from bitwright.training.prepare import prepare

    folder = write_training_plan(h100, tmp_path / "plan")
    model = make_tiny_model("llama").requires_grad_(True).train()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=folder)
    tokens = torch.arange(64).reshape(2, 32)
    with run.step() as step:
        step.backward(model(input_ids=tokens, labels=tokens).loss)
    assert run.policy == POLICIES["fp8-hybrid"] and run.last is not None and run.last.skipped is None


def test_prepare_runs_several_recipes_at_once(h100: TrainingPlan, make_tiny_model: Any, tmp_path: Path) -> None:
    from bitwright.training.prepare import prepare

    choices = {"model.layers.0.mlp.up_proj": "fp8-block", "model.layers.1.self_attn.q_proj": "bf16"}
    sites = [site.model_copy(update={"choice": choices.get(site.name, site.choice)}) for site in h100.sites]
    mixed = TrainingPlan.model_validate(
        {**{name: getattr(h100, name) for name in type(h100).model_fields}, "sites": sites}
    )
    planned = policy_of_plan(mixed)
    assert len(planned.by_recipe) == 2 and sum(len(layers) for _, layers in planned.by_recipe) == 13
    model = make_tiny_model("llama").requires_grad_(True).train()
    folder = write_training_plan(mixed, tmp_path / "plan")
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=folder)
    tokens = torch.arange(64).reshape(2, 32)
    with run.step() as step:
        step.backward(model(input_ids=tokens, labels=tokens).loss)
    own = {
        name for name, layer in model.named_modules() if "forward" in vars(layer) and isinstance(layer, torch.nn.Linear)
    }
    assert own == set(planned.recipes) and {"lm_head", "model.layers.1.self_attn.q_proj"} == set(planned.high)


def test_the_command_writes_shows_and_exports(
    make_tiny_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    arguments = ["--hardware", "h100", "--gpus", "8", "--batches", "2", "--seq", "32", "--out", str(out)]
    assert main(["train", "plan", str(make_tiny_folder("llama")), *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "attn.q fp8-hybrid" in printed and "fits" in printed and str(out) in printed.replace(" ", "")
    assert main(["show", str(out), "--sites"]) == 0
    assert "model.layers.1.mlp.down_proj" in capsys.readouterr().out
    assert main(["show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["content_hash"] == load_training_plan(out).content_hash
    assert main(["export", str(out), "--list"]) == 0
    assert "torchtitan" in capsys.readouterr().out
    assert main(["export", str(out), "--to", "torchtitan", "--out", str(tmp_path / "titan")]) == 0
    assert "no delayed scaling" in capsys.readouterr().out
    assert (tmp_path / "titan" / "torchtitan.toml").exists()
    assert main(["verify", str(out)]) == 2
    assert "is a training plan" in capsys.readouterr().err


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(TrainingError, match="max_error is 0"):
        PlanRequest(device=hardware.get("h100"), max_error=0)
    with pytest.raises(TrainingError, match="learning rate of -1"):
        PlanRequest(device=hardware.get("h100"), learning_rate=-1)
    with pytest.raises(TrainingError, match="0 GPUs"):
        PlanRequest(device=hardware.get("h100"), gpus=0)
