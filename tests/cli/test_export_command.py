"""``bitwright export``: what it prints, what it refuses, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from export_models import small_model, uniform

from bitwright.cli import main
from bitwright.plan import Run, write_plan


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A model and plans for it: for everybody, for no engine, and one that only the model speaks against."""
    folder = tmp_path_factory.mktemp("export")
    loaded = small_model(tiny_tokenizer)
    loaded.model.save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    for name, scheme in (("good", "int4_g64"), ("bad", "fp6_w"), ("fused", "nvfp4_w")):
        plan = uniform(loaded, scheme).attach(run=Run(paths={"model": str(folder / "model")}))
        write_plan(plan, folder / name)
    return folder


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def test_a_plan_is_written(plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("export", plans / "good", "--to", "compressed-tensors", "--out", out, "--dtype", "bf16") == 0
    said = capsys.readouterr().out
    assert "for      vllm (what 'compressed-tensors' is written for, unless told otherwise)" in said
    assert "dtype    bfloat16 (asked for)" in said
    assert "engines keep the scales of int4_g64 in the dtype of the model, here bf16" in said
    assert (out / "config.json").exists() and (out / "tokenizer.json").exists()


def test_refusals_name_the_sites_and_write_nothing(
    plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the model is not looked at: what the plan alone tells is told first
    code = run("export", plans / "bad", "--to", "compressed-tensors", "--out", tmp_path / "out", "--model", "/nowhere")
    said = capsys.readouterr().err
    assert code == 2 and "14 of 14 sites" in said and "model.layers.{0-1}.mlp.up_proj" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_told_before_anything_is_loaded(
    plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert run("export", plans / "good", "--to", "compressed-tensors", "--out", tmp_path, "--model", "/nowhere") == 2
    assert "exists, and an export replaces nothing" in capsys.readouterr().err


def test_the_list_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "--list") == 0
    said = capsys.readouterr().out
    assert "compressed-tensors for vllm" in said and "safetensors-dequantized" in said and "int4_g64" in said


def test_the_list_for_a_plan_says_what_stands_against_each(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "--list", plans / "bad") == 0
    said = capsys.readouterr().out
    assert "compressed-tensors has no fp6_e3m2 codes" in said and "14 sites: model.layers.{0-1}" in said
    assert "safetensors-dequantized\n  nothing in the plan stands against it; the model was not looked at" in said


def test_the_list_looks_at_the_model_or_says_that_it_did_not(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "--list", plans / "fused") == 0
    said = capsys.readouterr().out
    assert "can be written" not in said and "is looked at with --model" in said
    assert "nothing in the plan stands against it; the model was not looked at" in said[: said.index("gguf")]
    assert run("export", "--list", plans / "fused", "--model", plans / "model") == 0
    said = capsys.readouterr().out
    assert "under one tensor scale, and its parts have several" in " ".join(said.split())
    assert "not looked at" not in said
    assert "safetensors-dequantized\n  can be written" in said and "--model" not in said


def test_a_list_is_for_an_engine_by_name_or_alias(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), (plans / "good",)):
        assert run("export", "--list", *more, "--engine", "nonsense") == 2
        assert "unknown engine 'nonsense'" in capsys.readouterr().err
    assert run("export", "--list", plans / "good", "--engine", "hf") == 0
    said = capsys.readouterr().out
    assert "compressed-tensors for transformers (asked for)" in said and "gguf\n  transformers does not load it" in said
    assert run("export", "--list", "--engine", "llamacpp") == 0
    said = capsys.readouterr().out
    assert "gguf" in said and "llama.cpp" in said and "torchao" not in said


def test_every_target_says_what_loads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "--list") == 0
    said = capsys.readouterr().out
    assert "torchao for torchao" not in said
    for target, loader in (("gguf", "llama.cpp"), ("modelopt", "ModelOpt"), ("transformer-engine", "Transformer")):
        assert sum(line.startswith(f"{target} ") and loader in line for line in said.splitlines()) == 1


def test_what_is_missing_is_named(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", plans / "good") == 2
    assert "--to and --out missing" in capsys.readouterr().err
    assert run("export", plans / "good", "--to", "onnx", "--out", "x") == 2
    assert "unknown exporter 'onnx'" in capsys.readouterr().err
