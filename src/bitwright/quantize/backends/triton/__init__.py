"""The Triton backend: one kernel an operation, for GPUs; bit-equal to the reference.

    rounding    a number to a format: every rounding mode, every overflow rule
    scaling     groups of numbers under one scale: one read and one write where a group fits a program
    packing     codes to bytes and back
    grids       what kernels know of formats

Tensors are on a GPU. Under TRITON_INTERPRET=1, set before Triton is imported, its interpreter runs the kernels on CPU
tensors, slowly: that is how they are tested where no GPU is. Triton is imported by the first call, not before.

fp32, bf16 and fp16 go in and come out; arithmetic is fp32 and int32 (fp64 for stochastic rounding to codebooks alone).
Tensors that are not contiguous are copied first. Kernels are compiled for each format, mode and dtype.

Left to the other backends, in words (`why_not_…`): scales by percentile or squared error, which look at more than the
largest magnitude, and offsets.

Legend: N rows, K columns, R × G scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import MissingExtra, SchemeError
from bitwright.formats import Format
from bitwright.formats.encode import find_overflow
from bitwright.formats.round import MAX_RANDOM_BITS, find_rounding
from bitwright.quantize.backends.triton.grids import grid_of, overflow_of, rule_of, table_of, why_not_grid
from bitwright.quantize.pack import PackedTensor, decode_numbers, pack_codes, unpack_bits, why_not_pack
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = ("amax", "ocp_floor", "round_up", "power_of_two")
#: Elements that a program works on; of groups, at least one group.
BLOCK = 4096
#: Longer groups are read twice.
LARGEST_GROUP = 16384
#: Wider codes are packed by torch operations.
MAX_PACKED_BITS = 8


def why_not_round(number: Format, dtype: torch.dtype, rounding: str, overflow: str) -> str | None:
    """Return why this backend does not round to `number`, or None if it does.

    Raises:
        UnknownName: no such rounding or overflow rule.
    """
    find_overflow(overflow), find_rounding(rounding, 0, 0, MAX_RANDOM_BITS)
    return _why_not_run(dtype) or why_not_grid(number)


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
    return _why_not_run(dtype) or why_not_grid(number) or why_not_grid(scale_number)


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
    _raise_if(why_not_round(number, x.dtype, rounding, overflow), x)
    from bitwright.quantize.backends.triton.rounding import round_kernel

    grid = grid_of(number)
    source, written = x.contiguous(), _room(x, x.dtype, out)
    table = table_of(number, rounding == "nearest_away", x.device)
    block = 1024
    _launch(
        round_kernel,
        -(-x.numel() // block),
        (_words(source), _words(written), table, seed, x.numel()),
        (grid, overflow_of(number, overflow), rounding, random_bits, block),
        x,
    )
    return _hand_back(written, out)


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
    _raise_if(why_not_scaled(scheme, x_NK.dtype), x_NK)
    written = _room(x_NK, x_NK.dtype, out)
    _run_scaled(x_NK, scheme, written, "values")
    return _hand_back(written, out)


def quantize(x_NK: Tensor, scheme: TensorScheme) -> QTensor:
    """Return codes, as fp32 values, and stored scales of a matrix; arguments and errors of `fake_quantize`."""
    _raise_if(why_not_scaled(scheme, x_NK.dtype), x_NK)
    codes_NK = _room(x_NK, torch.float32, None)
    return replace(_run_scaled(x_NK, scheme, codes_NK, "code values"), codes_NK=codes_NK)


def pack(x_NK: Tensor, scheme: TensorScheme) -> PackedTensor:
    """Return a matrix as it is stored; arguments of `fake_quantize`.

    Raises:
        SchemeError, MissingExtra: as `fake_quantize`; a group that is not finite, under a scale format without NaN.
    """
    _raise_if(why_not_packed(scheme, x_NK.dtype), x_NK)
    bits = formats.FORMATS[scheme.format].bits
    if bits > MAX_PACKED_BITS:
        return pack_codes(quantize(x_NK, scheme))
    from bitwright.quantize.backends.triton.packing import pack_kernel

    rows, columns = x_NK.shape
    codes_NK = _room(x_NK, torch.uint8, None)
    scaled = _run_scaled(x_NK, scheme, codes_NK, "codes")
    packed_NB = codes_NK
    if bits != 8:
        num_row_bytes = -(-columns * bits // 8)
        packed_NB = torch.empty(rows, num_row_bytes, dtype=torch.uint8, device=x_NK.device)
        num_programs, num_pieces, tile = _row_tiles(rows, num_row_bytes)
        arguments = (codes_NK, packed_NB, rows, columns, num_row_bytes, num_pieces)
        _launch(pack_kernel, num_programs, arguments, (bits, *tile), x_NK)
    # the scales alone: of a matrix without columns there are no codes to store
    stored = pack_codes(replace(scaled, codes_NK=x_NK.new_empty(rows, 0, dtype=torch.float32)))
    return replace(stored, shape=(rows, columns), codes=packed_NB)


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a packed matrix, [N, K]: fp32 arithmetic, narrowed to `dtype` (fp32, bf16 or fp16).

    Raises:
        SchemeError, MissingExtra: as `fake_quantize`.
    """
    scheme, (rows, columns) = packed.scheme, packed.shape
    _raise_if(why_not_packed(scheme, dtype), packed.codes)
    number, scaling = formats.FORMATS[scheme.format], scheme.scaling
    if number.bits > MAX_PACKED_BITS:
        return packed.unpack(dtype)
    assert scaling is not None and packed.scales is not None
    from bitwright.quantize.backends.triton.packing import unpack_kernel

    granularity = scaling.granularity
    scales_RG = _read_scales(packed.scales, formats.FORMATS[scaling.scale_format]) * 2.0**scaling.element_exponent
    codes = torch.arange(1 << number.bits, dtype=torch.int32, device=packed.codes.device)
    out_NK = torch.empty(rows, columns, dtype=dtype, device=packed.codes.device)
    num_programs, num_pieces, tile = _row_tiles(rows, columns)
    arguments = (
        *(packed.codes.contiguous(), decode_numbers(codes, number), scales_RG, packed.tensor_scale, _words(out_NK)),
        *(rows, columns, packed.codes.shape[1], granularity.num_groups(columns), num_pieces),
    )
    block_rows = 0 if granularity.scope == "tensor" else granularity.block_rows or 1
    constants = (number.bits, block_rows, granularity.group_size, *tile)
    _launch(unpack_kernel, num_programs, arguments, constants, packed.codes)
    return out_NK


