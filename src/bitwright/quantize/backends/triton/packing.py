"""Triton kernels: codes of any width of 1 to 8 bits to bytes and back.

A row is a little-endian bitstream: code j occupies bits [j·b, (j + 1)·b). A program of `pack_kernel` gathers, for each
of its bytes, the few codes that lie in it; one of `unpack_kernel` takes, for each code, the two bytes it may lie in,
and looks its value up in a table of 2^b numbers, whatever the format.

Legend: N rows, K columns, B bytes of a row; G groups along a row, of c columns and r rows each.
"""

# Kernels are written in Triton's language, which type checkers of Python do not know.
# mypy: ignore-errors

import triton
import triton.language as tl

from bitwright.quantize.backends.triton.rounding import store_fp32


@triton.jit
def _tile(num_pieces, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, 1] and places of a row [1, BLOCK] of a program. Every place is below 2^31, every offset 64 bits."""
    row = (tl.program_id(0) // num_pieces) * ROWS + tl.arange(0, ROWS)[:, None]
    place = (tl.program_id(0) % num_pieces) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row.to(tl.int64), place


@triton.jit
def pack_kernel(
    codes_pointer,
    bytes_pointer,
    rows,
    columns,
    num_row_bytes,
    num_pieces,
    bits: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """uint8 codes [N, K] → bytes [N, B]."""
    row, place = _tile(num_pieces, ROWS, BLOCK)
    mask = (row < rows) & (place < num_row_bytes)
    # bits bytes hold 8 codes
    bit = (place % bits) * 8
    first = (place // bits) * 8 + bit // bits
    packed = tl.zeros([ROWS, BLOCK], tl.int32)
    num_codes: tl.constexpr = 8 // bits if 8 % bits == 0 else (8 + bits - 2) // bits + 1
    for step in tl.static_range(num_codes):
        shift = (bit // bits + step) * bits - bit
        column = first + step
        is_inside = mask & (column < columns) & (shift < 8)
        code = tl.load(codes_pointer + row * columns + column, mask=is_inside, other=0).to(tl.int32)
        # the first code may have begun in the byte before
        packed |= tl.where(shift >= 0, code << tl.maximum(shift, 0), code >> tl.maximum(-shift, 0))
    tl.store(bytes_pointer + row * num_row_bytes + place, (packed & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def unpack_kernel(
    bytes_pointer,
    values_pointer,
    scales_pointer,
    tensor_scale_pointer,
    out_pointer,
    rows,
    columns,
    num_row_bytes,
    num_column_groups,
    num_pieces,
    bits: tl.constexpr,
    block_rows: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bytes [N, B] and scales [R, G] → values [N, K]. A width of 0: rows; block_rows of 0: one scale for all."""
    row, column = _tile(num_pieces, ROWS, BLOCK)
    mask = (row < rows) & (column < columns)
    bit = (column % 8) * bits
    pointers = bytes_pointer + row * num_row_bytes + ((column // 8) * bits + bit // 8)
    shift = bit % 8
    word = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    if 8 % bits != 0:
        word |= tl.load(pointers + 1, mask=mask & (shift + bits > 8), other=0).to(tl.int32) << 8
    value = tl.load(values_pointer + ((word >> shift) & ((1 << bits) - 1)), mask=mask, other=0.0)
    if block_rows == 0:
        group = row * 0
    elif width == 0:
        group = row
    else:
        group = (row // block_rows) * num_column_groups + column // width
    unit = tl.load(scales_pointer + (group + column * 0), mask=mask, other=0.0)
    if tensor_scale_pointer is not None:
        unit *= tl.load(tensor_scale_pointer)
    store_fp32(out_pointer + row * columns + column, value * unit, mask, False)
