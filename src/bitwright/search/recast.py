"""Products under autocast whose backward pass casts the weight again, in place of a copy held since the forward pass.

Autocast casts a fp32 weight for its product, and the product holds the copy for its gradient: while a pass is under
way, half as much again as all weights. A second cast of a matrix costs next to nothing beside the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def recasting(operation: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """``operation(x)`` with `weight`, the very same numbers.

    Args:
        operation: takes x, and a weight in place of its own, of the same shape.
        x: the operation's input.
        weight: its own weight, without a gradient; not changed before the backward pass is over.

    Returns:
        What autocast gives; outside autocast, or where nothing has to be cast, the plain ``operation(x)``.
    """
    dtype = torch.get_autocast_dtype(weight.device.type)
    if not torch.is_autocast_enabled(weight.device.type) or weight.dtype == dtype or not torch.is_grad_enabled():
        return operation(x)
    cast = weight.to(dtype)
    place = cast.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != place:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else weight.to(dtype).as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return operation(x, cast)
