"""tf32 on devices that do not have it: products whose operands are rounded to 10 fraction bits, forward and back.

    C = r(A) · r(B)     linear layers, attention, matmul, einsum, …, and the products of their backward passes
    convolutions        likewise: output, gradient of the input, gradient of the weight

with r rounding to nearest, ties to even, and fp32 sums: what a matrix unit for tf32 computes, up to the order of the
sum. What is added (a bias) is not rounded. This is there to see what tf32 does to a run, not to be fast.

Operands are rounded below autograd, where a few operators are left of all that torch has, whatever they are called
above; a dispatch mode sees each of them, in both passes. Attention is taken apart into its products, by torch's own
reference of it. What one kernel does as a whole stays fp32: recurrent layers. So do products with a vector, which GPUs
do not give to their matrix units either.

Rejected: linear layers with a forward of their own. They leave out attention and every product that is no layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import TensorScheme

_aten = torch.ops.aten
#: Operator → which of its arguments are multiplied.
_OPERANDS: Mapping[Any, tuple[int, int]] = {
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten._grouped_mm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.addmm_: (1, 2),
    _aten.addbmm: (1, 2),
    _aten.addbmm_: (1, 2),
    _aten.baddbmm: (1, 2),
    _aten.baddbmm_: (1, 2),
    _aten.convolution: (0, 1),
}


@contextmanager
def rounded_products(format_name: str) -> Iterator[None]:
    """A region in which products read their fp32 operands in a format of fewer bits, backward passes included."""
    with sdpa_kernel(SDPBackend.MATH), _RoundedProducts(TensorScheme(format=format_name)):
        yield


class _RoundedProducts(TorchDispatchMode):
    def __init__(self, scheme: TensorScheme) -> None:
        super().__init__()
        self._scheme = scheme

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operator = getattr(func, "overloadpacket", None)
        if operator in _OPERANDS:
            args = self._rounded(args, _OPERANDS[operator])
        elif operator is _aten.convolution_backward:
            return self._convolution_backward(func, *args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, args: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self._round(value) if place in places else value for place, value in enumerate(args))

    def _round(self, x: Tensor) -> Tensor:
        return fake_quantize(x, self._scheme) if x.dtype == torch.float32 else x

    def _convolution_backward(self, func: Any, g: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        """The bias is no product: its gradient is a sum of g as it is."""
        *others, (wants_input, wants_weight, wants_bias) = args
        operands = self._rounded((g, *others), (0, 1, 2))
        dx, dw, _ = func(*operands, [wants_input, wants_weight, False])
        db = g.sum([dim for dim in range(g.dim()) if dim != 1]) if wants_bias else None
        return dx, dw, db
