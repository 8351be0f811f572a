"""Weights that torch multiplies as they are stored: floats, without scales, of a dtype that holds every number of x.

x is widened to that dtype where it is another one, exactly, and y rounded to that of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright import formats
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import PackedTensor, stored_dtype
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, slots=True)
class AsStored:
    """torch's own linear layer."""

    name: str = "as_stored"
    description: str = "torch's linear layer, on weights of the dtype of x"
    preference: int = 0

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Codes under scales, and weights of a dtype that does not hold x."""
        if scheme.scaling is not None:
            return "torch's linear layer takes values, not codes and scales"
        stored = stored_dtype(formats.FORMATS[scheme.format])
        if stored in (dtype, torch.float32):  # which holds whatever x may be
            return None
        return f"weights in {scheme.format} are not multiplied with {dtype} as they are"

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """The values as a tensor of their dtype."""
        dtype = stored_dtype(formats.FORMATS[packed.scheme.format])
        assert dtype is not None
        values = packed.codes.contiguous().view(dtype)
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts={"weight": values})

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ; see `MatmulLayout`."""
        weight = matrix.parts["weight"]
        return torch.nn.functional.linear(x_MK.to(weight.dtype), weight).to(x_MK.dtype)

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """The same for any number of tokens."""
        return f"torch's linear layer in {matrix.scheme.format}"

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K]; see `MatmulLayout`."""
        return matrix.parts["weight"][ids].float()

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K]."""
        return matrix.parts["weight"].float()


MATMULS = (AsStored(),)
