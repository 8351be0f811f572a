"""The Triton backend: one kernel an operation, for GPUs; bit-equal to the reference.

    rounding    a number to a format: every rounding mode, every overflow rule
    scaling     groups of numbers under one scale: one read and one write where a group fits a program
    delayed     all numbers under a scale that is known: one read and one write
    packing     codes to bytes and back
    grids       what kernels know of formats
    launch      a matrix cut into groups, programs, refusals

Tensors are on a GPU. Under TRITON_INTERPRET=1, set before Triton is imported, its interpreter runs the kernels on CPU
tensors, slowly: that is how they are tested where no GPU is. Triton is imported by the first call, not before.

fp32, bf16 and fp16 go in and come out; arithmetic is fp32 and int32 (fp64 for stochastic rounding to codebooks alone).
Tensors that are not contiguous are copied first. Kernels are compiled for each format, mode and dtype.

Left to the other backends, in words (`why_not_…`): scales by percentile or squared error, which look at more than the
largest magnitude, and offsets.

Legend: N rows, K columns, R × G scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format
from bitwright.formats.encode import find_overflow
from bitwright.formats.round import MAX_RANDOM_BITS, find_mode, find_rounding
from bitwright.quantize.backends.triton import launch
from bitwright.quantize.backends.triton.grids import grid_of, overflow_of, table_of, why_not_grid
from bitwright.quantize.pack import PackedTensor, decode_numbers, pack_codes, unpack_bits, why_not_pack
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme

RULES = ("amax", "ocp_floor", "round_up", "power_of_two")
#: Wider codes are packed by torch operations.
MAX_PACKED_BITS = 8


def why_not_round(number: Format, dtype: torch.dtype, rounding: str, overflow: str) -> str | None:
    """Return why this backend does not round to `number`, or None if it does.

    Raises:
        UnknownName: no such rounding or overflow rule.
    """
    find_overflow(overflow), find_mode(rounding)
    return launch.why_not_run(dtype) or why_not_grid(number)


def why_not_scaled(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why this backend does not apply a scheme, or None if it does."""
    if scheme.scaling is None:
        return f"{scheme.format} without scaling is rounded, not scaled; use round_values"
    if scheme.scaling.symmetry != "symmetric":
        return f"its kernels have no offsets ('{scheme.scaling.symmetry}')"
    if scheme.scaling.rule not in RULES:
        return f"its kernels look at the largest magnitude of a group alone, and rule '{scheme.scaling.rule}' at more"
    number, scale_number = formats.FORMATS[scheme.format], formats.FORMATS[scheme.scaling.scale_format]
    if not isinstance(scale_number, formats.FloatFormat):
        return f"its kernels store scales as floats, not as {scale_number.name}"
    return launch.why_not_run(dtype) or why_not_grid(number) or why_not_grid(scale_number)


