"""Products of codes in a GPU's matrix units, by `torch.nn.functional.scaled_mm`.

What torch multiplies is a pair of *layouts*: how the scales of each operand lie, in which formats codes come, on which
compute capabilities. A recipe is native where all three of its products are such pairs; else all of them are emulated,
since codes that some products share are written once.

    tensor        one fp32 scale; E4M3 by E4M3 or E5M2                        8.9 and later
    1 × 128       E4M3, fp32 scales, along what is summed over                9.0 alone
    128 × 128     E4M3, fp32 scales; the other operand is 1 × 128             9.0 alone
    1 × 32        E4M3, E8M0 scales in tiles                                  10.0 and later
    1 × 16        E2M1, E4M3 scales in tiles, and a tensor scale; blocks of 16 × 16 as 16 equal rows    10.0 and later

Matrix units want both operands with what is summed over contiguous, so that what is transposed is copied; rows and
columns are filled up with zeros to the multiples that kernels take.

Sources: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp (shapes, strides, types, capabilities); NVIDIA cuBLAS
documentation, "1D Block Scaling Factors Layout".

Legend: R rows of an operand, S what is summed over, G groups along S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from bitwright import formats
from bitwright.quantize.granularity import TENSOR, Granularity, block, group
from bitwright.quantize.matmuls.scaled_mm import to_tiles
from bitwright.quantize.operand import Operand
from bitwright.quantize.pack import PackedTensor, pack_bits, stored_dtype, unpack_bits
from bitwright.quantize.quantize import pack
from bitwright.quantize.scheme import TensorScheme
from bitwright.training.product_recipe import OperandRule, ProductRecipe

_ALIGNED_GROUPS, _BITS_OF_BYTE = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How torch takes one operand."""

    scaling: ScalingType
    #: Layouts that the other operand may have.
    others: frozenset[ScalingType]
    formats: tuple[str, ...]
    #: Those of them that only one of two operands may be in.
    once: tuple[str, ...] = ()
    granularities: tuple[Granularity, ...]
    scale_format: str
    has_tensor_scale: bool = False
    #: Compute capabilities from this one on, and below the other if there is one.
    capability: tuple[int, int]
    below: tuple[int, int] | None = None
    #: What rows and columns are filled up to multiples of.
    rows: int
    columns: int

    @property
    def is_tiled(self) -> bool:
        """Scales lie in tiles of 128 × 4."""
        return self.scaling in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)

    def takes(self, scheme: TensorScheme) -> bool:
        """Whether codes under a scheme lie so."""
        scaling = scheme.scaling
        assert scaling is not None
        return (
            scheme.format in self.formats
            and scaling.granularity in self.granularities
            and scaling.scale_format == self.scale_format
            and scaling.tensor_scale == self.has_tensor_scale
            and not scaling.element_exponent
        )


_ROWS, _BLOCKS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
LAYOUTS = (
    Layout(
        scaling=ScalingType.TensorWise,
        others=frozenset({ScalingType.TensorWise}),
        formats=("fp8_e4m3", "fp8_e5m2"),
        once=("fp8_e5m2",),
        granularities=(TENSOR,),
        scale_format="fp32",
        capability=(8, 9),
        rows=16,
        columns=16,
    ),
    Layout(
        scaling=_ROWS,
        others=frozenset({_ROWS, _BLOCKS}),
        formats=("fp8_e4m3",),
        granularities=(group(128),),
        scale_format="fp32",
        capability=(9, 0),
        below=(10, 0),
        rows=128,
        columns=128,
    ),
    Layout(
        scaling=_BLOCKS,
        others=frozenset({_ROWS}),
        formats=("fp8_e4m3",),
        granularities=(block(128, 128),),
        scale_format="fp32",
        capability=(9, 0),
        below=(10, 0),
        rows=128,
        columns=128,
    ),
    Layout(
        scaling=ScalingType.BlockWise1x32,
        others=frozenset({ScalingType.BlockWise1x32}),
        formats=("fp8_e4m3",),
        granularities=(group(32),),
        scale_format="e8m0",
        capability=(10, 0),
        rows=32,
        columns=32,
    ),
    Layout(
        scaling=ScalingType.BlockWise1x16,
        others=frozenset({ScalingType.BlockWise1x16}),
        formats=("fp4_e2m1",),
        granularities=(group(16), block(16, 16)),
        scale_format="fp8_e4m3",
        has_tensor_scale=True,
        capability=(10, 0),
        rows=32,
        columns=32,
    ),
)


