"""Float codes of a checkpoint: fp8 numbers as torch has them, and fp4 numbers two a byte.

    float8_matrix    weight [N, K] in float8, with one scale, one a row, or one a block
    float4_matrix    bytes [N, K / 2], the even column below, with a scale for every group [N, G] and perhaps one more

Which numbers share a scale follows from the shape of the scales; blocks also need their size, since the last ones may
be cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import ModelError
from bitwright.export.stored_matrix import SCALE_FORMATS, raise_unless_shape, tensor_scheme
from bitwright.quantize import QTensor
from bitwright.quantize.granularity import ROW, TENSOR, Granularity, block, group
from bitwright.quantize.pack import decode_numbers, unpack_bits

_FP4 = "fp4_e2m1"
_FP4_BITS = 4


def float8_matrix(weight_NK: Tensor, scales: Tensor, block_size: tuple[int, int] | None) -> QTensor:
    """Codes and scales of a float8 matrix.

    Args:
        weight_NK: float8 [N, K].
        scales: one number, [N] or [N, 1], or one a block.
        block_size: rows and columns of a block, where scales are of blocks.

    Raises:
        ModelError: the weight is no float8, or the scales fit none of these.
    """
    number = SCALE_FORMATS.get(weight_NK.dtype, str(weight_NK.dtype))
    if weight_NK.dtype.itemsize != 1 or not weight_NK.dtype.is_floating_point:
        raise ModelError(f"it has scales, but its weight is {number}, no float8")
    granularity, scales_RG = _sharers(scales, tuple(weight_NK.shape), block_size)
    return QTensor(
        scheme=tensor_scheme(number, granularity, scales.dtype),
        codes_NK=weight_NK.float(),
        scales_NG=scales_RG.float(),
        follows_from_scales=False,
    )


def float4_matrix(packed: Tensor, scales_NG: Tensor, tensor_scale: Tensor | None) -> QTensor:
    """Codes and scales of an fp4 (E2M1) matrix: uint8 [N, K / 2], scales of groups, and what multiplies all of them.

    Raises:
        ModelError: shapes that do not belong together.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    num_groups = scales_NG.shape[-1]
    raise_unless_shape("scales", scales_NG, (rows, num_groups))
    if columns % num_groups:
        raise ModelError(f"its {columns} columns do not divide into {num_groups} groups")
    size = columns // num_groups
    codes = unpack_bits(packed.view(torch.uint8), _FP4_BITS, columns)
    return QTensor(
        scheme=tensor_scheme(_FP4, group(size), scales_NG.dtype, tensor_scale=tensor_scale is not None),
        codes_NK=decode_numbers(codes, formats.FORMATS[_FP4]),
        scales_NG=scales_NG.float(),
        tensor_scale=None if tensor_scale is None else tensor_scale.float().reshape(()),
        follows_from_scales=False,
    )


def _sharers(scales: Tensor, shape: tuple[int, ...], block_size: tuple[int, int] | None) -> tuple[Granularity, Tensor]:
    """Who shares a scale, and the scales as [R, G]."""
    rows, columns = shape
    if block_size is not None:
        granularity = block(*block_size)
        if scales.dim() == 4:  # ModelOpt keeps a dimension of 1 behind each of the two
            scales = scales[:, 0, :, 0]
        expected = granularity.scale_shape(rows, columns)
        raise_unless_shape(f"scales of blocks of {block_size[0]} × {block_size[1]}", scales, expected)
        return granularity, scales
    if scales.numel() == 1:
        return TENSOR, scales.reshape(1, 1)
    if tuple(scales.shape) in ((rows,), (rows, 1)):
        return ROW, scales.reshape(rows, 1)
    if scales.dim() == 2 and scales.shape[0] == rows and columns % scales.shape[1] == 0:
        return group(columns // scales.shape[1]), scales
    raise ModelError(f"its {list(shape)} weight has scales of shape {list(scales.shape)}, which nothing here shares so")
