"""What is searched again, and what a plan says where that cannot be done or was not asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_search import BUDGET, search_options

from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan, Robustness
from bitwright.search import robustness
from bitwright.search.optimize import optimize


@pytest.fixture
def study(load_tiny: Callable[..., LoadedModel], prose: Path) -> Callable[..., Robustness]:
    def make(**changes: Any) -> Robustness:
        options = search_options(prose, schemes=["int4_g32", "int8_w"], tokens=64, **changes)
        found = optimize(load_tiny("llama"), budget=BUDGET, robustness=True, **options).robustness
        assert found is not None
        return found

    return make


def test_the_set_that_is_not_used_is_searched_on(study: Callable[..., Robustness]) -> None:
    """Calibrated on documentation and proved on a file: code is the set that is left."""
    found = study(calibration="docs")
    assert [other.what for other in found.others] == ["seed 1", "calibration on code"] and found.notes == ()
    for other in found.others:
        assert other.kl.mean > 0 and other.sequences == robustness.NUM_SEQUENCES


def test_where_both_sets_are_used_that_is_said(study: Callable[..., Robustness]) -> None:
    found = study(calibration="code", evaluation="docs")
    assert [other.what for other in found.others] == ["seed 1"]
    (note,) = found.notes
    assert "(code, docs) calibrate and evaluate already" in note and "a file of your own" in note
    assert len(found.contexts) == 2


def test_a_set_that_is_too_short_costs_nothing_but_itself(
    study: Callable[..., Robustness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short to be cut in three.", encoding="utf-8")
    monkeypatch.setattr(robustness, "_another_set", lambda _: str(short))
    found = study()
    assert [other.what for other in found.others] == ["seed 1"] and len(found.contexts) == 2
    (note,) = found.notes
    assert note.startswith(f"nothing was searched on {short}: ") and len(note) > len(str(short)) + 40


def test_a_plan_that_was_not_asked_says_how(plan_of: Callable[[str], Plan]) -> None:
    plan = plan_of("llama")
    assert plan.robustness is None and any("--robustness does" in note for note in plan.notes)
