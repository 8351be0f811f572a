"""``bitwright parallel``: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitwright.cli import main


def test_a_plan_names_layouts_reasons_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "plan", "llama-3-8b", "--cluster", "h100x8x2", "--policy", "fp8-hybrid"]) == 0
    said = capsys.readouterr().out
    for text in (
        "h100x8x2: 16 × h100-sxm",
        "tokens/s",
        "MFU",
        "exposed",
        "why 1",
        "bottleneck",
        "what if",
        "predicted",
    ):
        assert text in said


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "plan", "llama-3-8b", "--cluster", "h100x8", "--json", "--top", "2", "--fix", "tp=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and len(plan["layouts"]) == 2
    best = plan["layouts"][0]
    assert best["layout"]["tp"] == 2
    assert best["memory_bytes"] <= plan["usable_bytes"]
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])


def test_out_of_memory_is_exit_code_3_with_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "plan", "llama-3.1-405b", "--cluster", "h100x8"]) == 3
    said = capsys.readouterr().out
    assert "out of memory: no layout fits" in said and "nearest" in said and "states" in said
    assert main(["parallel", "plan", "llama-3.1-405b", "--cluster", "h100x8", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["nearest_miss"]["over_bytes"] > 0


def test_a_timeline_is_written_as_a_trace_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, drawing = tmp_path / "trace.json", tmp_path / "timeline.svg"
    arguments = ["parallel", "timeline", "llama-3-8b", "--cluster", "h100x8x2", "--fix", "pp=4"]
    assert main([*arguments, "--out", str(trace), "--out", str(drawing)]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert drawing.read_text().startswith("<svg")
    assert "16 of 16 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "llama-3-8b"], "name the cluster once"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--cluster-file", "x.toml"], "name the cluster once"),
        (["plan", "llama-3-8b", "--cluster", "h101x8"], "unknown cluster 'h101'"),
        (["plan", "llama-3-8b", "--cluster", "h100x9"], "joins 1 to 8"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--fix", "xp=2"], "--fix is 'xp=2'"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--fix", "tp=3"], "no layout divides"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--policy", "bf15"], "unknown policy 'bf15'"),
        (["timeline", "llama-3-8b", "--cluster", "h100x8", "--out", "trace.txt"], "ends in .json or .svg"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", *arguments]) == 2
    assert text in capsys.readouterr().err.replace("\n", " ")
