"""Training plans for other programs: read back by those that are installed, by their published keys otherwise."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fabricated_training_plan import training_plan

from bitwright.errors import ExportError, UnknownName
from bitwright.export.training_target import TRAINING_TARGETS, TrainingTarget, export_training
from bitwright.training.planning.planned_policy import policy_of_plan

PLANS = {
    "fp8-hybrid": training_plan(),
    "fp8-block": training_plan("fp8-block", "fp8-block"),
    "mxfp8": training_plan("mxfp8", "mxfp8"),
    "nvfp4": training_plan("nvfp4", "nvfp4"),
    "bf16-mixed": training_plan("bf16-mixed", None),
    "fp16-mixed": training_plan("fp16-mixed", None, "fp16"),
    "fp32": training_plan("fp32", None, "fp32", gpus=1),
}


def exported(tmp_path: Path, plan: str, to: str) -> tuple[str, tuple[str, ...]]:
    """(the text of the one file that is written, notes)"""
    written = export_training(PLANS[plan], to, tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    assert {file.name: file.read_text(encoding="utf-8")} == dict(written.files)
    return file.read_text(encoding="utf-8"), written.notes


@pytest.mark.parametrize("name", tuple(TRAINING_TARGETS))
def test_a_target_is_complete_and_repeats_itself(name: str) -> None:
    target = TRAINING_TARGETS[name]
    assert isinstance(target, TrainingTarget) and target.source and not target.description.endswith(".")
    for plan in PLANS.values():
        planned = policy_of_plan(plan)
        if target.why_not(plan, planned) is None:
            assert target.write(plan, planned) == target.write(plan, planned)


def test_a_policy_of_a_plan_knows_each_layer() -> None:
    planned = policy_of_plan(PLANS["fp8-hybrid"])
    assert planned.policy.name == "fp8-hybrid"
    ((recipe, layers),) = planned.by_recipe
    assert recipe == planned.policy.products and len(layers) == 3
    assert set(planned.high) == {"model.layers.11.mlp.down_proj", "lm_head"}
    assert policy_of_plan(PLANS["bf16-mixed"]).recipes == {}


# --- DeepSpeed ------------------------------------------------------------------------------------------------------

#: Fields of DeepSpeedBF16Config and DeepSpeedFP16Config (deepspeed/runtime/precision_config.py).
DS_BF16 = {"enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"}
DS_FP16 = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}


@pytest.mark.parametrize("name", tuple(PLANS))
def test_deepspeed_keys_exist(tmp_path: Path, name: str) -> None:
    text, notes = exported(tmp_path, name, "deepspeed")
    config = json.loads(text)
    assert config["bf16"].keys() <= DS_BF16 and config["fp16"].keys() <= DS_FP16
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config.get("communication_data_type", "fp32") in ("fp16", "bf16", "fp32")
    assert not (config["bf16"]["enabled"] and config["fp16"]["enabled"])
    assert config["zero_optimization"] == {"stage": 3}
    assert any("no key" in note for note in notes) == (name not in ("bf16-mixed", "fp16-mixed", "fp32"))


def test_deepspeed_gets_the_loss_scale(tmp_path: Path) -> None:
    config = json.loads(exported(tmp_path, "fp16-mixed", "deepspeed")[0])
    rule = policy_of_plan(PLANS["fp16-mixed"]).policy.loss_scale
    assert rule is not None
    assert config["fp16"]["enabled"] and 2 ** config["fp16"]["initial_scale_power"] == rule.initial
    assert config["fp16"]["loss_scale_window"] == rule.interval and config["fp16"]["min_loss_scale"] == 1


# --- Accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mixed"), [("fp8-hybrid", "fp8"), ("bf16-mixed", "bf16"), ("fp16-mixed", "fp16"), ("fp32", "no")]
)
def test_accelerate_loads_it(tmp_path: Path, name: str, mixed: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    exported(tmp_path, name, "accelerate")
    config = ClusterConfig.from_yaml_file(str(tmp_path / "out" / "accelerate.yaml"))  # unknown keys are errors there
    assert config.mixed_precision == mixed and config.num_processes == PLANS[name].gpus


def test_accelerate_launch_knows_its_fp8_keys(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    exported(tmp_path, "fp8-hybrid", "accelerate")
    config = ClusterConfig.from_yaml_file(str(tmp_path / "out" / "accelerate.yaml"))
    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    assert config.fp8_config["backend"] == "TE" and config.fp8_config["fp8_format"] == "HYBRID"
    assert {f"--fp8_{key.removeprefix('fp8_')}" for key in config.fp8_config} <= options
    assert config.fp8_config["amax_history_len"] == 1024 and config.fp8_config["amax_compute_algo"] == "max"


def test_accelerate_says_what_it_cannot(tmp_path: Path) -> None:
    _, notes = exported(tmp_path, "fp8-hybrid", "accelerate")
    assert any("2 layers are planned otherwise" in note for note in notes)
    text, notes = exported(tmp_path / "other", "nvfp4", "accelerate")
    assert "mixed_precision: bf16" in text and any("no backend" in note for note in notes)


# --- Lightning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision"), [("bf16-mixed", "bf16-mixed"), ("fp16-mixed", "16-mixed"), ("fp32", "32-true")]
)
def test_lightning_takes_the_precision(tmp_path: Path, name: str, precision: str) -> None:
    import yaml
    from lightning.fabric.plugins.precision.utils import _convert_fp_tensor  # noqa: F401  (the package is the real one)
    from lightning.pytorch import Trainer

    text, _ = exported(tmp_path, name, "lightning")
    config = yaml.safe_load(text)["trainer"]
    assert config == {"precision": precision}
    if name == "fp16-mixed":
        return  # on a CPU Lightning has no fp16
    trainer = Trainer(**config, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.precision == precision


def test_lightning_makes_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml
    from lightning.fabric.plugins.precision import transformer_engine as module
    from lightning.pytorch.plugins.precision import TransformerEnginePrecision

    text, notes = exported(tmp_path, "fp8-hybrid", "lightning")
    (plugin,) = yaml.safe_load(text)["trainer"]["plugins"]
    assert plugin["class_path"].rpartition(".")[2] == TransformerEnginePrecision.__name__
    arguments = {**plugin["init_args"]}
    for key in ("weights_dtype", "fallback_compute_dtype"):
        arguments[key] = getattr(torch, arguments[key].removeprefix("torch."))
    monkeypatch.setattr(module, "_TRANSFORMER_ENGINE_AVAILABLE", True)
    recipe = fake_transformer_engine(monkeypatch)
    made = TransformerEnginePrecision(**arguments)
    assert isinstance(made.recipe, recipe.DelayedScaling)
    assert made.recipe.fields == {
        "margin": 0,
        "fp8_format": recipe.Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    }
    assert any("replaces every linear layer" in note for note in notes)


# --- Transformer Engine ---------------------------------------------------------------------------------------------


def fake_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for transformer_engine.common.recipe: classes with the fields of its dataclasses, checked by name."""

    class Format:
        HYBRID, E4M3 = "HYBRID", "E4M3"

    def recipe(*names: str) -> type:
        def __init__(self: Any, **fields: Any) -> None:
            assert fields.keys() <= set(names), fields
            self.fields = fields

        return type("Recipe", (), {"__init__": __init__})

    module: Any = ModuleType("transformer_engine.common.recipe")
    module.Format = Format
    module.DelayedScaling = recipe("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax")
    module.Float8CurrentScaling = recipe("fp8_format")
    module.Float8BlockScaling = recipe("fp8_format", "x_block_scaling_dim", "w_block_scaling_dim")
    module.MXFP8BlockScaling = recipe("margin", "fp8_format")
    module.NVFP4BlockScaling = recipe("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    pytorch: Any = ModuleType("transformer_engine.pytorch")
    pytorch.autocast = lambda **arguments: arguments
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, pytorch.__name__, pytorch)
    return module


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("fp8-hybrid", "DelayedScaling"),
        ("fp8-block", "Float8BlockScaling"),
        ("mxfp8", "MXFP8BlockScaling"),
        ("nvfp4", "NVFP4BlockScaling"),
    ],
)
def test_transformer_engine_gets_recipes_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, class_name: str
) -> None:
    recipe = fake_transformer_engine(monkeypatch)
    text, _ = exported(tmp_path, name, "transformer-engine")
    ast.parse(text)
    space: dict[str, Any] = {}
    exec(compile(text, "te_training.py", "exec"), space)
    found = space["recipe_of"]("model.layers.0.self_attn.q_proj")
    assert isinstance(found, getattr(recipe, class_name))
    assert space["recipe_of"]("lm_head") is None and not space["replaced"]("lm_head")
    assert space["autocast_of"]("model.layers.0.self_attn.q_proj") == {"enabled": True, "recipe": found}
    if name == "nvfp4":
        assert found.fields == {"disable_rht": False, "disable_stochastic_rounding": False}


