"""The optimizer's state of one batch of pieces: taken out before its step, put back after it.

In `optimizer.state` a parameter has what it always has, in the formats of the policy: `exp_avg` is an fp32, bf16 or
fp16 tensor of the parameter's shape; beside fp16 stands `exp_avg_scale`, fp32, one number a piece. What has the
parameter's shape and is a float is a *moment*, whatever its name; everything else (step counters) is handed through,
and counters are kept in fp32: a counter in bf16 stops at 256.

Torch casts every state to its parameter's dtype when a state_dict is loaded. `load_exactly` puts back what was saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitwright.training.optimizer.draws import Draws
from bitwright.training.optimizer.moments import MOMENT_DTYPES, round_runs
from bitwright.training.optimizer.pieces import Piece
from bitwright.training.optimizer.swallowed import Swallowed, count_swallowed

#: Key of what rounding took away from a parameter (`update.py`).
COMPENSATION = "compensation"
_SCALE = "_scale"


class MomentStore:
    """Takes and puts back states.

    Args:
        optimizer: its `state` is read and written.
        format: what moments are kept in, a name in `MOMENT_DTYPES`.
        rounding: how they are rounded to it.
        draws: where random bits come from.
    """

    def __init__(self, optimizer: Any, format: str, rounding: str, draws: Draws) -> None:
        self._optimizer = optimizer
        self._format = format
        self._dtype = MOMENT_DTYPES[format]
        self._rounding = rounding
        self._draws = draws
        #: Keys that parameters in several pieces had when the step began: what their first pieces add is not yet whole.
        self._keys: dict[int, frozenset[str]] = {}

    def take(self, piece: Piece) -> dict[str, Any]:
        """The state of a piece in fp32; moments that are kept in fp32 are views of what is kept."""
        kept = self._optimizer.state.get(piece.parameter, {})
        if piece.number == 0:
            self._keys[id(piece.parameter)] = frozenset(kept)
        taken: dict[str, Any] = {}
        for key, value in kept.items():
            if key == COMPENSATION or _is_scale(key, kept) or key not in self._keys[id(piece.parameter)]:
                continue
            if _is_moment(value, piece):
                taken[key] = _widened(value, kept.get(key + _SCALE), piece)
            elif isinstance(value, Tensor):
                counter = _promoted(value)
                taken[key] = counter.clone() if piece.num_pieces > 1 else counter
            else:
                taken[key] = value
        return taken

    def put_back(
        self, states: list[tuple[Piece, Mapping[str, Any]]], batch: int, counts: dict[str, Swallowed] | None = None
    ) -> None:
        """Keep the states that a step left behind.

        Args:
            states: of each piece of the batch.
            batch: its number in the step.
            counts: moments that were to move and did not are added up here, by key.
        """
        moments: defaultdict[str, list[tuple[Piece, Tensor]]] = defaultdict(list)
        for piece, state in states:
            kept = self._optimizer.state[piece.parameter]
            for key, value in state.items():
                if isinstance(value, Tensor) and _is_run(value, piece):
                    moments[key].append((piece, value))
                elif piece.number == piece.num_pieces - 1:
                    kept[key] = _promoted(value) if isinstance(value, Tensor) else value
        for key, runs in moments.items():
            if self._format == "fp32":
                for piece, value in runs:
                    self._keep(piece, key, value)
            else:
                self._keep_narrow(key, runs, batch, counts)

    def _keep(self, piece: Piece, key: str, value: Tensor) -> None:
        kept = self._optimizer.state[piece.parameter]
        is_new = not _is_moment(kept.get(key), piece)
        if is_new and piece.num_pieces == 1 and value.dtype == self._dtype:
            kept[key] = value.view(piece.shape) if _is_own(value, piece) else value.clone().view(piece.shape)
            return
        target = piece.part_of(self._room(piece, key))
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def _keep_narrow(
        self, key: str, runs: list[tuple[Piece, Tensor]], batch: int, counts: dict[str, Swallowed] | None
    ) -> None:
        flat = torch.cat([value.reshape(-1) for _, value in runs]).float()
        lengths = [piece.num_elements for piece, _ in runs]
        values = flat.split(lengths)
        exact = [None] * len(runs) if counts is None else flat.clone().split(lengths)
        scales = round_runs(flat, list(values), self._format, self._rounding, self._draws.seed_of(key, batch))
        for index, ((piece, _), value, new) in enumerate(zip(runs, values, exact, strict=True)):
            kept = self._optimizer.state[piece.parameter]
            is_new = not _is_moment(kept.get(key), piece)
            target = piece.part_of(self._room(piece, key))
            before = None if is_new or new is None else _widened(kept[key], kept.get(key + _SCALE), piece)
            target.copy_(value)
            if scales is not None:
                kept[key + _SCALE][piece.number] = scales[index]
            if counts is not None and before is not None and new is not None:
                after = _widened(kept[key], kept.get(key + _SCALE), piece)
                counts[key] = counts.get(key, Swallowed()) + count_swallowed(before, new, after)

    def _room(self, piece: Piece, key: str) -> Tensor:
        """What is kept under a key in this store's format: as it is, or moved to it from the format it was kept in."""
        kept = self._optimizer.state[piece.parameter]
        here, scale = kept.get(key), kept.pop(key + _SCALE, None)
        is_scaled = self._format == "fp16"
        if (
            _is_moment(here, piece)
            and here.dtype == self._dtype
            and here.is_contiguous()
            and (scale is not None) == is_scaled
        ):
            room, scales = here, scale
        else:
            device = piece.flat.device
            room = torch.zeros(piece.shape, dtype=self._dtype, device=device)
            scales = torch.ones(piece.num_pieces, device=device)
            for part in piece.all_pieces if _is_moment(here, piece) else ():
                run = _widened(here, scale, part)
                found = round_runs(run, [run], self._format, "nearest_even", 0)
                part.part_of(room).copy_(run)
                if found is not None:
                    scales[part.number] = found[0]
        kept[key] = room
        if is_scaled:
            kept[key + _SCALE] = scales
        return room


