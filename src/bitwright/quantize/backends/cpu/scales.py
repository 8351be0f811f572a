"""Scales on their way in and out of kernels: rules as kernels know them, amaxes, and scales as they are stored."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.formats.block_scales import tensor_scales
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.backends.cpu import packing, tiles
from bitwright.quantize.backends.cpu.arrays import array_of, row_length, run_rows
from bitwright.quantize.backends.cpu.grids import (
    Code,
    FloatGrid,
    Grid,
    WideGrid,
    code_of,
    grid_of,
    why_no_code,
    why_no_grid,
)
from bitwright.quantize.backends.cpu.steps import CORRECTED, SHORT_CODES
from bitwright.quantize.granularity import to_groups
from bitwright.quantize.pack import stored_dtype
from bitwright.quantize.scaling import Scales, find_scales
from bitwright.quantize.scheme import Scaling, TensorScheme

_KINDS = {
    "amax": tiles.AMAX,
    "ocp_floor": tiles.OCP_FLOOR,
    "round_up": tiles.ROUND_UP,
    "power_of_two": tiles.POWER_OF_TWO,
}
_LARGEST_FP32 = float(np.finfo(np.float32).max)


@cache
def grid_of_format(number: Format, overflow: str = "saturate") -> Grid:
    """`grids.grid_of`, found once a format."""
    return grid_of(number, overflow)


@cache
def code_of_format(number: Format) -> Code:
    """`grids.code_of`, found once a format."""
    return code_of(number)


def finds_scales_on_the_way(scheme: TensorScheme, rows: int, columns: int) -> bool:
    """Whether one read suffices: a group lies in one row, and kernels know the rule and how scales are stored."""
    assert scheme.scaling is not None
    if rows == 1 and scheme.scaling.granularity.group_columns(columns) > tiles.RUN_NUMBERS:
        return False  # several threads find one amax sooner
    return _has_rule(scheme)


@cache
def _has_rule(scheme: TensorScheme) -> bool:
    scaling = scheme.scaling
    assert scaling is not None
    if scaling.granularity.scope not in ("row", "group") or scaling.rule not in _KINDS:
        return False
    return _store_of(scaling, formats.FORMATS[scaling.scale_format]) is not None


def _store_of(scaling: Scaling, number: Format) -> tuple[int, float, float, float] | None:
    """How a kernel stores scales in a format; None if it cannot."""
    gives_powers_of_two = scaling.rule != "amax"
    if isinstance(number, FloatFormat) and not number.has_zero and number.fraction_bits == 0 and gives_powers_of_two:
        return tiles.STORE_RANGE, number.min, number.max, 0.0
    if isinstance(number, FloatFormat) and number.fraction_bits >= 23 and number.exponent_bits >= 8:  # holds all fp32
        return tiles.STORE_RANGE, -_LARGEST_FP32, _LARGEST_FP32, 0.0
    if not isinstance(number, FloatFormat) or why_no_grid(number, "saturate") is not None:
        return None
    grid = grid_of(number)
    if isinstance(grid, WideGrid):
        return tiles.STORE_WIDE, float(grid.dropped_bits), float(grid.limit_bits), 0.0
    if isinstance(grid, FloatGrid):
        return tiles.STORE_FLOAT, float(grid.shift), float(grid.emin_bits), float(grid.largest)
    return None


def rule_of(scheme: TensorScheme, source: Tensor) -> tiles.Rule:
    """How the kernel finds the scales of one matrix."""
    rule, scaling = _rule_of_scheme(scheme), scheme.scaling
    assert scaling is not None
    if not scaling.tensor_scale:
        return rule
    peak = _finite_peak(source, scaling.granularity.group_columns(source.shape[1]))
    limit = float(formats.FORMATS[scaling.scale_format].max) * rule.top
    tensor_scale, inverse = tensor_scales(peak, limit)
    return rule._replace(tensor_scale=float(tensor_scale), inv_tensor_scale=float(inverse))


@cache
def _rule_of_scheme(scheme: TensorScheme) -> tiles.Rule:
    """How the kernel finds scales, save for the tensor scale."""
    scaling, number = scheme.scaling, formats.FORMATS[scheme.format]
    assert scaling is not None
    store = _store_of(scaling, formats.FORMATS[scaling.scale_format])
    assert store is not None
    is_exact = scaling.rule != "amax" and store[0] == tiles.STORE_RANGE and not scaling.tensor_scale
    is_field = scaling.rule == "ocp_floor" and _is_exponent(formats.FORMATS[scaling.scale_format])
    return tiles.Rule(
        kind=tiles.EXPONENT_FLOOR if is_field and not scaling.tensor_scale else _KINDS[scaling.rule],
        top=math.ldexp(number.max, scaling.element_exponent),
        emax=number.emax + scaling.element_exponent,
        margin=scaling.margin,
        inv_tensor_scale=1.0,
        tensor_scale=1.0,
        unit=2.0**scaling.element_exponent,
        method=SHORT_CODES if is_exact and is_short(number) else CORRECTED,
        store=store[0],
        store_a=store[1],
        store_b=store[2],
        store_c=store[3],
    )


def find_scales_of(source: Tensor, scheme: TensorScheme) -> Scales:
    """Scales of a matrix, from the amax of every group where the rule looks at nothing else."""
    scaling = scheme.scaling
    assert scaling is not None
    if scaling.rule not in _KINDS:
        return torch_backend.scales_of(to_groups(source.float(), scaling.granularity), source, scheme)
    rows, columns = source.shape
    granularity = scaling.granularity
    amax_NG = torch.from_numpy(_amaxes(source, granularity.group_columns(columns)))
    if granularity.scope == "tensor":
        if scaling.rule == "amax" and not (scaling.tensor_scale or scaling.element_exponent) and _is_fp32(scaling):
            return _scale_of_tensor(amax_NG.numpy().max(), scheme)
        amax_NG = amax_NG.amax().reshape(1, 1)
    elif granularity.block_rows:
        block_rows = granularity.group_rows(rows)
        missing = -rows % block_rows
        filled = torch.cat([amax_NG, amax_NG[-1:].expand(missing, -1)]) if missing else amax_NG
        amax_NG = filled.reshape(-1, block_rows, filled.shape[1]).amax(1)
    return find_scales(amax_NG.unsqueeze(-1), scheme.format, scaling)


def _is_fp32(scaling: Scaling) -> bool:
    """Whether every scale is stored as it is found."""
    number = formats.FORMATS[scaling.scale_format]
    return isinstance(number, FloatFormat) and number.fraction_bits >= 23 and number.exponent_bits >= 8


def _scale_of_tensor(amax: np.float32, scheme: TensorScheme) -> Scales:
    """What `find_scales` finds of one amax, without its dozen operations on one number: training asks for hundreds."""
    scale = amax / np.float32(formats.FORMATS[scheme.format].max) if np.isfinite(amax) else np.float32(np.nan)
    return Scales(scale=torch.tensor([[[float(scale)]]]), offset=None, tensor_scale=None)


def _amaxes(source: Tensor, size: int) -> npt.NDArray[np.float32]:
    """max |x| of every group of every row, [N, G]; NaN where there is one."""
    rows, columns = source.shape
    amax_bits = np.empty((rows, -(-columns // size)), np.uint32)
    x = array_of(source)
    run_rows(tiles.amax_rows, tiles.amax_rows_parallel, (x, amax_bits), rows, (columns, size), source.numel())
    return amax_bits.view(np.float32)


def _finite_peak(source: Tensor, size: int) -> np.float32:
    """The largest amax of all groups that are finite."""
    columns = row_length(source.numel())
    peak = _amaxes(source.reshape(-1, columns), columns).max()
    if np.isfinite(peak):
        return peak
    amax_NG = _amaxes(source, size)
    return amax_NG.max(where=np.isfinite(amax_NG), initial=np.float32(0.0))


def is_short(number: Format) -> bool:
    """Whether 8 significant bits hold every number, so that bf16 does too."""
    match number:
        case FloatFormat():
            return number.fraction_bits <= 7
        case IntFormat():
            return max(number.max, -number.min) <= 256
        case CodebookFormat():
            return False


def stored_scales(scales: Tensor, number: Format) -> Tensor:
    """Scales in torch's dtype of their format, which holds them exactly. torch's own casts to 8 bits take longer."""
    dtype = stored_dtype(number)
    assert dtype is not None
    if _is_exponent(number):
        return (scales.view(torch.int32) >> 23).to(torch.uint8).view(dtype)  # 2^−127 has the field 0, NaN all ones
    if number.bits != 8 or why_no_code(number) is not None or scales.numel() == 0:
        return scales.to(dtype)
    rows, columns = scales.shape
    codes = np.empty((rows, columns), np.uint8)
    arrays = (array_of(scales.contiguous()), codes, np.ones((1, 1), np.float32))
    arguments = (columns, columns, rows, grid_of_format(number), 8)
    run_rows(packing.pack_scaled_rows, packing.pack_scaled_rows_parallel, arrays, rows, arguments, scales.numel())
    stored, is_nan = torch.from_numpy(codes), scales.isnan()
    if isinstance(number, FloatFormat) and number.nan_code is not None and bool(is_nan.any()):
        stored.masked_fill_(is_nan, number.nan_code)
    return stored.view(dtype)


def loaded_scales(scales: Tensor, number: Format) -> Tensor:
    """Undo `_stored`: fp32."""
    if _is_exponent(number):
        field = scales.view(torch.uint8).to(torch.int32)
        words = (field << 23) + ((field == 0).to(torch.int32) << 22) + ((field == 255).to(torch.int32) << 22)
        return words.view(torch.float32)
    if number.bits != 8 or why_no_code(number) is not None or scales.numel() == 0:
        return scales.to(torch.float32)
    rows, columns = scales.shape
    values = torch.empty(rows, columns)
    arrays = (scales.contiguous().view(torch.uint8).numpy(), array_of(values), np.ones((1, 1), np.float32))
    arguments = (columns, columns, rows, code_of_format(number), 8, None)
    run_rows(packing.unpack_rows, packing.unpack_rows_parallel, arrays, rows, arguments, scales.numel())
    return values


def _is_exponent(number: Format) -> bool:
    """Whether a code is the exponent field of fp32 (E8M0)."""
    return isinstance(number, FloatFormat) and number.bits == number.exponent_bits == 8 and number.bias == 127
