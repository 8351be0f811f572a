"""What a policy adds to a checkpoint that another library writes: loss scale, histories of amax, random bits.

Model, optimizer and generators are that library's. The policy is written too, so that a checkpoint of another one is
refused with what differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.checkpoint_checks import raise_if_other_policy
from bitwright.training.checkpoints.checkpoint_files import read_part, write_parts
from bitwright.training.record_facts import plain_facts
from bitwright.training.run import TrainingRun


def run_state(run: TrainingRun) -> dict[str, Any]:
    """Return a run's own state and its policy."""
    return {"policy": plain_facts(run.policy), "run": run.state_dict()}


def set_run_state(run: TrainingRun, state: Any, where: str) -> None:
    """Take up where `run_state` left off.

    Args:
        run: prepared as the saved one was.
        state: what `run_state` returned.
        where: what errors call the checkpoint.

    Raises:
        TrainingError: it is one of another policy.
    """
    raise_if_other_policy(where, state["policy"], plain_facts(run.policy))
    run.load_state_dict(state["run"])


def save_run_state(folder: Path, name: str, run: TrainingRun) -> None:
    """Write `NAME.json` and `NAME.safetensors` into a folder. TrainingError where the disk refuses."""
    for file in (folder / f"{name}.json", folder / f"{name}.safetensors"):
        file.unlink(missing_ok=True)
    _, failure = write_parts(folder, {name: run_state(run)})
    if failure is not None:
        raise TrainingError(f"could not write the policy's state to '{folder}': {failure}")


def load_run_state(folder: Path, name: str, run: TrainingRun) -> None:
    """Read what `save_run_state` wrote.

    Raises:
        TrainingError: there is none, it is damaged, or one of another policy.
    """
    if not (folder / f"{name}.json").is_file():
        raise TrainingError(
            f"'{folder}' has no '{name}.json', so loss scale and histories of the policy are not known; resume from a "
            "checkpoint that was saved under a policy, or say where it lies (resume_from)"
        )
    set_run_state(run, read_part(folder, name), str(folder))
