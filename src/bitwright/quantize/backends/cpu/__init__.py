"""Quantisation on the CPU at the speed of memory: Numba kernels behind the interface of `backends`.

    elementwise   numbers by themselves, to nearest even
    modes         the same in every rounding mode
    tiles         groups under a scale: found on the way, or known
    packing       codes as bits, and back
    steps, rounding, lanes    what those are made of: blocks of numbers as LLVM vectors
    grids         a format as the few numbers that a kernel needs

Kernels are compiled at their first call and kept on disk. They run on as many threads as torch does
(`torch.set_num_threads`), and one after the other: Numba's own pool is not safe under concurrent callers everywhere.

Large results are allocated by NumPy, which asks for huge pages: memory fresh from the system otherwise costs several
times what it takes to fill it.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.formats.block_scales import tensor_scales
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.backends.cpu import elementwise, modes, packing, tiles
from bitwright.quantize.backends.cpu.announce import run
from bitwright.quantize.backends.cpu.grids import (
    Code,
    FloatGrid,
    Grid,
    OneZeroGrid,
    WideGrid,
    code_of,
    grid_of,
    why_no_code,
    why_no_grid,
)
from bitwright.quantize.backends.cpu.lanes import CACHE_LINE
from bitwright.quantize.backends.cpu.modes import MODES, why_no_mode
from bitwright.quantize.backends.cpu.steps import BLOCK, CORRECTED, SHORT_CODES
from bitwright.quantize.granularity import to_groups
from bitwright.quantize.pack import PackedTensor, stored_dtype
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scaling import Scales, find_scales
from bitwright.quantize.scheme import Scaling, TensorScheme

#: What arrays hold a torch dtype's numbers; the kernels tell them apart by it.
_ARRAY_DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
#: Numbers per thread below which a second thread costs more than it brings.
_MIN_PER_THREAD = 1 << 14
#: Results from here on are allocated in huge pages.
_HUGE_BYTES = 1 << 22
#: Results from here on are written past the caches.
_STREAMED_BYTES = 1 << 25
_KINDS = {
    "amax": tiles.AMAX,
    "ocp_floor": tiles.OCP_FLOOR,
    "round_up": tiles.ROUND_UP,
    "power_of_two": tiles.POWER_OF_TWO,
}
_ONE_AT_A_TIME = threading.Lock()
_LARGEST_FP32 = float(np.finfo(np.float32).max)


# --- what there is ----------------------------------------------------------------------------------------------------


def why_not_round(number: Format, dtype: torch.dtype, rounding: str, overflow: str) -> str | None:
    """Return why there is no kernel that rounds to `number`, or None if there is one."""
    if dtype not in _ARRAY_DTYPES:
        return f"CPU kernels take fp32, bf16 and fp16, not {dtype}"
    reason = why_no_mode(number)
    return why_no_grid(number, overflow) if rounding == "nearest_even" and reason is not None else reason


def why_not_scaled(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why there is no kernel that quantises under `scheme`, or None if there is one."""
    if dtype not in _ARRAY_DTYPES:
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
        return _round_by_mode(x, number, modes.mode_grid(number, overflow), MODES[rounding], seed, random_bits, out)
    source = x.detach().contiguous()
    target = _target(source, out)
    grid = _grid(number, overflow)
    is_bounded = not isinstance(grid, FloatGrid | OneZeroGrid) or bool(grid.limit == grid.largest)
    is_short = is_bounded and isinstance(number, FloatFormat) and _is_short(number) and x.dtype == torch.bfloat16
    arrays, streams = (_array(source), _array(target)), _streams(target)
    num_threads = _num_threads(source.numel())
    if num_threads > 1:
        with _ONE_AT_A_TIME:
            run(elementwise.round_parallel, *arrays, grid, is_bounded, is_short, streams, num_threads)
    else:
        run(elementwise.round_range, *arrays, 0, source.numel(), grid, is_bounded, is_short, streams)
    return _finished(target, x, out)


