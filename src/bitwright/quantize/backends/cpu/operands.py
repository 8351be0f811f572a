"""Operands of products of codes (`quantize/operand.py`): codes in bf16, one read and one write where scales allow it.

fp32 and bf16 go in; fp16 goes by fp32. Scales are found as ever; what is written is

    the codes                 one scale a tensor or a row, which stays outside
    codes times scales        groups under powers of two: what `tiles` calls values, exact in bf16; written again where
                              all scales are so small that they have to be lifted
    codes, then times scales  E2M1 under E4M3 scales: exact in bf16 too, in a second pass
    codes in fp32             stochastic rounding, narrowed afterwards; other roundings go by `quantize`
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format
from bitwright.formats.round import MAX_RANDOM_BITS, find_mode
from bitwright.quantize.backends.cpu import stochastic, tiles
from bitwright.quantize.backends.cpu.arrays import array_of, new_memory, run_rows, run_whole, streams_to
from bitwright.quantize.backends.cpu.matrices import quantize_into
from bitwright.quantize.backends.cpu.modes import mode_grid, why_no_mode
from bitwright.quantize.backends.cpu.scales import find_scales_of, grid_of_format
from bitwright.quantize.operand import SMALL_SCALE, Operand, folds_in_bf16, operand_dtype, operand_of
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.quantize import quantize
from bitwright.quantize.scheme import TensorScheme


def operand(x_NK: Tensor, scheme: TensorScheme, *, rounding: str = "nearest_even", seed: int | None = None) -> Operand:
    """A matrix with elements as an operand; `why_not_scaled` must have said None."""
    scaling, number = scheme.scaling, formats.FORMATS[scheme.format]
    assert scaling is not None
    source = _source(x_NK)
    if rounding != "nearest_even":
        if find_mode(rounding).needs_seed and seed is not None and why_no_mode(number) is None:
            return operand_of(_quantize_stochastically(source.float(), scheme, seed))
        return operand_of(quantize(x_NK, scheme, rounding=rounding, seed=seed))
    is_outside = scaling.granularity.scope in ("tensor", "row")
    dtype = operand_dtype(number)
    target = new_memory(source.shape, dtype)
    if is_outside or scaling.tensor_scale or not folds_in_bf16(scheme):
        scales, tensor_scale = quantize_into(source, target, scheme, gives_codes=True, wants_scales=True)
        return operand_of(QTensor(scheme=scheme, codes_NK=target, scales_NG=scales, tensor_scale=tensor_scale))
    scales, _ = quantize_into(source, target, scheme, gives_codes=False, wants_scales=True)
    if 0 < float(scales.amax()) < SMALL_SCALE:
        return operand_of(quantize(x_NK, scheme))
    return Operand(numbers=target, scale=torch.ones(()))


def codes_with_amax(x: Tensor, number: Format, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes under a scale that is known, and max |x|, from one read; `why_not_delayed` must have said None."""
    source = _source(x)
    target = new_memory(source.shape, operand_dtype(number))
    arguments = (np.float32(inv_scale.item()), np.float32(1.0), grid_of_format(number), streams_to(target))
    amax_bits = np.zeros(max(1, -(-source.numel() // tiles.RUN_NUMBERS)), np.uint32)
    arrays = (array_of(source), array_of(target), amax_bits)
    run_whole(
        tiles.multiply_range, tiles.multiply_parallel, arrays, source.numel(), arguments, multiple=tiles.RUN_NUMBERS
    )
    return target, torch.tensor(amax_bits.max().view(np.float32).item())


def _source(x: Tensor) -> Tensor:
    contiguous = x.detach().contiguous()
    return contiguous.float() if contiguous.dtype == torch.float16 else contiguous


def _quantize_stochastically(source: Tensor, scheme: TensorScheme, seed: int) -> QTensor:
    """Codes by random bits, under scales that are found first."""
    assert scheme.scaling is not None
    rows, columns = source.shape
    granularity = scheme.scaling.granularity
    scales = find_scales_of(source, scheme)
    codes = new_memory(source.shape, torch.float32)
    grid = mode_grid(formats.FORMATS[scheme.format], "saturate")
    size, block_rows = granularity.group_columns(columns), granularity.group_rows(rows)
    arrays = (array_of(source), array_of(codes), scales.effective[..., 0].contiguous().numpy())
    arguments = (columns, size, block_rows, grid, np.uint64(seed), MAX_RANDOM_BITS)
    run_rows(stochastic.scale_stochastic, stochastic.scale_stochastic_parallel, arrays, rows, arguments, source.numel())
    return QTensor(scheme=scheme, codes_NK=codes, scales_NG=scales.scale[..., 0], tensor_scale=scales.tensor_scale)
