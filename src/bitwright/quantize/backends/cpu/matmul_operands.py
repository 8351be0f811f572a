"""What packed multiplication is given: columns of x in blocks, and its sums over groups.

    pairs     of bf16, a 32-bit word each, where x is bf16 and its products are taken in pairs
    fp32      of any dtype

Legend: M tokens, K columns of x, P pairs of columns as tiles have them, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantize.backends.cpu.matmul_layout import Tiles


def blocks_of(x_MK: Tensor, tiles: Tiles, block_columns: int) -> Tensor:
    """x as kernels read it: [blocks, P, 1 or 2, columns of a block], filled up with zeros.

    bf16 becomes pairs, int32 and one of them; fp32 stays numbers, two of them.
    """
    tokens, columns = x_MK.shape
    num_blocks, places = -(-tokens // block_columns), 2 * tiles.num_pairs
    filled = x_MK
    if (num_blocks * block_columns, places) != (tokens, columns):
        filled = x_MK.new_zeros(num_blocks * block_columns, places)
        if tiles.group_columns == 2 * tiles.group_pairs or tiles.num_groups == 1:
            filled[:tokens, :columns] = x_MK
        else:
            filled[:tokens, torch.from_numpy(tiles.column_places)] = x_MK
    filled = filled.contiguous()
    words = filled if x_MK.dtype == torch.float32 else filled.view(torch.int32)
    halves = words.shape[1] // tiles.num_pairs
    if block_columns == 1:
        return words.reshape(tokens, tiles.num_pairs, halves, 1)
    blocks = words.reshape(num_blocks, block_columns, -1).transpose(1, 2).contiguous()
    return blocks.reshape(num_blocks, tiles.num_pairs, halves, block_columns)


def group_sums(x_MK: Tensor, tiles: Tiles) -> Tensor:
    """Sums of x over groups of its columns: fp32 [M, G]."""
    tokens, columns = x_MK.shape
    filled = x_MK.float()
    if columns != tiles.num_groups * tiles.group_columns:
        filled = torch.nn.functional.pad(filled, (0, tiles.num_groups * tiles.group_columns - columns))
    return filled.reshape(tokens, tiles.num_groups, tiles.group_columns).sum(-1)