def promote_counters(state: Mapping[Any, Any]) -> None:
    """Let step counters of all parameters be fp32: in bf16 they stop at 256, in fp16 at 2048."""
    for kept in state.values():
        if isinstance(kept, dict):
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    kept[key] = _promoted(value)


def load_exactly(optimizer: Any) -> Callable[[], None]:
    """Let `optimizer.load_state_dict` keep the dtypes that were saved, where torch casts to the parameter's.

    Returns:
        What undoes it.
    """
    loading: list[Mapping[str, Any]] = []

    def remember(_: Any, state_dict: dict[str, Any]) -> None:
        loading[:] = [state_dict]

    def put_back(loaded: Any) -> None:
        saved = loading.pop()
        identities = [identity for group in saved["param_groups"] for identity in group["params"]]
        parameters = [parameter for group in loaded.param_groups for parameter in group["params"]]
        for identity, parameter in zip(identities, parameters, strict=True):
            for key, value in saved["state"].get(identity, {}).items():
                here = loaded.state[parameter].get(key)
                if isinstance(value, Tensor) and isinstance(here, Tensor) and here.dtype != value.dtype:
                    loaded.state[parameter][key] = _promoted(value.to(here.device, copy=True))

    handles = (
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(put_back),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# --- what is what -----------------------------------------------------------------------------------------------------


def _is_moment(value: Any, piece: Piece) -> bool:
    """Whether a kept state is one number for each element of the parameter."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.numel() == piece.flat.numel() > 1
        and value.shape in (piece.shape, piece.flat.shape)
    )


def _is_run(value: Tensor, piece: Piece) -> bool:
    """Whether a state of a stand-in is one number for each of its elements."""
    return value.is_floating_point() and piece.flat.numel() > 1 and value.shape == (piece.num_elements,)


def _is_own(value: Tensor, piece: Piece) -> bool:
    """Whether a state may be kept as it is: it is neither the gradient nor a part of something larger."""
    gradient = piece.parameter.grad
    is_whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return is_whole and value.is_contiguous() and (gradient is None or value.data_ptr() != gradient.data_ptr())


def _is_scale(key: str, kept: Mapping[str, Any]) -> bool:
    return isinstance(key, str) and key.endswith(_SCALE) and key.removesuffix(_SCALE) in kept


def _widened(value: Tensor, scale: Tensor | None, piece: Piece) -> Tensor:
    """A run of a kept state in fp32: a view of it if it is fp32 without a scale."""
    run = piece.part_of(value).float()
    return run if scale is None else run * scale[piece.number]


def _promoted(value: Tensor) -> Tensor:
    """A counter in fp32 if it is a float of less."""
    is_narrow = value.is_floating_point() and value.numel() == 1 and value.element_size() < 4
    return value.float() if is_narrow else value
