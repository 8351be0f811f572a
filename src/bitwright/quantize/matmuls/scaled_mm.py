"""Codes of x times codes of the weight in the matrix units of a GPU, by `torch.nn.functional.scaled_mm`.

    y = (codes of x · codes of Wᵀ) under the scales of both, summed in fp32, rounded once

`select_matmul` never takes this layout: what it is asked about are numbers, and rounding those to codes is a choice of
the plan (W8A8, MX, NVFP4), not of a kernel. Whoever runs such a plan asks `scaled_recipes.why_not_codes`, keeps the
weight in this layout, and calls `multiply_scaled`. Tokens that stay numbers (`multiply`) go the way of "dequantise".

Rows and columns are filled up to the multiples that the kernels take, with codes of zeros. Scales of groups of 16 and
32 lie in tiles of 128 rows by 4 groups: of row r and group g of a tile at (r mod 32) · 16 + ⌊r / 32⌋ · 4 + g.

Source: NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".

Legend: M tokens, N rows and K columns of the weight, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.matmuls.dequantise import Dequantise
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.packed_rows import packed_rows
from bitwright.quantize.quantize import unpack
from bitwright.quantize.scaled_recipes import Recipe, nvidia_capability, recipe_of, why_not_codes
from bitwright.quantize.scheme import TensorScheme

__all__ = ["MATMULS", "ScaledMm", "from_tiles", "multiply_scaled", "nvidia_capability", "to_tiles", "why_not_codes"]

#: Rows and groups of a tile of scales.
_TILE_ROWS, _TILE_GROUPS = 128, 4
_NUMBERS = Dequantise()


@dataclass(frozen=True, slots=True)
class ScaledMm:
    """Codes as torch's scaled products take them."""

    name: str = "scaled_mm"
    description: str = "codes of x times codes of the weight, by torch in a GPU's matrix units"
    preference: int = 900

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Always: numbers are no codes."""
        return f"it multiplies codes with codes, and x are numbers of {str(dtype)[6:]}"

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """Codes [rows, columns] and scales, filled up, as torch takes them."""
        recipe, (rows, columns) = recipe_of(packed.scheme), packed.shape
        assert packed.scales is not None
        rows, columns = _up_to(rows, recipe.rows), _up_to(columns, recipe.columns)
        codes = _fill(packed.codes, rows, columns // recipe.codes_of_byte)
        parts = {"codes": codes.view(recipe.dtype), "scales": _weight_scales(packed.scales, recipe, rows)}
        if packed.tensor_scale is not None:
            parts["tensor_scale"] = packed.tensor_scale
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts=parts)

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ of numbers: for tokens that are not rounded to codes."""
        return _NUMBERS.multiply(x_MK, _NUMBERS.prepare(_packed_of(matrix)))

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """Of numbers, as "dequantise" does."""
        return f"x are numbers: {_NUMBERS.how(num_tokens, _NUMBERS.prepare(_packed_of(matrix)), dtype)}"

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K]; see `MatmulLayout`."""
        return unpack(packed_rows(_packed_of(matrix), ids))

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K], by way of the packed matrix."""
        return unpack(_packed_of(matrix))


MATMULS = (ScaledMm(),)


