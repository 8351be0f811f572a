"""How codes of a weight lie in memory and are multiplied there, one file a layout; each module defines MATMULS.

y = x Wᵀ with a weight that stays packed. What every layout keeps to:

    codes      exact
    products   accumulate in fp32, or more precisely
    scales     their stored values multiply the fp32 sum of a group, or its codes; they are not rounded again
    y          rounded once, to the dtype of x

A packed product is therefore the product with the dequantised weight up to the order of an fp32 sum.

One member is a layout's own choice, for what is called once a token: `prepared(matrix)`, a function of x [..., K]
alone, with what follows from the weight settled.

Legend: M columns of x as kernels see it (tokens), N rows and K columns of the weight, R × G scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedMatrix:
    """A weight as a layout keeps it: its facts, and tensors that can be saved, loaded and moved like any other."""

    #: Name in `MATMULS`.
    layout: str
    scheme: TensorScheme
    #: [N, K] of the weight.
    shape: tuple[int, int]
    #: Whatever the layout needs, by name.
    parts: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


@runtime_checkable
class MatmulLayout(Protocol):
    """What every layout is: codes at their places, and the kernels that read them there."""

    @property
    def name(self) -> str:
        """As reports write it."""

    @property
    def description(self) -> str:
        """One line for tables."""

    @property
    def preference(self) -> int:
        """Its place among all layouts: the first one that has no reason against it is taken, low numbers first."""

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Why it does not hold a weight of that scheme and shape, for inputs of that dtype there; None if it does."""

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """The weight in this layout, on the device of its codes; `why_not` has said None."""

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ, [M, N] in the dtype of x (fp32, bf16 or fp16), for any M ≥ 0."""

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """What `multiply` does for so many tokens, and why."""

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Rows of what `unpack` gives, fp32 [n, K], by their numbers, int64 [n]: what an embedding reads."""

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """The weight, fp32 [N, K]: what `PackedTensor.unpack` gives, bit for bit."""
