"""A training run on disk, such that going on from it gives the same bits as never having stopped.

    FOLDER/checkpoint.json           what it is: policy, step, number of processes, versions, sha256 of every file
    FOLDER/model.safetensors         the model's parameters and buffers, under their own names
    FOLDER/optimizer.*, run.*        moments and step counters; loss scale, amax histories, compensation, counters
    FOLDER/rank-0.*                  what each process has of its own: generators, position in the data, and what it
                                     owes of gradients that were rounded on the wire

A state is a pair of files, tensors as safetensors and the rest as JSON (`checkpoint_files.py`); nothing is pickled. The
folder is assembled beside its place, flushed and renamed, so it is there whole or not at all. Where parameters lie in
pieces on many ranks (FSDP2), each rank writes its pieces of everything, `model.rank-0.safetensors` and so on.

Everything is read and compared before anything is changed: the bytes of every file, the policy field by field, names,
shapes and ties of the model, class and groups of the optimizer, the data. Of many processes all load, or none.

Where gradients travel in blocks with scales (`comms/hooks.py`), DDP lays out the first bucket of a process anew, so a
run that goes on may differ in last bits from one that never stopped; what is owed is not lost.

Rejected: torch.distributed.checkpoint. It can lay pieces out anew for another number of ranks, but is pickled metadata
and a folder that can be half there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from bitwright.errors import TrainingError
from bitwright.plan.whole_folder import assembled_folder
from bitwright.training.checkpoints.checkpoint_checks import (
    class_name,
    is_sharded,
    raise_if_no_count,
    raise_if_other_class,
    raise_if_other_model,
    raise_if_other_optimizer,
    raise_if_other_policy,
    raise_if_size_matters,
    raise_if_spread_otherwise,
)
from bitwright.training.checkpoints.checkpoint_facts import (
    CHECKPOINT_FILE,
    read_checkpoint_facts,
    write_checkpoint_facts,
)
from bitwright.training.checkpoints.checkpoint_files import load_model, load_optimizer, read_part, write_parts
from bitwright.training.checkpoints.random_state import read_random_state, set_random_state
from bitwright.training.checkpoints.saved_extra import extra_from_json, extra_to_json
from bitwright.training.checkpoints.state_tree import join_state, split_state
from bitwright.training.processes.ranks import Ranks, unwrapped
from bitwright.training.record_facts import plain_facts

_Found = TypeVar("_Found")


class Resumable(Protocol):
    """What is saved of a run (`run.py` has it)."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def policy(self) -> Any: ...

    @property
    def scheduler(self) -> Any: ...

    @property
    def settings(self) -> Any: ...

    @property
    def pending(self) -> int: ...

    def raise_if_not_between_steps(self, doing: str) -> None:
        """Raise TrainingError while a step is open, and once the run is closed."""

    def state_dict(self) -> dict[str, Any]:
        """Everything else that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""


class Positioned(Protocol):
    """What knows where it stands: what hands out batches (`batches.py`), what carries gradients (`comms/hooks.py`)."""

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
    exchange: Positioned | None = None,
    extra: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write a run as `folder`; of many processes all call this, and see the same file system.

    Args:
        folder: where; an older checkpoint there is replaced, anything else refused.
        run: what is saved, between two steps.
        step: how many steps were taken, 0 or more; only told back.
        data: its position is saved with it.
        exchange: of gradients, where they are rounded on their way (`comms.register`); what it owes is saved too.
        extra: further plain values (numbers, NaN and Inf too, text, lists, tuples, dicts), told back as they were.
        ranks: by default those of the process group.

    Raises:
        TrainingError: something else is there, the run is closed or in a step, `step` is no count, `extra` holds what
            JSON does not know, or writing failed on some rank; nothing has changed then.
    """
    ranks = Ranks.of_process_group() if ranks is None else ranks
    target = Path(os.path.realpath(folder))

    def checked_extra() -> Any:
        _raise_if_not_replaceable(target)
        run.raise_if_not_between_steps("saved")
        raise_if_no_count(step)
        return extra_to_json(extra)

    plain_extra = _agreed(checked_extra, ranks)
    model = unwrapped(run.model)
    own = {
        "random": read_random_state(),
        "data": None if data is None else data.state_dict(),
        "exchange": None if exchange is None else exchange.state_dict(),
    }
    states = {"model": model.state_dict(), "optimizer": run.optimizer.state_dict(), "run": run.state_dict()}
    in_pieces = is_sharded(model)
    parts = {f"{name}.rank-{ranks.rank}" if in_pieces else name: state for name, state in states.items()}
    written = {f"rank-{ranks.rank}": own, **(parts if in_pieces or ranks.is_first else {})}
    facts = {
        "step": int(step),
        "policy": plain_facts(run.policy),
        "optimizer": class_name(run.optimizer),
        "scheduler": class_name(run.scheduler),
        "world_size": ranks.world_size,
        "is_sharded": in_pieces,
        "settings": split_state(_settings(run))[0],
        "extra": plain_extra,
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
    exchange: Positioned | None = None,
    ranks: Ranks | None = None,
    allow_other_world_size: bool = False,
) -> Resumed:
    """Bring a run, made as the saved one was, to where it stood.

    Args:
        folder: what `save_checkpoint` wrote.
        run: of the same model, optimizer and policy.
        data: of the same text; its position is set.
        exchange: of gradients, in the same format; what it owes is set.
        ranks: by default those of the process group.
        allow_other_world_size: go on with another number of processes, where each holds the whole model. Generators
            are then those of the first rank, moved on by the rank, so dropout differs from a run that never stopped.

    Raises:
        TrainingError: the checkpoint is missing or damaged, or is one of another policy, model, optimizer or number of
            processes; or the run is closed or in a step. Says what differs and what to do. Nothing has changed then.
        DataError: it is one of other data.
        CommsError: what it owes is that of another exchange.
    """
    ranks = Ranks.of_process_group() if ranks is None else ranks
    found = _agreed(lambda: _read(Path(folder), run, data, ranks, allow_other_world_size), ranks)
    same_size = found.facts["world_size"] == ranks.world_size
    _set_small_states(run, found, data, exchange if same_size else None)
    load_model(unwrapped(run.model), found.weights)
    load_optimizer(run.optimizer, found.optimizer)
    set_random_state(found.own["random"])
    facts = found.facts
    notes = tuple(_notes(found, run, data, exchange))
    if not same_size:
        torch.manual_seed((torch.initial_seed() + ranks.rank) % 2**63)
        dropped = "what gradients were still owed by the processes that saved it is dropped"
        notes = (
            f"saved by {facts['world_size']} processes, gone on by {ranks.world_size}: weights, moments, scales and "
            "the position in the data are the same, random numbers are not",
            *(() if exchange is None else (dropped,)),
            *notes,
        )
    return Resumed(step=facts["step"], extra=extra_from_json(facts["extra"]), notes=notes)


