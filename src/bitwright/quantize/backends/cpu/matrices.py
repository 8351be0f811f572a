"""One matrix to values, codes or bytes: which kernel writes them, and where its scales come from.

What is written to says what is written: bytes of packed codes to uint8, values or codes to fp32 and bf16 (codes in bf16
only where it holds them). Where one read suffices scales are found on the way, else before (`scales.find_scales_of`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.quantize.backends.cpu import packing, tiles
from bitwright.quantize.backends.cpu.arrays import array_of, cut_into_runs, row_length, run_rows, streams_to
from bitwright.quantize.backends.cpu.scales import find_scales_of, finds_scales_on_the_way, grid_of_format, rule_of
from bitwright.quantize.scheme import TensorScheme


def quantize_into(
    source: Tensor, target: Tensor, scheme: TensorScheme, *, gives_codes: bool, wants_scales: bool
) -> tuple[Tensor, Tensor | None]:
    """Write values, codes or bytes of a contiguous matrix; returns its scales [R, G] (empty unless wanted) and tensor
    scale."""
    scaling = scheme.scaling
    assert scaling is not None
    number = formats.FORMATS[scheme.format]
    rows, columns = source.shape
    size = scaling.granularity.group_columns(columns)
    if not finds_scales_on_the_way(scheme, rows, columns):
        scales = find_scales_of(source, scheme)
        write_known(source, target, scales.effective[..., 0], scheme, gives_codes)
        return scales.scale[..., 0], scales.tensor_scale
    found = np.empty((rows, scaling.granularity.num_groups(columns)) if wants_scales else (0, 0), np.float32)
    rule, grid = rule_of(scheme, source), grid_of_format(number)
    flat = (array_of(source), target.numpy() if target.dtype == torch.uint8 else array_of(target), found.reshape(-1))
    if target.dtype == torch.uint8:
        num_rows = rows
        arguments: tuple[Any, ...] = (columns, size, rule, grid, number.bits)
        one, several = packing.pack_rows, packing.pack_rows_parallel
    else:
        num_rows, run_columns = cut_into_runs(rows, columns, size)
        arguments = (run_columns, size, rule, grid, gives_codes, streams_to(target, columns, size))
        one, several = tiles.quantize_rows, tiles.quantize_rows_parallel
    run_rows(one, several, flat, num_rows, arguments, source.numel())
    tensor_scale = torch.tensor(rule.tensor_scale, dtype=torch.float32) if scaling.tensor_scale else None
    return torch.from_numpy(found), tensor_scale


def write_known(source: Tensor, target: Tensor, scales_RG: Tensor, scheme: TensorScheme, gives_codes: bool) -> None:
    """Values, codes or bytes of a matrix under scales [R, G] that are known."""
    assert scheme.scaling is not None
    number = formats.FORMATS[scheme.format]
    rows, columns = source.shape
    granularity = scheme.scaling.granularity
    size, block_rows = granularity.group_columns(columns), granularity.group_rows(rows)
    scales = scales_RG.contiguous().numpy()
    if target.dtype == torch.uint8:
        arrays: tuple[Any, ...] = (array_of(source), target.numpy(), scales)
        packed_as: tuple[Any, ...] = (columns, size, block_rows, grid_of_format(number), number.bits)
        run_rows(packing.pack_scaled_rows, packing.pack_scaled_rows_parallel, arrays, rows, packed_as, source.numel())
        return
    if granularity.scope == "tensor":
        columns = size = row_length(source.numel())
        rows = block_rows = source.numel() // columns
    arrays = (array_of(source), array_of(target), scales)
    arguments = (columns, size, block_rows, grid_of_format(number), gives_codes, streams_to(target, columns, size))
    run_rows(tiles.scale_rows, tiles.scale_rows_parallel, arrays, rows, arguments, source.numel())
