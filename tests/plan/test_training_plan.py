"""A training plan and its folder: what it says comes back, and what was changed is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fabricated_training_plan import once, training_plan

from bitwright.errors import PlanError
from bitwright.plan import Run, load_plan
from bitwright.plan.training_folder import is_training_plan, load_training_plan, write_training_plan


def test_a_plan_comes_back(tmp_path: Path) -> None:
    plan = training_plan().attach(Run(created="2026-01-01T00:00:00", timings={"plan": 1.5}))
    folder = write_training_plan(plan, tmp_path / "plan")
    again = load_training_plan(folder)
    assert again == plan and again.run == plan.run
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "run.json"]
    assert is_training_plan(folder) and is_training_plan(folder / "plan.json")
    assert write_training_plan(plan, folder) == folder  # an older plan is replaced
    text = (folder / "plan.json").read_text(encoding="utf-8")
    assert text == plan.to_json() and json.loads(text)["kind"] == "training"


def test_the_decision_is_hashed_apart_from_the_evidence() -> None:
    plan = training_plan()
    seen = training_plan(loss=3.0)
    assert plan.decision_hash == seen.decision_hash and plan.content_hash != seen.content_hash
    assert training_plan(low="fp8-block").decision_hash != plan.decision_hash


def test_damage_is_refused(tmp_path: Path) -> None:
    folder = write_training_plan(training_plan(), tmp_path / "plan")
    file = folder / "plan.json"
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace('"fp8-hybrid"', '"fp8-blocks"'), encoding="utf-8")
    with pytest.raises(PlanError, match="is not what was written"):
        load_training_plan(folder)
    file.write_text(whole.replace('"schema_version": 1', '"schema_version": 9'), encoding="utf-8")
    with pytest.raises(PlanError, match="schema version 9"):
        load_training_plan(folder)


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    folder = write_training_plan(training_plan(), tmp_path / "plan")
    with pytest.raises(PlanError, match="is a training plan"):
        load_plan(folder)
    (tmp_path / "plan.json").write_text('{"schema_version": 2}', encoding="utf-8")
    with pytest.raises(PlanError, match="is a plan for serving"):
        load_training_plan(tmp_path / "plan.json")


def test_two_sites_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="'norms' appears twice"):
        training_plan(sites=(once("norms", "norm", "fp32"), once("norms", "norm", "bf16")))
    with pytest.raises(PlanError, match="no site 'router'"):
        training_plan().site("router")
