"""A weight matrix as packed codes: what modules multiply with, and read rows from, where a plan runs packed.

A matrix is one or more runs of rows, each with its own codes and scales: q, k and v of a fused matrix were quantised
apart. Inputs are rounded once for all of them (`input_rounding.py`); an exact change of inputs that belongs to one run
alone, as weight-only schemes may have it, is made for that run.

    PackedRows     codes in a layout of `quantize/packed_matmul.py`, expanded inside the kernel
    native rows    codes that the device multiplies with codes of inputs (`native_rows.py`)
    PlainRows      rows that no choice touches, beside others of their matrix that one does

Codes and scales are buffers: they travel with `state_dict`, `.to(device)` and `deepcopy`, and `.to(dtype)` leaves them
what they are. Gradients go to inputs only, through the values of the weights (as QLoRA has them), and straight through
what is rounded.

Compilers do not look inside: `torch.compile` breaks its graph at every packed matrix and runs the kernel as it is.

Legend: M tokens, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.errors import SchemeError
from bitwright.inference.fallback import Action, Fallback, places_of
from bitwright.inference.input_rounding import InputRounding, keeping_dtypes
from bitwright.quantize.catalogs import MATMULS
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.packed_matmul import PackedMatrix, packed_matmul


class Rows(nn.Module):
    """Consecutive rows [N, K] of a matrix; the classes below are its kinds."""

    num_rows: int
    num_columns: int
    #: Whether inputs are multiplied as codes.
    takes_codes: bool = False

    def multiply(self, x_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs that are numbers, in their dtype."""
        raise NotImplementedError

    def multiply_codes(self, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs [M, N] of inputs as codes under scales; `dtype` is what the model computes in."""
        raise NotImplementedError

    def values(self) -> Tensor:
        """What inputs are multiplied with, fp32 [N, K]."""
        raise NotImplementedError

    def lookup(self, ids: Tensor) -> Tensor:
        """Some of them, fp32 [*ids.shape, K]."""
        return self.values()[ids]

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.numel() * part.element_size() for part in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(keeping_dtypes(fn), recurse)


class PackedRows(Rows):
    """Rows in a packed layout.

    Args:
        matrix: their codes and scales.
        dtype: of the inputs that the layout was selected for.
        device_type: where its kernels run.
    """

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype, device_type: str) -> None:
        super().__init__()
        self.layout, self.scheme = matrix.layout, matrix.scheme
        self.num_rows, self.num_columns = matrix.shape
        self.dtype, self.device_type = dtype, device_type
        for name, part in matrix.parts.items():
            self.register_buffer(name, part)
        self._matrix: PackedMatrix | None = None
        #: Dtype of inputs → what they are multiplied in.
        self._multiplied_in: dict[torch.dtype, torch.dtype] = {}

    @property
    def matrix(self) -> PackedMatrix:
        """As layouts take it; made once, since a step asks for hundreds."""
        if self._matrix is None:
            parts = {name: part for name, part in self._buffers.items() if part is not None}
            self._matrix = PackedMatrix(
                layout=self.layout, scheme=self.scheme, shape=(self.num_rows, self.num_columns), parts=parts
            )
        return self._matrix

    def multiply(self, x_MK: Tensor) -> Tensor:
        """Outputs [M, N], by the layout's kernel."""
        if x_MK.device.type != self.device_type:
            raise SchemeError(
                f"a weight was packed for {self.device_type} and meets inputs on {x_MK.device.type}, where its layout "
                f"'{self.layout}' may have no kernel; apply the plan to a model that is on {x_MK.device.type} already"
            )
        dtype = self._multiplied_in.get(x_MK.dtype)
        if dtype is None:
            dtype = self._multiplied_in[x_MK.dtype] = self._dtype_for(x_MK.dtype)
        y_MN = packed_matmul(x_MK.to(dtype).contiguous(), self.matrix)
        return y_MN.to(x_MK.dtype)

    def values(self) -> Tensor:
        """fp32 [N, K], exact."""
        return MATMULS[self.layout].unpack(self.matrix)

    def lookup(self, ids: Tensor) -> Tensor:
        """Some rows, fp32 [*ids.shape, K]: by the layout where it can read rows, else of all values."""
        rows = getattr(MATMULS[self.layout], "rows", None)
        return super().lookup(ids) if rows is None else rows(self.matrix, ids.flatten()).unflatten(0, ids.shape)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.num_rows} x {self.num_columns}, {self.scheme}, layout {self.layout}"

    def _dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Another dtype than the layout was selected for only where it has a kernel for that."""
        shape = self.num_rows, self.num_columns
        takes = MATMULS[self.layout].why_not(self.scheme, shape, self.device_type, dtype) is None
        return dtype if takes else self.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._matrix = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        self._matrix = None
        super()._load_from_state_dict(*arguments, **named)


class PlainRows(Rows):
    """Rows that stay numbers of the model's dtype."""

    weight: Tensor

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__()
        self.num_rows, self.num_columns = weight_NK.shape
        self.register_buffer("weight", weight_NK)

    def multiply(self, x_MK: Tensor) -> Tensor:
        """Outputs [M, N]."""
        return F.linear(x_MK, self.weight.to(x_MK.dtype))

    def values(self) -> Tensor:
        """fp32 [N, K]."""
        return self.weight.float()


