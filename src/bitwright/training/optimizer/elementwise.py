"""Whether an optimizer treats every number by itself: found by trying it, not by its name.

Parameters narrower than fp32 are updated in pieces: a bounded number of elements at a time, flat, with their part of
the optimizer's state. That is right where element i of the new parameter depends on element i of the parameter, of its
gradient and of its state alone: SGD, Adam and their like, Lion, RMSprop, Adagrad. It is wrong where an update needs a
norm of the whole (LAMB, Prodigy), rows and columns (Adafactor), a matrix (Muon, Shampoo) or all parameters at once
(L-BFGS).

So a copy of the optimizer is given one small tensor as a matrix, and then the same numbers flat and in two pieces that
do not know of each other, for three steps. Where the updates differ by more than rounding, it is not elementwise; where
it refuses a flat tensor, it said so itself. Nothing of the real optimizer changes: what it holds is copied first.

Rejected: a list of names. It would have to know every optimizer that anybody writes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_ROWS, _COLUMNS, _CUT, _STEPS = 6, 8, 17, 3
_LEARNING_RATE = 1e-2
#: What groups may differ in without having to be asked again.
_DIFFERENT = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr", "weight_decay")
#: Updates are compared relative to the largest one. Kernels for long and short tensors round differently.
_TOLERANCE = 1e-3
#: What a step of an optimizer raises where it cannot do what it is asked.
_REFUSALS = (
    AttributeError,
    AssertionError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def why_not_elementwise(optimizer: Any) -> str | None:
    """Return why an optimizer cannot work on pieces of parameters, or None if it can.

    Args:
        optimizer: a torch optimizer or anything like one: `param_groups`, `state` and `step`. It is not changed.
    """
    held = _holder_of_parameters(optimizer)
    if held is not None:
        return f"it keeps parameters of its own in `{held}`, which pieces cannot stand in for"
    asked: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        settings = repr([(key, value) for key, value in group.items() if key not in _DIFFERENT])
        if settings in asked:
            continue
        asked.add(settings)
        reason = _why_not_group(optimizer, group)
        if reason is not None:
            return reason if len(optimizer.param_groups) == 1 else f"{reason} (parameter group {number})"
    return None


def _why_not_group(optimizer: Any, group: Mapping[str, Any]) -> str | None:
    device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
    start = _numbers(0, device) + 2.0
    whole = _try(optimizer, group, start, slice(None), is_flat=False)
    first = _try(optimizer, group, start, slice(None, _CUT), is_flat=True)
    rest = _try(optimizer, group, start, slice(_CUT, None), is_flat=True)
    for outcome, shape in ((whole, "matrix"), (first, "flat piece"), (rest, "flat piece")):
        if isinstance(outcome, str):
            return f"one step on a small {shape} says: {outcome}"
    assert isinstance(whole, Tensor) and isinstance(first, Tensor) and isinstance(rest, Tensor)
    difference = float((whole.flatten() - torch.cat([first, rest])).abs().max())
    size = float((whole - start).abs().max())
    if not difference <= _TOLERANCE * size:
        return (
            f"its update of an element depends on other elements: in pieces it differs by {difference / size:.1%}"
            if size > 0
            else "it changes nothing"
        )
    return None


def _numbers(step: int, device: torch.device) -> Tensor:
    """[rows, columns] in [−1, 1], rows and columns of different sizes, others in each step."""
    index = torch.arange(_ROWS * _COLUMNS, dtype=torch.float64).reshape(_ROWS, _COLUMNS)
    sizes = torch.linspace(0.1, 1.0, _ROWS, dtype=torch.float64)[:, None]
    return (torch.sin(index * (1.7 + step) + step) * sizes).to(device, torch.float32)


@torch.no_grad()
def _try(optimizer: Any, group: Mapping[str, Any], start: Tensor, part: slice, *, is_flat: bool) -> Tensor | str:
    """The parameter after some steps of a copy, or what the copy says against it."""
    parameter = start.flatten()[part].clone() if is_flat else start.clone()
    try:
        trial = _copy_for(optimizer, group, parameter)
        for step in range(1, _STEPS + 1):
            gradient = _numbers(step, start.device)
            parameter.grad = gradient.flatten()[part].clone() if is_flat else gradient
            trial.step()
    except _REFUSALS as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return parameter


def _copy_for(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Any:
    """An optimizer like the given one, as it was before its first step, for one other parameter."""
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):  # a learning rate scheduler puts its own `step` in
            continue
        trial.__dict__[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value)
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
    if "lr" in settings:  # it may be zero at first
        rate = settings["lr"]
        settings["lr"] = torch.full_like(rate, _LEARNING_RATE) if isinstance(rate, Tensor) else _LEARNING_RATE
    trial.__dict__["state"] = defaultdict(dict)
    trial.__dict__["param_groups"] = [{**settings, "params": [parameter]}]
    return trial


def _holder_of_parameters(optimizer: Any) -> str | None:
    """Name of an attribute that holds parameters, or an optimizer, beside the groups and the state."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults") and not name.endswith("_hooks"):
            if any(id(thing) in parameters or hasattr(thing, "param_groups") for thing in _things_in(value)):
                return name
    return None


def _things_in(value: Any) -> Iterator[Any]:
    match value:
        case Mapping():
            for inner in value.values():
                yield from _things_in(inner)
        case list() | tuple():
            for inner in value:
                yield from _things_in(inner)
        case _:
            yield value
