"""Triton kernels: products with packed weights, whose codes are decoded in registers.

    y[m, n] = Σ_g scale[n, g] · Σ_k (code[n, k] − zero point[n, g]) · x[m, k]  +  Σ_g minimum[n, g] · Σ_k x[m, k]

`multiply_kernel` takes one token: plain products and sums in fp32, each thread over the words that it read. Codes are
where `matmul_layout` says. `product_kernel` takes several: matrix units multiply 16-bit floats, exactly, and sum in
fp32; columns go by in their own order, a group of scales or a piece of one at a time, so that a scale meets the sum of
its group. Programs that share an output each write their part of the sum, and `add_kernel` adds the parts in order:
the same numbers on every run. Rejected: atomic additions, which come in any order.

What scales are per: "row" (also one for all), "lane", "code" (a lane has several), or "none" of them. Scales and
offsets of a dtype that Triton reads are numbers; of bits, a stream of codes, one after the other.

Products and sums may be contracted: one rounding less.

Legend: N rows, K columns of the weight, M tokens; S parts of a sum; L lanes of a chunk, of u codes and v words each.
"""

# Kernels are written in Triton's language, which type checkers of Python do not know.
# mypy: ignore-errors

import triton
import triton.language as tl

from bitwright.quantize.backends.triton.rounding import load_fp32, store_fp32, to_bits, to_float

_INF = tl.constexpr(0x7F800000)
_UPPER_HALF = tl.constexpr(-0x10000)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def decode(word, shift: tl.constexpr, values, number: tl.constexpr):
    """Codes in bits shift … shift + bits − 1 of words, int32 → fp32; `values`: of a format that goes by its table."""
    if number.kind == "integer":
        # 2^(23 − low) has its unit at bit `low`
        low: tl.constexpr = shift if shift + number.bits <= 23 else shift - 16
        held = word if shift + number.bits <= 23 else word >> 16
        field = held & (((1 << number.bits) - 1) << low)
        return to_float(field ^ ((number.top << low) | ((150 - low) << 23))) - ((1 << (23 - low)) + number.top) * 1.0
    elif number.kind == "float":
        # the sign on top, copies of it in between, the exponent's lowest bit at bit 23
        field = (word << (32 - shift - number.bits)) >> (8 - number.exponent_bits)
        fraction_bits: tl.constexpr = number.bits - 1 - number.exponent_bits
        value = to_float(field & (((1 << (number.bits - 1)) - 1) << (23 - fraction_bits) | -0x80000000))
        if number.factor != 1.0:
            value *= number.factor
        if number.has_specials:
            is_inf = tl.abs(value) == number.inf
            value = tl.where(
                tl.abs(value) > number.largest, tl.where(is_inf, value * float("inf"), float("nan")), value
            )
        return value
    else:
        return tl.load(values + ((word >> shift) & ((1 << number.bits) - 1)))