# --- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A matrix cut into groups, as kernels see it: one scale per tensor is a matrix of one row."""

    rows: int
    columns: int
    num_column_groups: int
    num_groups: int
    #: Elements of a whole group.
    size: int
    block_rows: int
    #: 0: a group is a row.
    width: int


def _cut(x_NK: Tensor, scheme: TensorScheme) -> _Cut:
    assert scheme.scaling is not None
    granularity, (rows, columns) = scheme.scaling.granularity, x_NK.shape
    if granularity.scope == "tensor":
        return _Cut(
            rows=1,
            columns=rows * columns,
            num_column_groups=1,
            num_groups=1,
            size=rows * columns,
            block_rows=1,
            width=0,
        )
    block_rows = granularity.block_rows or 1
    return _Cut(
        rows=rows,
        columns=columns,
        num_column_groups=granularity.num_groups(columns),
        num_groups=granularity.num_scales(rows, columns),
        size=block_rows * (granularity.group_size or columns),
        block_rows=block_rows,
        width=granularity.group_size,
    )


def _run_scaled(x_NK: Tensor, scheme: TensorScheme, out: Tensor, gives: str) -> QTensor:
    """Write what is asked for into `out`; return stored scales, which values do without, and `out` for the codes."""
    from bitwright.quantize.backends.triton import scaling as kernels

    scaling = scheme.scaling
    assert scaling is not None
    number, scale_number = formats.FORMATS[scheme.format], formats.FORMATS[scaling.scale_format]
    rule = rule_of(number, scaling, scale_number.max)
    grids = (
        *(grid_of(number), overflow_of(number, "saturate")),
        *(grid_of(scale_number), overflow_of(scale_number, "saturate")),
    )
    scales = tensor_peak = tensor_scale = None
    if gives != "values":
        shape = scaling.granularity.scale_shape(*x_NK.shape)
        scales = torch.empty(shape, dtype=torch.float32, device=x_NK.device)
    cut, source = _cut(x_NK, scheme), _words(x_NK.contiguous())
    layout, place = (cut.block_rows, cut.width), (cut.rows, cut.columns, cut.num_column_groups)
    table = table_of(number, False, x_NK.device)
    kernel: Any
    rest: tuple[Any, ...]
    tile: tuple[int, ...]
    is_long = cut.size > LARGEST_GROUP or scaling.granularity.scope == "tensor"
    if is_long:
        kernel, tile, num_warps = kernels.pieces_kernel, (BLOCK,), 4
        num_pieces = max(-(-cut.size // BLOCK), 1)
        num_programs = cut.num_groups * num_pieces
        peaks = torch.zeros(cut.num_groups, dtype=torch.int32, device=x_NK.device)
        _launch(kernels.peaks_kernel, num_programs, (source, peaks, *place, num_pieces), (*layout, BLOCK), x_NK)
        rest = (peaks, table, *place, num_pieces)
    else:
        kernel, block = kernels.groups_kernel, _power_of_two_from(cut.size)
        tile = (min(max(BLOCK // block, 1), _power_of_two_from(cut.num_groups)), block)
        num_warps = max(4, block // 1024)
        num_programs = -(-cut.num_groups // tile[0])
        rest = (table, *place, cut.num_groups)
    if scaling.tensor_scale:
        if is_long:
            tensor_peak = torch.where(peaks < _INF_WORD, peaks, 0).amax().reshape(1)
        else:
            tensor_peak = torch.zeros(1, dtype=torch.int32, device=x_NK.device)
            arguments = (source, None, None, tensor_peak, *rest)
            _launch(kernel, num_programs, arguments, (*layout, rule, *grids, "peak", *tile), x_NK, num_warps)
        tensor_scale = torch.empty((), dtype=torch.float32, device=x_NK.device)
        _launch(kernels.tensor_scale_kernel, 1, (tensor_peak, tensor_scale), (rule,), x_NK)
    arguments = (source, _words(out), scales, tensor_peak, *rest)
    _launch(kernel, num_programs, arguments, (*layout, rule, *grids, gives, *tile), x_NK, num_warps)
    return QTensor(scheme=scheme, codes_NK=out, scales_NG=scales, tensor_scale=tensor_scale)


_INF_WORD = 0x7F800000


def _launch(
    kernel: Any,
    num_programs: int,
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    x: Tensor,
    num_warps: int = 4,
) -> None:
    """Run a kernel on the device of `x`, its products and sums rounded one by one."""
    if num_programs == 0:
        return
    # the interpreter computes with NumPy, which would warn of infinities
    with torch.cuda.device_of(x), np.errstate(all="ignore"):
        kernel[(num_programs,)](*arguments, *constants, num_warps=num_warps, enable_fp_fusion=False)


def _row_tiles(rows: int, width: int) -> tuple[int, int, tuple[int, int]]:
    """Programs for [rows, width] elements, pieces of a row, and the rows and elements of a row that a program takes."""
    per_row = min(_power_of_two_from(width), BLOCK)
    num_rows = min(BLOCK // per_row, _power_of_two_from(rows))
    num_pieces = -(-width // per_row)
    return -(-rows // num_rows) * num_pieces, max(num_pieces, 1), (num_rows, per_row)


def _power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def _words(x: Tensor) -> Tensor:
    """bf16 as int16, which is how kernels take it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _room(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Contiguous memory for a result of the shape of `x`."""
    if out is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        raise SchemeError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; "
            f"it has to be {dtype} {tuple(x.shape)} on {x.device}"
        )
    return out if out.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device)


def _hand_back(written: Tensor, out: Tensor | None) -> Tensor:
    return written if out is None or out is written else out.copy_(written)


def _read_scales(stored: Tensor, number: Format) -> Tensor:
    """Scales as fp32 values, in order."""
    if stored.dtype != torch.uint8:
        return stored.float().contiguous()
    num_scales = stored.numel() * 8 // number.bits
    return decode_numbers(unpack_bits(stored.reshape(1, -1), number.bits, num_scales), number)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _why_not_run(dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "the package 'triton' is not installed"
    if dtype not in DTYPES:
        return f"its kernels read fp32, bf16 and fp16, not {dtype}"
    return None


def _raise_if(reason: str | None, x: Tensor) -> None:
    """Refuse before anything is written."""
    if find_spec("triton") is None:
        raise MissingExtra("triton", "triton", "the Triton backend")
    if reason is not None:
        raise SchemeError(f"the Triton backend does not do this: {reason}; choose another backend")
    from bitwright.quantize.backends.triton.rounding import RUNS_ON_CPU

    if x.device.type == "cpu" and not RUNS_ON_CPU:
        raise SchemeError(
            "the Triton backend runs on GPUs, and the tensor is on the CPU; choose another backend (to test kernels, "
            "set TRITON_INTERPRET=1 before Triton is imported)"
        )
