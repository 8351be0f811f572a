"""The folder of a training run: what was asked, what was measured, where to go on.

    OUT/config.json                what decides the run, as it was asked
    OUT/metrics.jsonl              a line a step and a measurement (`metrics_file.py`)
    OUT/checkpoints/step-000200/   the newest few (`checkpoints/`)
    OUT/model/                     the trained model, once the run is over

A folder that holds a run already is only gone on with when that is asked for, and only as the same run: from its
newest checkpoint, or from the one that is named; later ones then go, as their lines of metrics do. A folder in which
nothing was ever trained (a wrong word in the configuration was found after it was made) holds no run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.checkpoint_facts import (
    CHECKPOINT_FILE,
    damaged,
    latest_checkpoint,
    read_checkpoint_facts,
)
from bitwright.training.record_facts import differences

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    #: Where to go on; None: from the beginning.
    resume_from: Path | None

    @property
    def metrics(self) -> Path:
        """The file of measurements."""
        return self.path / METRICS_FILE

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.path / "model"

    def checkpoint(self, step: int) -> Path:
        """The folder of a checkpoint after so many steps."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def drop_old_checkpoints(self, keep: int) -> None:
        """Delete all checkpoints but the newest."""
        for _, folder in _checkpoints(self.path)[:-keep]:
            shutil.rmtree(folder)

    def drop_checkpoints_after(self, step: int) -> tuple[str, ...]:
        """Delete checkpoints of later steps than the one that is gone on from; returns their names."""
        later = [folder for number, folder in _checkpoints(self.path) if number > step]
        for folder in later:
            shutil.rmtree(folder)
        return tuple(folder.name for folder in later)

    def drop_if_unused(self) -> None:
        """Delete the folder where no step was taken and nothing is saved in it."""
        if _is_unused(self.path):
            shutil.rmtree(self.path)


def open_run_folder(
    out: str, decisive: Mapping[str, Any], *, resume: bool, checkpoint: Path | None = None
) -> RunFolder:
    """Make the folder of a new run, or find where an old one is gone on with. One process calls it.

    Args:
        out: the folder.
        decisive: what decides the run.
        resume: go on with the run that is there; where none is, begin.
        checkpoint: go on from this one of the run; None: the newest.

    Raises:
        TrainingError: a run is there and is not to be gone on with, or was another one; there is none to go on with
            from a checkpoint; the checkpoint is damaged; or no folder can be made.
    """
    path = Path(out)
    there = _read_config(path)
    if there is None or _is_unused(path):
        if checkpoint is not None:
            raise TrainingError(
                f"'{path}' holds no run that could go on from '{checkpoint}'; leave out --from to begin"
            )
        _begin(path, decisive)
        return RunFolder(path=path, resume_from=None)
    latest = _latest_checkpoint(path) if checkpoint is None else checkpoint
    steps = 0 if latest is None else read_checkpoint_facts(latest)["step"]
    if not resume and checkpoint is None:
        raise TrainingError(
            f"'{path}' holds a run already (saved after {steps} steps); pass --resume to go on with it, or choose "
            "another out"
        )
    differing = differences(there, decisive)
    if differing:
        fields = "; ".join(f"{field} was {was!r}, is {now!r}" for field, was, now in differing)
        raise TrainingError(
            f"'{path}' holds another run ({fields}); set these back to go on with it, or choose another out"
        )
    return RunFolder(path=path, resume_from=latest)


def find_run_folder(out: str, resume_from: Path | None) -> RunFolder:
    """Return the folder that another process has opened."""
    return RunFolder(path=Path(out), resume_from=resume_from)


def _checkpoints(path: Path) -> list[tuple[int, Path]]:
    """Steps and folder of every checkpoint of a run, the oldest first; as text, step-1000000 is before step-999999."""
    named = ((folder.name.removeprefix("step-"), folder) for folder in (path / "checkpoints").glob("step-*"))
    return sorted((int(number), folder) for number, folder in named if number.isdecimal() and folder.is_dir())


def _latest_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint of a run; refuses to pass over one that is only half there."""
    place = path / "checkpoints"
    for _, folder in reversed(_checkpoints(path)):
        if not (folder / CHECKPOINT_FILE).is_file():
            raise damaged(folder, f"'{folder / CHECKPOINT_FILE}' is missing")
    return latest_checkpoint(place) if place.is_dir() else None


def _read_config(path: Path) -> Any:
    """What the run that is there was asked for; None: none is there."""
    file = path / CONFIG_FILE
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not file.is_file():
        raise TrainingError(f"'{path}' exists and holds no training run (no {CONFIG_FILE}); choose another out")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"'{file}' cannot be read ({error}); choose another out") from error
    if not isinstance(facts, dict) or "policy" not in facts:
        raise TrainingError(
            f"'{path}' exists and holds no training run (its {CONFIG_FILE} is something else's); choose another out"
        )
    return facts


def _is_unused(path: Path) -> bool:
    """Whether a run was begun in a folder, and ended before its first step."""
    if not (path / CONFIG_FILE).is_file():
        return False
    others = {entry.name for entry in path.iterdir()} - {CONFIG_FILE, f".{CONFIG_FILE}"}
    return others <= {METRICS_FILE} and all((path / name).stat().st_size == 0 for name in others)


def _begin(path: Path, decisive: Mapping[str, Any]) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        temporary = path / f".{CONFIG_FILE}"
        temporary.write_text(json.dumps(decisive, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path / CONFIG_FILE)
    except OSError as error:
        raise TrainingError(f"no run can be begun in '{path}' ({error.strerror}); choose another out") from error
