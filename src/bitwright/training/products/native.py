"""Products of codes in a GPU's matrix units, by `torch.nn.functional.scaled_mm`.

Operands lie as `native_layouts.py` says. Matrix units want both with what is summed over contiguous, so that what is
transposed is copied; rows and columns are filled up with zeros to the multiples that kernels take.

Sources: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp; NVIDIA cuBLAS documentation, "1D Block Scaling Factors
Layout".

Legend: R rows of an operand, S what is summed over, G groups along S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from bitwright import formats
from bitwright.quantize.matmuls.scaled_mm import to_tiles
from bitwright.quantize.operand import Operand
from bitwright.quantize.pack import PackedTensor, pack_bits, stored_dtype, unpack_bits
from bitwright.quantize.quantize import pack
from bitwright.quantize.scheme import TensorScheme
from bitwright.training.product_recipe import OperandRule
from bitwright.training.products.native_layouts import Layout, layout_of

_ALIGNED_GROUPS, _BITS_OF_BYTE = 4, 8


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
