"""Codes of x times codes of the weight in the matrix units of a GPU, by `torch.nn.functional.scaled_mm`.

    y = (codes of x · codes of Wᵀ) under the scales of both, summed in fp32, rounded once

`select_matmul` never takes this layout: what it is asked about are numbers, and rounding those to codes is a choice of
the plan (W8A8, MX, NVFP4), not of a kernel. Whoever runs such a plan asks `why_not_codes`, keeps the weight in this
layout, and calls `multiply_scaled`. Tokens that stay numbers (`multiply`) take the way of "dequantise".

What torch takes are records, `RECIPES`:

    row          FP8, one scale a row of each (or one for all); from compute capability 8.9 on
    block 128    FP8, groups of 128 of x and blocks of 128 × 128 of W; on 9.x alone
    MX           FP8 in groups of 32 under powers of two; from 10.0 on
    NVFP4        FP4 in groups of 16 under E4M3 scales, and a scale a tensor; from 10.0 on

Rows and columns are filled up to the multiples that the kernels take, with codes of zeros. Scales of groups of 16 and
32 lie in tiles of 128 rows by 4 groups: of row r and group g of a tile at (r mod 32) · 16 + ⌊r / 32⌋ · 4 + g.

On a CPU torch has these products as a loop that is there to be compared with, far slower than bf16: never there.

Sources: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp (shapes, strides, capabilities); NVIDIA cuBLAS documentation,
"1D Block Scaling Factors Layout". MXFP4 is left out: torch has it in builds with a further library only.

Legend: M tokens, N rows and K columns of the weight, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize.granularity import ROW, TENSOR, Granularity, block, group
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.matmuls.dequantise import Dequantise
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.quantize import unpack
from bitwright.quantize.scheme import Scheme, TensorScheme

#: Rows and groups of a tile of scales.
_TILE_ROWS, _TILE_GROUPS = 128, 4
_BITS_OF_BYTE = 8
_NUMBERS = Dequantise()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One kind of product."""

    name: str
    format: str
    #: torch's dtype of the codes: of FP4, of two of them.
    dtype: torch.dtype
    scale_format: str
    has_tensor_scale: bool = False
    #: Who may share a scale in the weight, and in x.
    weights: tuple[Granularity, ...]
    inputs: tuple[Granularity, ...]
    #: Compute capabilities from this one on, and below the other if there is one.
    capability: tuple[int, int]
    below: tuple[int, int] | None = None
    #: What rows and columns are multiples of.
    rows: int
    columns: int
    #: As torch calls the scales of x and of the weight.
    of_inputs: ScalingType
    of_weights: ScalingType

    @property
    def is_tiled(self) -> bool:
        """Scales lie in tiles."""
        return self.of_weights in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)

    @property
    def codes_of_byte(self) -> int:
        """Codes in a byte."""
        return _BITS_OF_BYTE // formats.FORMATS[self.format].bits

    def lacks(self, scheme: TensorScheme | None, sharers: tuple[Granularity, ...]) -> str | None:
        """What a tensor under a scheme would have to be instead; None if it is taken."""
        scaling = None if scheme is None else scheme.scaling
        if (
            scheme is None
            or scaling is None
            or (scheme.format, scaling.scale_format) != (self.format, self.scale_format)
        ):
            return f"{self.format} under {self.scale_format} scales"
        if scaling.symmetry != "symmetric" or scaling.element_exponent:
            return "codes times scales and nothing else"
        if scaling.tensor_scale != self.has_tensor_scale:
            return f"{'two levels' if self.has_tensor_scale else 'one level'} of scales"
        return None if scaling.granularity in sharers else f"scales per {' or '.join(map(str, sharers))}"


RECIPES = (
    Recipe(
        name="row",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        scale_format="fp32",
        weights=(ROW, TENSOR),
        inputs=(ROW, TENSOR),
        capability=(8, 9),
        rows=16,
        columns=16,
        of_inputs=ScalingType.RowWise,
        of_weights=ScalingType.RowWise,
    ),
    Recipe(
        name="block 128",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        scale_format="fp32",
        weights=(block(128, 128),),
        inputs=(group(128),),
        capability=(9, 0),
        below=(10, 0),
        rows=128,
        columns=128,
        of_inputs=ScalingType.BlockWise1x128,
        of_weights=ScalingType.BlockWise128x128,
    ),
    Recipe(
        name="MX",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        scale_format="e8m0",
        weights=(group(32),),
        inputs=(group(32),),
        capability=(10, 0),
        rows=32,
        columns=32,
        of_inputs=ScalingType.BlockWise1x32,
        of_weights=ScalingType.BlockWise1x32,
    ),
    Recipe(
        name="NVFP4",
        format="fp4_e2m1",
        dtype=torch.float4_e2m1fn_x2,
        scale_format="fp8_e4m3",
        has_tensor_scale=True,
        weights=(group(16),),
        inputs=(group(16),),
        capability=(10, 0),
        rows=32,
        columns=32,
        of_inputs=ScalingType.BlockWise1x16,
        of_weights=ScalingType.BlockWise1x16,
    ),
)


def nvidia_capability(device_type: str) -> tuple[int, int] | None:
    """Compute capability of the first GPU of NVIDIA; None where that is no such GPU."""
    if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def why_not_codes(scheme: Scheme, device_type: str, capability: tuple[int, int] | None) -> str | None:
    """Return why torch does not multiply codes with codes under a scheme, or None if it does.

    Args:
        scheme: of weight and x.
        device_type: where.
        capability: of the GPU there (`nvidia_capability`).
    """
    if device_type == "cpu":
        return "torch has scaled products on a CPU as a loop to compare with, far slower than bf16"
    if capability is None:
        return f"scaled products are known of GPUs of NVIDIA, and {device_type} here is none"
    wanted: list[str] = []
    for recipe in RECIPES:
        lacking = recipe.lacks(scheme.weights, recipe.weights)
        if lacking is not None:
            wanted.append(lacking)
            continue
        lacking = recipe.lacks(scheme.activations, recipe.inputs)
        if lacking is not None:
            return f"scaled products per {recipe.name} take inputs as {lacking}, not {scheme.activations or 'numbers'}"
        return _why_no_capability(recipe, capability)
    return f"scaled products take weights as {', or '.join(dict.fromkeys(wanted))}, not {scheme.weights or 'numbers'}"


def _why_no_capability(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    if recipe.capability <= capability and (recipe.below is None or capability < recipe.below):
        return None
    last = "" if recipe.below is None else f" and below {_spell(recipe.below)}"
    needed = f"{_spell(recipe.capability)}{last}"
    return f"scaled products per {recipe.name} need compute capability {needed}, and here it is {_spell(capability)}"


def _spell(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def recipe_of(weights: TensorScheme) -> Recipe:
    """The kind of product that takes weights under a scheme.

    Raises:
        SchemeError: none does.
    """
    for recipe in RECIPES:
        if recipe.lacks(weights, recipe.weights) is None:
            return recipe
    raise SchemeError(f"torch has no scaled product for weights as {weights}; choose another layout")


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
