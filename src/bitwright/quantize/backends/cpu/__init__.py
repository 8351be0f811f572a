"""Quantisation on the CPU at the speed of memory: Numba kernels behind the interface of `backends`.

    elementwise   numbers by themselves, to nearest even
    modes         the same in every rounding mode without random bits
    stochastic    the same with random bits, of groups under a scale too
    tiles         groups under a scale: found on the way, or known
    packing       codes as bits, and back
    operands      codes for products of codes
    matrices      which of these writes a matrix
    steps, rounding, lanes    what those are made of: blocks of numbers as LLVM vectors
    grids, scales, arrays     what kernels are given: formats, rules and scales, and tensors

Kernels are compiled at their first call and kept on disk. They run on as many threads as torch does
(`torch.set_num_threads`), and on its threads where they are those of GNU's OpenMP (`team`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import FloatFormat, Format
from bitwright.formats.round import find_mode
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.backends.cpu import elementwise, modes, packing, stochastic, tiles
from bitwright.quantize.backends.cpu.arrays import (
    ARRAY_DTYPES,
    array_of,
    finished,
    new_memory,
    run_rows,
    run_whole,
    streams_to,
    target_for,
)
from bitwright.quantize.backends.cpu.grids import FloatGrid, OneZeroGrid, why_no_code, why_no_grid
from bitwright.quantize.backends.cpu.matrices import quantize_into
from bitwright.quantize.backends.cpu.modes import MODES, why_no_mode
from bitwright.quantize.backends.cpu.operands import codes_with_amax as codes_with_amax
from bitwright.quantize.backends.cpu.operands import operand as operand
from bitwright.quantize.backends.cpu.scales import (
    code_of_format,
    grid_of_format,
    is_short,
    loaded_scales,
    stored_scales,
)
from bitwright.quantize.pack import PackedTensor, stored_dtype
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme

# --- what there is ----------------------------------------------------------------------------------------------------


def why_not_round(number: Format, dtype: torch.dtype, rounding: str, overflow: str) -> str | None:
    """Return why there is no kernel that rounds to `number`, or None if there is one."""
    if dtype not in ARRAY_DTYPES:
        return f"CPU kernels take fp32, bf16 and fp16, not {dtype}"
    reason = why_no_mode(number)
    return why_no_grid(number, overflow) if rounding == "nearest_even" and reason is not None else reason


def why_not_scaled(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why there is no kernel that quantises under `scheme`, or None if there is one."""
    if dtype not in ARRAY_DTYPES:
        return f"CPU kernels take fp32, bf16 and fp16, not {dtype}"
    if scheme.scaling is None or scheme.scaling.symmetry != "symmetric":
        return "CPU kernels know symmetric groups only"
    return why_no_grid(formats.FORMATS[scheme.format], "saturate")


