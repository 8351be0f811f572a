"""Consecutive rows of a matrix: tensors that can be saved, moved and copied, and what multiplies with them.

A module (`Rows`) holds the tensors, its parts, and a *product* says what they are: how inputs are multiplied with them,
and which values they stand for. Products are facts alone, so that copies of a model share them.

    PackedProduct    codes in a layout of `quantize/packed_matmul.py`, expanded inside the kernel
    PlainProduct     numbers of the model's dtype: rows that no choice touches, beside others that one does
    CodeProduct      its own kind: the device multiplies codes with codes (`native_rows.py`)

A step of decoding multiplies with hundreds of matrices, one token each, so that what can be known before there is an
input is found once: `product.prepared(parts)` gives a function of x alone. It is made anew when the parts are others.

Legend: M tokens, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.errors import SchemeError
from bitwright.inference.packed.input_rounding import keeping_dtypes
from bitwright.quantize.catalogs import MATMULS
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.packed_matmul import PackedMatrix, prepare_matmul
from bitwright.quantize.scheme import TensorScheme

#: Outputs [..., N] of inputs [..., K] that are numbers, in their dtype.
Multiply = Callable[[Tensor], Tensor]
Parts = Mapping[str, Tensor]


class RowProduct(Protocol):
    """What rows are, and how they are multiplied."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""

    def prepared(self, parts: Parts) -> Multiply:
        """What multiplies with these tensors."""

    def traced(self, parts: Parts, x: Tensor) -> Tensor:
        """The same for one x, in operators that a compiler knows."""

    def values(self, parts: Parts) -> Tensor:
        """What inputs are multiplied with, fp32 [N, K]."""

    def lookup(self, parts: Parts, ids: Tensor) -> Tensor:
        """Some rows of the values, fp32 [*ids.shape, K]."""