def _round_by_mode(
    x: Tensor, number: Format, grid: modes.ModeGrid, mode: int, seed: int, random_bits: int, out: Tensor | None
) -> Tensor:
    """Any rounding mode: fp32 arithmetic, narrowed to the dtype of `x` at the end."""
    source = x.detach().float().contiguous()
    target = _target(source, out if x.dtype == torch.float32 else None)
    arguments = (grid, mode, np.uint64(seed), random_bits)
    arrays, num_threads = (_array(source), _array(target)), _num_threads(source.numel())
    if num_threads > 1:
        with _ONE_AT_A_TIME:
            run(modes.round_modes_parallel, *arrays, source.numel(), *arguments, num_threads)
    else:
        run(modes.round_modes, *arrays, 0, source.numel(), *arguments)
    if x.dtype == torch.float32:
        return _finished(target, x, out)
    return target.to(x.dtype) if out is None else out.copy_(target)


def fake_quantize(x_NK: Tensor, scheme: TensorScheme, *, out: Tensor | None = None) -> Tensor:
    """Values of a matrix after quantising and dequantising; `why_not_scaled` must have said None."""
    if x_NK.numel() == 0:
        return x_NK.clone() if out is None else out
    if x_NK.dtype == torch.float16:  # seldom enough to go the long way
        values = fake_quantize(x_NK.float(), scheme).to(x_NK.dtype)
        return values if out is None else out.copy_(values)
    source = x_NK.detach().contiguous()
    target = _target(source, out)
    _quantize_into(source, target, scheme, gives_codes=False, wants_scales=False)
    return _finished(target, x_NK, out)


