"""`bitwright compare`: what is printed, exit codes, and what is refused before any model is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fabricated_plan import make_plan

from bitwright.cli import main
from bitwright.plan import Interval, PlanComparison, diff_sites, verdict_of, write_plan


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A plan, one with another choice at a site, and one for another model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    first = make_plan(num_layers=2)
    changed = first.sites[0].model_copy(update={"scheme": "bf16", "rounding": "rtn", "bytes": 2 * 576 * 576})
    second = first.replace(sites=(changed, *first.sites[1:]))
    other = first.replace(model=first.model.model_copy(update={"hash": "f" * 64}))
    for name, plan in (("first", first), ("second", second), ("other", other)):
        write_plan(plan, tmp_path / name)
    return ["first", "second", "other"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the measurement: its difference is set by the test."""
    module = ModuleType("bitwright.search.compare_plans")
    module.difference = Interval(mean=-0.002, low=-0.003, high=-0.001)
    module.calls = []

    def compare_plans(first, second, *, progress, **options):
        module.calls.append(options)
        return PlanComparison(
            sites=diff_sites(first, second),
            num_sites=len(first.sites),
            first_bytes=first.summary.weight_bytes,
            second_bytes=first.summary.weight_bytes + 500_000,
            first_kl=Interval(mean=0.02, low=0.018, high=0.022),
            second_kl=Interval(mean=0.018, low=0.016, high=0.02),
            difference=module.difference,
            sequences=64,
            source="docs",
            verdict=verdict_of(module.difference),
        )

    module.compare_plans = compare_plans
    monkeypatch.setitem(sys.modules, "bitwright.search", ModuleType("bitwright.search"))
    monkeypatch.setitem(sys.modules, "bitwright.search.compare_plans", module)
    return module


def test_what_is_said(folders, measured, capsys):
    assert main(["compare", "first", "second", "--tokens", "512"]) == 0
    out = capsys.readouterr().out
    assert "attn.q" in out and "int8_w" in out and "bf16" in out
    assert "1 of 15 sites differ" in out
    assert "the second plan is better beyond the noise" in out and "larger" in out
    assert "−0.00200 [−0.00300, −0.00100]" in out
    assert max(map(len, out.splitlines())) <= 80
    assert measured.calls == [{"model": None, "evaluation": None, "tokens": 512}]


def test_site_by_site(folders, measured, capsys):
    assert main(["compare", "first", "second", "--sites"]) == 0
    assert "model.layers.0.self_attn.q_proj" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("low", "high", "code", "words"),
    [
        (-0.001, 0.001, 0, "the difference in quality is within the noise"),
        (0.001, 0.003, 3, "the second plan is worse beyond the noise"),
    ],
)
def test_the_verdict_follows_from_the_interval(folders, measured, capsys, low, high, code, words):
    measured.difference = Interval(mean=(low + high) / 2, low=low, high=high)
    assert main(["compare", "first", "second"]) == code
    assert words in capsys.readouterr().out


def test_json_is_the_comparison_and_nothing_else(folders, measured, capsys):
    assert main(["compare", "first", "second", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "better" and len(found["sites"]) == 1


def test_plans_of_different_weights_are_refused_before_any_work(folders, measured, capsys):
    assert main(["compare", "first", "other"]) == 2
    assert "different weights" in capsys.readouterr().err
    assert measured.calls == []
