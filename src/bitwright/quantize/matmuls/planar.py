"""Codes in planes over tiles of 64 rows, expanded in vector registers: products at the speed of memory on a CPU.

Where codes lie is `backends/cpu/matmul_layout.py`, what is kept beside them `matmul_parts.py`, how they are expanded
`matmul_lanes.py` and multiplied `matmul.py` there. It takes the bytes of the packed matrix, filled up to whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.quantize.backends.cpu.features import DOT_PRODUCTS, PERMUTATIONS, lacks
from bitwright.quantize.backends.cpu.matmul import BLOCK_COLUMNS
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS
from bitwright.quantize.backends.cpu.matmul_operands import NUM_PARTS
from bitwright.quantize.backends.cpu.matmul_parts import parts_of, tile_of, why_no_parts
from bitwright.quantize.backends.cpu.matmul_product import multiply
from bitwright.quantize.backends.cpu.matmul_token import TokenProduct, takes_pairs_as_they_are
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.quantize import unpack
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, slots=True)
class Planar:
    """Our own kernels, for processors with permutations of whole registers."""

    name: str = "planar"
    description: str = "codes in planes, expanded in vector registers"
    preference: int = 10

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Why a weight is not kept in planes: the device, the processor, its codes, scales or groups."""
        if device_type != "cpu":
            return f"its kernels run on a CPU, not on {device_type}"
        if missing := lacks(PERMUTATIONS):
            return f"the processor has no permutations of whole registers ({', '.join(sorted(missing))})"
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
        columns = num_tokens * NUM_PARTS[dtype]
        products = "bf16 dot products" if not lacks(DOT_PRODUCTS) else "fp32 products: the processor has none of bf16"
        parts = "" if columns == num_tokens else f" ({NUM_PARTS[dtype]} bf16 of each number of x)"
        if columns <= BLOCK_COLUMNS:
            return f"codes expanded in registers, once for all of {columns} columns{parts}; {products}"
        return (
            f"codes expanded to bf16 in the first cache, 64 rows of 128 columns at a time: {columns} columns{parts} "
            f"are more than the {BLOCK_COLUMNS} that registers hold; {products}"
        )

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K], by way of the packed matrix."""
        return unpack(parts_of(matrix.scheme.text, matrix.shape).collect(dict(matrix.parts)))

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows of `unpack`, fp32 [len(ids), K]: of the tiles that they lie in, each expanded once."""
        parts = parts_of(matrix.scheme.text, matrix.shape)
        tiles, place = torch.unique(ids // TILE_ROWS, return_inverse=True)
        whole = [tile_of(parts, matrix.parts, tile) for tile in tiles.numpy().tolist()]
        if not whole or any(tile is None for tile in whole):
            return self.unpack(matrix)[ids]
        values = torch.stack([unpack(tile) for tile in whole if tile is not None])
        return values[place, ids % TILE_ROWS]


MATMULS = (Planar(),)
