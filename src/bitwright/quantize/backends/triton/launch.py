"""Launching Triton kernels: a matrix cut into groups, memory for results, programs, and what is refused beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import MissingExtra, SchemeError
from bitwright.quantize.backends.triton.grids import grid_of, overflow_of, rule_of, table_of
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements that a program works on; of groups, at least one group.
BLOCK = 4096
#: Longer groups are read twice.
LARGEST_GROUP = 16384
_INF_WORD = 0x7F800000


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


def run_scaled(x_NK: Tensor, scheme: TensorScheme, out: Tensor, gives: str) -> QTensor:
    """Write what is asked for into `out`; return stored scales, which values do without, and `out` for the codes."""
    from bitwright.quantize.backends.triton import scaling as kernels

    scaling = scheme.scaling
    assert scaling is not None
    number, scale_number = formats.FORMATS[scheme.format], formats.FORMATS[scaling.scale_format]
    rule = rule_of(number, scaling, scale_number)
    grids = (
        *(grid_of(number), overflow_of(number, "saturate")),
        *(grid_of(scale_number), overflow_of(scale_number, "saturate")),
    )
    scales = tensor_peak = tensor_scale = None
    if gives != "values":
        shape = scaling.granularity.scale_shape(*x_NK.shape)
        scales = torch.empty(shape, dtype=torch.float32, device=x_NK.device)
    cut, source = _cut(x_NK, scheme), words(x_NK.contiguous())
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
        peaks = torch.zeros(max(cut.num_groups, 1), dtype=torch.int32, device=x_NK.device)
        run(kernels.peaks_kernel, num_programs, (source, peaks, *place, num_pieces), (*layout, BLOCK), x_NK)
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
            run(kernel, num_programs, arguments, (*layout, rule, *grids, "peak", *tile), x_NK, num_warps)
        tensor_scale = torch.empty((), dtype=torch.float32, device=x_NK.device)
        run(kernels.tensor_scale_kernel, 1, (tensor_peak, tensor_scale), (rule,), x_NK)
    arguments = (source, words(out), scales, tensor_peak, *rest)
    run(kernel, num_programs, arguments, (*layout, rule, *grids, gives, *tile), x_NK, num_warps)
    return QTensor(scheme=scheme, codes_NK=out, scales_NG=scales, tensor_scale=tensor_scale)


def run(
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


def row_tiles(rows: int, width: int) -> tuple[int, int, tuple[int, int]]:
    """Programs for [rows, width] elements, pieces of a row, and the rows and elements of a row that a program takes."""
    per_row = min(_power_of_two_from(width), BLOCK)
    num_rows = min(BLOCK // per_row, _power_of_two_from(rows))
    num_pieces = -(-width // per_row)
    return -(-rows // num_rows) * num_pieces, max(num_pieces, 1), (num_rows, per_row)


def _power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def words(x: Tensor) -> Tensor:
    """bf16 as int16, which is how kernels take it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def room(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Contiguous memory for a result of the shape of `x`."""
    if out is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        raise SchemeError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; "
            f"it has to be {dtype} {tuple(x.shape)} on {x.device}"
        )
    return out if out.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device)


def hand_back(written: Tensor, out: Tensor | None) -> Tensor:
    """What was written, in the place that the caller gave."""
    return written if out is None or out is written else out.copy_(written)


def why_not_run(dtype: torch.dtype) -> str | None:
    """Why kernels do not run on tensors of a dtype here; None if they do."""
    if find_spec("triton") is None:
        return "the package 'triton' is not installed"
    if dtype not in DTYPES:
        return f"its kernels read fp32, bf16 and fp16, not {dtype}"
    return None


def raise_if(reason: str | None, x: Tensor) -> None:
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
