"""``bitwright comm time``: every algorithm of a collective on a cluster, the one that is chosen, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitwright.cli import main

FLAT = """
name = "flat"
[[levels]]
kind = "switch"
medium = "network"
members = 8
one_way_gb_per_s = 1.0
source = "a test"
certainty = "derived"
[[levels.curves]]
algorithm = "ring"
ceiling_gb_per_s = 1.0
latency_s = 1e-3
"""


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["comm", "time", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_algorithm_stands_there_or_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "time", "allreduce", "--cluster", "h100x8x16", "--size", "64MiB"]) == 0
    said = capsys.readouterr().out
    for text in (
        "128 ranks of h100x8x16",
        "→  nvls_tree (Simple)",
        "hierarchical",
        "busbw",
        "NCCL's model takes the least",
        "sharp: needs a switch that adds, which NDR InfiniBand is not",
        "predicted",
    ):
        assert text in said


def test_times_are_the_closed_form_and_bandwidths_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flat.toml"
    file.write_text(FLAT, encoding="utf-8")
    found = told(capsys, "allreduce", "--cluster-file", str(file), "--size", "1MiB")
    (size,) = found["sizes"]
    ring = next(row for row in size["algorithms"] if row["algorithm"] == "ring")
    assert ring["time_s"] == pytest.approx(1e-3 + 2 * 7 / 8 * (1 << 20) / 1e9)
    assert ring["algbw_gb_per_s"] == pytest.approx((1 << 20) / ring["time_s"] / 1e9)
    assert ring["busbw_gb_per_s"] == pytest.approx(2 * 7 / 8 * ring["algbw_gb_per_s"])
    assert size["chosen"] == "ring"  # the only one that somebody measured there
    assert "multimem" in found["refused"]


def test_sizes_of_a_range_are_rows_and_trees_win_small(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "all-reduce", "--cluster", "a100x8x8", "--size", "1KiB..1GiB")
    chosen = [row["chosen"] for row in found["sizes"]]
    assert len(chosen) == 11
    assert chosen[0] == "tree"
    assert main(["comm", "time", "allreduce", "--cluster", "a100x8x8", "--size", "1KiB,1GiB"]) == 0
    assert "1.00 KiB" in capsys.readouterr().out


def test_a_group_is_one_of_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "allgather", "--cluster", "h100x8x16", "--ranks", "16", "--stride", "8")
    assert found["ranks"] == 16
    assert {row["bound"] for row in found["sizes"][0]["algorithms"]} == {"NDR InfiniBand"}


def said_of(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    file = tmp_path / "flat.toml"
    file.write_text(FLAT, encoding="utf-8")
    assert main(["comm", "time", "allreduce", "--cluster-file", str(file), *arguments]) == 0
    return capsys.readouterr().out


def test_what_nobody_measured_is_not_said_to_be_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_of(capsys, tmp_path, "--size", "64KiB")
    assert "the only algorithm of all_reduce that is measured here" in said
    assert "≈" in said and "faster" not in said
    # Both were measured there.
    assert main(["comm", "time", "allreduce", "--cluster", "h100x8", "--size", "64KiB"]) == 0
    assert "faster  one_shot by" in capsys.readouterr().out


def test_every_time_that_is_not_measured_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = said_of(capsys, tmp_path, "--size", "64KiB,1MiB")
    rows = [line for line in several.splitlines() if "KiB" in line or "MiB" in line]
    found = told(capsys, "allreduce", "--cluster-file", str(tmp_path / "flat.toml"), "--size", "64KiB")
    guessed = [row for row in found["sizes"][0]["algorithms"] if not row["is_measured"]]
    assert guessed and [line.count("≈ ") for line in rows] == [len(guessed)] * 2


@pytest.mark.parametrize("sizes", ["64KiB", "64KiB,1MiB"])
def test_one_rank_takes_no_time(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "time", "allreduce", "--cluster", "h100x8x16", "--ranks", "1", "--size", sizes]) == 0
    said = capsys.readouterr().out
    assert "1 rank of h100x8x16" in said and "none" in said
    assert told(capsys, "allreduce", "--cluster", "h100x8", "--ranks", "1")["sizes"][0]["chosen"] == "none"


def test_more_members_than_a_file_describes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the file describes" not in said_of(capsys, tmp_path)
    assert main(["comm", "time", "allreduce", "--cluster-file", f"{tmp_path / 'flat.toml'}x16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "16 by switch, where the file describes 8: its rates and latencies are taken for more" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["allreduce", "--cluster", "h100x8", "--size", "0.5B"], "'0.5B' cannot be read"),
        (["allreduce"], "name the cluster once"),
        (["allreduc", "--cluster", "h100x8"], "did you mean 'allreduce'"),
        (["allreduce", "--cluster", "h100x8", "--size", "big"], "'big' cannot be read"),
        (["allreduce", "--cluster", "h100x8", "--ranks", "16"], "does not fit into the 8 ranks"),
        (["allreduce", "--cluster", "h100x8", "--launch", "lazy"], "unknown launch 'lazy'"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "time", *arguments]) == 2
    assert words in capsys.readouterr().err