def _settings(run: Resumable) -> dict[str, Any]:
    """What decides a step beside policy, optimizer and data, and may be changed on the way."""
    norm = run.settings.max_grad_norm
    return {
        "accumulate": int(run.settings.accumulate),
        "max_grad_norm": None if norm is None else float(norm),
    }


def _notes(found: _Read, run: Resumable, data: Positioned | None, exchange: Positioned | None) -> Iterator[str]:
    """What differs from the saved run and is allowed to, and what was saved and is not taken up."""
    # older checkpoints have no settings, and no batch
    there, here = dict(join_state(found.facts.get("settings", {}), {})), _settings(run)
    position = found.own["data"]
    if data is not None:
        there["batch"], here["batch"] = _batch_of(position), _batch_of(data.state_dict())
        if None in (there["batch"], here["batch"]):
            del there["batch"]
    for name, was in there.items():
        if name in here and here[name] != was:
            yield (
                f"saved with {name} {was}, gone on with {here[name]}: steps from here on differ from those of the run "
                "that was saved"
            )
    if data is None and position is not None:
        yield "the position in its data was not set, since no data was passed; pass data=… to go on where it stood"
    if exchange is None and found.own.get("exchange") is not None:
        yield "what was owed of gradients was not set, since no exchange was passed; pass exchange=… to send it"


