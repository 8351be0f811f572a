"""Codes in words that the threads of a GPU read side by side, decoded in registers: our own kernels, in Triton.

Where codes lie is `backends/triton/matmul_layout.py`, how they are decoded `matmul_numbers.py`, how products are cut
into programs `matmul_call.py` and called `matmul.py` there. It takes the bytes of the packed matrix, rows filled up to
whole words; scales and offsets stay as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.quantize.backends.triton import launch
from bitwright.quantize.backends.triton.matmul import multiply, operands_of
from bitwright.quantize.backends.triton.matmul_call import call_of, split_of, why_no_call
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.packed_rows import packed_rows
from bitwright.quantize.quantize import unpack
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, slots=True)
class TritonPacked:
    """Our own kernels, for GPUs."""

    name: str = "triton"
    description: str = "codes in words, decoded in the registers of a GPU"
    preference: int = 20

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Why a weight is not kept so: the device, no Triton, its codes or scales."""
        if device_type != "cuda":
            return f"its kernels run on GPUs of NVIDIA and AMD, not on {device_type}"
        return launch.why_not_run(dtype) or why_no_call(scheme, shape)

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """Codes in chunks; scales and offsets as they are."""
        call = call_of(packed.scheme.text, packed.shape)
        parts = {"codes": call.chunks.lay(packed.codes)}
        for name in ("scales", "offsets", "tensor_scale"):
            stored = getattr(packed, name)
            if stored is not None:
                parts[name] = stored.contiguous()
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts=parts)

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ; see `MatmulLayout`."""
        return multiply(x_MK, call_of(matrix.scheme.text, matrix.shape), matrix.parts)

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """Which kernel runs, and why."""
        if num_tokens == 0:
            return "nothing to multiply"
        call = call_of(matrix.scheme.text, matrix.shape)
        parts = split_of(call, num_tokens).num_parts
        shared = f", each sum in {parts} parts that are added in order" if parts > 1 else ""
        if num_tokens == 1:
            return f"codes of one token's product decoded and multiplied in the same registers, in fp32{shared}"
        element, x_parts, w_parts = operands_of(call.number, dtype)
        pieces = "" if x_parts == w_parts == 1 else f" ({x_parts} of each number of x, {w_parts} of each code)"
        return f"matrix units multiply {num_tokens} tokens with codes in {str(element)[6:]}{pieces}{shared}"

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K], by way of all codes; see `MatmulLayout`."""
        return unpack(packed_rows(self._packed_of(matrix), ids))

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K], by way of the packed matrix."""
        return unpack(self._packed_of(matrix))

    def _packed_of(self, matrix: PackedMatrix) -> PackedTensor:
        """Undo `prepare`."""
        others = {name: part for name, part in matrix.parts.items() if name != "codes"}
        codes = call_of(matrix.scheme.text, matrix.shape).chunks.collect(matrix.parts["codes"])
        return PackedTensor(scheme=matrix.scheme, shape=matrix.shape, codes=codes, **others)


MATMULS = (TritonPacked(),)
