"""``bitwright memory``: what is printed adds up, and what does not fit is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitwright.cli import main


def facts(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["memory", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_lines_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "llama-7b", "--seq", "512")
    for instant in ("loss", "backward", "update"):
        alive = [line["bytes"] for line in found["lines"] if instant in line["alive"]]
        assert sum(alive) == found[f"{instant}_bytes"] <= found["peak_bytes"]
    kept = {line["name"]: line["bytes"] for line in found["lines"]}
    assert kept["parameters"] == 4 * 6_738_415_616 and kept["optimizer moments"] == 8 * 6_738_415_616


def test_masters_in_the_optimizer_are_sixteen_bytes_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "llama-65b", "--masters", "optimizer")
    kept = {line["name"]: line["bytes"] for line in found["lines"]}
    states = ("parameters", "fp32 masters", "gradients", "optimizer moments")
    assert sum(kept[name] for name in states) == 16 * 65_285_660_672
    assert "copies for products" not in kept


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "llama-7b", "--hardware", "l40s"]) == 3  # 48 GB
    out = capsys.readouterr().out
    assert "does not fit on l40s" in out and "would fit with --gpus" in out
    assert main(["memory", "llama-7b", "--hardware", "l40s", "--lora-rank", "16", "--base", "int4_g128"]) == 0
    assert "fits on l40s" in capsys.readouterr().out
    assert facts(capsys, "gpt3-175b", "--gpus", "8", "--zero", "3", "--hardware", "a100", code=3)["fits"] is False


def test_auto_is_what_the_device_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(capsys, "gpt2", "--policy", "auto", "--hardware", "v100")["policy"] == "fp16-mixed"
    assert main(["memory", "gpt2", "--policy", "auto"]) == 2
    assert "--hardware" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "mixtral"])
def test_a_config_is_enough(
    make_tiny_model: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    model.config.save_pretrained(tmp_path)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert facts(capsys, str(tmp_path))["parameters"] == expected
    assert facts(capsys, str(tmp_path / "config.json"))["parameters"] == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-8b",), "did you mean 'llama-"),
        (("llama-7b", "--policy", "bf16-mixt"), "did you mean 'bf16-mixed'"),
        (("llama-7b", "--gpus", "6", "--tensor-parallel", "4"), "6 GPUs with tensor parallelism over 4"),
        (("llama-7b", "--optimizer", "adamv"), "did you mean 'adam"),
        (("llama-7b", "--recompute", "half"), "none or full"),
        (("llama-7b", "--masters", "optimizer", "--policy", "fp32"), "no masters"),
        (("llama-7b", "--lora-rank", "8", "--base", "int4"), "unknown scheme"),
        (("llama-7b", "--base", "int4_g128"), "without --lora-rank all of the model is trained; add --lora-rank"),
        (("llama-7b", "--policy", "."), "plan.json"),
    ],
)
def test_wrong_questions_are_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert main(["memory", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_zero_over_one_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--gpus", "4", "--tensor-parallel", "4")):
        assert main(["memory", "gpt2", "--zero", "3", *arguments]) == 0
        assert "which divides nothing" in " ".join(capsys.readouterr().out.split())
    assert main(["memory", "gpt2", "--zero", "3", "--gpus", "2"]) == 0
    assert "divides nothing" not in capsys.readouterr().out


def test_a_plan_is_a_policy(
    make_tiny_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plan = str(make_tiny_folder("llama")), str(tmp_path / "plan")
    run = ("--batches", "2", "--batch", "1", "--seq", "16")
    assert main(["train", "plan", model, "--hardware", "h100", "--out", plan, *run]) == 0
    capsys.readouterr()
    found = facts(capsys, model, "--policy", plan)
    decided = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert found["policy"] == decided["policy"]
    assert f"by the plan '{plan}'" in found["policy_reason"]
    assert main(["memory", model, "--policy", plan]) == 0
    assert "by the plan" in capsys.readouterr().out


def test_a_plan_that_is_not_there_is_no_policy_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "gpt2", "--policy", "./nothere-plan"]) == 2
    told = capsys.readouterr().err
    assert "there is no such folder" in told and "`bitwright train plan` wrote" in told
