"""A transform as fitted to one matrix: an invertible change of its inputs that the weights take back.

    y = W x = (W A⁻¹)(A x) = W' x'        exactly, in real numbers

A is the product of two simple things, either of which may be missing: a division of every column by its own factor s,
and a rotation by a Hadamard matrix H after random changes of sign d. H is symmetric and orthogonal, so

    x' = H (d · x / s)        W' = H (d · s · W), row by row        W = d · H W' / s

H is the Sylvester matrix of the largest power of two that divides the columns, repeated along the diagonal (576 columns
are 9 blocks of 64), and is applied as Kronecker factors of at most 64: K · Σ factors products a row instead of K².

Rejected: Hadamard matrices of other orders (12, 20, 28 …, with which most widths need no blocks) as tables to carry
around for little; rotations found by training (SpinQuant), which are dense.

Legend: N rows, K columns (inputs).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import SchemeError

#: Widest Kronecker factor of a rotation: a product with it stays in the cache.
_FACTOR = 64
#: Names under which a plan stores the two parts.
_COLUMN_SCALES, _SIGNS = "column_scales", "signs"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """Column factors and signs of one matrix; without either, the matrix as it is.

    Raises:
        SchemeError: factors that are not positive and finite, or signs that are not ±1.
    """

    #: fp32 [K], positive: the weight's columns are multiplied by it, the inputs divided.
    column_scales_K: Tensor | None = None
    #: ±1, fp32 [K]: signs that are changed before rotating; None: no rotation.
    signs_K: Tensor | None = None

    def __post_init__(self) -> None:
        scales, signs = self.column_scales_K, self.signs_K
        if scales is not None and not bool((torch.isfinite(scales) & (scales > 0)).all()):
            raise SchemeError("column scales have to be positive and finite; fit the transform to finite inputs")
        if signs is not None and not bool((signs.abs() == 1).all()):
            raise SchemeError("signs of a rotation have to be 1 or -1; make the plan again")

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed."""
        scales = self.column_scales_K
        return self.signs_K is None and (scales is None or bool((scales == 1).all()))

    def weight(self, weight_NK: Tensor) -> Tensor:
        """W' of the weight [N, K]: what is quantised."""
        if self.column_scales_K is not None:
            weight_NK = weight_NK * self.column_scales_K.to(weight_NK)
        return self._rotated(weight_NK)

    def input(self, x: Tensor) -> Tensor:
        """x' of inputs [..., K], in their dtype."""
        if self.column_scales_K is not None:
            x = x / self.column_scales_K.to(x)
        return self._rotated(x)

    def restore(self, changed: Tensor) -> Tensor:
        """W of a W' [..., K]: the weight in the original space, with restore(W') x = W' x'."""
        if self.signs_K is not None:
            changed = rotate(changed) * self.signs_K.to(changed)
        return changed if self.column_scales_K is None else changed / self.column_scales_K.to(changed)

    def agrees_with(self, other: Fitted) -> bool:
        """Whether both are the same change of the inputs, so that one pass over them serves both."""
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(np.array_equal(mine[part], theirs[part]) for part in mine)

    def tensors(self) -> dict[str, np.ndarray]:
        """What a plan stores: "column_scales" fp32 [K] and "signs" int8 [K], each where there is one."""
        kept: dict[str, np.ndarray] = {}
        if self.column_scales_K is not None:
            kept[_COLUMN_SCALES] = self.column_scales_K.cpu().numpy().astype(np.float32)
        if self.signs_K is not None:
            kept[_SIGNS] = self.signs_K.cpu().numpy().astype(np.int8)
        return kept

    @staticmethod
    def from_tensors(stored: Mapping[str, np.ndarray]) -> Fitted:
        """Undo `tensors`; other entries of the mapping are not looked at."""

        def read(part: str) -> Tensor | None:
            found = stored.get(part)
            return None if found is None else torch.from_numpy(found.astype(np.float32))

        return Fitted(column_scales_K=read(_COLUMN_SCALES), signs_K=read(_SIGNS))

    def _rotated(self, values: Tensor) -> Tensor:
        return values if self.signs_K is None else rotate(values * self.signs_K.to(values))


#: The change that changes nothing.
UNCHANGED = Fitted()


def rotation_width(columns: int) -> int:
    """Width of the blocks that `columns` are rotated in: the largest power of two that divides them."""
    return columns & -columns


def rotate(values: Tensor) -> Tensor:
    """Multiply the last dimension by the block-diagonal Hadamard matrix, its own inverse; floating dtype is kept."""
    columns = values.shape[-1]
    remaining = rotation_width(columns)
    inner = 1
    rotated = values
    while remaining > 1:
        factor = min(_FACTOR, remaining)
        hadamard = _hadamard(factor).to(values)
        # one matrix product where the factor is the last dimension, else one for each of the numbers before it
        rotated = (
            rotated.reshape(-1, factor) @ hadamard if inner == 1 else hadamard @ rotated.reshape(-1, factor, inner)
        )
        inner, remaining = inner * factor, remaining // factor
    return rotated.reshape(values.shape)


@functools.cache
def _hadamard(width: int) -> Tensor:
    """Sylvester's Hadamard matrix divided by √width: symmetric, orthogonal, fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / width**0.5
