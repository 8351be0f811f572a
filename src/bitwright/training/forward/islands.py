"""Islands in fp32 inside a forward pass in fp16 or bf16: autocast's own list, completed by ours.

Autocast is a set of kernels under a dispatch key of its own, one for each operator on its list. For operators of
`operations.py` that it leaves out on a kind of device, and whose kernels do not compute in fp32 anyway, the same is
registered here: a kernel that casts floating inputs of 16 bits to fp32, and calls the operator below autocast.

    with torch.autocast("cpu", torch.float16), Islands("fp16", "cpu"):
        model(x)

The kernels act inside such a region only; elsewhere they hand on what they are given, so another autocast of the same
process gives the bits that it would give without them. All other operators pay nothing, in contrast to a function mode,
which costs some 5 µs for each call of anything (15 % of a step of a model of 100 000 parameters, 2 % of one of 14
million). Operators that torch itself calls inside others are reached as well, and so are compiled models and forward
passes that are computed again in the middle of a backward pass.

Which modules run in fp32 by what they are is in `named_islands.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from bitwright.training.forward.operations import OPERATIONS, Treatment, treat

#: Dtypes whose tensors islands cast.
NARROW_DTYPES = (torch.bfloat16, torch.float16)
_WIDE_DTYPES = (torch.float32, torch.float64)
_OURS = Treatment(format="fp32", by="bitwright")

#: Operators of the regions that are entered, the innermost last. A list for the process rather than for a thread:
#: backward passes run in threads of their own.
_ENTERED: list[frozenset[str]] = []


class Islands:
    """A region in which listed operators get their 16-bit inputs in fp32, wherever autocast is on.

    Args:
        compute: the policy's format of products; with fp32 or tf32 nothing is cast.
        device_type: kind of device whose autocast surrounds it, as torch calls it.
        semantics: kind of device whose autocast is acted out there, for tests; the same unless given.
    """

    def __init__(self, compute: str, device_type: str, *, semantics: str | None = None) -> None:
        #: Names of ATen operators.
        self.operators = left_to_us(compute, semantics or device_type)
        for operator in self.operators:
            _register(operator, device_type)

    def __enter__(self) -> Self:
        _ENTERED.append(self.operators)
        return self

    def __exit__(self, *_: object) -> None:
        _ENTERED.pop()


@cache
def left_to_us(compute: str, device_type: str) -> frozenset[str]:
    """Operators that run in fp32 under a format because bitwright sees to it, and nobody else."""
    return frozenset(
        operator
        for operation in OPERATIONS
        for operator in operation.operators
        if treat(operation, operator, compute=compute, device_type=device_type) == _OURS
    )


def in_fp32(value: Any) -> Any:
    """A tensor of bf16 or fp16 as fp32, also inside tuples and lists; everything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW_DTYPES else value
    if type(value) in (tuple, list):
        return type(value)(in_fp32(item) for item in value)
    return value


# --- kernels under autocast's key ------------------------------------------------------------------------------------


@cache
def _library() -> Any:
    """What holds the kernels, as long as the process lives."""
    return torch.library.Library("aten", "IMPL")


@cache
def _register(operator: str, device_type: str) -> None:
    """Give every overload of an operator a kernel under a device's autocast key, once."""
    key = _autocast_key(device_type)
    for name, overload in _overloads(operator, key):
        _library().impl(name, _kernel(operator, overload, key), key)


def _overloads(operator: str, key: str) -> Iterator[tuple[str, Any]]:
    """(name, overload) of those that take tensors, return new ones, and have no such kernel yet."""
    packet = getattr(torch.ops.aten, operator)
    known = set(torch._C._dispatch_get_all_op_names())
    for suffix in packet.overloads():
        name = operator if suffix == "default" else f"{operator}.{suffix}"
        overload = getattr(packet, suffix)
        arguments = overload._schema.arguments
        is_usual = any("Tensor" in str(argument.type) for argument in arguments) and not any(
            argument.alias_info is not None or "Dimname" in str(argument.type) for argument in arguments
        )
        if is_usual and f"aten::{name}" in known:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                yield name, overload


def _kernel(operator: str, overload: Any, key: str) -> Callable[..., Any]:
    below_autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):
            if _ENTERED and operator in _ENTERED[-1] and not _says_its_dtype(args, kwargs):
                args, kwargs = in_fp32(args), {name: in_fp32(value) for name, value in kwargs.items()}
            return overload(*args, **kwargs)

    return kernel


def _says_its_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the caller asks for a wide result, which the operator then computes in."""
    return any(value in _WIDE_DTYPES for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype))


def _autocast_key(device_type: str) -> str:
    return f"Autocast{device_type.upper()}"
