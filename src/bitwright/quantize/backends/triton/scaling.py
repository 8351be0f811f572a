"""Triton kernels: groups of numbers under one scale, found and used on the way.

The arithmetic is that of `quantize/scaling.py`, operation by operation; powers of two are made of exponent fields.
Groups that fit a program's registers are read once and written once (`groups_kernel`: several groups a program). Longer
ones, and one scale per tensor, take two launches: `peaks_kernel`, whose programs agree on a group's largest magnitude
by an atomic maximum of its word (words of magnitudes are ordered like the magnitudes, Inf and NaN last), and
`pieces_kernel`. Two levels of scales look for the tensor's largest magnitude first.

What is written: values, values of codes (fp32), or codes (uint8 or uint16), and stored scales.

Legend: N rows, K columns of the matrix; r rows and c columns of a group; G groups along a row; element e of a group is
at row e // c, column e % c of it. A width of 0 stands for K.
"""

# Kernels are written in Triton's language, which type checkers of Python do not know.
# mypy: ignore-errors

import triton
import triton.language as tl

from bitwright.quantize.backends.triton.rounding import (
    codebook_position,
    floor_log2,
    load_fp32,
    round_bits,
    round_fp32,
    store_fp32,
    to_bits,
    to_float,
)

_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LARGEST = tl.constexpr(0x7F7FFFFF)
_SMALLEST_TENSOR_SCALE = tl.constexpr(0x00200000)  # 2^−128


@triton.jit
def _power_of_two(exponent):
    """2^exponent, the exponent held within those of fp32."""
    normal = (tl.minimum(tl.maximum(exponent, -126), 127) + 127) << 23
    subnormal = 1 << (tl.minimum(tl.maximum(exponent, -149), -127) + 149)
    return to_float(tl.where(exponent >= -126, normal, subnormal))


@triton.jit
def tensor_scales(peak_word, rule: tl.constexpr):
    """Word of the tensor's largest magnitude → tensor scale and what block scales are multiplied with."""
    peak = to_float(peak_word)
    limit = tl.full(peak.shape, rule.tensor_limit, tl.float32)
    scale = to_float(tl.maximum(to_bits(tl.math.div_rn(peak, limit)), _SMALLEST_TENSOR_SCALE))
    inverse = to_float(tl.minimum(to_bits(tl.math.div_rn(limit, peak)), _LARGEST))
    return tl.where(peak_word == 0, 1.0, scale), tl.where(peak_word == 0, 1.0, inverse)


@triton.jit
def stored_scale(amax_word, inverse, rule: tl.constexpr, grid: tl.constexpr, overflow: tl.constexpr):
    """Word of a group's largest magnitude → what multiplies its codes; NaN where the group is not finite."""
    amax = to_float(amax_word)
    largest = tl.full(amax.shape, rule.largest, tl.float32)
    if rule.kind == "amax":
        ideal = tl.math.div_rn(amax, largest)
    elif rule.kind == "ocp_floor":
        ideal = tl.where(amax_word == 0, 0.0, _power_of_two(floor_log2(amax_word) - rule.emax))
    elif rule.kind == "round_up":
        ratio = to_bits(tl.math.div_rn(amax, largest))
        floor = floor_log2(ratio)
        is_above = to_bits(_power_of_two(floor)) < ratio
        ideal = tl.where(ratio == 0, 0.0, _power_of_two(floor + is_above.to(tl.int32)))
    else:
        tl.static_assert(rule.kind == "power_of_two")
        ratio = tl.minimum(to_bits(tl.math.div_rn(largest, amax)), _LARGEST)
        ideal = tl.where(amax_word == 0, 0.0, _power_of_two(rule.margin - floor_log2(ratio)))
    if rule.tensor_limit > 0:
        ideal *= inverse
    stored = to_float(round_bits(to_bits(ideal), 0, grid, overflow, "nearest_even", 32))
    if rule.element_exponent != 0:
        stored *= _power_of_two(tl.full(amax.shape, rule.element_exponent, tl.int32))
    return tl.where(amax_word < _INF, stored, to_float(tl.full(amax.shape, _NAN, tl.int32)))


