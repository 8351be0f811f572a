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
def pack_kernel(
    codes_pointer, bytes_pointer, columns, num_row_bytes, num_bytes, bits: tl.constexpr, BLOCK: tl.constexpr
):
    """uint8 codes [N, K] → bytes [N, B]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, place = index // num_row_bytes, index % num_row_bytes
    first = place * 8 // bits
    packed = tl.zeros_like(place).to(tl.int32)
    for step in tl.static_range((8 + bits - 2) // bits + 1):
        column = first + step
        shift = (column * bits - place * 8).to(tl.int32)
        mask = (index < num_bytes) & (column < columns) & (shift < 8)
        code = tl.load(codes_pointer + row * columns + column, mask=mask, other=0).to(tl.int32)
        # the first code may have begun in the byte before
        packed |= tl.where(shift >= 0, code << tl.maximum(shift, 0), code >> tl.maximum(-shift, 0))
    tl.store(bytes_pointer + index, (packed & 0xFF).to(tl.uint8), mask=index < num_bytes)


@triton.jit
def unpack_kernel(
    bytes_pointer,
    values_pointer,
    scales_pointer,
    tensor_scale_pointer,
    out_pointer,
    columns,
    num_row_bytes,
    num_column_groups,
    size,
    bits: tl.constexpr,
    block_rows: tl.constexpr,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bytes [N, B] and scales [R, G] → values [N, K]. A width of 0: rows; block_rows of 0: one scale for all."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    row, column = index // columns, index % columns
    place = column * bits // 8
    shift = (column * bits % 8).to(tl.int32)
    pointers = bytes_pointer + row * num_row_bytes + place
    word = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    if 8 % bits != 0:
        straddles = mask & (shift + bits > 8)
        word |= tl.load(pointers + 1, mask=straddles, other=0).to(tl.int32) << 8
    value = tl.load(values_pointer + ((word >> shift) & ((1 << bits) - 1)), mask=mask, other=0.0)
    if scales_pointer is not None:
        if block_rows == 0:
            group = row * 0
        elif width == 0:
            group = row
        else:
            group = (row // block_rows) * num_column_groups + column // width
        unit = tl.load(scales_pointer + group, mask=mask, other=0.0)
        if tensor_scale_pointer is not None:
            unit *= tl.load(tensor_scale_pointer)
        value *= unit
    store_fp32(out_pointer + index, value, mask, False)
