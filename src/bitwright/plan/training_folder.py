"""A training plan on disk: the folder of ``folder.py`` without tensors, since nothing in it depends on weights' codes.

NAME/plan.json   the plan, canonical JSON, ``"kind": "training"``
NAME/run.json    timings, paths, date: not hashed
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from bitwright.errors import PlanError
from bitwright.plan.canonical import canonical_json
from bitwright.plan.folder import (
    PLAN_FILE,
    RUN_FILE,
    invalid_plan,
    raise_if_changed,
    read_content,
    read_run,
    write_files,
)
from bitwright.plan.training_plan import TRAINING_SCHEMA_VERSION, TrainingPlan

_KIND = "training"


def is_training_plan(path: str | os.PathLike[str]) -> bool:
    """Is this the folder, or the ``plan.json``, of a training plan? Raises ``PlanError`` where there is no plan."""
    content, _ = read_content(path)
    return content.get("kind") == _KIND


def write_training_plan(plan: TrainingPlan, folder: str | os.PathLike[str]) -> Path:
    """Write ``plan`` as ``folder``, all of it or nothing; return the folder.

    An older plan folder there is replaced. Raises ``PlanError`` where something else is there or writing fails.
    """
    files = {
        PLAN_FILE: plan.to_json().encode("utf-8"),
        RUN_FILE: canonical_json(plan.run.model_dump(mode="json")).encode("utf-8"),
    }
    return write_files(files, folder)


def load_training_plan(path: str | os.PathLike[str]) -> TrainingPlan:
    """Read the folder, or the ``plan.json``, of a training plan.

    Raises ``PlanError`` where it is missing, damaged, changed by hand, from a newer schema, or a plan for serving.
    """
    content, file = read_content(path)
    if content.get("kind") != _KIND:
        raise PlanError(
            f"'{file}' is a plan for serving, and a training plan is asked for here; make one with: bitwright train "
            "plan"
        )
    hashed = raise_if_changed(content, file, TRAINING_SCHEMA_VERSION)
    try:
        plan = TrainingPlan.model_validate({key: value for key, value in hashed.items() if key != "decision_hash"})
    except ValidationError as error:
        raise invalid_plan(file, error) from error
    if hashed.get("decision_hash") != plan.decision_hash:
        raise PlanError(f"'{file}': decision_hash does not fit the sites and choices; make the plan again")
    return plan.attach(read_run(file.parent / RUN_FILE))