def why_not_packed(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why this backend does not pack under a scheme, or None if it does."""
    stored = [scheme.format] if scheme.scaling is None else [scheme.format, scheme.scaling.scale_format]
    reasons = (why_not_pack(formats.FORMATS[name]) for name in stored)
    return why_not_scaled(scheme, dtype) or next((reason for reason in reasons if reason), None)


def round_values(
    x: Tensor,
    number: Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
    out: Tensor | None = None,
) -> Tensor:
    """Round every element to a format.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.
        number: a format that `why_not_round` does not refuse.
        rounding: a name in `formats.ROUNDINGS`.
        overflow: a name in `formats.OVERFLOWS`. NaN stays NaN where the rule refuses it.
        seed, random_bits: of stochastic rounding; an element draws by its place in the row-major flattened tensor.
        out: where to write, of the shape and dtype of `x`; it may be `x`.

    Returns:
        `out`, or a new tensor: the shape and dtype of `x`, values found in fp32 and narrowed to nearest even.

    Raises:
        UnknownName, FormatError, SchemeError, MissingExtra: a name that is none, a setting out of range, a tensor that
            kernels do not reach, no Triton.
    """
    find_rounding(rounding, 0, seed, random_bits)
    launch.raise_if(why_not_round(number, x.dtype, rounding, overflow), x)
    from bitwright.quantize.backends.triton.rounding import round_kernel

    grid = grid_of(number)
    source, written = x.contiguous(), launch.room(x, x.dtype, out)
    table = table_of(number, rounding == "nearest_away", x.device)
    block = 1024
    launch.run(
        round_kernel,
        -(-x.numel() // block),
        (launch.words(source), launch.words(written), table, seed, x.numel()),
        (grid, overflow_of(number, overflow), rounding, random_bits, block),
        x,
    )
    return launch.hand_back(written, out)


def fake_quantize(x_NK: Tensor, scheme: TensorScheme, *, out: Tensor | None = None) -> Tensor:
    """Quantise and dequantise a matrix in one read and one write, or two reads for long groups and tensor scales.

    Args:
        x_NK: fp32, bf16 or fp16 [N, K], any strides.
        scheme: one that `why_not_scaled` does not refuse.
        out: where to write, of the shape and dtype of `x_NK`; it may be `x_NK`.

    Returns:
        Values in the dtype of `x_NK`. A group with NaN or Inf is all NaN.

    Raises:
        SchemeError, MissingExtra: the scheme or the tensor is not for this backend; no Triton.
    """
    launch.raise_if(why_not_scaled(scheme, x_NK.dtype), x_NK)
    written = launch.room(x_NK, x_NK.dtype, out)
    launch.run_scaled(x_NK, scheme, written, "values")
    return launch.hand_back(written, out)


def quantize(x_NK: Tensor, scheme: TensorScheme) -> QTensor:
    """Return codes, as fp32 values, and stored scales of a matrix; arguments and errors of `fake_quantize`."""
    launch.raise_if(why_not_scaled(scheme, x_NK.dtype), x_NK)
    codes_NK = launch.room(x_NK, torch.float32, None)
    return replace(launch.run_scaled(x_NK, scheme, codes_NK, "code values"), codes_NK=codes_NK)


def why_not_delayed(number: Format, dtype: torch.dtype) -> str | None:
    """Return why `scale_with_amax` does not take `number`, or None if it does."""
    return launch.why_not_run(dtype) or why_not_grid(number)


def scale_with_amax(
    x: Tensor, number: Format, inv_scale: Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise under a scale that is known, and find amax, in one read and one write.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.
        number: a format that `why_not_delayed` does not refuse.
        inv_scale: fp32, 0-d.
        out: where to write, of the shape and dtype of `x`; it may be `x`.

    Returns:
        Values ``format(x · inv_scale) · (1 / inv_scale)`` in the dtype of `x`, saturating; max |x|, fp32 0-d on the
        device of `x`: NaN if `x` holds one, 0 if it is empty.

    Raises:
        SchemeError, MissingExtra: the format or the tensor is not for this backend; no Triton.
    """
    launch.raise_if(why_not_delayed(number, x.dtype), x)
    from bitwright.quantize.backends.triton.delayed import delayed_kernel

    source, written = x.detach().contiguous(), launch.room(x, x.dtype, out)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    arrays = (launch.words(source), launch.words(written), inv_scale.detach().to(x.device), amax)
    launch.run(
        delayed_kernel,
        -(-x.numel() // launch.BLOCK),
        (*arrays, table_of(number, False, x.device), x.numel()),
        (grid_of(number), overflow_of(number, "saturate"), launch.BLOCK),
        x,
    )
    return launch.hand_back(written, out), amax.view(torch.float32)


def pack(x_NK: Tensor, scheme: TensorScheme) -> PackedTensor:
    """Return a matrix as it is stored; arguments of `fake_quantize`.

    Raises:
        SchemeError, MissingExtra: as `fake_quantize`; a group that is not finite, under a scale format without NaN.
    """
    launch.raise_if(why_not_packed(scheme, x_NK.dtype), x_NK)
    bits = formats.FORMATS[scheme.format].bits
    if bits > MAX_PACKED_BITS:
        return pack_codes(quantize(x_NK, scheme))
    from bitwright.quantize.backends.triton.packing import pack_kernel

    rows, columns = x_NK.shape
    codes_NK = launch.room(x_NK, torch.uint8, None)
    scaled = launch.run_scaled(x_NK, scheme, codes_NK, "codes")
    packed_NB = codes_NK
    if bits != 8:
        num_row_bytes = -(-columns * bits // 8)
        packed_NB = torch.empty(rows, num_row_bytes, dtype=torch.uint8, device=x_NK.device)
        num_programs, num_pieces, tile = launch.row_tiles(rows, num_row_bytes)
        arguments = (codes_NK, packed_NB, rows, columns, num_row_bytes, num_pieces)
        launch.run(pack_kernel, num_programs, arguments, (bits, *tile), x_NK)
    # the scales alone: of a matrix without columns there are no codes to store
    stored = pack_codes(replace(scaled, codes_NK=x_NK.new_empty(rows, 0, dtype=torch.float32)))
    return replace(stored, shape=(rows, columns), codes=packed_NB)


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Return the values of a packed matrix, [N, K]: fp32 arithmetic, narrowed to `dtype` (fp32, bf16 or fp16).

    `out` is written and returned if it is given: contiguous, of that shape and dtype.

    Raises:
        SchemeError, MissingExtra: as `fake_quantize`.
    """
    scheme, (rows, columns) = packed.scheme, packed.shape
    launch.raise_if(why_not_packed(scheme, dtype), packed.codes)
    number, scaling = formats.FORMATS[scheme.format], scheme.scaling
    if number.bits > MAX_PACKED_BITS:
        values = packed.unpack(dtype)
        return values if out is None else out.copy_(values)
    assert scaling is not None and packed.scales is not None
    from bitwright.quantize.backends.triton.packing import unpack_kernel

    granularity = scaling.granularity
    scales_RG = _read_scales(packed.scales, formats.FORMATS[scaling.scale_format]) * 2.0**scaling.element_exponent
    codes = torch.arange(1 << number.bits, dtype=torch.int32, device=packed.codes.device)
    out_NK = torch.empty(rows, columns, dtype=dtype, device=packed.codes.device) if out is None else out
    num_programs, num_pieces, tile = launch.row_tiles(rows, columns)
    codes_NB, values = packed.codes.contiguous(), decode_numbers(codes, number)
    sizes = (rows, columns, codes_NB.shape[1], granularity.num_groups(columns), num_pieces)
    arguments = (codes_NB, values, scales_RG, packed.tensor_scale, launch.words(out_NK), *sizes)
    block_rows = 0 if granularity.scope == "tensor" else granularity.block_rows or 1
    constants = (number.bits, block_rows, granularity.group_size, *tile)
    launch.run(unpack_kernel, num_programs, arguments, constants, packed.codes)
    return out_NK


def _read_scales(stored: Tensor, number: Format) -> Tensor:
    """Scales as fp32 values, in order."""
    if stored.dtype != torch.uint8:
        return stored.float().contiguous()
    num_scales = stored.numel() * 8 // number.bits
    return decode_numbers(unpack_bits(stored.reshape(1, -1), number.bits, num_scales), number)
