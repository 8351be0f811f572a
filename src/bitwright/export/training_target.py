"""A training plan as the precision part of another program's configuration: one file of `training_targets/` a program.

A target is a function of the plan: it gives files (name → text) and notes, and touches no model. What the program
cannot be told is a note with its reason, since a run under the rest is still a run; a plan of which nothing can be said
is refused (`why_not`). Files hold what precision decides and nothing else: they are merged into a configuration that
says what is trained, on what and where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from bitwright.catalog import Catalog
from bitwright.errors import ExportError
from bitwright.plan.training_plan import TrainingPlan
from bitwright.plan.whole_folder import assembled_folder, write_and_sync
from bitwright.training.planning.planned_policy import PlannedPolicy, policy_of_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a target makes of a plan."""

    #: File name → text.
    files: Mapping[str, str]
    #: What the program does otherwise, and why.
    notes: tuple[str, ...] = ()


@runtime_checkable
class TrainingTarget(Protocol):
    """What every target is."""

    @property
    def name(self) -> str:
        """As the command line writes it."""

    @property
    def description(self) -> str:
        """One line for tables: what is written, and who reads it."""

    @property
    def source(self) -> str:
        """Where the program's keys can be looked up."""

    def why_not(self, plan: TrainingPlan, planned: PlannedPolicy) -> str | None:
        """Why the program cannot train under a plan at all; None if it can."""

    def write(self, plan: TrainingPlan, planned: PlannedPolicy) -> Written:
        """Return files and notes. Two calls with one plan give equal texts."""


#: Every target, by name.
TRAINING_TARGETS: Catalog[TrainingTarget] = Catalog(
    kind="training target",
    package="bitwright.export.training_targets",
    attribute="TRAINING_TARGETS",
    record_type=TrainingTarget,
)


def export_training(plan: TrainingPlan, to: str, out: str | os.PathLike[str]) -> Written:
    """Write a training plan for a program, as a new folder: all of it or nothing.

    Args:
        plan: any.
        to: name of a target.
        out: a folder that is not there yet.

    Raises:
        UnknownName: no such target, or the plan names a policy that is not there any more.
        ExportError: the program cannot train under the plan, or the folder is there already or cannot be written.
    """
    target = TRAINING_TARGETS[to]
    planned = policy_of_plan(plan)
    why = target.why_not(plan, planned)
    if why is not None:
        raise ExportError(f"the plan cannot be written for {to}: {why}; nothing was written")
    folder = Path(os.path.realpath(out))
    if folder.exists():
        raise ExportError(f"'{out}' exists, and an export replaces nothing; choose another --out")
    written = target.write(plan, planned)
    try:
        with assembled_folder(folder) as assembled:
            for name, text in written.files.items():
                write_and_sync(assembled / name, text.encode("utf-8"))
    except OSError as error:
        raise ExportError(
            f"could not write '{out}' ({error.strerror or error}); nothing was written: choose another --out"
        ) from error
    return written
