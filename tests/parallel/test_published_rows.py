"""What is judged of predictions against published rows: the rules of calibration, verdicts, runs out of memory."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("comm_accuracy")


def prediction(row: str, group: str, measured: float, predicted: float, **more: object) -> object:
    read = importlib.import_module("comm_rows.read")
    return read.Prediction(row=row, group=group, measured=measured, predicted=predicted, constant=2 * measured, **more)


def test_rows_that_figures_were_fitted_to_are_not_judged(accuracy: ModuleType) -> None:
    rows = [
        prediction("a", "mine", 1.0, 1.3),
        prediction("b", "mine", 1.0, 1.0, is_calibration=True),
        prediction("c", "theirs", 1.0, 1.0, is_fitted=True),
    ]
    lines = accuracy.report(rows, [], show_rows=False, show_left=False)["groups"]
    assert accuracy.judged_line(lines)["mean"] == pytest.approx(0.3)
    verdict = accuracy.verdicts_of("gemm-per-source", lines)[0]
    assert verdict == {"what": "mean error ≤ 10 %", "found": "30.0%", "is_met": False}
    assert accuracy.verdicts_of("prefill", lines) == []


def test_sweeps_have_to_beat_a_constant(accuracy: ModuleType) -> None:
    rows = [prediction("a", "BLOOM, a device", 1.0, 1.05), prediction("b", "nanotron", 1.0, 3.5)]
    lines = [accuracy.line_of(group, [row]) for group, row in (("BLOOM, a device", rows[0]), ("nanotron", rows[1]))]
    found = accuracy.verdicts_of("training", [*lines, accuracy.line_of("all", rows)])
    assert [verdict["is_met"] for verdict in found] == [False, True, False]


@pytest.mark.parametrize("part", ["gemm", "memory"])
def test_three_rows_calibrate_a_group_and_by_source_no_more_of_a_source(
    accuracy: ModuleType, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = accuracy.parts()
    fine, coarse = (parts[name]()[0] for name in (part, f"{part}-per-source"))
    assert {row.row for row in fine} == {row.row for row in coarse}
    for rows in (fine, coarse):
        used: dict[str, int] = defaultdict(int)
        for row in rows:
            used[row.group] += row.is_calibration
        assert max(used.values()) <= 3
    assert sum(row.is_calibration for row in coarse) < sum(row.is_calibration for row in fine)


def test_runs_out_of_memory_are_counted_in_all(accuracy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    read = importlib.import_module("comm_rows.read")
    found = accuracy.report_out_of_memory()
    # Every published row that says so is there, named or left out with its reason.
    published = sum(bool(row.get("oom")) for row in read.read_rows("training"))
    assert found["ran_out"] + len(found["left_out"]) == published == 4
    assert found["share"] == found["named"] / found["ran_out"]
    assert found["verdicts"][0]["is_met"] == (found["share"] >= 0.9)


def test_work_beside_collectives_is_scored_with_nothing_calibrated(accuracy: ModuleType) -> None:
    predictions, left = accuracy.parts()["overlap"]()
    found = {row.row: row for row in predictions}
    assert len({row.row.removesuffix("-work") for row in predictions}) + len(left) == 8
    assert not any(row.is_calibration for row in predictions)
    # 0.18 ms of attention beside an all-gather on an A100, whose products ran 1.76 times slower there.
    assert found["ov-0-work"].predicted == pytest.approx(1.76 * 0.18)
    # One after the other: 2.96 ms; nothing that overlaps takes longer.
    assert found["ov-2"].constant == pytest.approx(2.96)
    assert found["ov-2"].roofline <= found["ov-2"].predicted <= 2.96
