"""What benchmarks/training/ stands on: points that are measured once, intervals by a table of t, pairs on the same
text, and an outlier that one token makes and no other."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the scripts by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def asked(folder: Path, *, again: bool = False) -> argparse.Namespace:
    return argparse.Namespace(out=folder, quick=False, again=again)


def test_a_point_is_measured_once_and_anew_under_other_settings(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = script("points").Points
    measured = []

    def run() -> dict[str, float]:
        measured.append(None)
        return {"loss": 1.5}

    for settings, again, times in (
        ({"steps": 3}, False, 1),
        ({"steps": 3}, False, 1),
        ({"steps": 4}, False, 2),
        ({"steps": 4}, True, 3),
    ):
        found = points("trial", "a trial", settings, asked(tmp_path, again=again)).measure("gpt2 fp32 0", run)
        assert found["loss"] == 1.5
        assert len(measured) == times
    filed = json.loads((tmp_path / "training-trial.json").read_text(encoding="utf-8"))
    assert filed["settings"] == {"steps": 4}
    assert filed["machine"]["torch"] == torch.__version__
    assert "dropped" in capsys.readouterr().err


def test_points_are_found_by_the_words_their_key_begins_with(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    points = script("points").Points("trial", "a trial", {}, asked(tmp_path))
    for key in ("gpt2 bf16-pure 0", "gpt2 bf16-pure 1", "gpt2 bf16-pure-sr 0"):
        points.measure(key, dict)
    assert [rest for rest, _ in points.named("gpt2", "bf16-pure")] == ["0", "1"]


def test_intervals_are_those_of_the_table_of_t(script: Callable[[str], ModuleType]) -> None:
    interval = script("intervals").t_interval
    # 1 … 5: mean 3, standard deviation √2.5, t with 4 degrees of freedom 2.776
    mean, low, high = interval([1, 2, 3, 4, 5])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert (mean, low, high) == pytest.approx((3, 3 - half, 3 + half))
    assert interval([0.25]) == (0.25, -math.inf, math.inf)
    # 39 degrees of freedom: 2.0227 (any table)
    mean, low, high = interval([0.0] * 20 + [2.0] * 20)
    assert (high - mean) * math.sqrt(40) / math.sqrt(40 / 39) == pytest.approx(2.0227, abs=1e-4)


def test_pairs_see_the_same_text_and_other_seeds_do_not(script: Callable[[str], ModuleType]) -> None:
    runs = script("small_runs")
    setup = runs.Setup(model="gpt2", steps=3)
    other = runs.Setup(model="llama", steps=3, learning_rate=1.0)
    assert runs.text_hash(setup, 0) == runs.text_hash(other, 0)
    assert runs.text_hash(setup, 0) != runs.text_hash(setup, 1)


@pytest.mark.parametrize("width", [64, 128])
def test_the_outlier_leaves_fp16_for_its_token_alone(script: Callable[[str], ModuleType], width: int) -> None:
    outlier, runs = script("outlier"), script("small_runs")
    setup = runs.Setup(model="gpt2", steps=2, batch=8, width=width, layers=2, outlier_steps=(1,))
    model = runs.build(setup, seed=0).eval()
    largest = []
    for block in model.transformer.h:
        block.mlp.c_proj.register_forward_hook(
            lambda _, inputs, output: largest.append(float(output.detach().abs().max()))
        )
    plain, with_token = runs.batches(setup, 0)
    assert not (plain == outlier.TOKEN).any() and (with_token == outlier.TOKEN).sum() == 1
    model(plain)
    assert max(largest) < 10
    model(with_token)
    assert 65_504 < max(largest) < 1.3e5