class PackedWeight(nn.Module):
    """One matrix [N, K] of a model.

    Args:
        rows: its rows, in order.
        changes: what is done to the inputs of each of them alone.
        inputs: what is done to the inputs of all of them.
        dtype: what the model computes in.
        fallback: what happens to tokens whose inputs overflow; None where none can.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        changes: Sequence[InputRounding],
        inputs: InputRounding | None,
        dtype: torch.dtype,
        fallback: Fallback | None = None,
    ) -> None:
        super().__init__()
        self.rows = nn.ModuleList(rows)
        self.changes = nn.ModuleList(changes)
        self.inputs = inputs
        self.dtype = dtype
        self.fallback = fallback
        # beside the lists of modules, which take a while to go through
        self._rows, self._changes = tuple(rows), tuple(changes)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((sum(rows.num_rows for rows in self._rows), self._rows[0].num_columns))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., N] of inputs [..., K], in their dtype."""
        if torch.is_grad_enabled() and x.requires_grad:
            return cast(Tensor, _Product.apply(x, self))
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """The same without gradients."""
        if torch.compiler.is_compiling():
            return cast(Tensor, _untraced(self, x))
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        if self.inputs is None:
            y_MN = self._multiply(x_MK)
        else:
            y_MN = self._rounded(self.inputs, self.inputs.change(x_MK))
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], y_MN.shape[-1])

    @torch.compiler.disable
    def values(self) -> Tensor:
        """The weight that the model as it was loaded would have to have, fp32 [N, K]."""
        parts = [
            change.transform.restore(rows.values()) for rows, change in zip(self._rows, self._changes, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if self.inputs is None else self.inputs.transform.restore(whole)

    @torch.compiler.disable
    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of `values()`, in the model's dtype [*ids.shape, K]."""
        if len(self._rows) > 1:
            return self.values()[ids].to(self.dtype)
        found = self._changes[0].transform.restore(self._rows[0].lookup(ids))
        return (found if self.inputs is None else self.inputs.transform.restore(found)).to(self.dtype)

    def nbytes(self) -> int:
        """Bytes of codes and scales; what transforms and static scales take is in the buffers beside them."""
        return sum(rows.nbytes() for rows in self._rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(self.buffers()).device)).dtype
        return super()._apply(fn, recurse)

    def narrow(self, changed_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs after their change, which are rounded here."""
        assert self.inputs is not None
        if self._rows[0].takes_codes:
            codes = self.inputs.codes(changed_MK)
            return _beside([rows.multiply_codes(codes, self.dtype) for rows in self._rows])
        return self._multiply(self.inputs.round(changed_MK))

    def wide(self, changed_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs after their change, which stay numbers of the model's dtype."""
        return self._multiply(changed_MK.to(self.dtype))

    def _rounded(self, inputs: InputRounding, changed_MK: Tensor) -> Tensor:
        """Outputs of inputs that are rounded, but for tokens that overflow."""
        beyond = None if self.fallback is None else inputs.overflows(changed_MK)
        if self.fallback is None or beyond is None:
            return self.narrow(changed_MK)
        overflowed_M = beyond.any(-1)
        match self.fallback.decide(beyond, overflowed_M):
            case Action.NARROW:
                return self.narrow(changed_MK)
            case Action.WIDE:
                return self.wide(changed_MK)
            case Action.TOKENS:
                y_MN = self.narrow(changed_MK)
                places = places_of(overflowed_M)
                return y_MN.index_copy(0, places, self.wide(changed_MK[places]).to(y_MN.dtype))

    def _multiply(self, x_MK: Tensor) -> Tensor:
        """Products with inputs that are numbers, in their dtype."""
        return _beside(
            [
                rows.multiply(change.change(x_MK).to(x_MK.dtype))
                for rows, change in zip(self._rows, self._changes, strict=True)
            ]
        )


@torch.compiler.disable
def _untraced(weight: PackedWeight, x: Tensor) -> Tensor:
    return weight._product(x)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=-1)


class _Product(torch.autograd.Function):
    """The product, with the gradient of its inputs."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        context.weight = weight
        return weight.product(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient.float() @ context.weight.values()).to(gradient.dtype), None
