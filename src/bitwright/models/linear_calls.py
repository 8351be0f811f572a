"""Seeing every linear operation of a running model, whatever the module around it looks like.

A model computes with a site's weight in one of a few functions: `linear` (nn.Linear, a router, one expert's slice of a
3-D parameter), `addmm` (Conv1D, stored [in, out]), `embedding`, or in hand-written code `matmul`, `mm` and `einsum`.
Those functions are watched, and the call is known for a site's by the *identity of its weight*: storage, offset and
shape, the weight's transpose included. So fused matrices, experts, Conv1D and layers that nobody has thought of are
reached without a branch on an architecture, and the model is not touched.

    with LinearCalls(model, sites, handle):
        model(input_ids)

`handle(matrix, x, operation)` is called instead of the operation and returns its output; `operation(x)` is the
original, `operation(x, weight)` the same with another tensor in the weight's place. Matrices whose sites were not given
are left alone. Only eager execution can be watched: not a compiled model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitwright.models.sites import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One physical [out, in] matrix and the sites that are its rows."""

    #: Dotted parameter name, with the expert's index where the parameter is 3-D; unique in a model.
    name: str
    parameter: str
    expert: int | None
    transposed: bool
    #: In the order of their rows; a matrix that is not fused has one site.
    sites: tuple[Site, ...]


class Operation(Protocol):
    """The operation that a model asked for."""

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compute it with input `x`, and with `weight`, as the parameter stores it, in place of the model's own."""


#: Computes a matrix's output from its input: (matrix, x, the original operation) → y.
Handler = Callable[[Matrix, Tensor, Operation], Tensor]

#: function → (position and name of x, position and name of the weight)
_FUNCTIONS: Mapping[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    F.linear: ((0, "input"), (1, "weight")),
    F.embedding: ((0, "input"), (1, "weight")),
    torch.addmm: ((1, "mat1"), (2, "mat2")),
    torch.mm: ((0, "input"), (1, "mat2")),
    torch.matmul: ((0, "input"), (1, "other")),
    torch.Tensor.addmm: ((1, "mat1"), (2, "mat2")),
    torch.Tensor.mm: ((0, "self"), (1, "mat2")),
    torch.Tensor.matmul: ((0, "self"), (1, "other")),
    torch.Tensor.__matmul__: ((0, "self"), (1, "other")),
    # what a program calls (`graph_run.py`)
    torch.ops.aten.linear.default: ((0, "input"), (1, "weight")),
    torch.ops.aten.embedding.default: ((1, "indices"), (0, "weight")),
    torch.ops.aten.addmm.default: ((1, "mat1"), (2, "mat2")),
    torch.ops.aten.mm.default: ((0, "self"), (1, "mat2")),
    torch.ops.aten.matmul.default: ((0, "self"), (1, "other")),
}
_EINSUMS = (torch.functional.einsum, torch.ops.aten.einsum.default)


def einsum_is_in_out(equation: str, weight: int) -> bool | None:
    """Which way the matrix at position `weight` of an einsum of two operands lies.

    True: [in, out], as in "btd,de->bte". False: [out, in], as in "btd,ed->bte". None where the einsum is no product of
    an input with that matrix: it is one if the matrix has two letters, the input ends in one of them, and the output is
    the input with that letter replaced by the other.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2:
        return None
    letters, x = operands[weight], operands[1 - weight]
    if len(letters) != 2 or letters[0] == letters[1] or not x or x[-1] not in letters:
        return None
    inner = x[-1]
    outer = letters.replace(inner, "")
    if output != x[:-1] + outer or outer in x or inner in x[:-1]:
        return None
    return letters[0] == inner


def matrices_of(sites: Iterable[Site]) -> tuple[Matrix, ...]:
    """Group sites by the matrix that they are rows of, in order of appearance."""
    grouped: dict[tuple[str, int | None], list[Site]] = {}
    for site in sites:
        grouped.setdefault((site.parameter, site.expert), []).append(site)
    return tuple(
        Matrix(
            name=parameter if expert is None else f"{parameter}[{expert}]",
            parameter=parameter,
            expert=expert,
            transposed=members[0].transposed,
            sites=tuple(sorted(members, key=lambda site: site.rows or (0, 0))),
        )
        for (parameter, expert), members in grouped.items()
    )


class LinearCalls(TorchFunctionMode):
    """Context in which every call that computes with one of the sites' weights goes through a handler."""

    def __init__(self, model: nn.Module, sites: Iterable[Site], handle: Handler) -> None:
        super().__init__()
        self._handle = handle
        self._model = model
        self._matrices = matrices_of(sites)
        #: Identity of a stored matrix or of its transpose → the matrix, and whether it is the transpose.
        self._by_weight: dict[_Identity, tuple[Matrix, bool]] = {}

    def __enter__(self) -> LinearCalls:
        self._by_weight.clear()
        for matrix in self._matrices:
            weight: Tensor = self._model.get_parameter(matrix.parameter)
            stored = weight if matrix.expert is None else weight[matrix.expert]
            self._by_weight[_identity(stored.T)] = matrix, True
            self._by_weight[_identity(stored)] = matrix, False
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EINSUMS:
            return self._watch_einsum(args, kwargs)
        where = _FUNCTIONS.get(func)
        if where is None:
            return func(*args, **kwargs)
        (x_position, x_name), (weight_position, weight_name) = where
        weight = args[weight_position] if len(args) > weight_position else kwargs.get(weight_name)
        known = self._by_weight.get(_identity(weight)) if isinstance(weight, Tensor) else None
        if known is None:
            return func(*args, **kwargs)
        matrix, is_transpose = known

        def operation(x: Tensor, weight: Tensor | None = None) -> Any:
            placed, named = list(args), dict(kwargs)
            in_place_of = weight.T if weight is not None and is_transpose else weight
            for position, name, value in ((x_position, x_name, x), (weight_position, weight_name, in_place_of)):
                if value is not None and position < len(placed):
                    placed[position] = value
                elif value is not None:
                    named[name] = value
            return func(*placed, **named)

        return self._handle(matrix, args[x_position] if len(args) > x_position else kwargs[x_name], operation)

    def _watch_einsum(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        found = [self._by_weight.get(_identity(operand)) for operand in operands]
        position = next((at for at, known in enumerate(found) if known is not None), None)
        if position is None or len(operands) != 2 or einsum_is_in_out(str(equation), position) is None:
            return torch.einsum(*args, **kwargs)
        known = found[position]
        assert known is not None
        matrix, is_transpose = known

        def operation(x: Tensor, weight: Tensor | None = None) -> Tensor:
            own = operands[position] if weight is None else weight.T if is_transpose else weight
            result: Tensor = torch.einsum(equation, *((own, x) if position == 0 else (x, own)))
            return result

        return self._handle(matrix, operands[1 - position], operation)


_Identity = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _identity(weight: Tensor) -> _Identity:
    return weight.untyped_storage().data_ptr(), int(weight.storage_offset()), tuple(weight.shape), weight.stride()
