"""CUDA's autocast on any machine: its lists, carried out by a mode.

    with CudaAutocast(torch.float16):
        model(x)

The real one is a set of kernels that a CPU build of torch has but does not reach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

from bitwright.training.forward.autocast_lists import lists_of

#: Function → the operator of ATen that it comes down to.
_OPERATORS = {
    "rpow": "pow",
    "cross_entropy": "nll_loss",
    "vector_norm": "linalg_vector_norm",
    "matrix_norm": "linalg_matrix_norm",
}


class CudaAutocast(TorchFunctionMode):
    """Casts what CUDA's autocast would cast, by the names of functions. Enter it before other modes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.lists = lists_of("cuda")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(resolve_name(func) or "").rpartition(".")[2].strip("_")
        name = _OPERATORS.get(name, name)
        target = None
        if name in self.lists.compute:
            target = self.dtype
        elif name in self.lists.fp32:
            target = torch.float32
        if target is None:
            return func(*args, **kwargs)

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(target) if is_float else value

        return func(*tree_map(cast, args), **tree_map(cast, kwargs))
