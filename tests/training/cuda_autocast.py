"""CUDA's autocast on any machine: its lists, carried out by a mode, and a watch on what kernels are given.

    with CudaAutocast(torch.float16), Watch() as seen:
        model(x)
    seen.inputs["softmax"]        # dtypes of the floating inputs that ATen's softmax had

The real one is a set of kernels that a CPU build of torch has but does not reach. It casts operators, so this is a mode
on operators of ATen as they arrive at autocast's place: before autograd takes them apart.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bitwright.training.autocast_lists import lists_of

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

    def __enter__(self) -> Any:
        # only the flag: a build without CUDA has nothing that it would change
        torch.set_autocast_enabled("cuda", True)
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        torch.set_autocast_enabled("cuda", False)
        super().__exit__(*arguments)

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


class Watch(TorchDispatchMode):
    """Which dtypes the floating inputs of kernels have, by the kernel's name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        found = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        self.inputs[func.overloadpacket.__name__.strip("_")] |= found
        return func(*args, **(kwargs or {}))