# --- torchtitan -----------------------------------------------------------------------------------------------------


def test_torchtitan_sections(tmp_path: Path) -> None:
    text, notes = exported(tmp_path, "fp8-hybrid", "torchtitan")
    config = tomllib.loads(text)
    assert config["model"] == {"converters": ["quantize.linear.float8"]}
    assert config["training"] == {
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    section = config["quantize"]["linear"]["float8"]
    assert section == {"recipe_name": "tensorwise", "filter_fqns": ["layers.11.feed_forward.w2", "output"]}
    # torchtitan leaves a layer alone where one of the names is a part of its own
    for layer in ("layers.0.feed_forward.w2", "layers.1.feed_forward.w2", "layers.110.feed_forward.w2"):
        assert not any(part in layer for part in section["filter_fqns"])
    assert any("no delayed scaling" in note for note in notes)


def test_torchtitan_has_a_converter_for_mxfp8_and_none_for_nvfp4(tmp_path: Path) -> None:
    config = tomllib.loads(exported(tmp_path, "mxfp8", "torchtitan")[0])
    assert config["quantize"]["linear"]["mx"]["recipe_name"] == "mxfp8_cublas_rceil"
    text, notes = exported(tmp_path / "other", "nvfp4", "torchtitan")
    assert tomllib.loads(text).keys() == {"training"} and any("no converter" in note for note in notes)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_a_program_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"torchtitan computes in bf16 or fp32.*nothing was written"):
        export_training(PLANS["fp16-mixed"], "torchtitan", tmp_path / "out")
    with pytest.raises(ExportError, match="all products are in bf16"):
        export_training(PLANS["bf16-mixed"], "transformer-engine", tmp_path / "out")
    with pytest.raises(UnknownName, match="did you mean 'torchtitan'"):
        export_training(PLANS["fp8-hybrid"], "torchtitans", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export_training(PLANS["fp8-hybrid"], "deepspeed", tmp_path / "out")
    with pytest.raises(ExportError, match="an export replaces nothing"):
        export_training(PLANS["fp8-hybrid"], "deepspeed", tmp_path / "out")
