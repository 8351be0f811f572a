"""A state of nested dicts, lists and tensors ↔ JSON and named tensors: exact both ways, and reading runs no code.

    split_state({"step": 3, "exp_avg": tensor})  →  ({"step": 3, "exp_avg": {"$": "tensor", "name": "exp_avg"}},
                                                     {"exp_avg": tensor})

JSON has text, numbers, lists and objects with text as keys. What it lacks is an object with the key "$":

    tensor   a tensor of the file beside it, by name; a piece of a larger one (DTensor) with the shape of the whole
    tuple    its items
    pairs    a dict whose keys are no text (torch's optimizers number their parameters)
    float    nan, inf or -inf; every other float is written with the digits that read back to it

Rejected: `torch.save`. A pickle can run code when it is read, and nobody can look into it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bitwright.errors import TrainingError

_TAG = "$"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shard:
    """This rank's piece of a tensor that lies in pieces on many."""

    local: Tensor
    #: Of the whole.
    shape: tuple[int, ...]


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state as a value for JSON and the tensors that it names, on the CPU, each stored once.

    Raises:
        TrainingError: something in it is neither a tensor nor a plain value; says where.
    """
    splitter = _Splitter({}, {})
    return splitter.split(state, ()), splitter.tensors


def join_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `split_state`. Pieces of larger tensors come back as `Shard`. KeyError where a tensor is not there."""
    if isinstance(tree, list):
        return [join_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree.get(_TAG):
        case "tensor" if "shape" in tree:
            return Shard(local=tensors[tree["name"]], shape=tuple(tree["shape"]))
        case "tensor":
            return tensors[tree["name"]]
        case "tuple":
            return tuple(join_state(item, tensors) for item in tree["items"])
        case "pairs":
            return {join_state(key, tensors): join_state(value, tensors) for key, value in tree["items"]}
        case "float":
            return float(tree["text"])
        case _:
            return {key: join_state(value, tensors) for key, value in tree.items()}


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return, of each tensor that has the numbers of an earlier one of a state, the name of that one."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        piece = value.local if isinstance(value, Shard) else value
        if not isinstance(piece, Tensor):
            continue
        piece = piece.detach()
        if hasattr(piece, "to_local"):  # DTensor
            piece = piece.to_local()
        if piece.numel():
            owner = first.setdefault(_lies_at(piece), name)
            if owner != name:
                tied[name] = owner
    return tied


def _lies_at(value: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers lie, and how they are read."""
    return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())


@dataclass(frozen=True, slots=True)
class _Splitter:
    tensors: dict[str, Tensor]
    #: Where a tensor's numbers lie → the name that it has already.
    names: dict[tuple[Any, ...], str]

    def split(self, value: Any, place: tuple[str, ...]) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return value if math.isfinite(value) else {_TAG: "float", "text": str(value)}
            case Tensor():
                return self._tensor(value, place)
            case list():
                return [self.split(item, (*place, str(index))) for index, item in enumerate(value)]
            case tuple():
                items = [self.split(item, (*place, str(index))) for index, item in enumerate(value)]
                return {_TAG: "tuple", "items": items}
            case Mapping():
                return self._mapping(value, place)
            case _:
                raise TrainingError(
                    f"'{'.'.join(place)}' of a state is {type(value).__name__}, but a checkpoint holds tensors, "
                    "numbers, text, lists and dicts; have its state_dict return one of those"
                )

    def _mapping(self, value: Mapping[Any, Any], place: tuple[str, ...]) -> Any:
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: self.split(item, (*place, key)) for key, item in value.items()}
        pairs = [
            [self.split(key, (*place, "key")), self.split(item, (*place, str(key)))] for key, item in value.items()
        ]
        return {_TAG: "pairs", "items": pairs}

    def _tensor(self, value: Tensor, place: tuple[str, ...]) -> dict[str, Any]:
        value = value.detach()
        whole: dict[str, Any] = {}
        if hasattr(value, "to_local"):  # DTensor
            whole = {"shape": list(value.shape)}
            value = value.to_local()
        lies_at = _lies_at(value)
        name = self.names.get(lies_at) if value.numel() else None
        if name is None:
            name = self._free_name(".".join(place) or "state")
            self.names[lies_at] = name
            self.tensors[name] = _by_itself(value)
        return {_TAG: "tensor", "name": name, **whole}

    def _free_name(self, wanted: str) -> str:
        name, number = wanted, 2
        while name in self.tensors:
            name, number = f"{wanted}#{number}", number + 1
        return name


def _by_itself(value: Tensor) -> Tensor:
    """On the CPU, contiguous, sharing no memory with another tensor, as safetensors asks."""
    value = value.cpu().contiguous()
    return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value