@runtime_checkable
class CodeProduct(RowProduct, Protocol):
    """Rows that are multiplied with codes of inputs too."""

    def multiply_codes(self, parts: Parts, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs [M, N] of inputs as codes under scales; `dtype` is what the model computes in."""


class Rows(nn.Module):
    """Rows of a matrix.

    Args:
        parts: their tensors, which become buffers.
        product: what these are.
    """

    def __init__(self, parts: Parts, product: RowProduct) -> None:
        super().__init__()
        self.product = product
        self.num_rows, self.num_columns = product.shape
        self._code_product = product if isinstance(product, CodeProduct) else None
        for name, part in parts.items():
            self.register_buffer(name, part)
        #: What multiplies, and the tensors that it was prepared for.
        self._prepared: Multiply | None = None
        self._prepared_for: tuple[Tensor | None, ...] = ()

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        return {name: part for name, part in self._buffers.items() if part is not None}

    @property
    def takes_codes(self) -> bool:
        """Whether inputs are multiplied as codes."""
        return self._code_product is not None

    def multiply(self, x: Tensor) -> Tensor:
        """Outputs [..., N] of inputs that are numbers, in their dtype."""
        prepared, parts = self._prepared, self._buffers.values()
        if prepared is None or not all(map(operator.is_, parts, self._prepared_for)):
            prepared = self._prepared = self.product.prepared(self.parts)
            self._prepared_for = tuple(parts)
        return prepared(x)

    def traced(self, x: Tensor) -> Tensor:
        """The same, in operators that a compiler knows."""
        return self.product.traced(self.parts, x)

    def multiply_codes(self, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs [M, N] of inputs as codes under scales; `dtype` is what the model computes in."""
        assert self._code_product is not None, "inputs of these rows are numbers"
        return self._code_product.multiply_codes(self.parts, x, dtype)

    def values(self) -> Tensor:
        """What inputs are multiplied with, fp32 [N, K]."""
        return self.product.values(self.parts)

    def lookup(self, ids: Tensor) -> Tensor:
        """Some of them, fp32 [*ids.shape, K]."""
        return self.product.lookup(self.parts, ids)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.numel() * part.element_size() for part in self.buffers())

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.num_rows} x {self.num_columns}, {self.product}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._prepared = None  # the same tensors may lie elsewhere afterwards
        return super()._apply(keeping_dtypes(fn), recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None, "_prepared_for": ()}  # a copy has tensors of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedProduct:
    """Codes in a packed layout."""

    #: Name in `MATMULS`.
    layout: str
    scheme: TensorScheme
    shape: tuple[int, int]
    #: Of the inputs that the layout was selected for, and where its kernels run.
    dtype: torch.dtype
    device_type: str
    #: The scheme as operators have it.
    scheme_text: str

    def prepared(self, parts: Parts) -> Multiply:
        """By the layout's kernel; refuses inputs on another device."""
        matrix = self._matrix(parts)
        by_dtype: dict[torch.dtype, Multiply] = {}
        device_type = self.device_type

        def multiply(x_MK: Tensor) -> Tensor:
            known = by_dtype.get(x_MK.dtype)
            if known is None or x_MK.device.type != device_type:
                self._raise_if_elsewhere(x_MK)
                known = by_dtype[x_MK.dtype] = self._in_dtype(matrix, x_MK.dtype)
            return known(x_MK)

        return multiply

    def traced(self, parts: Parts, x: Tensor) -> Tensor:
        """The operator of packed products, in the dtype that the layout was selected for."""
        facts = (" ".join(parts), self.layout, self.scheme_text, *self.shape)
        y: Tensor = torch.ops.bitwright.packed_matmul(x.to(self.dtype), list(parts.values()), *facts)
        return y.to(x.dtype)

    def values(self, parts: Parts) -> Tensor:
        """fp32 [N, K], exact."""
        return MATMULS[self.layout].unpack(self._matrix(parts))

    def lookup(self, parts: Parts, ids: Tensor) -> Tensor:
        """Some rows, fp32 [*ids.shape, K]."""
        return rows_of_layout(self._matrix(parts), ids)

    def __str__(self) -> str:
        return f"{self.scheme}, layout {self.layout}"

    def _matrix(self, parts: Parts) -> PackedMatrix:
        return PackedMatrix(layout=self.layout, scheme=self.scheme, shape=self.shape, parts=dict(parts))

    def _in_dtype(self, matrix: PackedMatrix, dtype: torch.dtype) -> Multiply:
        """Inputs of another dtype than the layout was selected for as they are only where it has a kernel for that."""
        takes = MATMULS[self.layout].why_not(self.scheme, self.shape, self.device_type, dtype) is None
        product = prepare_matmul(matrix)
        if takes:
            return product
        return lambda x_MK: product(x_MK.to(self.dtype)).to(dtype)

    def _raise_if_elsewhere(self, x_MK: Tensor) -> None:
        if x_MK.device.type != self.device_type:
            raise SchemeError(
                f"a weight was packed for {self.device_type} and meets inputs on {x_MK.device.type}, where its layout "
                f"'{self.layout}' may have no kernel; apply the plan to a model that is on {x_MK.device.type} already"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainProduct:
    """Numbers of the model's dtype: one part, "weight"."""

    shape: tuple[int, int]

    def prepared(self, parts: Parts) -> Multiply:
        """By torch's linear layer."""
        return lambda x: self.traced(parts, x)

    def traced(self, parts: Parts, x: Tensor) -> Tensor:
        """The same."""
        return F.linear(x, parts["weight"].to(x.dtype))

    def values(self, parts: Parts) -> Tensor:
        """fp32 [N, K]."""
        return parts["weight"].float()

    def lookup(self, parts: Parts, ids: Tensor) -> Tensor:
        """Some rows, fp32 [*ids.shape, K]."""
        return parts["weight"][ids].float()

    def __str__(self) -> str:
        return "as loaded"


def rows_of_layout(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Some rows of a packed matrix, fp32 [*ids.shape, K]: its layout reads those alone."""
    return MATMULS[matrix.layout].rows(matrix, ids.flatten()).unflatten(0, ids.shape)


def packed_rows(matrix: PackedMatrix, dtype: torch.dtype, device_type: str) -> Rows:
    """Rows in a packed layout.

    Args:
        matrix: their codes and scales.
        dtype: of the inputs that the layout was selected for.
        device_type: where its kernels run.
    """
    product = PackedProduct(
        layout=matrix.layout,
        scheme=matrix.scheme,
        shape=matrix.shape,
        dtype=dtype,
        device_type=device_type,
        scheme_text=matrix.scheme.text,
    )
    return Rows(matrix.parts, product)


def plain_rows(weight_NK: Tensor) -> Rows:
    """Rows that stay numbers of the model's dtype."""
    rows, columns = weight_NK.shape
    return Rows({"weight": weight_NK}, PlainProduct(shape=(rows, columns)))
