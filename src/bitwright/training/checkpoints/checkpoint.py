"""A training run on disk, such that going on from it gives the same bits as never having stopped.

    FOLDER/checkpoint.json           what it is: policy, step, number of processes, versions, size of every file
    FOLDER/model.safetensors         the model's parameters and buffers, under their own names
    FOLDER/optimizer.*, run.*        moments and step counters; loss scale, amax histories, compensation, counters
    FOLDER/rank-0.*                  what each process has of its own: generators, position in the data

A state is a pair of files, tensors as safetensors and the rest as JSON (`checkpoint_files.py`); nothing is pickled. The
folder is assembled beside its place, flushed and renamed, so it is there whole or not at all. Where parameters lie in
pieces on many ranks (FSDP2), each rank writes its pieces of everything, `model.rank-0.safetensors` and so on.

Everything is compared before anything is changed: the policy field by field, names and shapes of the model, groups of
the optimizer, the data.

Rejected: torch.distributed.checkpoint. It can lay pieces out anew for another number of ranks, but is pickled metadata
and a folder that can be half there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bitwright.errors import TrainingError
from bitwright.plan.whole_folder import assembled_folder, write_and_sync
from bitwright.training.checkpoints.checkpoint_checks import (
    is_sharded,
    raise_if_other_model,
    raise_if_other_optimizer,
    raise_if_other_policy,
    raise_if_size_matters,
    raise_if_spread_otherwise,
)
from bitwright.training.checkpoints.checkpoint_files import load_model, load_optimizer, read_part, to_json, write_parts
from bitwright.training.checkpoints.random_state import read_random_state, set_random_state
from bitwright.training.processes.ranks import Ranks, unwrapped
from bitwright.training.record_facts import plain_facts

CHECKPOINT_FILE = "checkpoint.json"
SCHEMA_VERSION = 1


class Resumable(Protocol):
    """What is saved of a run (`run.py` has it)."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def policy(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        """Everything else that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""


class Positioned(Protocol):
    """What hands out batches, and knows where it stands (`batches.py`)."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Stand there again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What a checkpoint says beside the states that it restored."""

    step: int
    #: What the caller saved as `extra`.
    extra: dict[str, Any]
    #: What a person should know of it.
    notes: tuple[str, ...] = ()


