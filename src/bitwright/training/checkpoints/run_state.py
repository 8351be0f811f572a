"""What a policy adds to a checkpoint that another library writes: loss scale, histories of amax, random bits.

Model, optimizer and generators are that library's. The policy and the class of the optimizer are written too, so that a
checkpoint of another one is refused with what differs; and, of files, their sha256.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.checkpoint_checks import class_name, raise_if_other_class, raise_if_other_policy
from bitwright.training.checkpoints.checkpoint_facts import damaged, to_json
from bitwright.training.checkpoints.checkpoint_files import files_of, read_part, write_parts
from bitwright.training.record_facts import plain_facts
from bitwright.training.run import TrainingRun


def run_state(run: TrainingRun) -> dict[str, Any]:
    """Return a run's own state, its policy, and which optimizer it is of."""
    return {"policy": plain_facts(run.policy), "optimizer": class_name(run.optimizer), "run": run.state_dict()}


def set_run_state(run: TrainingRun, state: Any, where: str) -> None:
    """Take up where `run_state` left off.

    Args:
        run: prepared as the saved one was.
        state: what `run_state` returned.
        where: what errors call the checkpoint.

    Raises:
        TrainingError: it is one of another policy or optimizer.
    """
    raise_if_other_policy(where, state["policy"], plain_facts(run.policy))
    raise_if_other_class(where, "optimizer", state["optimizer"], run.optimizer)
    run.load_state_dict(state["run"])


def save_run_state(folder: Path, name: str, run: TrainingRun) -> None:
    """Write `NAME.json`, `NAME.safetensors` and the sha256 of both. TrainingError where the disk refuses."""
    for file in (*files_of(name), _digests(name)):
        (folder / file).unlink(missing_ok=True)
    written, failure = write_parts(folder, {name: run_state(run)})
    if failure is not None:
        raise TrainingError(f"could not write the policy's state to '{folder}': {failure}")
    (folder / _digests(name)).write_bytes(to_json(written))


def load_run_state(folder: Path, name: str, run: TrainingRun) -> None:
    """Read what `save_run_state` wrote.

    Raises:
        TrainingError: there is none, it is damaged, or one of another policy or optimizer.
    """
    if not (folder / f"{name}.json").is_file():
        raise TrainingError(
            f"'{folder}' has no '{name}.json', so loss scale and histories of the policy are not known; resume from a "
            "checkpoint that was saved under a policy, or say where it lies (resume_from)"
        )
    try:
        files = json.loads((folder / _digests(name)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"'{folder / _digests(name)}' cannot be read ({error})") from error
    set_run_state(run, read_part(folder, name, files), str(folder))


def _digests(name: str) -> str:
    return f"{name}.sha256.json"