def layout_of(scheme: TensorScheme) -> Layout | None:
    """The layout of codes under a scheme; None if torch has none."""
    return next((layout for layout in LAYOUTS if layout.takes(scheme)), None)


def why_not_native(recipe: ProductRecipe, device_type: str, capability: tuple[int, int] | None) -> str | None:
    """Return why torch does not multiply a recipe's codes, or None if it does.

    Args:
        recipe: all three products are asked about.
        device_type: where.
        capability: of the GPU there (`scaled_recipes.nvidia_capability`).
    """
    if device_type == "cpu":
        return "torch has scaled products on a CPU as a loop to compare with, far slower than bf16"
    if capability is None:
        return f"scaled products are known of GPUs of NVIDIA, and {device_type} here is none"
    for rule in recipe.operands.values():
        layout = layout_of(rule.scheme)
        if layout is None:
            return f"torch has no scaled products of {rule.scheme}"
        if not layout.capability <= capability or (layout.below is not None and capability >= layout.below):
            here = _dotted(capability)
            return f"products of {rule.scheme} need compute capability {_spell(layout)}, and here it is {here}"
    for name, pair in recipe.products.items():
        if not _are_multiplied(*(rule.scheme for rule in pair)):
            return f"torch has no {name} product of {pair[0].scheme} with {pair[1].scheme}"
    return None