def save_checkpoint(
    folder: str | os.PathLike[str],
    run: Resumable,
    *,
    step: int,
    data: Positioned | None = None,
    extra: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write a run as `folder`; of many processes all call this, and see the same file system.

    Args:
        folder: where; an older checkpoint there is replaced, anything else refused.
        run: what is saved, between two steps.
        step: how many steps were taken; only told back.
        data: its position is saved with it.
        extra: further plain values, told back.
        ranks: by default those of the process group.

    Raises:
        TrainingError: something else is there, or writing failed on some rank; nothing has changed then.
    """
    ranks = Ranks.of_process_group() if ranks is None else ranks
    target = Path(os.path.realpath(folder))
    _raise_if_not_replaceable(target)
    model = unwrapped(run.model)
    own = {"random": read_random_state(), "data": None if data is None else data.state_dict()}
    states = {"model": model.state_dict(), "optimizer": run.optimizer.state_dict(), "run": run.state_dict()}
    in_pieces = is_sharded(model)
    parts = {f"{name}.rank-{ranks.rank}" if in_pieces else name: state for name, state in states.items()}
    written = {f"rank-{ranks.rank}": own, **(parts if in_pieces or ranks.is_first else {})}
    facts = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "policy": plain_facts(run.policy),
        "world_size": ranks.world_size,
        "is_sharded": in_pieces,
        "extra": dict(extra or {}),
        "torch": torch.__version__,
    }
    try:
        _write_together(target, written, facts, ranks)
    except OSError as error:
        raise TrainingError(
            f"could not write the checkpoint '{target}': {error.strerror or error}; the one before it stands"
        ) from error
    ranks.wait()
    return target


def load_checkpoint(
    folder: str | os.PathLike[str],
    run: Resumable,
    *,
    data: Positioned | None = None,
    ranks: Ranks | None = None,
    allow_other_world_size: bool = False,
) -> Resumed:
    """Bring a run, made as the saved one was, to where it stood.

    Args:
        folder: what `save_checkpoint` wrote.
        run: of the same model, optimizer and policy.
        data: of the same text; its position is set.
        ranks: by default those of the process group.
        allow_other_world_size: go on with another number of processes, where each holds the whole model. Generators
            are then those of the first rank, moved on by the rank, so dropout differs from a run that never stopped.

    Raises:
        TrainingError: the checkpoint is missing or damaged, or is one of another policy, model, optimizer or number of
            processes; says what differs and what to do. Nothing has changed then.
        DataError: it is one of other data.
    """
    ranks = Ranks.of_process_group() if ranks is None else ranks
    place = Path(folder)
    facts = read_checkpoint_facts(place)
    raise_if_other_policy(place, facts["policy"], plain_facts(run.policy))
    same_size = facts["world_size"] == ranks.world_size
    if not same_size:
        raise_if_size_matters(place, facts, ranks, allow_other_world_size)
    suffix = f".rank-{ranks.rank}" if facts["is_sharded"] else ""
    model = unwrapped(run.model)
    raise_if_spread_otherwise(place, facts["is_sharded"], model)
    weights, optimizer, state = (read_part(place, f"{name}{suffix}") for name in ("model", "optimizer", "run"))
    own = read_part(place, f"rank-{ranks.rank if same_size else 0}")
    raise_if_other_model(place, weights, model)
    raise_if_other_optimizer(place, optimizer, run.optimizer)
    if data is not None:
        if own["data"] is None:
            raise TrainingError(f"'{place}' was saved without a position in its data; pass none, or begin anew")
        data.load_state_dict(own["data"])
    run.load_state_dict(state)
    load_model(model, weights)
    load_optimizer(run.optimizer, optimizer)
    set_random_state(own["random"])
    notes: tuple[str, ...] = ()
    if not same_size:
        torch.manual_seed((torch.initial_seed() + ranks.rank) % 2**63)
        notes = (
            f"saved by {facts['world_size']} processes, gone on by {ranks.world_size}: weights, moments, scales and "
            "the position in the data are the same, random numbers are not",
        )
    return Resumed(step=facts["step"], extra=facts["extra"], notes=notes)


def read_checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `checkpoint.json`, its files being there in their whole size.

    Raises:
        TrainingError: it is missing, damaged, or of a later release.
    """
    file = folder / CHECKPOINT_FILE
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(
            f"there is no checkpoint at '{folder}' ({error.strerror}); give a folder that holds {CHECKPOINT_FILE}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"'{file}' is damaged ({error}); go back to an earlier checkpoint") from error
    if not isinstance(facts, dict) or facts.get("schema_version") != SCHEMA_VERSION:
        found = facts.get("schema_version") if isinstance(facts, dict) else None
        raise TrainingError(
            f"'{file}' has schema version {found}, and this bitwright reads {SCHEMA_VERSION}; use the release that "
            "wrote it"
        )
    for name, size in facts["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise TrainingError(f"'{path}' {state}, so the checkpoint is damaged; go back to an earlier one")
    return facts


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps among the folders in `folder`; None: there is none."""
    found = [file.parent for file in folder.glob(f"*/{CHECKPOINT_FILE}") if not file.parent.name.startswith(".")]
    return max(found, key=lambda place: read_checkpoint_facts(place)["step"], default=None)


def _raise_if_not_replaceable(target: Path) -> None:
    if target.is_dir() and (not any(target.iterdir()) or (target / CHECKPOINT_FILE).is_file()):
        return
    if target.exists():
        raise TrainingError(f"'{target}' exists and is no checkpoint; choose another folder")


def _write_together(target: Path, written: Mapping[str, Any], facts: dict[str, Any], ranks: Ranks) -> None:
    """Each rank writes its parts into one new folder; the first one writes what it is, and puts it in its place."""
    with _assembled(target, ranks) as assembled:
        place = Path(ranks.gather(None if assembled is None else str(assembled))[0])
        answers = ranks.gather(write_parts(place, written))
        for _, why in answers:
            if why is not None:
                raise TrainingError(f"could not write the checkpoint '{target}': {why}; the one before it stands")
        if assembled is not None:
            facts["files"] = {name: size for found, _ in answers for name, size in found.items()}
            write_and_sync(place / CHECKPOINT_FILE, to_json(facts))


def _assembled(target: Path, ranks: Ranks) -> AbstractContextManager[Path | None]:
    """The first rank makes the folder and renames it; the others only write into it."""
    return assembled_folder(target) if ranks.is_first else nullcontext()