def why_not_packed(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why there is no kernel that packs under `scheme`, or None if there is one."""
    if scheme.scaling is not None and stored_dtype(formats.FORMATS[scheme.scaling.scale_format]) is None:
        return f"torch has no dtype for scales in {scheme.scaling.scale_format}"
    return why_not_scaled(scheme, dtype) or why_no_code(formats.FORMATS[scheme.format])


# --- the interface ----------------------------------------------------------------------------------------------------


def round_values(
    x: Tensor,
    number: Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int = 0,
    random_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Round to a format; `why_not_round` must have said None. Arguments: see `backends`."""
    if rounding != "nearest_even" or why_no_grid(number, overflow) is not None:
        return _round_by_mode(x, modes.mode_grid(number, overflow), rounding, seed, random_bits, out)
    source = x.detach().contiguous()
    target = target_for(source, out)
    grid = grid_of_format(number, overflow)
    is_bounded = not isinstance(grid, FloatGrid | OneZeroGrid) or bool(grid.limit == grid.largest)
    gives_bf16 = is_bounded and isinstance(number, FloatFormat) and is_short(number) and x.dtype == torch.bfloat16
    arrays = (array_of(source), array_of(target))
    arguments = (grid, is_bounded, gives_bf16, streams_to(target))
    run_whole(elementwise.round_range, elementwise.round_parallel, arrays, source.numel(), arguments)
    return finished(target, x, out)


def _round_by_mode(
    x: Tensor, grid: modes.ModeGrid, rounding: str, seed: int, random_bits: int, out: Tensor | None
) -> Tensor:
    """Any rounding mode: fp32 arithmetic, narrowed to the dtype of `x` at the end."""
    source = x.detach().float().contiguous()
    target = target_for(source, out if x.dtype == torch.float32 else None)
    arrays = (array_of(source), array_of(target))
    if find_mode(rounding).needs_seed:
        drawn = (grid, np.uint64(seed), random_bits)
        run_whole(stochastic.round_stochastic, stochastic.round_stochastic_parallel, arrays, source.numel(), drawn)
    else:
        run_whole(modes.round_modes, modes.round_modes_parallel, arrays, source.numel(), (grid, MODES[rounding]))
    if x.dtype == torch.float32:
        return finished(target, x, out)
    return target.to(x.dtype) if out is None else out.copy_(target)


def fake_quantize(x_NK: Tensor, scheme: TensorScheme, *, out: Tensor | None = None) -> Tensor:
    """Values of a matrix after quantising and dequantising; `why_not_scaled` must have said None."""
    if x_NK.numel() == 0:
        return x_NK.clone() if out is None else out
    if x_NK.dtype == torch.float16:  # seldom enough to go the long way
        values = fake_quantize(x_NK.float(), scheme).to(x_NK.dtype)
        return values if out is None else out.copy_(values)
    source = x_NK.detach().contiguous()
    target = target_for(source, out)
    quantize_into(source, target, scheme, gives_codes=False, wants_scales=False)
    return finished(target, x_NK, out)


def quantize(x_NK: Tensor, scheme: TensorScheme) -> QTensor:
    """Codes (as fp32 values) and scales of a matrix; `why_not_scaled` must have said None."""
    if x_NK.numel() == 0:
        return torch_backend.quantize(x_NK, scheme)
    source = x_NK.detach().float().contiguous()
    codes = new_memory(source.shape, torch.float32)
    scales, tensor_scale = quantize_into(source, codes, scheme, gives_codes=True, wants_scales=True)
    return QTensor(scheme=scheme, codes_NK=codes, scales_NG=scales, tensor_scale=tensor_scale)


def why_not_delayed(number: Format, dtype: torch.dtype) -> str | None:
    """Return why `scale_with_amax` does not take `number`, or None if it does."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"CPU kernels of delayed scaling take fp32 and bf16, not {dtype}"
    return why_no_grid(number, "saturate")


def scale_with_amax(
    x: Tensor, number: Format, inv_scale: Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values under a scale that is known, and max |x|, from one read; see `backends`."""
    source = x.detach().contiguous()
    target = target_for(source, out)
    scale = np.float32((1 / inv_scale.float()).item())
    arguments = (np.float32(inv_scale.item()), scale, grid_of_format(number), streams_to(target))
    amax_bits = np.zeros(max(1, -(-source.numel() // tiles.RUN_NUMBERS)), np.uint32)
    arrays = (array_of(source), array_of(target), amax_bits)
    run_whole(
        tiles.multiply_range, tiles.multiply_parallel, arrays, source.numel(), arguments, multiple=tiles.RUN_NUMBERS
    )
    return finished(target, x, out), torch.tensor(amax_bits.max().view(np.float32).item())


def pack(x_NK: Tensor, scheme: TensorScheme) -> PackedTensor:
    """Codes as bits and scales as stored; `why_not_packed` must have said None."""
    assert scheme.scaling is not None
    if x_NK.numel() == 0:
        return torch_backend.pack(x_NK, scheme)
    source = x_NK.detach().contiguous()
    if source.dtype == torch.float16:
        source = source.float()
    number = formats.FORMATS[scheme.format]
    rows, columns = source.shape
    packed = new_memory((rows, -(-columns * number.bits // 8)), torch.uint8)
    scales, tensor_scale = quantize_into(source, packed, scheme, gives_codes=True, wants_scales=True)
    return PackedTensor(
        scheme=scheme,
        shape=(rows, columns),
        codes=packed,
        scales=stored_scales(
            scales / 2.0**scheme.scaling.element_exponent, formats.FORMATS[scheme.scaling.scale_format]
        ),
        tensor_scale=tensor_scale,
    )


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Values of a packed matrix; `why_not_packed` must have said None."""
    scaling = packed.scheme.scaling
    assert scaling is not None and packed.scales is not None
    rows, columns = packed.shape
    if rows * columns == 0 or dtype == torch.float16:
        return torch_backend.unpack(packed, dtype, out=out)
    number = formats.FORMATS[packed.scheme.format]
    scales = loaded_scales(packed.scales, formats.FORMATS[scaling.scale_format]) * 2.0**scaling.element_exponent
    if packed.tensor_scale is not None:
        scales = scales * packed.tensor_scale
    target = new_memory((rows, columns), dtype) if out is None else out
    size, block_rows = scaling.granularity.group_columns(columns), scaling.granularity.group_rows(rows)
    arrays = (packed.codes.numpy(), array_of(target), scales.numpy())
    arguments = (columns, size, block_rows, code_of_format(number), number.bits, streams_to(target, columns, size))
    run_rows(packing.unpack_rows, packing.unpack_rows_parallel, arrays, rows, arguments, rows * columns)
    return target
