"""Islands in fp32 inside a forward pass in fp16 or bf16: by rule, and by name.

By rule: a mode that sees every function of torch that a forward pass calls, and hands those of `operations.py` that
neither autocast nor a kernel takes care of their floating inputs in fp32. It acts where autocast is on, and costs a
look-up in a dictionary a function.

    with torch.autocast("cpu", torch.bfloat16), Islands("bf16", "cpu"):
        model(x)

By name: a router decides which experts see a token, and tables of positions turn an angle per token; both run with
autocast off and their inputs in fp32, whatever they are made of (`named_islands.py`). A table that was cast to 16 bits
along with its model cannot be cast back: it is computed anew, from the model's config, or refused.

Rejected: kernels registered for autocast's dispatch keys. They cost nothing, but change every other autocast of the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitwright.training.operations import OPERATIONS, Operation, treat

#: Dtypes whose tensors islands cast.
NARROW_DTYPES = (torch.bfloat16, torch.float16)
_NAMESPACES: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special)


class Islands(TorchFunctionMode):
    """A region in which listed functions get their 16-bit inputs in fp32, wherever autocast is on.

    It may be entered around a backward pass too: what is computed again there (activation checkpointing) has autocast
    on again, and is then what it was.

    Args:
        compute: the policy's format of products; with fp32 or tf32 nothing is cast.
        device_type: kind of device whose autocast surrounds it, as torch calls it.
    """

    def __init__(self, compute: str, device_type: str) -> None:
        super().__init__()
        self._handlers = _handlers(compute, device_type)
        self._device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handle = self._handlers.get(func)
        if handle is not None and torch.is_autocast_enabled(self._device_type):
            args, kwargs = handle(args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def functions_of(operation: Operation) -> Iterator[tuple[str, Any]]:
    """(name, function of torch) for every spelling of an operation."""
    for name in operation.functions:
        for space in _NAMESPACES:
            found = getattr(space, name, None)
            if found is not None:
                yield name, found


_Handler = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@cache
def _handlers(compute: str, device_type: str) -> Mapping[Any, _Handler]:
    """Function → what makes its arguments those of an island; only functions that are left to us."""
    return {
        function: _makes_fp32 if function in _MAKERS else _upcast
        for operation in OPERATIONS
        for name, function in functions_of(operation)
        if treat(operation, name, compute=compute, device_type=device_type).by == "bitwright"
    }


def in_fp32(value: Any) -> Any:
    """A tensor of bf16 or fp16 as fp32, also inside tuples and lists; everything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW_DTYPES else value
    if type(value) in (tuple, list):
        return type(value)(in_fp32(item) for item in value)
    return value


def _upcast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get("out") is not None or kwargs.get("dtype") in (torch.float32, torch.float64):
        return args, kwargs  # the caller has said in which dtype
    return tuple(in_fp32(value) for value in args), {name: in_fp32(value) for name, value in kwargs.items()}


#: Functions without inputs, whose dtype is an argument.
_MAKERS = (torch.arange, torch.linspace)


def _makes_fp32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    asked = kwargs.get("dtype") or _default_dtype(args)
    return args, {**kwargs, "dtype": torch.float32} if asked in NARROW_DTYPES else kwargs


def _default_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    """The default dtype, where numbers with a fraction make torch take it."""
    return torch.get_default_dtype() if any(isinstance(value, float) for value in args) else None
