"""Tables beside other tools show what is filed so far, whatever is missing still."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MACHINE = {"cpu": "a processor", "cores": 2, "python": "3.11", "torch": "2.13"}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, reading an empty folder of results."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import measured
    import measured_peers

    for module in (measured, measured_peers):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return measured_peers


def file(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps({"machine": MACHINE, **content}), encoding="utf-8")


def run(row: str, tool: str, **more: Any) -> dict[str, Any]:
    return {"row": row, "tool": tool, "kl": 0.1234, "stored_bits_with_fp16_scales": 4.75, **more}


def test_without_a_file_the_command_is_named(tables: ModuleType) -> None:
    for text in (tables.allocation_table("demo"), tables.seconds_table("demo"), tables.stored_table("demo")):
        assert text.startswith("Not measured yet: `python benchmarks/peers/run.py --model demo")
    assert tables.scale_table() == "Not measured yet: `python benchmarks/scale.py all`."


def test_files_in_parts(tables: ModuleType, tmp_path: Path) -> None:
    """Runs without times, roundings without runs, a free run whose rival is missing."""
    file(
        tmp_path,
        "peers-demo.json",
        runs=[
            run("4.62", "autoround"),
            run(
                "4.62", "bitwright-free", kl=0.0617, notes={"stored_bits": 4.75}, times={"cpu_s": 99.6, "wall_s": 50.2}
            ),
            run("5.31", "bitwright-free", notes={}),
            run("5.31", "modelopt", times={"cpu_s": 7, "wall_s": 8, "threads": 1}),
        ],
        same_rounding={"rtn + clip": [], "gradient_aware": [run("4.62", "modelopt"), run("4.80", "autoround")]},
    )
    allocation = tables.allocation_table("demo")
    assert "rtn + clip" not in allocation and "All rounded by `gradient_aware`" in allocation
    assert "| 4.62 | 0.123 | – |\n| 4.80 | – | 0.123 |" in allocation
    assert "| 4.62 | 100 (50) | – |\n| 5.31 | – | 7 (8, one thread) |" in tables.seconds_table("demo")
    assert "| 4.62 | 4.750 | 0.123 | 4.750 | 0.0617 | 0.50 |" in tables.stored_table("demo")
    assert "5.31" not in tables.stored_table("demo")
    file(tmp_path, "peers-demo.json", runs=[])
    assert tables.allocation_table("demo").startswith("Not measured yet")


def test_growth_in_parts(tables: ModuleType, tmp_path: Path) -> None:
    point = {"parameters": 1_543_714_304, "peak_memory_gib": 8.94, "processor_s": 5400.0, "calibration_tokens": 512}
    file(tmp_path, "scale.json", sizes={"1.5B": point}, tokens={})
    assert "| 1,543,714,304 | 8.9 | 90.0 |" in tables.scale_table() and "scale.svg" not in tables.scale_table()
    lines = {"processor minutes over parameters (billions)": {"at_zero": 1.0, "slope": 58.25, "r_squared": 0.9987}}
    file(tmp_path, "scale.json", sizes={}, tokens={"512": point}, lines=lines, what="whole searches")
    (tmp_path / "scale.svg").write_text("<svg/>", encoding="utf-8")
    text = tables.scale_table()
    assert "| 512 | 8.9 | 90.0 |" in text and "1,543,714,304" not in text
    assert "| processor minutes over parameters (billions) | 1.00 | 58.25 | 0.9987 |" in text
    assert "![growth](../benchmarks/results/scale.svg)" in text and "whole searches." in text


def test_runs_that_are_only_filed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has one tool's new run; the file has its old run, another's, and a failure that is done since."""
    folder = Path(__file__).parents[2] / "benchmarks" / "peers"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    spec = importlib.util.spec_from_file_location("peers_run", folder / "run.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place, facts = script.Place(model="demo"), {"model": "demo"}
    place.folder.mkdir(parents=True)
    (place.folder / "facts.json").write_text(json.dumps(facts))
    for tool, kl in (("autoround", 0.5), ("bitwright", 0.2)):
        done = place.run("4.62", tool)
        done.mkdir(parents=True)
        (done / "evaluation.json").write_text(json.dumps({"kl": kl}))
        (done / "result.json").write_text(json.dumps({"bits": {"a": 4}}))
    older = {
        "facts": facts,
        "runs": [run("4.00", "bitwright", kl=0.3), run("4.62", "bitwright", kl=0.9), run("4.62", "modelopt", kl=0.8)],
        "failed": [{"row": "4.62", "tool": "autoround", "reason": "no"}, {"row": "5.31", "tool": "modelopt"}],
        "same_rounding": {"rtn + clip": [run("4.62", "modelopt", kl=0.7)]},
    }
    found = script.collect(place, older)
    assert [(r["row"], r["tool"], r["kl"]) for r in found["runs"]] == [
        ("4.00", "bitwright", 0.3), ("4.62", "modelopt", 0.8), ("4.62", "autoround", 0.5), ("4.62", "bitwright", 0.2),
    ]  # fmt: skip
    assert [(r["row"], r["tool"]) for r in found["failed"]] == [("5.31", "modelopt")]
    assert [r["kl"] for r in found["same_rounding"]["rtn + clip"]] == [0.7]
    of_other_text = script.collect(place, {**older, "facts": {"model": "demo", "text": "another"}})
    assert [r["kl"] for r in of_other_text["runs"]] == [0.5, 0.2] and not of_other_text["failed"]
