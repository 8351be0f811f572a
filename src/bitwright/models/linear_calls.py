"""Seeing every linear operation of a running model, whatever the module around it looks like.

A model computes with a site's weight in one of a few functions: `linear` (nn.Linear, a router, one expert's slice of a
3-D parameter), `addmm` (Conv1D, stored [in, out]) or `embedding`. Those functions are watched, and the call is known
for a site's by the *identity of its weight*: storage, offset and shape. So fused matrices, experts, Conv1D and layers
that nobody has thought of are reached without a branch on an architecture, and the model is not touched.

    with LinearCalls(model, sites, handle):
        model(input_ids)

`handle(matrix, x, operation)` is called instead of the operation and returns its output; `operation(x)` is the
original. Matrices whose sites were not given are left alone. Only eager execution can be watched: not a compiled model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


#: Computes a matrix's output from its input: (matrix, x, the original operation) → y.
Handler = Callable[[Matrix, Tensor, Callable[[Tensor], Tensor]], Tensor]

#: function → (position and name of x, position and name of the weight)
_FUNCTIONS: Mapping[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    F.linear: ((0, "input"), (1, "weight")),
    F.embedding: ((0, "input"), (1, "weight")),
    torch.addmm: ((1, "mat1"), (2, "mat2")),
}


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
        self._by_weight: dict[tuple[int, int, tuple[int, ...]], Matrix] = {}

    def __enter__(self) -> LinearCalls:
        self._by_weight.clear()
        for matrix in self._matrices:
            weight: Tensor = self._model.get_parameter(matrix.parameter)
            self._by_weight[_identity(weight if matrix.expert is None else weight[matrix.expert])] = matrix
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        where = _FUNCTIONS.get(func)
        if where is None:
            return func(*args, **kwargs)
        (x_position, x_name), (weight_position, weight_name) = where
        weight = args[weight_position] if len(args) > weight_position else kwargs[weight_name]
        matrix = self._by_weight.get(_identity(weight))
        if matrix is None:
            return func(*args, **kwargs)
        if len(args) <= x_position:
            return self._handle(matrix, kwargs[x_name], lambda x: func(*args, **{**kwargs, x_name: x}))
        before, after = args[:x_position], args[x_position + 1 :]
        return self._handle(matrix, args[x_position], lambda x: func(*before, x, *after, **kwargs))


def _identity(weight: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return weight.untyped_storage().data_ptr(), int(weight.storage_offset()), tuple(weight.shape)