@triton.jit
def read(pointer, index, mask, values, number: tl.constexpr):
    """Scales or offsets at places of their array, fp32; 0 outside the mask."""
    if pointer.dtype.element_ty == tl.uint8:
        if number.bits == 8:
            code = tl.load(pointer + index, mask=mask, other=0).to(tl.int32)
        else:
            bit = index * number.bits
            code = tl.load(pointer + bit // 8, mask=mask, other=0).to(tl.int32)
            if 8 % number.bits != 0:
                straddles = mask & (bit % 8 + number.bits > 8)
                code |= tl.load(pointer + bit // 8 + 1, mask=straddles, other=0).to(tl.int32) << 8
            code = code >> (bit % 8)
        return tl.where(mask, decode(code, 0, values, number), 0.0)
    else:
        return load_fp32(pointer + index, mask)


@triton.jit
def _place_of(row, group, scaling: tl.constexpr, num_groups):
    """Where the scale of a row and a group lies."""
    return (row // scaling.group_rows) * num_groups + group


@triton.jit
def _next_value(pointers, word, mask, values, c: tl.constexpr, number: tl.constexpr, chunk: tl.constexpr):
    """Value of code c of lanes, and the word that the next one begins in; `word`: what code c − 1 ended in."""
    plane: tl.constexpr = (c * number.bits) // 32
    shift: tl.constexpr = (c * number.bits) % 32
    if shift == 0 and c > 0:
        word = tl.load(pointers + plane * chunk.lanes, mask=mask, other=0)
    if shift + number.bits > 32:
        begun = (word >> shift) & ((1 << (32 - shift)) - 1)
        word = tl.load(pointers + (plane + 1) * chunk.lanes, mask=mask, other=0)
        return decode(begun | (word << (32 - shift)), 0, values, number), word
    else:
        return decode(word, shift, values, number), word


# sizes that no address is a multiple of are no other kernel
@triton.jit(do_not_specialize=["rows", "num_groups", "num_tiles", "tiles_per_part"])
def multiply_kernel(
    x_pointer,
    words_pointer,
    values,
    scales_pointer,
    scale_values,
    offsets_pointer,
    offset_values,
    tensor_scale_pointer,
    out_pointer,
    rows,
    columns,
    num_lane_steps,
    num_groups,
    num_tiles,
    tiles_per_part,
    number: tl.constexpr,
    chunk: tl.constexpr,
    scaling: tl.constexpr,
    is_whole: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One token: x [K] → `ROWS` rows of part program_id(1) of the sum, fp32 [S, N]; of all of it, y in its dtype."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    num_words = num_lane_steps * (chunk.step * chunk.words)
    total = tl.zeros([ROWS, LANES], tl.float32)
    first_tile = tl.program_id(1) * tiles_per_part
    for tile in range(first_tile, tl.minimum(first_tile + tiles_per_part, num_tiles)):
        lane = tile * LANES + tl.arange(0, LANES)
        mask = is_row[:, None] & (lane // chunk.step < num_lane_steps)[None, :]
        first_word = (lane // chunk.lanes) * (chunk.lanes * chunk.words) + lane % chunk.lanes
        first_column = (lane // chunk.lanes) * (chunk.lanes * chunk.codes) + lane % chunk.lanes
        pointers = words_pointer + (row.to(tl.int64)[:, None] * num_words + first_word[None, :])
        if scaling.per == "lane":
            place = _place_of(row[:, None], (lane // scaling.group_lanes)[None, :], scaling, num_groups)
            scale = read(scales_pointer, place, mask, scale_values, scaling.scales) * scaling.unit
            if scaling.symmetry != "symmetric":
                offset = read(offsets_pointer, place, mask, offset_values, scaling.offsets)
        part = tl.zeros([ROWS, LANES], tl.float32)
        sums = tl.zeros([LANES], tl.float32)
        word = tl.load(pointers, mask=mask, other=0)
        for c in tl.static_range(chunk.codes):
            value, word = _next_value(pointers, word, mask, values, c, number, chunk)
            column = first_column + c * chunk.lanes
            x = load_fp32(x_pointer + column, column < columns)
            if scaling.per == "code":
                is_code = mask & (column < columns)[None, :]
                place = _place_of(row[:, None], (column // scaling.group_columns)[None, :], scaling, num_groups)
                if scaling.symmetry == "zero_point":
                    value -= read(offsets_pointer, place, is_code, offset_values, scaling.offsets)
                value *= read(scales_pointer, place, is_code, scale_values, scaling.scales) * scaling.unit
                if scaling.symmetry == "minimum":
                    value += read(offsets_pointer, place, is_code, offset_values, scaling.offsets)
            elif scaling.symmetry == "zero_point":
                value -= offset
            elif scaling.symmetry == "minimum":
                sums += x
            part += value * x[None, :]
        if scaling.per == "lane":
            part *= scale
            if scaling.symmetry == "minimum":
                part += offset * sums[None, :]
        total += part
    y = tl.sum(total, axis=1)
    if scaling.per == "row":
        y *= read(scales_pointer, row // scaling.group_rows, is_row, scale_values, scaling.scales) * scaling.unit
    if is_whole and tensor_scale_pointer is not None:
        y *= tl.load(tensor_scale_pointer)
    store_fp32(out_pointer + tl.program_id(1) * rows + row, y, is_row, False)


@triton.jit
def _upper_half(x):
    """fp32 → the fp32 number of its upper 16 bits, which bf16 holds; NaN stays NaN."""
    return tl.where(x == x, to_float(to_bits(x) & _UPPER_HALF), x)


@triton.jit
def _finite(x):
    """Numbers, and 0 for those that are not finite."""
    return tl.where((to_bits(x) & _INF) == _INF, 0.0, x)


@triton.jit
def _operand(x, element: tl.constexpr):
    """Numbers as matrix units take them; Triton's interpreter multiplies no bf16, but what bf16 holds."""
    narrow = x.to(element)
    return narrow.to(tl.float32) if _INTERPRETED else narrow


@triton.jit
def _add_products(total, x_MK, w_NK, element: tl.constexpr, x_parts: tl.constexpr, w_parts: tl.constexpr):
    """total + x wᵀ: products of parts that `element`, a 16-bit float, holds. Infinity meets the first part alone."""
    for i in tl.static_range(x_parts):
        x = _upper_half(x_MK) if x_parts > 1 else x_MK
        w_rest = w_NK
        for j in tl.static_range(w_parts):
            w = _upper_half(w_rest) if w_parts > 1 else w_rest
            x_part = _operand(x if j == 0 else _finite(x), element)
            w_part = _operand(w if i == 0 else _finite(w), element)
            total = tl.dot(x_part, tl.trans(w_part), total)
            if j + 1 < w_parts:
                w_rest = _finite(w_rest) - _finite(w)
        if i + 1 < x_parts:
            x_MK = _finite(x_MK) - _finite(x)
    return total


# sizes that no address is a multiple of are no other kernel
@triton.jit(do_not_specialize=["tokens", "num_groups", "num_segments", "segments_per_part"])
def product_kernel(
    x_pointer,
    words_pointer,
    values,
    scales_pointer,
    scale_values,
    offsets_pointer,
    offset_values,
    tensor_scale_pointer,
    out_pointer,
    tokens,
    rows,
    columns,
    num_words,
    num_groups,
    num_segments,
    segments_per_part,
    number: tl.constexpr,
    chunk: tl.constexpr,
    scaling: tl.constexpr,
    is_whole: tl.constexpr,
    segment_columns: tl.constexpr,
    element: tl.constexpr,
    x_parts: tl.constexpr,
    w_parts: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x [M, K] → `TOKENS` × `ROWS` of part program_id(2) of the sum, fp32 [S, M, N]; of all of it, y in its dtype."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < rows, token < tokens
    x_rows = x_pointer + token.to(tl.int64)[:, None] * columns
    word_rows = words_pointer + row.to(tl.int64)[:, None] * num_words
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    has_scales: tl.constexpr = scaling.per == "lane" or scaling.per == "code"
    first_segment = tl.program_id(2) * segments_per_part
    for segment in range(first_segment, tl.minimum(first_segment + segments_per_part, num_segments)):
        first_column = segment * segment_columns
        if has_scales:
            place = _place_of(row, segment, scaling, num_groups)
            scale = read(scales_pointer, place, is_row, scale_values, scaling.scales) * scaling.unit
            if scaling.symmetry != "symmetric":
                offset = read(offsets_pointer, place, is_row, offset_values, scaling.offsets)
            part = tl.zeros([TOKENS, ROWS], tl.float32)
            sums = tl.zeros([TOKENS], tl.float32)
        else:
            part = total
        for piece in range(0, segment_columns, COLUMNS):
            within = piece + tl.arange(0, COLUMNS)
            column = first_column + within
            is_column = column < columns
            if segment_columns % COLUMNS != 0:
                is_column = is_column & (within < segment_columns)
            x = load_fp32(x_rows + column[None, :], is_token[:, None] & is_column[None, :])
            w = _decode_columns(word_rows, values, column, is_row[:, None] & is_column[None, :], number, chunk)
            if scaling.symmetry == "zero_point":
                w = tl.where(is_column[None, :], w - offset[:, None], 0.0)
            if scaling.symmetry == "minimum":
                sums += tl.sum(x, axis=1)
            part = _add_products(part, x, w, element, x_parts, w_parts)
        if has_scales:
            total += part * scale[None, :]
            if scaling.symmetry == "minimum":
                total += sums[:, None] * offset[None, :]
        else:
            total = part
    if scaling.per == "row":
        scale = read(scales_pointer, row // scaling.group_rows, is_row, scale_values, scaling.scales) * scaling.unit
        total *= scale[None, :]
    if is_whole and tensor_scale_pointer is not None:
        total *= tl.load(tensor_scale_pointer)
    out_row = tl.program_id(2) * tokens + token
    out = out_pointer + (out_row.to(tl.int64)[:, None] * rows + row[None, :])
    store_fp32(out, total, is_token[:, None] & is_row[None, :], False)


@triton.jit
def _decode_columns(word_rows, values, column, mask, number: tl.constexpr, chunk: tl.constexpr):
    """Values of some columns of some rows, each from the words that it lies in."""
    width: tl.constexpr = chunk.lanes * chunk.codes
    bit = (column % width) // chunk.lanes * number.bits
    first = (column // width) * (chunk.lanes * chunk.words) + column % chunk.lanes
    pointers = word_rows + (first + bit // 32 * chunk.lanes)[None, :]
    shift = (bit % 32)[None, :]
    code = tl.load(pointers, mask=mask, other=0) >> shift
    if 32 % number.bits != 0:
        straddles = shift + number.bits > 32
        rest = tl.load(pointers + chunk.lanes, mask=mask & straddles, other=0)
        kept = (1 << tl.minimum(32 - shift, number.bits)) - 1
        code = (code & kept) | tl.where(straddles, rest << tl.minimum(32 - shift, 31), 0)
    value = decode(code, 0, values, number)
    return tl.where(mask, value, 0.0) if number.kind == "table" else value


@triton.jit(do_not_specialize=["num_parts"])
def add_kernel(parts_pointer, tensor_scale_pointer, out_pointer, size, num_parts, BLOCK: tl.constexpr):
    """Parts fp32 [S, size] → their sum, in order, in the dtype of y."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    total = tl.zeros([BLOCK], tl.float32)
    pointers = parts_pointer + index
    for _ in range(num_parts):
        total += tl.load(pointers, mask=mask, other=0.0)
        pointers += size
    if tensor_scale_pointer is not None:
        total *= tl.load(tensor_scale_pointer)
    store_fp32(out_pointer + index, total, mask, False)
