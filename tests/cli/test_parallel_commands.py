"""``bitwright parallel``: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        (["pp=4", "schedule=zero-bubble"], {"pp": 4, "schedule": "zero-bubble", "interleave": 1}),
        (["pp=2", "interleave=4"], {"pp": 2, "schedule": "1f1b", "interleave": 4}),
        (["tp=2", "recompute=full", "zero=2"], {"tp": 2, "recompute": "full", "zero": 2}),
        (["tp=1", "zero=3", "zero-group=4", "micro-batch=2"], {"zero": 3, "zero_group": 4, "micro_batch": 2}),
    ],
)
def test_every_axis_can_be_given(
    fixed: list[str], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for text in fixed for word in ("--fix", text)]
    assert main(["parallel", "plan", "llama-3-8b", "--cluster", "h100x8x2", "--json", "--top", "9", *options]) == 0
    for layout in json.loads(capsys.readouterr().out)["layouts"]:
        assert {name: layout["layout"][name] for name in expected} == expected


def test_out_of_memory_is_exit_code_3_with_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "plan", "llama-3.1-405b", "--cluster", "h100x8"]) == 3
    said = capsys.readouterr().out
    assert "out of memory: no layout fits" in said and "nearest" in said and "states" in said
    assert "18 bytes a parameter: 16, and 2 of working copies that are kept through the step" in " ".join(said.split())
    assert main(["parallel", "plan", "llama-3.1-405b", "--cluster", "h100x8", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["nearest_miss"]["over_bytes"] > 0


def test_a_timeline_is_written_as_a_trace_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, drawing = tmp_path / "trace.json", tmp_path / "timeline.svg"
    arguments = ["parallel", "timeline", "llama-3-8b", "--cluster", "h100x8x2", "--fix", "pp=4"]
    assert main([*arguments, "--out", str(trace), "--out", str(drawing)]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert drawing.read_text().startswith("<svg")
    assert "16 of 16 micro-batches" in capsys.readouterr().out
    drawn = trace.read_bytes()
    assert main([*arguments, "--out", str(trace)]) == 2
    assert "exists, and nothing is replaced" in capsys.readouterr().err
    assert trace.read_bytes() == drawn


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "llama-3-8b"], "name the cluster once"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--cluster-file", "x.toml"], "name the cluster once"),
        (["plan", "llama-3-8b", "--cluster", "h101x8"], "unknown cluster 'h101'"),
        (["plan", "llama-3-8b", "--cluster", "h100x9"], "joins 1 to 8"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--fix", "xp=2"], "--fix is 'xp=2'"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--fix", "tp=3"], "with tp=3; tp may be 1, 2, 4, 8"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--fix", "tp=2", "--fix", "tp=4"], "tp=2 and tp=4"),
        (["timeline", "llama-3-8b", "--cluster", "h100x8", "--fix", "pp=0", "--out", "0.svg"], "pp is 0"),
        (["plan", "gpt2", "--cluster", "h100x8", "--seq", "8192"], "8192 tokens are more than the 1,024 learned"),
        (["timeline", "gpt2", "--cluster", "h100x8", "--seq", "8192", "--out", "0.svg"], "1,024 learned positions"),
        (["serve", "gpt2", "--cluster", "h100x8", "--context", "8192"], "1,024 learned positions"),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--fix", "schedule=zb"], "schedule: gpipe, 1f1b, zero-bubble"),
        (
            [
                "timeline",
                "llama-3-8b",
                "--cluster",
                "h100x8",
                "--fix",
                "pp=4",
                "--fix",
                "schedule=zero-bubble",
                "--out",
                "zero-bubble.svg",
            ],
            "not drawn; draw 1f1b",
        ),
        (["plan", "llama-3-8b", "--cluster", "h100x8", "--policy", "bf15"], "unknown policy 'bf15'"),
        (["timeline", "llama-3-8b", "--cluster", "h100x8", "--out", "trace.txt"], "ends in .json or .svg"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", *arguments]) == 2
    assert text in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep", "micro_batch", "interleave"])
def test_an_axis_of_no_gpus_is_refused(axis: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "plan", "llama-3-8b", "--cluster", "h100x8", "--fix", f"{axis}=0"]) == 2
    assert f"{axis} is 0; its least size is 1" in capsys.readouterr().err


def test_auto_is_the_policy_of_the_cluster_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["parallel", "plan", "llama-3-8b", "--cluster", "h100x8", "--policy", "auto", "--fix", "tp=2"]
    assert main([*arguments, "--policy", "fp8-hybrid"]) == 0
    said = capsys.readouterr().out
    # Named twice, it is planned once.
    assert "chosen" in said and "fp8-hybrid" in said and said.count("dp4 tp2 pp1 zero2 ") <= 1
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {layout["policy"] for layout in plan["layouts"]} == {"fp8-hybrid"} and "h100-sxm" in plan["policy_reason"]
    assert main([*arguments, "--hardware", "a100", "--json"]) == 0
    assert {layout["policy"] for layout in json.loads(capsys.readouterr().out)["layouts"]} == {"bf16-mixed"}
    drawing = ["--cluster", "a100x8", "--policy", "auto", "--out", str(tmp_path / "auto.svg")]
    assert main(["parallel", "timeline", "llama-3-8b", *drawing]) == 0
    assert "bf16-mixed" in capsys.readouterr().out


def test_a_sequence_beyond_what_a_model_was_trained_on_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "more than the 8,192 positions of llama-3-8b"
    own = ["llama-3-8b", "--cluster", "h100x8"]
    for arguments in (
        ["plan", *own, "--seq", "16384"],
        ["serve", *own, "--context", "16384"],
        ["timeline", *own, "--seq", "16384", "--out", str(tmp_path / "long.svg")],
    ):
        assert main(["parallel", *arguments]) == 0
        assert told in " ".join(capsys.readouterr().out.split())
    assert main(["parallel", "plan", *own, "--seq", "8192"]) == 0
    assert "positions" not in capsys.readouterr().out


def test_what_a_batch_rules_out_and_what_is_not_listed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["parallel", "plan", "llama-3-8b", "--cluster", "h100x8", "--top", "99"]
    assert main([*own, "--global-batch", "7"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "7 sequences rule out dp 2, 4, 8; a multiple of 8 allows them" in said
    assert main([*own, "--global-batch", "7", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_fit"] - plan["num_alike"] == len(plan["layouts"])
    assert f"{plan['num_fit']} fit, {plan['num_alike']} of them slower variants" in said
    assert main(own) == 0
    assert "rule out" not in capsys.readouterr().out


def served(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["parallel", "serve", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_serving_says_what_fits_and_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "serve", "llama-3-70b", "--cluster", "h100x8x2"]) == 0
    said = capsys.readouterr().out
    for text in ("h100x8x2: 16 × h100-sxm", "prefill", "a token", "fastest token", "most tokens of a GPU", "predicted"):
        assert text in said
    assert "out of memory: tp 1 from 1 at once" in said
    found = served(capsys, "llama-3-70b", "--cluster", "h100x8x2", "--tp", "4,8", "--batch", "1,16")
    first = next(row for row in found["choices"] if (row["tp"], row["batch"]) == (4, 1))
    assert first["replicas"] == 4
    # Weights are read once, by four GPUs of 3.35 TB/s; and no GPU is faster than its links.
    least = 2 * 70.6e9 / 4 / 3.35e12
    assert least < first["decode_s"] < 2 * least
    assert sum(first["decode_parts_s"].values()) == pytest.approx(first["decode_s"])
    # 2 · 80 layers · 8 heads · 128 · 2 bytes of each token.
    more = next(row for row in found["choices"] if (row["tp"], row["batch"]) == (4, 16))
    assert more["memory_bytes"] - first["memory_bytes"] == pytest.approx(15 * 4096 * 2 * 80 * 8 * 128 * 2 / 4)


def test_fewer_bits_leave_room_and_move_less(capsys: pytest.CaptureFixture[str]) -> None:
    own = ("llama-3-8b", "--cluster", "h100x8", "--tp", "1", "--batch", "1")
    plain, packed = served(capsys, *own), served(capsys, *own, "--scheme", "int4_g128", "--kv", "fp8_e4m3_tensor")
    assert (packed["weight_bits"], packed["kv_bits"]) == (4.125, 8.0)
    assert packed["choices"][0]["decode_s"] < 0.7 * plain["choices"][0]["decode_s"]
    assert packed["largest_batch"][0]["batch"] > 2 * plain["largest_batch"][0]["batch"]


def test_what_does_not_fit_is_exit_code_3_with_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "serve", "llama-3.1-405b", "--cluster", "h100x8"]) == 3
    assert "nothing fits; the nearest, tp 8 with 1 at once, is" in capsys.readouterr().out
    assert served(capsys, "llama-3.1-405b", "--cluster", "h100x8", code=3)["choices"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "16"], "tp 16 is more than the 8 GPUs of a node"),
        (["--tp", "3"], "tp 3 does not divide 32 heads"),
        (["--batch", "0"], "--batch has '0'; it takes whole numbers from 1"),
        (["--kv", "fp8_e4m3_tensr"], "did you mean 'fp8_e4m3_tensor'"),
        (["--scheme", "int5"], "unknown scheme 'int5'"),
        (["--cluster-file", "x.toml"], "name the cluster once"),
    ],
)
def test_serving_that_cannot_be_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel", "serve", "llama-3-8b", "--cluster", "h100x8", *options]) == 2
    assert words in capsys.readouterr().err
