"""What packed multiplication is given: columns of x as pairs of bf16, and its sums over groups.

    bf16    is one column
    fp16    is the exact sum of two bf16, fp32 of three: each the upper half of what is left

Numbers that are not finite stand in the first column, and zeros in the others. What is left of numbers near 2^−126 is
below what products of bf16 see, and counts as zero.

Legend: M tokens, K columns of x, C columns as kernels see them: M times the parts of a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantize.backends.cpu.matmul import BLOCK_COLUMNS
from bitwright.quantize.backends.cpu.matmul_layout import Tiles

#: bf16 numbers that add up to one number of a dtype.
NUM_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def columns_of(x_MK: Tensor) -> Tensor:
    """bf16 numbers that add up to x: [C, K], all first parts before all second ones."""
    if x_MK.dtype == torch.bfloat16:
        return x_MK
    rest = x_MK.float()
    is_finite = rest.isfinite()
    parts: list[Tensor] = []
    for _ in range(NUM_PARTS[x_MK.dtype]):
        upper = (rest.view(torch.int32) & -65536).view(torch.float32)
        parts.append(torch.where(is_finite, upper, rest if not parts else 0.0).bfloat16())
        rest = rest - upper
    return torch.cat(parts)


def pairs_of(columns_CK: Tensor, tiles: Tiles) -> Tensor:
    """Columns as kernels read them: int32 [blocks, pairs, columns of a block], filled up with zeros."""
    num_columns, num_numbers = columns_CK.shape
    width = 1 if num_columns == 1 else BLOCK_COLUMNS
    num_blocks = -(-num_columns // width)
    filled = columns_CK
    if num_numbers != 2 * tiles.num_pairs or num_columns != num_blocks * width:
        filled = columns_CK.new_zeros(num_blocks * width, 2 * tiles.num_pairs)
        if tiles.group_columns == 2 * tiles.group_pairs or tiles.num_groups == 1:
            filled[:num_columns, :num_numbers] = columns_CK
        else:
            filled[:num_columns, torch.from_numpy(tiles.column_places)] = columns_CK
    words = filled.contiguous().view(torch.int32)
    if width == 1:
        return words.reshape(1, -1, 1)
    return words.reshape(num_blocks, width, -1).transpose(1, 2).contiguous()


def group_sums(columns_CK: Tensor, tiles: Tiles) -> Tensor:
    """Sums of x over groups of its columns: fp32 [C, G]."""
    num_columns, num_numbers = columns_CK.shape
    filled = columns_CK.float()
    if num_numbers != tiles.num_groups * tiles.group_columns:
        filled = torch.nn.functional.pad(filled, (0, tiles.num_groups * tiles.group_columns - num_numbers))
    return filled.reshape(num_columns, tiles.num_groups, tiles.group_columns).sum(-1)
