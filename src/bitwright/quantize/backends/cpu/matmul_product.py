"""One product: from x and the parts of a matrix to the call of a kernel, and to y.

Legend: M tokens, N rows and K columns of the weight, C columns of x as kernels see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright.quantize.backends.cpu.arrays import array_of, run_rows
from bitwright.quantize.backends.cpu.features import DOT_PRODUCTS, lacks
from bitwright.quantize.backends.cpu.matmul import BLOCK_COLUMNS, Sizes, multiply_tiles, multiply_tiles_parallel
from bitwright.quantize.backends.cpu.matmul_layout import constant, pair_bytes
from bitwright.quantize.backends.cpu.matmul_operands import NUM_PARTS, columns_of, group_sums, pairs_of
from bitwright.quantize.backends.cpu.matmul_parts import Parts, Side
from bitwright.quantize.backends.cpu.matmul_tables import table_of

#: Columns of x that one call takes: beyond, their sums would leave the second cache.
MAX_COLUMNS = 512
#: Codes that a kernel multiplies in the time in which others round one number (`arrays.MIN_PER_THREAD` counts those).
_SPEED = 16
_ONE = np.ones(1, np.float32)
_NO_TABLE = np.zeros(1, np.uint8)
_NO_SUMS = np.zeros((0, 0), np.float32)


def multiply(
    x_MK: Tensor,
    parts: Parts,
    tensors: Mapping[str, Tensor],
    *,
    has_dot: bool | None = None,
    direct: int = BLOCK_COLUMNS,
) -> Tensor:
    """x Wᵀ, [M, N] in the dtype of x.

    Args:
        x_MK: fp32, bf16 or fp16.
        parts: how the weight is kept, and
        tensors: what is kept (`Parts.lay`).
        has_dot: whether dot products of bf16 are used; None: where the processor has them.
        direct: columns of x up to which codes are expanded in registers, anew for every four of them.
    """
    tokens, rows = x_MK.shape[0], parts.shape[0]
    if tokens == 0:
        return x_MK.new_empty(0, rows)
    call = call_of(parts, has_dot=has_dot, direct=direct)
    at_once = MAX_COLUMNS // NUM_PARTS[x_MK.dtype]
    if tokens <= at_once:
        return _product(x_MK, parts, tensors, call)
    return torch.cat([_product(some, parts, tensors, call) for some in x_MK.split(at_once)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """Arguments of the kernel that follow from scheme and shape."""

    tables: tuple[npt.NDArray[Any], ...]
    sizes: Sizes
    constants: tuple[Any, ...]


@cache
def call_of(parts: Parts, *, has_dot: bool | None = None, direct: int = BLOCK_COLUMNS) -> Call:
    """What every product with a matrix has in common; see `multiply`."""
    has_dot = not lacks(DOT_PRODUCTS) if has_dot is None else has_dot
    tiles, table, scaling = parts.tiles, table_of(parts.number), parts.scheme.scaling
    if scaling is None:
        rows_of_scale = tiles.rows
    else:
        assert parts.scales is not None
        rows_of_scale = scaling.granularity.group_rows(tiles.rows) if parts.scales.is_shared else 0
    sizes = Sizes(
        rows=tiles.rows,
        num_groups=tiles.num_groups,
        group_pairs=tiles.group_pairs,
        last_pairs=tiles.last_pairs,
        pair_bytes=pair_bytes(tiles.bits),
        num_tables=table.num_tables,
        num_entries=table.num_entries,
        rows_of_scale=rows_of_scale,
        has_zero_points=scaling is not None and scaling.symmetry == "zero_point",
        scale_unit=1.0 if scaling is None else 2.0**scaling.element_exponent,
        direct_blocks=direct // BLOCK_COLUMNS,
    )
    scale_table, scale_bits = _codes_of(parts.scales)
    offset_table, offset_bits = _codes_of(parts.offsets)
    constants = (tiles.bits, int(table.is_mirrored), scale_bits, offset_bits, int(has_dot))
    return Call(
        tables=(table.entries, scale_table, offset_table), sizes=sizes, constants=tuple(map(constant, constants))
    )


def _codes_of(side: Side | None) -> tuple[npt.NDArray[Any], int]:
    """The table and the bits of scales or offsets that are kept as codes."""
    if side is None or side.tiles is None:
        return _NO_TABLE, 0
    return table_of(side.number, can_mirror=False).entries, side.number.bits


def _product(x_MK: Tensor, parts: Parts, tensors: Mapping[str, Tensor], call: Call) -> Tensor:
    columns_CK = columns_of(x_MK.detach() if x_MK.requires_grad else x_MK)
    pairs = pairs_of(columns_CK, parts.tiles)
    y_CN = torch.empty(len(columns_CK), parts.shape[0])
    codes, scales, offsets, factor = operands_of(tensors)
    sums = _NO_SUMS if offsets is None else group_sums(columns_CK, parts.tiles).numpy()
    arrays = (codes, pairs.numpy().view(np.uint32), y_CN.numpy(), scales, offsets, sums)
    arguments = (factor, call.tables, call.sizes, *call.constants)
    num_tiles, work = parts.tiles.num_tiles, work_of(parts, pairs.shape[0])
    run_rows(multiply_tiles, multiply_tiles_parallel, arrays, num_tiles, arguments, work)
    if len(columns_CK) != len(x_MK):
        y_CN = y_CN.reshape(-1, *x_MK.shape[:1], parts.shape[0]).sum(0)
    return y_CN.to(x_MK.dtype)


def operands_of(tensors: Mapping[str, Tensor]) -> tuple[Any, Any, Any, Any]:
    """Codes, scales, offsets (None without) and the factor of all outputs, as kernels take them."""
    scales, offsets, tensor_scale = (tensors.get(name) for name in ("scales", "offsets", "tensor_scale"))
    return (
        tensors["codes"].numpy().reshape(-1),
        _ONE if scales is None else _array(scales),
        None if offsets is None else _array(offsets),
        _ONE if tensor_scale is None else tensor_scale.reshape(1).numpy(),
    )


def work_of(parts: Parts, num_blocks: int) -> int:
    """What a product with so many blocks of columns of x takes, in numbers that other kernels round."""
    return parts.shape[0] * parts.shape[1] * num_blocks // _SPEED


def _array(stored: Tensor) -> npt.NDArray[Any]:
    return stored.numpy().reshape(-1) if stored.dtype == torch.uint8 else array_of(stored)