def quantize(x_NK: Tensor, scheme: TensorScheme) -> QTensor:
    """Codes (as fp32 values) and scales of a matrix; `why_not_scaled` must have said None."""
    if x_NK.numel() == 0:
        return torch_backend.quantize(x_NK, scheme)
    source = x_NK.detach().float().contiguous()
    codes = _new(source.shape, torch.float32)
    scales, tensor_scale = _quantize_into(source, codes, scheme, gives_codes=True, wants_scales=True)
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
    target = _target(source, out)
    scale = np.float32((1 / inv_scale.float()).item())
    arguments = (np.float32(inv_scale.item()), scale, _grid(number), _streams(target))
    arrays, num_threads = (_array(source), _array(target)), _num_threads(source.numel())
    if num_threads > 1:
        with _ONE_AT_A_TIME:
            amax_bits = run(tiles.multiply_parallel, *arrays, *arguments, num_threads)
    else:
        amax_bits = run(tiles.multiply_range, *arrays, 0, source.numel(), *arguments)
    return _finished(target, x, out), torch.tensor(np.uint32(amax_bits).view(np.float32).item())


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
    packed = _new((rows, -(-columns * number.bits // 8)), torch.uint8)
    scales, tensor_scale = _quantize_into(source, packed, scheme, gives_codes=True, wants_scales=True)
    return PackedTensor(
        scheme=scheme,
        shape=(rows, columns),
        codes=packed,
        scales=_stored(scales / 2.0**scheme.scaling.element_exponent, formats.FORMATS[scheme.scaling.scale_format]),
        tensor_scale=tensor_scale,
    )


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Values of a packed matrix; `why_not_packed` must have said None."""
    scaling = packed.scheme.scaling
    assert scaling is not None and packed.scales is not None
    rows, columns = packed.shape
    if rows * columns == 0 or dtype == torch.float16:
        return torch_backend.unpack(packed, dtype)
    number = formats.FORMATS[packed.scheme.format]
    scales = _loaded(packed.scales, formats.FORMATS[scaling.scale_format]) * 2.0**scaling.element_exponent
    if packed.tensor_scale is not None:
        scales = scales * packed.tensor_scale
    target = _new((rows, columns), dtype) if out is None else out
    size, block_rows = scaling.granularity.group_columns(columns), scaling.granularity.group_rows(rows)
    arrays = (packed.codes.numpy(), _array(target), scales.numpy())
    arguments = (columns, size, block_rows, _code(number), number.bits, _streams(target, columns, size))
    _run_rows(packing.unpack_rows, packing.unpack_rows_parallel, arrays, rows, arguments, rows * columns)
    return target


# --- one matrix -------------------------------------------------------------------------------------------------------


def _quantize_into(
    source: Tensor, target: Tensor, scheme: TensorScheme, *, gives_codes: bool, wants_scales: bool
) -> tuple[Tensor, Tensor | None]:
    """Write values, codes or bytes of a contiguous matrix; returns its scales [R, G] (empty unless wanted) and tensor
    scale."""
    scaling = scheme.scaling
    assert scaling is not None
    number = formats.FORMATS[scheme.format]
    rows, columns = source.shape
    size = scaling.granularity.group_columns(columns)
    if not _finds_scales_on_the_way(scheme, rows, columns):
        scales = _find_scales(source, scheme)
        _write_known(source, target, scales.effective[..., 0], scheme, gives_codes)
        return scales.scale[..., 0], scales.tensor_scale
    found = np.empty((rows, scaling.granularity.num_groups(columns)) if wants_scales else (0, 0), np.float32)
    rule, grid = _rule_of(scheme, source), _grid(number)
    flat = (_array(source), target.numpy() if target.dtype == torch.uint8 else _array(target), found.reshape(-1))
    if target.dtype == torch.uint8:
        num_rows = rows
        arguments: tuple[Any, ...] = (columns, size, rule, grid, number.bits)
        one, several = packing.pack_rows, packing.pack_rows_parallel
    else:
        num_rows, run_columns = _runs_of(rows, columns, size)
        arguments = (run_columns, size, rule, grid, gives_codes, _streams(target, columns, size))
        one, several = tiles.quantize_rows, tiles.quantize_rows_parallel
    _run_rows(one, several, flat, num_rows, arguments, source.numel())
    tensor_scale = torch.tensor(rule.tensor_scale, dtype=torch.float32) if scaling.tensor_scale else None
    return torch.from_numpy(found), tensor_scale


def _run_rows(
    one: Any, several: Any, arrays: tuple[Any, ...], num_rows: int, arguments: tuple[Any, ...], numbers: int
) -> None:
    """Call a kernel for all rows, on one thread or on several."""
    num_threads = min(num_rows, _num_threads(numbers))
    if num_threads > 1:
        with _ONE_AT_A_TIME:
            run(several, *arrays, num_rows, *arguments, num_threads)
    else:
        run(one, *arrays, 0, num_rows, *arguments)


def _finds_scales_on_the_way(scheme: TensorScheme, rows: int, columns: int) -> bool:
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


@cache
def _grid(number: Format, overflow: str = "saturate") -> Grid:
    return grid_of(number, overflow)


@cache
def _code(number: Format) -> Code:
    return code_of(number)


def _store_of(scaling: Scaling, number: Format) -> tuple[int, float, float, float] | None:
    """How a kernel stores scales in a format; None if it cannot."""
    gives_powers_of_two = scaling.rule != "amax"
    if isinstance(number, FloatFormat) and not number.has_zero and number.fraction_bits == 0 and gives_powers_of_two:
        return tiles.STORE_RANGE, number.min, number.max, 0.0
    if number.name == "fp32":
        return tiles.STORE_RANGE, -_LARGEST_FP32, _LARGEST_FP32, 0.0
    if not isinstance(number, FloatFormat) or why_no_grid(number, "saturate") is not None:
        return None
    grid = grid_of(number)
    if isinstance(grid, WideGrid):
        return tiles.STORE_WIDE, float(grid.dropped_bits), float(grid.limit_bits), 0.0
    if isinstance(grid, FloatGrid):
        return tiles.STORE_FLOAT, float(grid.shift), float(grid.emin_bits), float(grid.largest)
    return None


def _rule_of(scheme: TensorScheme, source: Tensor) -> tiles.Rule:
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
    return tiles.Rule(
        kind=_KINDS[scaling.rule],
        top=math.ldexp(number.max, scaling.element_exponent),
        emax=number.emax + scaling.element_exponent,
        margin=scaling.margin,
        inv_tensor_scale=1.0,
        tensor_scale=1.0,
        unit=2.0**scaling.element_exponent,
        method=SHORT_CODES if is_exact and _is_short(number) else CORRECTED,
        store=store[0],
        store_a=store[1],
        store_b=store[2],
        store_c=store[3],
    )


def _find_scales(source: Tensor, scheme: TensorScheme) -> Scales:
    """Scales of a matrix, from the amax of every group where the rule looks at nothing else."""
    scaling = scheme.scaling
    assert scaling is not None
    if scaling.rule not in _KINDS:
        return torch_backend.scales_of(to_groups(source.float(), scaling.granularity), source, scheme)
    rows, columns = source.shape
    granularity = scaling.granularity
    amax_NG = torch.from_numpy(_amaxes(source, granularity.group_columns(columns)))
    if granularity.scope == "tensor":
        amax_NG = amax_NG.amax().reshape(1, 1)
    elif granularity.block_rows:
        block_rows = granularity.group_rows(rows)
        missing = -rows % block_rows
        filled = torch.cat([amax_NG, amax_NG[-1:].expand(missing, -1)]) if missing else amax_NG
        amax_NG = filled.reshape(-1, block_rows, filled.shape[1]).amax(1)
    return find_scales(amax_NG.unsqueeze(-1), scheme.format, scaling)


def _amaxes(source: Tensor, size: int) -> npt.NDArray[np.float32]:
    """max |x| of every group of every row, [N, G]; NaN where there is one."""
    rows, columns = source.shape
    amax_bits = np.empty((rows, -(-columns // size)), np.uint32)
    x = _array(source)
    num_threads = min(rows, _num_threads(source.numel()))
    if num_threads > 1:
        with _ONE_AT_A_TIME:
            run(tiles.amax_rows_parallel, x, amax_bits, columns, size, num_threads)
    else:
        run(tiles.amax_rows, x, amax_bits, 0, rows, columns, size)
    return amax_bits.view(np.float32)


def _finite_peak(source: Tensor, size: int) -> np.float32:
    """The largest amax of all groups that are finite."""
    columns = _row_length(source.numel())
    peak = _amaxes(source.reshape(-1, columns), columns).max()
    if np.isfinite(peak):
        return peak
    amax_NG = _amaxes(source, size)
    return amax_NG.max(where=np.isfinite(amax_NG), initial=np.float32(0.0))


def _write_known(source: Tensor, target: Tensor, scales_RG: Tensor, scheme: TensorScheme, gives_codes: bool) -> None:
    """Values, codes or bytes of a matrix under scales [R, G] that are known."""
    assert scheme.scaling is not None
    number = formats.FORMATS[scheme.format]
    rows, columns = source.shape
    granularity = scheme.scaling.granularity
    size, block_rows = granularity.group_columns(columns), granularity.group_rows(rows)
    scales = scales_RG.contiguous().numpy()
    if target.dtype == torch.uint8:
        arrays: tuple[Any, ...] = (_array(source), target.numpy(), scales)
        packed_as: tuple[Any, ...] = (columns, size, block_rows, _grid(number), number.bits)
        _run_rows(packing.pack_scaled_rows, packing.pack_scaled_rows_parallel, arrays, rows, packed_as, source.numel())
        return
    if granularity.scope == "tensor":
        columns = size = _row_length(source.numel())
        rows = block_rows = source.numel() // columns
    arrays = (_array(source), _array(target), scales)
    arguments = (columns, size, block_rows, _grid(number), gives_codes, _streams(target, columns, size))
    _run_rows(tiles.scale_rows, tiles.scale_rows_parallel, arrays, rows, arguments, source.numel())


def _is_short(number: Format) -> bool:
    """Whether 8 significant bits hold every number, so that bf16 does too."""
    match number:
        case FloatFormat():
            return number.fraction_bits <= 7
        case IntFormat():
            return max(number.max, -number.min) <= 256
        case CodebookFormat():
            return False


# --- arrays -----------------------------------------------------------------------------------------------------------


def _array(x: Tensor) -> Any:
    """The numbers of a contiguous tensor as a flat NumPy array that the kernels know."""
    return x.view(_ARRAY_DTYPES[x.dtype]).reshape(-1).numpy()


def _target(source: Tensor, out: Tensor | None) -> Tensor:
    """Where a kernel writes: `out` if it is contiguous, else new memory."""
    return out if out is not None and out.is_contiguous() else _new(source.shape, source.dtype)


def _finished(target: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return target if out is None or target is out else out.copy_(target)


def _new(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory to write to: in huge pages where it is large."""
    if math.prod(shape) * dtype.itemsize < _HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).reshape(shape)


def _streams(target: Tensor, columns: int = BLOCK, size: int = BLOCK) -> bool | None:
    """True if results go past the caches, else None: they are larger than those, and blocks begin with cache lines."""
    if target.numel() * target.element_size() < _STREAMED_BYTES or target.data_ptr() % CACHE_LINE:
        return None
    return True if columns % BLOCK == 0 and (size % BLOCK == 0 or size in (8, 16, 32)) else None


def _stored(scales: Tensor, number: Format) -> Tensor:
    """Scales in torch's dtype of their format, which holds them exactly. torch's own casts to 8 bits take longer."""
    dtype = stored_dtype(number)
    assert dtype is not None
    if _is_exponent(number):
        return (scales.view(torch.int32) >> 23).to(torch.uint8).view(dtype)  # 2^−127 has the field 0, NaN all ones
    if number.bits != 8 or why_no_code(number) is not None or scales.numel() == 0:
        return scales.to(dtype)
    rows, columns = scales.shape
    codes = np.empty((rows, columns), np.uint8)
    arrays = (_array(scales.contiguous()), codes, np.ones((1, 1), np.float32))
    arguments = (columns, columns, rows, _grid(number), 8)
    _run_rows(packing.pack_scaled_rows, packing.pack_scaled_rows_parallel, arrays, rows, arguments, scales.numel())
    stored, is_nan = torch.from_numpy(codes), scales.isnan()
    if isinstance(number, FloatFormat) and number.nan_code is not None and bool(is_nan.any()):
        stored.masked_fill_(is_nan, number.nan_code)
    return stored.view(dtype)


def _loaded(scales: Tensor, number: Format) -> Tensor:
    """Undo `_stored`: fp32."""
    if _is_exponent(number):
        field = scales.view(torch.uint8).to(torch.int32)
        words = (field << 23) + ((field == 0).to(torch.int32) << 22) + ((field == 255).to(torch.int32) << 22)
        return words.view(torch.float32)
    if number.bits != 8 or why_no_code(number) is not None or scales.numel() == 0:
        return scales.to(torch.float32)
    rows, columns = scales.shape
    values = torch.empty(rows, columns)
    arrays = (scales.contiguous().view(torch.uint8).numpy(), _array(values), np.ones((1, 1), np.float32))
    arguments = (columns, columns, rows, _code(number), 8, None)
    _run_rows(packing.unpack_rows, packing.unpack_rows_parallel, arrays, rows, arguments, scales.numel())
    return values


def _is_exponent(number: Format) -> bool:
    """Whether a code is the exponent field of fp32 (E8M0)."""
    return isinstance(number, FloatFormat) and number.bits == number.exponent_bits == 8 and number.bias == 127


def _num_threads(numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), numbers // _MIN_PER_THREAD))


def _row_length(numbers: int) -> int:
    """A length that divides a number of elements, near RUN_NUMBERS, so that threads share them; else all of them."""
    for length in (tiles.RUN_NUMBERS, 1024, 256, 64):
        if numbers % length == 0:
            return length
    return numbers


def _runs_of(rows: int, columns: int, size: int) -> tuple[int, int]:
    """Rows and columns of the same matrix cut anew for threads: into runs of whole groups where its rows hold such."""
    if columns % size or rows > 64:
        return rows, columns
    length = size * tiles.RUN_GROUPS
    return (rows * columns // length, length) if rows * columns % length == 0 else (rows, columns)