def multiply_scaled(
    x_codes: Tensor,
    x_scales: Tensor,
    matrix: PackedMatrix,
    *,
    x_tensor_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Product of codes with codes: y [M, N].

    Args:
        x_codes: in the dtype of the matrix's codes: FP8 [M, K], or FP4 [M, K / 2].
        x_scales: as stored: fp32 [M, 1] or [1, 1], fp32 [M, G], E8M0 or E4M3 [M, G].
        matrix: a weight that `ScaledMm.prepare` laid out.
        x_tensor_scale: fp32 0-d, of two levels of scales.
        dtype: of y, bf16 or fp16.
    """
    recipe, (num_rows, _) = recipe_of(matrix.scheme), matrix.shape
    weight, scales = matrix.parts["codes"], matrix.parts["scales"]
    tokens = x_codes.shape[0]
    if tokens == 0:
        return x_codes.new_empty(0, num_rows, dtype=dtype)
    x = _fill(x_codes.view(torch.uint8), tokens, weight.shape[1]).view(recipe.dtype)
    of_x, of_w = [recipe.of_inputs], [recipe.of_weights]
    scales_x, scales_w = [_input_scales(x_scales, recipe, tokens)], [scales]
    if recipe.has_tensor_scale:
        assert x_tensor_scale is not None
        of_x, of_w = [*of_x, ScalingType.TensorWise], [*of_w, ScalingType.TensorWise]
        scales_x, scales_w = [*scales_x, x_tensor_scale], [*scales_w, matrix.parts["tensor_scale"]]
    swizzle = [SwizzleType.SWIZZLE_32_4_4 if recipe.is_tiled else SwizzleType.NO_SWIZZLE]
    swizzle += [SwizzleType.NO_SWIZZLE] * (len(of_x) - 1)
    y = F.scaled_mm(x, weight.T, scales_x, of_x, scales_w, of_w, swizzle, swizzle, output_dtype=dtype)
    return y[:, :num_rows]


# --- scales as torch takes them ---------------------------------------------------------------------------------------


def _weight_scales(stored: Tensor, recipe: Recipe, rows: int) -> Tensor:
    """Stored scales [R, G] of the weight: [1, N]; [G, R] that lie row by row; or in tiles."""
    if recipe.of_weights == ScalingType.RowWise:
        is_shared = stored.shape[0] == 1
        return stored.expand(1, rows).contiguous() if is_shared else _fill(stored.T, 1, rows).contiguous()
    if recipe.is_tiled:
        return to_tiles(stored)
    num_groups = _up_to(stored.shape[1], _TILE_GROUPS)
    return _fill(stored, stored.shape[0], num_groups).contiguous().T


def _input_scales(stored: Tensor, recipe: Recipe, tokens: int) -> Tensor:
    """Stored scales of x: [M, 1]; [M, G] that lie token by token within a group; or in tiles."""
    if recipe.of_inputs == ScalingType.RowWise:
        return stored.expand(tokens, 1).contiguous()
    return to_tiles(stored) if recipe.is_tiled else stored.T.contiguous().T


def to_tiles(stored_RG: Tensor) -> Tensor:
    """Scales [R, G] of 8 bits in tiles of 128 × 4, one after the other along a row of tiles; filled up with zeros."""
    rows, groups = _up_to(stored_RG.shape[0], _TILE_ROWS), _up_to(stored_RG.shape[1], _TILE_GROUPS)
    filled = _fill(stored_RG.view(torch.uint8), rows, groups)
    tiles = filled.reshape(rows // _TILE_ROWS, 4, 32, groups // _TILE_GROUPS, _TILE_GROUPS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(stored_RG.dtype)


def from_tiles(tiled: Tensor, rows: int, groups: int) -> Tensor:
    """Undo `to_tiles`: [R, G]."""
    shape = (_up_to(rows, _TILE_ROWS) // _TILE_ROWS, _up_to(groups, _TILE_GROUPS) // _TILE_GROUPS, 32, 4, _TILE_GROUPS)
    filled = tiled.view(torch.uint8).reshape(shape).permute(0, 3, 2, 1, 4)
    whole = filled.reshape(shape[0] * _TILE_ROWS, shape[1] * _TILE_GROUPS)
    return whole[:rows, :groups].contiguous().view(tiled.dtype)


def _packed_of(matrix: PackedMatrix) -> PackedTensor:
    """Undo `prepare`."""
    recipe, (rows, columns), scaling = recipe_of(matrix.scheme), matrix.shape, matrix.scheme.scaling
    assert scaling is not None
    scale_rows, groups = scaling.granularity.scale_shape(rows, columns)
    scales = matrix.parts["scales"]
    if recipe.of_weights == ScalingType.RowWise:
        scales = scales.T[:scale_rows].contiguous()
    elif recipe.is_tiled:
        scales = from_tiles(scales, scale_rows, groups)
    else:
        scales = scales.T[:scale_rows, :groups].contiguous()
    num_bytes = -(-columns // recipe.codes_of_byte)
    return PackedTensor(
        scheme=matrix.scheme,
        shape=matrix.shape,
        codes=matrix.parts["codes"].view(torch.uint8)[:rows, :num_bytes].contiguous(),
        scales=scales,
        tensor_scale=matrix.parts.get("tensor_scale"),
    )


def _fill(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix with zeros behind its rows and columns."""
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
