"""Codes in planes over tiles of 64 rows, expanded in vector registers: products at the speed of memory on a CPU.

Where codes lie is `backends/cpu/matmul_layout.py`, what is kept beside them `matmul_parts.py`; how codes become numbers
is `matmul_numbers.py` and `matmul_expand.py`, which way a product goes `matmul_ways.py`, and the kernel `matmul.py`
there. It takes the bytes of the packed matrix, filled up to whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.quantize.backends.cpu.features import processor_features
from bitwright.quantize.backends.cpu.matmul_parts import parts_of, why_no_parts
from bitwright.quantize.backends.cpu.matmul_product import multiply, way_of_parts
from bitwright.quantize.backends.cpu.matmul_token import TokenProduct, takes_pairs_as_they_are
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.quantize import unpack
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, slots=True)
class Planar:
    """Our own kernels, for processors of any kind."""

    name: str = "planar"
    description: str = "codes in planes, expanded in vector registers"
    preference: int = 10

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Why a weight is not kept in planes: the device, its codes, scales or groups."""
        if device_type != "cpu":
            return f"its kernels run on a CPU, not on {device_type}"
        return why_no_parts(scheme, shape)

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """Codes, scales and offsets in tiles."""
        parts = parts_of(packed.scheme.text, packed.shape).lay(packed)
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts=parts)

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ; see `MatmulLayout`."""
        return multiply(x_MK, parts_of(matrix.scheme.text, matrix.shape), matrix.parts)

    def prepared(self, matrix: PackedMatrix) -> Callable[[Tensor], Tensor]:
        """x [..., K] ↦ x Wᵀ; one token in bf16 goes to its kernel by the shortest way."""
        parts = parts_of(matrix.scheme.text, matrix.shape)
        rows, columns = matrix.shape
        one_token = TokenProduct(parts, matrix.parts) if takes_pairs_as_they_are(parts) else None

        def product(x: Tensor) -> Tensor:
            if one_token is not None and x.numel() == columns and x.dtype == torch.bfloat16 and x.is_contiguous():
                return one_token(x)
            return multiply(x.reshape(-1, columns), parts, matrix.parts).reshape(*x.shape[:-1], rows)

        return product

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """Which kernel runs, and why."""
        parts = parts_of(matrix.scheme.text, matrix.shape)
        return way_of_parts(parts, dtype, processor_features()).spelled(num_tokens)

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K]; see `MatmulLayout`."""
        if len(ids) == 0:
            return torch.empty(0, matrix.shape[1])
        return unpack(parts_of(matrix.scheme.text, matrix.shape).rows(dict(matrix.parts), ids))

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K], by way of the packed matrix."""
        return unpack(parts_of(matrix.scheme.text, matrix.shape).collect(dict(matrix.parts)))


MATMULS = (Planar(),)
