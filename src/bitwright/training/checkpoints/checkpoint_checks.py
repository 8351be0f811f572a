"""What a checkpoint is compared in before it changes anything: the policy, the processes, the model, the optimizer.

Each function raises TrainingError with what was saved, what is there, and what to do.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.state_tree import Shard, tied_names
from bitwright.training.processes.ranks import Ranks
from bitwright.training.record_facts import ABSENT, differences

#: Fields of a policy that change nothing in a step.
_WORDS = frozenset({"description", "source", "aliases", "preference", "reason"})


def raise_if_other_policy(place: str | Path, there: Any, here: Any) -> None:
    """Raise TrainingError, with what differs, unless the facts of two policies agree in all that a step depends on."""
    if there == here or not differences(there, here, ignored=_WORDS):
        return
    fields = "; ".join(_fields_that_differ(there, here))
    raise TrainingError(
        f"'{place}' was saved under policy '{there['name']}', and this run's is '{here['name']}'"
        f"{f' ({fields})' if fields else ''}; prepare the run with policy '{there['name']}', or begin a new one from "
        "the weights in model.safetensors"
    )


def _fields_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two policies, a few words a field; records are named, not printed."""
    for name in dict.fromkeys([*there, *here]):
        was, now = there.get(name), here.get(name)
        word = name.replace("_", " ")
        inner = differences(was, now)
        if name in _WORDS or name == "name" or not inner:
            continue
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            parts = dict.fromkeys(field.partition(".")[0].replace("_", " ") for field, _, _ in inner)
            yield f"{word} differ in {', '.join(parts)}"
        elif isinstance(was, list) and was and now:
            yield f"{word} differ"
        elif isinstance(was, Mapping | list) or isinstance(now, Mapping | list):
            yield f"{word}: {_there_or_not(was)} then, {_there_or_not(now)} now"
        else:
            yield f"{word} was {was}, is {now}"


def _there_or_not(value: Any) -> str:
    return "some" if value else "none"


def raise_if_size_matters(place: Path, facts: Mapping[str, Any], ranks: Ranks, allowed: bool) -> None:
    """Refuse another number of processes, unless that is allowed and each holds the whole model."""
    before = f"'{place}' was saved by {facts['world_size']} processes, and there are {ranks.world_size} now"
    if facts["is_sharded"]:
        raise TrainingError(
            f"{before}, but each file holds one process's pieces of the model; start {facts['world_size']} of them"
        )
    if not allowed:
        raise TrainingError(
            f"{before}; start {facts['world_size']} (torchrun --nproc-per-node {facts['world_size']}) to get the same "
            "bits as without a stop, or allow another number (allow_other_world_size), after which only random numbers "
            "and the size of a batch over all processes differ"
        )


def raise_if_spread_otherwise(place: Path, was_sharded: bool, model: torch.nn.Module) -> None:
    """Refuse pieces for a model that is whole, and a whole model for one that lies in pieces."""
    if was_sharded != is_sharded(model):
        ways = ("whole on every process (ddp)", "in pieces (fsdp2)")
        before, now = ways[was_sharded], ways[not was_sharded]
        raise TrainingError(
            f"'{place}' was saved from a model that lay {before}, and this one lies {now}; spread it as before"
        )


def raise_if_other_model(place: Path, saved: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Refuse weights of other names or shapes, or tied otherwise, naming the first that differs."""
    state = model.state_dict()
    here = {name: list(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    there = {name: list(value.shape) for name, value in saved.items() if isinstance(value, Tensor | Shard)}
    differing = differences(there, here)
    if differing:
        name, was, now = differing[0]
        more = f" (and {len(differing) - 1} more tensors)" if len(differing) > 1 else ""
        raise TrainingError(
            f"'{place}' is of another model: the shape of '{name}' was {was} and is {now}{more}; build the model that "
            "the run began with"
        )
    # in one order of names, so that the same one of two is called the first
    for name, was, now in differences(tied_names({name: saved[name] for name in here}), tied_names(state)):
        raise TrainingError(
            f"'{place}' is of another model: '{name}' was {_spell_tie(was)} and is {_spell_tie(now)}; build the model "
            "that the run began with"
        )


def _spell_tie(owner: str) -> str:
    return "a tensor of its own" if owner == ABSENT else f"tied to '{owner}'"


def class_name(thing: Any) -> str | None:
    """What a checkpoint calls an optimizer or a scheduler; None of none."""
    return None if thing is None else type(thing).__qualname__


def raise_if_other_class(place: str | Path, what: str, saved: str | None, here: Any) -> None:
    """Refuse the state of another kind of optimizer or scheduler: its numbers mean something else."""
    now = class_name(here)
    if saved != now:
        raise TrainingError(
            f"'{place}' was saved with {_spell_class(what, saved)}, and this run has {_spell_class(what, now)}; make "
            "the run with what it began with, or begin a new one from the weights in model.safetensors"
        )


def _spell_class(what: str, name: str | None) -> str:
    return f"no {what}" if name is None else f"{what} {name}"


def raise_if_other_optimizer(place: Path, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse moments for other groups of parameters."""
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise TrainingError(
            f"'{place}' has an optimizer with {there} parameters in its groups, and this run's has {here}; build the "
            "optimizer that the run began with"
        )


def raise_if_no_count(step: Any) -> None:
    """Refuse what is no number of steps."""
    if not isinstance(step, numbers.Integral) or isinstance(step, bool) or int(step) < 0:
        raise TrainingError(f"step is {step!r}; give how many steps were taken, a whole number of 0 or more")


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the parameters of a model lie in pieces on many ranks."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())