@triton.jit
def code_of(x, table, grid: tl.constexpr, overflow: tl.constexpr):
    """Number of the format nearest to x, saturating → its code, int32; 0 for NaN, whose group has the scale NaN."""
    is_nan = (to_bits(x) & _MAGNITUDE) > _INF
    if grid.is_codebook:
        position = codebook_position(x, 0, table, grid, "nearest_even", 32)
        code = tl.load(table + (4 << grid.bits) + position).to(tl.int32)
    elif grid.is_integer:  # two's complement
        rounded = to_float(round_bits(to_bits(tl.where(is_nan, 0.0, x)), 0, grid, overflow, "nearest_even", 32))
        code = rounded.to(tl.int32) & ((1 << grid.bits) - 1)
    else:
        bits = round_bits(to_bits(x), 0, grid, overflow, "nearest_even", 32)
        word = bits & _MAGNITUDE
        field = word >> 23
        exponent = tl.maximum(floor_log2(word), grid.emin)
        significand = tl.where(field > 0, (word & 0x7FFFFF) | 0x800000, word)
        shift = exponent - grid.fraction_bits + 150 - tl.maximum(field, 1)
        code = ((exponent - grid.emin) << grid.fraction_bits) + (significand >> tl.minimum(tl.maximum(shift, 0), 31))
        if grid.smallest > 0:
            code -= 1 << grid.fraction_bits
        if grid.signed:
            code |= (bits < 0).to(tl.int32) << (grid.bits - 1)
    return tl.where(is_nan, 0, code)


@triton.jit
def _write(
    out,
    multiplier,
    x,
    offset,
    mask,
    table,
    rule: tl.constexpr,
    grid: tl.constexpr,
    overflow: tl.constexpr,
    gives: tl.constexpr,
):
    """Numbers of groups under the scales `multiplier` (of the shape of x, or broadcast to it)."""
    if rule.divides_by_product:
        # by the stored scale, whose reciprocal fp32 holds, then by the power of two of the elements; where the first
        # product is subnormal the number is far below half the smallest code
        unit = _power_of_two(tl.full(multiplier.shape, rule.element_exponent, tl.int32))
        quotient = x * tl.math.div_rn(unit, multiplier)
        if rule.element_exponent != 0:
            quotient *= _power_of_two(tl.full(x.shape, -rule.element_exponent, tl.int32))
    else:
        divisor = tl.where(multiplier == 0, float("inf"), multiplier)
        quotient = tl.math.div_rn(x, tl.broadcast_to(divisor, x.shape))
    if gives == "codes":
        code = code_of(quotient, table, grid, overflow)
        tl.store(out + offset, code.to(out.dtype.element_ty), mask=mask)
    else:
        rounded = round_fp32(quotient, 0, table, grid, overflow)
        if gives == "values":
            rounded *= multiplier
        store_fp32(out + offset, rounded, mask, False)