def _batch_of(position: Any) -> Any:
    """Rows of a batch, where a position in some data tells them."""
    return position.get("batch") if isinstance(position, Mapping) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A checkpoint that fits the run at hand."""

    facts: dict[str, Any]
    weights: Any
    optimizer: Any
    state: Any
    own: Any


def _read(place: Path, run: Resumable, data: Positioned | None, ranks: Ranks, allow_other_world_size: bool) -> _Read:
    """Read a checkpoint and compare it with the run; changes nothing."""
    run.raise_if_not_between_steps("loaded")
    facts = read_checkpoint_facts(place)
    raise_if_other_policy(place, facts["policy"], plain_facts(run.policy))
    same_size = facts["world_size"] == ranks.world_size
    if not same_size:
        raise_if_size_matters(place, facts, ranks, allow_other_world_size)
    model, files = unwrapped(run.model), facts["files"]
    raise_if_spread_otherwise(place, facts["is_sharded"], model)
    suffix = f".rank-{ranks.rank}" if facts["is_sharded"] else ""
    # the model first: where it is another one, the optimizer's parameters are others too
    weights = read_part(place, f"model{suffix}", files)
    raise_if_other_model(place, weights, model)
    raise_if_other_class(place, "optimizer", facts["optimizer"], run.optimizer)
    raise_if_other_class(place, "scheduler", facts["scheduler"], run.scheduler)
    optimizer, state = (read_part(place, f"{name}{suffix}", files) for name in ("optimizer", "run"))
    own = read_part(place, f"rank-{ranks.rank if same_size else 0}", files)
    raise_if_other_optimizer(place, optimizer, run.optimizer)
    if data is not None and own["data"] is None:
        raise TrainingError(f"'{place}' was saved without a position in its data; pass none, or begin anew")
    return _Read(facts=facts, weights=weights, optimizer=optimizer, state=state, own=own)


def _agreed(look: Callable[[], _Found], ranks: Ranks) -> _Found:
    """What was found, once every rank has found its own; else a refusal on all of them, so that none waits."""
    found: list[_Found] = []
    failure: TrainingError | None = None
    try:
        found.append(look())
    except TrainingError as error:
        failure = error
    failures = [answer for answer in ranks.gather(failure) if answer is not None]
    if failures:
        raise failures[0] if failure is None else failure
    return found[0]


def _set_small_states(run: Resumable, found: _Read, data: Positioned | None, exchange: Positioned | None) -> None:
    """Set the run, the position in the data and what is owed, or, where one of them refuses, none."""
    before = None if run.pending else copy.deepcopy(run.state_dict())
    states = {"data": data, "exchange": exchange}
    positions = {name: part.state_dict() for name, part in states.items() if part is not None}
    try:
        for name, part in states.items():
            if part is not None and found.own.get(name) is not None:
                part.load_state_dict(found.own[name])
        run.load_state_dict(found.state)
    except BaseException:
        for name, part in states.items():
            if part is not None:
                part.load_state_dict(positions[name])
        if before is not None:
            run.load_state_dict(before)
        raise


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
            facts["files"] = {name: about for found, _ in answers for name, about in found.items()}
            write_checkpoint_facts(place, facts)


def _assembled(target: Path, ranks: Ranks) -> AbstractContextManager[Path | None]:
    """The first rank makes the folder and renames it; the others only write into it."""
    return assembled_folder(target) if ranks.is_first else nullcontext()
