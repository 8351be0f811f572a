"""The files of a checkpoint: a pair for each state, tensors as safetensors and the rest as JSON; and states of models
and optimizers, put back exactly.

Pieces of a model that lies on many ranks (`state_tree.Shard`) go where the pieces of the model at hand lie.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from bitwright.plan.whole_folder import write_and_sync
from bitwright.training.checkpoints.checkpoint_facts import damaged, facts_of_file, raise_if_changed, to_json
from bitwright.training.checkpoints.state_tree import Shard, join_state, split_state


def write_parts(place: Path, parts: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Write states; return size and sha256 of each file, and what went wrong."""
    written: dict[str, dict[str, Any]] = {}
    try:
        for name, state in parts.items():
            tree, tensors = split_state(state)
            write_and_sync(place / f"{name}.json", to_json(tree))
            safetensors.torch.save_file(tensors, place / f"{name}.safetensors")
            _sync(place / f"{name}.safetensors")
            written |= {file: facts_of_file(place / file) for file in files_of(name)}
    except OSError as error:
        space = "; free some space" if error.errno == errno.ENOSPC else ""
        return written, f"{error.strerror or error}{space}"
    except SafetensorError as error:  # how it tells a full disk
        return written, str(error)
    return written, None


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def files_of(name: str) -> tuple[str, str]:
    """The files of a state."""
    return f"{name}.json", f"{name}.safetensors"


def read_part(place: Path, name: str, files: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the state that `write_parts` wrote under a name.

    Args:
        place: the folder.
        name: of the state.
        files: what `write_parts` returned of its files; their bytes are compared before they are read.

    Raises:
        TrainingError: a file is missing, or has other bytes than were written.
    """
    raise_if_changed(place, files, files_of(name))
    try:
        tree = json.loads((place / f"{name}.json").read_text(encoding="utf-8"))
        return join_state(tree, safetensors.torch.load_file(place / f"{name}.safetensors"))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise damaged(place, f"'{place / name}' cannot be read ({error})") from error


def load_model(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy saved parameters and buffers into a model that has the same names and shapes."""
    pieces = {name: value for name, value in saved.items() if isinstance(value, Shard)}
    if not pieces:
        model.load_state_dict(saved)
        return
    here = model.state_dict()
    with torch.no_grad():
        for name, value in saved.items():
            if isinstance(value, Shard):
                here[name].to_local().copy_(value.local)
            elif isinstance(value, Tensor):
                here[name].copy_(value)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore groups and moments; in which dtypes is the business of who steps it (`moment_store.load_exactly`)."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))
    moments = {
        number: {name: _on(value, by_number[number]) for name, value in kept.items()}
        for number, kept in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": moments})


def _on(value: Any, parameter: Tensor) -> Any:
    """A piece of a larger tensor laid out as its parameter is; everything else as it is."""
    if not isinstance(value, Shard):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value.local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=torch.Size(value.shape),
        stride=parameter.stride(),
    )
