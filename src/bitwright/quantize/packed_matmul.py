"""Products with packed weights: which layout holds a weight, and the product as one torch operator.

    selection = select_matmul(packed.scheme, packed.shape, "cpu", torch.bfloat16)
    matrix = selection.layout.prepare(packed)
    y = packed_matmul(x, matrix)                     x [..., K] → y [..., N]

Layouts (`matmuls/`) are asked in their order of preference why they do not hold a weight; the first that has no reason
is taken, and `MatmulSelection.reason` says what was passed over and why. The last one, dequantise, has no exceptions.

The operator `bitwright::packed_matmul` is opaque to compilers, as all of `ops` are. Its gradient is that of a linear
layer with a frozen weight: grad x = grad y · W, with the dequantised weight; codes have none. Where nobody traces and
no gradient is taken, the layout is called without torch's dispatcher, which costs as much as a small product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.catalogs import MATMULS
from bitwright.quantize.matmuls import MatmulLayout, PackedMatrix
from bitwright.quantize.scheme import TensorScheme, read_scheme

__all__ = ["MatmulLayout", "MatmulSelection", "PackedMatrix", "packed_matmul", "prepare_matmul", "select_matmul"]

_LOG = logging.getLogger(__name__)
#: What x may be.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulSelection:
    """A layout and the reason for it."""

    layout: MatmulLayout
    #: "not dot: …" of every layout that comes before it.
    passed_over: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """What it is, and what was passed over for it."""
        passed = "; ".join(self.passed_over)
        return f"{self.layout.description}{f' ({passed})' if passed else ''}"


@cache
def select_matmul(
    scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype
) -> MatmulSelection:
    """Return the layout that holds a weight.

    Args:
        scheme: of the weight.
        shape: [N, K] of the weight.
        device_type: "cpu", "cuda", …: where it will be multiplied.
        dtype: of the inputs: fp32, bf16 or fp16.

    Raises:
        SchemeError: another dtype, or no layout can; the reason of each is said.
    """
    if dtype not in DTYPES:
        raise SchemeError(f"inputs of packed weights are fp32, bf16 or fp16, not {dtype}; convert them first")
    passed_over: list[str] = []
    for layout in sorted(MATMULS.values(), key=lambda layout: layout.preference):
        reason = layout.why_not(scheme, shape, device_type, dtype)
        if reason is None:
            selection = MatmulSelection(layout=layout, passed_over=tuple(passed_over))
            _LOG.info("layout %s of %s %s: %s", layout.name, scheme, shape, selection.reason)
            return selection
        passed_over.append(f"not {layout.name}: {reason}")
    raise SchemeError(f"no layout holds {scheme}: {'; '.join(passed_over)}; choose another scheme")


def packed_matmul(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x Wᵀ: x [..., K] of fp32, bf16 or fp16 → [..., N] in its dtype.

    Raises:
        SchemeError: another dtype, or another number of columns than the weight has.
    """
    if x.dtype not in DTYPES:
        raise SchemeError(f"inputs of packed weights are fp32, bf16 or fp16, got {x.dtype}; convert them first")
    if x.dim() == 0 or x.shape[-1] != matrix.shape[1]:
        raise SchemeError(
            f"x has shape {tuple(x.shape)}, but the weight has {matrix.shape[1]} columns; the last dimension of x is "
            "multiplied with those"
        )
    if not _is_watched(x):
        return _product(x, matrix)
    parts = list(matrix.parts.values())
    names = " ".join(matrix.parts)
    return torch.ops.bitwright.packed_matmul(x, parts, names, matrix.layout, matrix.scheme.text, *matrix.shape)


def prepare_matmul(matrix: PackedMatrix) -> Callable[[Tensor], Tensor]:
    """x ↦ `packed_matmul(x, matrix)`, for a weight that is multiplied with again and again.

    What follows from the weight alone is settled here, once, where its layout has a shorter way (`prepared`). The parts
    of the matrix must stay the same tensors; what is written to their memory counts.
    """
    columns = matrix.shape[1]
    prepared = getattr(MATMULS[matrix.layout], "prepared", None)
    if prepared is None:
        return lambda x: packed_matmul(x, matrix)
    product = prepared(matrix)

    def multiply(x: Tensor) -> Tensor:
        if x.dtype not in DTYPES or x.dim() == 0 or x.shape[-1] != columns or _is_watched(x):
            return packed_matmul(x, matrix)
        return cast(Tensor, product(x))

    return multiply


def _is_watched(x: Tensor) -> bool:
    """Whether someone traces what is computed, or will ask for its gradient."""
    return (
        type(x) is not Tensor
        or (x.requires_grad and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _product(x: Tensor, matrix: PackedMatrix) -> Tensor:
    rows, columns = matrix.shape
    y_MN = MATMULS[matrix.layout].multiply(x.reshape(-1, columns), matrix)
    return y_MN.reshape(*x.shape[:-1], rows)


# --- the operators ----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("bitwright", "FRAGMENT")
_SCHEMAS = {
    "packed_matmul": "(Tensor x, Tensor[] parts, str names, str layout, str scheme, SymInt rows, SymInt columns)",
    "packed_matmul_backward": (
        "(Tensor grad, Tensor[] parts, str names, str layout, str scheme, SymInt rows, SymInt columns)"
    ),
}


def _matrix_of(parts: Sequence[Tensor], names: str, layout: str, scheme: str, rows: int, columns: int) -> PackedMatrix:
    return PackedMatrix(
        layout=layout,
        scheme=read_scheme(scheme),
        shape=(rows, columns),
        parts=dict(zip(names.split(" "), parts, strict=True)),
    )


def _multiply(x: Tensor, *facts: Any) -> Tensor:
    return _product(x, _matrix_of(*facts))


def _multiply_back(grad: Tensor, *facts: Any) -> Tensor:
    matrix = _matrix_of(*facts)
    values_NK = MATMULS[matrix.layout].unpack(matrix)
    return (grad.float() @ values_NK).to(grad.dtype)


def _shape_of_product(x: Tensor, parts: Any, names: str, layout: str, scheme: str, rows: int, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _shape_of_gradient(
    grad: Tensor, parts: Any, names: str, layout: str, scheme: str, rows: int, columns: int
) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], columns))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, *facts = inputs
    ctx.save_for_backward(*parts)
    ctx.facts = facts


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    grad_x = torch.ops.bitwright.packed_matmul_backward(grad, parts, *ctx.facts)
    return grad_x, [None] * len(parts), *(None for _ in ctx.facts)


for _name, _run, _shape in (
    ("packed_matmul", _multiply, _shape_of_product),
    ("packed_matmul_backward", _multiply_back, _shape_of_gradient),
):
    _LIBRARY.define(f"{_name}{_SCHEMAS[_name]} -> Tensor")
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitwright::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("bitwright::packed_matmul", _backward, setup_context=_keep, lib=_LIBRARY)