def _are_multiplied(first: TensorScheme, second: TensorScheme) -> bool:
    """Whether torch multiplies operands of two schemes that have layouts."""
    layouts = layout_of(first), layout_of(second)
    assert layouts[0] is not None and layouts[1] is not None
    is_twice = first.format == second.format and first.format in layouts[0].once
    return layouts[1].scaling in layouts[0].others and not is_twice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NativeOperand:
    """One side of a product as `scaled_mm` takes it."""

    scheme: TensorScheme
    #: [R, S] of the matrix itself.
    rows: int
    columns: int
    #: fp8 [R', S'], or two fp4 a byte [R', S' / 2].
    codes: Tensor
    #: As stored: [R, G], or fp32 0-d.
    scales: Tensor
    #: fp32 0-d.
    tensor_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NativeProducts:
    """Rounds operands to bytes, and multiplies those."""

    name: str = "native"

    def operand(self, x_RS: Tensor, rule: OperandRule, seed: int | None) -> NativeOperand:
        """Codes of a matrix whose scales are found on it."""
        packed = pack(x_RS, rule.scheme, rounding=rule.rounding, seed=seed)
        return _native(packed)

    def scaled(self, found: Operand, rule: OperandRule) -> NativeOperand:
        """Codes under a scale that was known, as bytes."""
        dtype = stored_dtype(formats.FORMATS[rule.scheme.format])
        assert dtype is not None
        codes = found.numbers.to(dtype).view(torch.uint8)
        return _filled(rule.scheme, codes, found.scale, None, (codes.shape[0], codes.shape[1]))

    def transposed(self, operand: NativeOperand) -> NativeOperand:
        """The same codes from the other side, copied."""
        bits = formats.FORMATS[operand.scheme.format].bits
        stored = operand.codes.view(torch.uint8)[: operand.rows, : -(-operand.columns * bits // _BITS_OF_BYTE)]
        codes = unpack_bits(stored, bits, operand.columns)
        codes = pack_bits(codes.t(), bits)
        scales = operand.scales if operand.scales.dim() == 0 else operand.scales.t().contiguous()
        return _filled(operand.scheme, codes, scales, operand.tensor_scale, (operand.columns, operand.rows))

    def multiply(self, a: NativeOperand, b: NativeOperand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a · bᵀ, [R of a, R of b] in `dtype`; see `EmulatedProducts.multiply`."""
        if 0 in (a.rows, b.rows, a.columns):
            y = torch.zeros(a.rows, b.rows, dtype=dtype, device=a.codes.device)
            return y if bias is None else y + bias.to(dtype)
        first, second = layout_of(a.scheme), layout_of(b.scheme)
        assert first is not None and second is not None
        fused = None if bias is None else F.pad(bias.to(dtype), (0, b.codes.shape[0] - b.rows))
        y = F.scaled_mm(
            a.codes,
            b.codes.t(),
            *_scales(a, first),
            *_scales(b, second),
            _swizzles(first),
            _swizzles(second),
            bias=fused if dtype != torch.float32 else None,
            output_dtype=dtype,
        )
        y = y[: a.rows, : b.rows]
        return y + bias.to(dtype) if bias is not None and dtype == torch.float32 else y


def _native(packed: PackedTensor) -> NativeOperand:
    assert packed.scales is not None and packed.scheme.scaling is not None
    is_tensor = packed.scheme.scaling.granularity.scope == "tensor"
    scales = packed.scales[0, 0] if is_tensor else packed.scales
    return _filled(packed.scheme, packed.codes, scales, packed.tensor_scale, packed.shape)


def _filled(
    scheme: TensorScheme, codes: Tensor, scales: Tensor, tensor_scale: Tensor | None, shape: tuple[int, int]
) -> NativeOperand:
    """Bytes [R, S · bits / 8] filled up with zeros, in torch's dtype of their format."""
    layout, number = layout_of(scheme), formats.FORMATS[scheme.format]
    assert layout is not None
    rows, columns = (-(-size // unit) * unit for size, unit in zip(shape, (layout.rows, layout.columns), strict=True))
    filled = codes.new_zeros(rows, columns * number.bits // _BITS_OF_BYTE)
    filled[: codes.shape[0], : codes.shape[1]] = codes
    dtype = stored_dtype(number) if number.bits == _BITS_OF_BYTE else torch.float4_e2m1fn_x2
    assert dtype is not None
    return NativeOperand(
        scheme=scheme,
        rows=shape[0],
        columns=shape[1],
        codes=filled.view(dtype),
        scales=scales,
        tensor_scale=tensor_scale,
    )


def _scales(operand: NativeOperand, layout: Layout) -> tuple[list[Tensor], list[ScalingType]]:
    """Scales of an operand and what torch calls them."""
    scales, granularity = operand.scales, layout.granularities[0]
    if granularity.scope == "tensor":
        return [scales.reshape(1)], [layout.scaling]
    rows = operand.codes.shape[0]
    if layout.is_tiled:
        per_row = scales
        if operand.scheme.scaling is not None and operand.scheme.scaling.granularity.block_rows:
            size = operand.scheme.scaling.granularity.group_rows(operand.rows)
            per_row = scales.view(torch.uint8).repeat_interleave(size, 0)[: operand.rows].view(scales.dtype)
        tiled = to_tiles(_grown(per_row, rows, operand, layout))
        if operand.tensor_scale is None:
            return [tiled], [layout.scaling]
        return [tiled, operand.tensor_scale.reshape(1)], [layout.scaling, ScalingType.TensorWise]
    if granularity.block_rows:
        num_groups = -(-scales.shape[1] // _ALIGNED_GROUPS) * _ALIGNED_GROUPS
        return [F.pad(scales, (0, num_groups - scales.shape[1])).contiguous().t()], [layout.scaling]
    return [_grown(scales, rows, operand, layout).t().contiguous().t()], [layout.scaling]


def _grown(scales: Tensor, rows: int, operand: NativeOperand, layout: Layout) -> Tensor:
    """Scales [R, G] with a row for each that was filled up, and a group for every one of S'."""
    columns = operand.codes.shape[1] * _BITS_OF_BYTE // formats.FORMATS[operand.scheme.format].bits
    num_groups = -(-columns // layout.granularities[0].group_size)
    missing = (num_groups - scales.shape[1]) * scales.element_size(), rows - scales.shape[0]
    grown = F.pad(scales.contiguous().view(torch.uint8), (0, missing[0], 0, missing[1]))
    return grown.view(scales.dtype)


def _swizzles(layout: Layout) -> list[SwizzleType]:
    first = SwizzleType.SWIZZLE_32_4_4 if layout.is_tiled else SwizzleType.NO_SWIZZLE
    return [first, SwizzleType.NO_SWIZZLE] if layout.has_tensor_scale else [first]


def _spell(layout: Layout) -> str:
    low = _dotted(layout.capability)
    return low if layout.below is None else f"{low} and below {_dotted(layout.below)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