@triton.jit
def _place(group, element, rows, columns, num_column_groups, block_rows: tl.constexpr, width: tl.constexpr):
    """Offset of an element of a group, and whether the matrix has it."""
    if width == 0:  # groups are rows
        return group.to(tl.int64) * columns + element, (group < rows) & (element < columns)
    else:
        first_column = (group % num_column_groups) * width
        if block_rows == 1:
            row = group // num_column_groups
            column = first_column + element
            is_inside = element < width
        else:
            row = (group // num_column_groups) * block_rows + element // width
            column = first_column + element % width
            is_inside = element < block_rows * width
        return row.to(tl.int64) * columns + column, is_inside & (row < rows) & (column < columns)


@triton.jit
def groups_kernel(
    x_pointer,
    out_pointer,
    scales_pointer,
    tensor_peak_pointer,
    table,
    rows,
    columns,
    num_column_groups,
    num_groups,
    block_rows: tl.constexpr,
    width: tl.constexpr,
    rule: tl.constexpr,
    grid: tl.constexpr,
    overflow: tl.constexpr,
    scale_grid: tl.constexpr,
    scale_overflow: tl.constexpr,
    gives: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`GROUPS` whole groups a program, each in `BLOCK` places. `gives` "peak": the tensor's largest magnitude."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    offset, mask = _place(
        group[:, None], tl.arange(0, BLOCK)[None, :], rows, columns, num_column_groups, block_rows, width
    )
    mask = mask & (group < num_groups)[:, None]
    x = load_fp32(x_pointer + offset, mask)
    amax_word = tl.max(to_bits(x) & _MAGNITUDE, axis=1)
    if gives == "peak":
        finite = tl.where(amax_word < _INF, amax_word, 0)
        tl.atomic_max(tensor_peak_pointer, tl.max(finite, axis=0))
    else:
        tensor_scale, inverse = amax_word, amax_word
        if rule.tensor_limit > 0:
            tensor_scale, inverse = tensor_scales(tl.load(tensor_peak_pointer + group * 0), rule)
        scale = stored_scale(amax_word, inverse, rule, scale_grid, scale_overflow)
        if scales_pointer is not None:
            tl.store(scales_pointer + group, scale, mask=group < num_groups)
        multiplier = scale * tensor_scale if rule.tensor_limit > 0 else scale
        _write(out_pointer, multiplier[:, None], x, offset, mask, table, rule, grid, overflow, gives)


@triton.jit
def peaks_kernel(
    x_pointer,
    peaks_pointer,
    rows,
    columns,
    num_column_groups,
    num_pieces,
    block_rows: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One piece of one long group a program: ``peaks[group] = max(peaks[group], words of magnitudes)``."""
    group, piece = tl.program_id(0) // num_pieces, tl.program_id(0) % num_pieces
    element = piece.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    everywhere = group + tl.zeros([BLOCK], tl.int32)
    offset, mask = _place(everywhere, element, rows, columns, num_column_groups, block_rows, width)
    word = to_bits(load_fp32(x_pointer + offset, mask)) & _MAGNITUDE
    tl.atomic_max(peaks_pointer + group, tl.max(word, axis=0))


@triton.jit
def pieces_kernel(
    x_pointer,
    out_pointer,
    scales_pointer,
    tensor_peak_pointer,
    peaks_pointer,
    table,
    rows,
    columns,
    num_column_groups,
    num_pieces,
    block_rows: tl.constexpr,
    width: tl.constexpr,
    rule: tl.constexpr,
    grid: tl.constexpr,
    overflow: tl.constexpr,
    scale_grid: tl.constexpr,
    scale_overflow: tl.constexpr,
    gives: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One piece of one long group a program, whose largest magnitude is known."""
    group, piece = tl.program_id(0) // num_pieces, tl.program_id(0) % num_pieces
    element = piece.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    everywhere = group + tl.zeros([BLOCK], tl.int32)
    offset, mask = _place(everywhere, element, rows, columns, num_column_groups, block_rows, width)
    x = load_fp32(x_pointer + offset, mask)
    # one lane each: Triton's scalars have no shape to divide in
    lane = tl.arange(0, 1)
    amax_word = tl.load(peaks_pointer + group + lane)
    tensor_scale, inverse = amax_word, amax_word
    if rule.tensor_limit > 0:
        tensor_scale, inverse = tensor_scales(tl.load(tensor_peak_pointer + lane), rule)
    scale = stored_scale(amax_word, inverse, rule, scale_grid, scale_overflow)
    if scales_pointer is not None:
        tl.store(scales_pointer + group + lane, scale, mask=(piece + lane) == 0)
    multiplier = scale * tensor_scale if rule.tensor_limit > 0 else scale
    _write(out_pointer, multiplier, x, offset, mask, table, rule, grid, overflow, gives)


@triton.jit
def tensor_scale_kernel(tensor_peak_pointer, tensor_scale_pointer, rule: tl.constexpr):
    """The tensor scale of a tensor's largest magnitude, once."""
    lane = tl.arange(0, 1)
    tensor_scale, _ = tensor_scales(tl.load(tensor_peak_pointer + lane), rule)
    tl.store(tensor_scale_pointer + lane, tensor_scale)
