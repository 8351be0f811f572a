"""Codes to bf16 and their dot products, 32 at a time: the steps of packed multiplication as LLVM vectors.

*Expanding* is a table lookup in registers, whatever the format: a table of up to 32 words is one permutation by 16-bit
index (`vpermw`, which looks at five bits of it: what stands above a code of fewer bits picks a copy), of 64 words one
permutation of two registers (`vpermi2w`, six bits). For 8 bits the low and the high bytes of all 256 values are looked
up by `vpermi2b`, which knows 128: where the upper half of the table is the lower half with the other sign, the code's
top bit is the sign; else a second lookup is selected by it. Subnormal numbers, NaN and odd biases need no care: they
stand in the table.

*Multiplying* takes a pair of columns: each 32-bit lane has two weights of a row, and x is the same pair in all lanes.

    vdpbf16ps            acc + w₁x₁ + w₀x₀, products exact; numbers below 2^−126 count as zero there
    two fused products   the same in fp32, where the processor has no such instruction

Rejected: re-biasing exponents by shifts (subnormal numbers and NaN come out wrong, and mending that takes longer than
the lookup), conversion of integers to fp32 (twice the instructions), magic numbers (bf16 has too few bits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bitwright.quantize.backends.cpu.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    all_lanes,
    call,
    fma,
    load_in_order,
    pointer,
    splat,
    to,
)
from bitwright.quantize.backends.cpu.matmul_layout import (
    PAIR_VECTORS,
    TILE_ROWS,
    VECTOR_ROWS,
    VECTOR_WORDS,
    Piece,
    pair_bytes,
    unit_of,
)

VECTOR_BYTES = 2 * VECTOR_WORDS
#: How far ahead codes are asked for: a product at batch 1 takes a seventh less time than without; 1 and 16 KiB ahead,
#: a tenth less.
PREFETCHED_BYTES = 4096
#: Groups whose scales are widened together: as many as the widest unit fills up to.
GROUPS = 8
_BYTES = ir.VectorType(I8, VECTOR_BYTES)
_WORDS = ir.VectorType(I16, VECTOR_WORDS)
_PAIRS = ir.VectorType(I32, VECTOR_ROWS)
_SUMS = ir.VectorType(F32, VECTOR_ROWS)
_ZEROS = ir.Constant(_SUMS, [ir.Constant(F32, 0.0)] * VECTOR_ROWS)
_UPPER_HALF = 0xFFFF0000


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BF16_PAIRS = ir.VectorType(_BFloat(), VECTOR_WORDS)


def _at(number: int) -> ir.Constant:
    return ir.Constant(I64, number)


# --- codes to bf16 ----------------------------------------------------------------------------------------------------


def _table(context: Any, builder: Any, table_type: Any, table: Any, position: Any, bits: int, mirrored: bool) -> Any:
    """Registers of a table (`matmul_tables`)."""
    count = (4 if mirrored else 8) if bits == 8 else (1 if bits < 6 else 2)
    vector = _BYTES if bits == 8 else _WORDS
    step = VECTOR_BYTES // (table_type.dtype.bitwidth // 8)
    places = [builder.add(position, _at(step * i)) for i in range(count)]
    return [builder.load(pointer(context, builder, table_type, table, at, vector), align=1) for at in places]


def _piece(builder: Any, vectors: list[Any], piece: Piece, is_whole: bool) -> Any:
    """The bits of a piece at their places in the code; above a whole code stands whatever it may be."""
    words, by = vectors[piece.vector], piece.shift - piece.target
    if by:
        shift = builder.lshr if by > 0 else builder.shl
        words = shift(words, all_lanes(abs(by), _WORDS, I16))
    if is_whole:
        return words
    return builder.and_(words, all_lanes(((1 << piece.num_bits) - 1) << piece.target, _WORDS, I16))


def _looked_up(builder: Any, vectors: list[Any], pieces: tuple[Piece, ...], table: list[Any]) -> Any:
    """A code vector of up to six bits as bf16."""
    codes = _piece(builder, vectors, pieces[0], len(pieces) == 1)
    for piece in pieces[1:]:
        codes = builder.or_(codes, _piece(builder, vectors, piece, False))
    if len(table) == 1:
        return call(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, [table[0], codes])
    return call(builder, "llvm.x86.avx512.vpermi2var.hi.512", _WORDS, [table[0], codes, table[1]])


def _bytes_looked_up(builder: Any, words: Any, table: list[Any]) -> list[Any]:
    """The two code vectors of 8 bits in a vector as bf16."""
    codes = to_bytes(builder, words)

    def looked_up(i: int) -> Any:
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [table[i], codes, table[i + 1]])

    if len(table) == 4:  # mirrored: low bytes, high bytes
        low, high = looked_up(0), looked_up(2)
        high = builder.or_(high, builder.and_(codes, all_lanes(-128, _BYTES, I8)))
    else:  # low bytes of either half of the codes, high bytes of either half
        is_upper = builder.icmp_signed("<", codes, all_lanes(0, _BYTES, I8))
        low = builder.select(is_upper, looked_up(2), looked_up(0))
        high = builder.select(is_upper, looked_up(6), looked_up(4))
    low, high = builder.bitcast(low, _WORDS), builder.bitcast(high, _WORDS)
    eight = all_lanes(8, _WORDS, I16)
    first = builder.or_(builder.and_(low, all_lanes(0xFF, _WORDS, I16)), builder.shl(high, eight))
    second = builder.or_(builder.lshr(low, eight), builder.and_(high, all_lanes(0xFF00, _WORDS, I16)))
    return [first, second]


def to_bytes(builder: Any, words: Any) -> Any:
    """The bytes of 32 words."""
    return builder.bitcast(words, _BYTES)


def _expanded(context: Any, builder: Any, codes_type: Any, codes: Any, position: Any, bits: int, table: Any) -> Any:
    """Code vectors of the units that hold whole pairs, from byte `position` on; 16 bits are bf16 as they stand."""
    if bits == 16:
        num_vectors, repeats = PAIR_VECTORS, 1
    else:
        unit = unit_of(bits)
        num_vectors, repeats = unit.num_vectors, unit.repeats
    places = [builder.add(position, _at(VECTOR_BYTES * i)) for i in range(num_vectors * repeats)]
    vectors = [builder.load(pointer(context, builder, codes_type, codes, at, _WORDS), align=1) for at in places]
    if bits == 16:
        return vectors
    for at in places:
        _prefetch(context, builder, codes_type, codes, builder.add(at, _at(PREFETCHED_BYTES)))
    if bits == 8:
        return [words for vector in vectors for words in _bytes_looked_up(builder, vector, table)]
    return [
        _looked_up(builder, vectors[repeat * num_vectors :], pieces, table)
        for repeat in range(repeats)
        for pieces in unit.codes
    ]


def _prefetch(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> None:
    """Ask for a cache line; one that does not exist is no error."""
    place = pointer(context, builder, array_type, array, index, I8)
    function_type = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(prefetch, [place, *(ir.Constant(I32, number) for number in (0, 3, 1))])


def _pairs_of(bits: int) -> int:
    """Pairs of columns that `_expanded` gives."""
    return 1 if bits == 16 else unit_of(bits).num_pairs


def _for_pairs(builder: Any, num_pairs: Any, bits: int, body: Callable[[Any, Any], None]) -> None:
    """body(first pair, its byte) for all units of so many pairs."""
    step = _at(_pairs_of(bits))
    with cgutils.for_range_slice(builder, _at(0), num_pairs, step, I64) as (pair, _):
        body(pair, builder.mul(pair, _at(pair_bytes(bits))))


def _halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """bf16 at even and at odd words as fp32 lanes."""
    pairs = builder.bitcast(words, _PAIRS)
    even = builder.shl(pairs, all_lanes(16, _PAIRS))
    return to(builder, even, F32), to(builder, builder.and_(pairs, all_lanes(_UPPER_HALF, _PAIRS)), F32)


@intrinsic(prefer_literal=True)
def expand_pairs(
    typing_context: Any,
    codes: Any,
    position: Any,
    num_pairs: Any,
    table: Any,
    table_position: Any,
    out: Any,
    bits: Any,
    mirrored: Any,
) -> Any:
    """Codes of a tile, from byte `position` on, as bf16 to `out`, uint8 [pairs · 256]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes_, position_, num_pairs_, table_, table_position_, out_, *_ = args
        codes_type, table_type, out_type = (signature.args[i] for i in (0, 3, 5))
        registers = _table(context, builder, table_type, table_, table_position_, bits.count, mirrored.count > 0)

        def unit(pair: Any, byte: Any) -> None:
            at = builder.add(position_, byte)
            for i, words in enumerate(_expanded(context, builder, codes_type, codes_, at, bits.count, registers)):
                place = builder.add(builder.mul(pair, _at(pair_bytes(16))), _at(VECTOR_BYTES * i))
                builder.store(words, pointer(context, builder, out_type, out_, place, _WORDS), align=1)

        _for_pairs(builder, num_pairs_, bits.count, unit)
        return context.get_dummy_value()

    arguments = (codes, types.intp, types.intp, table, types.intp, out, bits, mirrored)
    return types.void(*arguments), emit


# --- dot products -----------------------------------------------------------------------------------------------------


def _multiplied(builder: Any, sums: Any, words: Any, x: Any, has_dot: bool) -> Any:
    """sums + the products of weights and x, both pairs of bf16."""
    if has_dot:
        pairs = [builder.bitcast(operand, _BF16_PAIRS) for operand in (words, x)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, [sums, *pairs])
    (even, odd), (x_even, x_odd) = _halves(builder, words), _halves(builder, x)
    return fma(builder, even, x_even, fma(builder, odd, x_odd, sums))


@intrinsic(prefer_literal=True)
def multiply_pairs(
    typing_context: Any,
    codes: Any,
    position: Any,
    num_pairs: Any,
    table: Any,
    table_position: Any,
    x: Any,
    x_position: Any,
    totals: Any,
    totals_position: Any,
    scales: Any,
    scales_position: Any,
    bits: Any,
    mirrored: Any,
    columns: Any,
    has_dot: Any,
) -> Any:
    """totals[m, row] += scales[row] · Σ codes · x, over pairs of columns of a tile under one scale.

    x: uint32 [pairs, M], from x_position on. totals: fp32 [M, 64]; scales: fp32 [64]. M is `columns`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes_, position_, num_pairs_, table_, table_position_, x_, x_position_, totals_, at_totals, *rest = args
        scales_, at_scales = rest[:2]
        codes_type, table_type, x_type, totals_type, scales_type = (signature.args[i] for i in (0, 3, 5, 7, 9))
        num_columns = columns.count
        registers = _table(context, builder, table_type, table_, table_position_, bits.count, mirrored.count > 0)
        sums = [[cgutils.alloca_once(builder, _SUMS) for _ in range(PAIR_VECTORS)] for _ in range(num_columns)]
        for column in sums:
            for place in column:
                builder.store(_ZEROS, place)

        def unit(pair: Any, byte: Any) -> None:
            at = builder.add(position_, byte)
            words = _expanded(context, builder, codes_type, codes_, at, bits.count, registers)
            for i in range(_pairs_of(bits.count)):
                of_pair = builder.mul(builder.add(pair, _at(i)), _at(num_columns))
                for m, column in enumerate(sums):
                    where = builder.add(builder.add(x_position_, of_pair), _at(m))
                    both = splat(builder, builder.load(pointer(context, builder, x_type, x_, where, I32)), _PAIRS)
                    for place, weights in zip(column, words[i * PAIR_VECTORS :], strict=False):
                        product = _multiplied(builder, builder.load(place), weights, both, has_dot.count > 0)
                        builder.store(product, place)

        _for_pairs(builder, num_pairs_, bits.count, unit)
        for m, column in enumerate(sums):
            for i, place in enumerate(column):
                at = builder.add(at_scales, _at(VECTOR_ROWS * i))
                scale = load_in_order(context, builder, scales_type, scales_, at, VECTOR_ROWS)
                at = builder.add(at_totals, _at(TILE_ROWS * m + VECTOR_ROWS * i))
                total = pointer(context, builder, totals_type, totals_, at, _SUMS)
                builder.store(fma(builder, builder.load(place), scale, builder.load(total, align=4)), total, align=4)
        return context.get_dummy_value()

    integers = (types.intp,) * 2
    arguments = (codes, *integers, table, types.intp, x, types.intp, totals, types.intp, scales, types.intp)
    return types.void(*arguments, bits, mirrored, columns, has_dot), emit


# --- scales and offsets -----------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def widen_groups(
    typing_context: Any,
    source: Any,
    tile: Any,
    num_groups: Any,
    first: Any,
    count: Any,
    table: Any,
    out: Any,
    unit: Any,
    bits: Any,
) -> Any:
    """What is stored for `count` groups of a tile's rows, from `first` on, times `unit`, to `out`, fp32 [groups, 64].

    source: numbers [tiles, groups, 64] of 16 or 32 bits; or bytes: codes in tiles of `bits` bits, whose columns are
    groups, filled up as columns are. `first` is a multiple of GROUPS; `out` has place for as many.
    """

    def numbers(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_, tile_, num_groups_, first_, count_, _, out_, unit_, _ = args
        begin = builder.mul(builder.add(builder.mul(tile_, num_groups_), first_), _at(TILE_ROWS))
        factor = splat(builder, unit_, _SUMS)
        end = builder.mul(count_, _at(TILE_ROWS))
        with cgutils.for_range_slice(builder, _at(0), end, _at(VECTOR_ROWS), I64) as (index, _):
            at = builder.add(begin, index)
            values = load_in_order(context, builder, signature.args[0], source_, at, VECTOR_ROWS)
            place = pointer(context, builder, signature.args[6], out_, index, _SUMS)
            builder.store(builder.fmul(values, factor), place, align=4)
        return context.get_dummy_value()

    def codes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_, tile_, num_groups_, first_, count_, table_, out_, unit_, _ = args

        def pairs_of_groups(groups: Any) -> Any:
            step = 2 * _pairs_of(bits.count)
            whole = builder.add(groups, _at(step - 1))
            return builder.mul(builder.sdiv(whole, _at(step)), _at(step // 2))

        before = builder.add(builder.mul(tile_, pairs_of_groups(num_groups_)), builder.sdiv(first_, _at(2)))
        begin = builder.mul(before, _at(pair_bytes(bits.count)))
        registers = _table(context, builder, signature.args[5], table_, _at(0), bits.count, False)
        factor = splat(builder, unit_, _SUMS)

        def expand(pair: Any, byte: Any) -> None:
            at = builder.add(begin, byte)
            words = _expanded(context, builder, signature.args[0], source_, at, bits.count, registers)
            for i, vector in enumerate(words):
                row = builder.mul(builder.add(pair, _at(i // PAIR_VECTORS)), _at(2 * TILE_ROWS))
                for half, values in enumerate(_halves(builder, vector)):
                    index = builder.add(row, _at(half * TILE_ROWS + i % PAIR_VECTORS * VECTOR_ROWS))
                    place = pointer(context, builder, signature.args[6], out_, index, _SUMS)
                    builder.store(builder.fmul(values, factor), place, align=4)

        _for_pairs(builder, pairs_of_groups(count_), bits.count, expand)
        return context.get_dummy_value()

    is_bytes = source.dtype == types.uint8
    integers = (types.intp,) * 4
    return types.void(source, *integers, table, out, types.float32, bits), codes if is_bytes else numbers


@intrinsic(prefer_literal=True)
def add_offsets(
    typing_context: Any, totals: Any, totals_position: Any, offsets: Any, sums: Any, sums_position: Any, num_groups: Any
) -> Any:
    """totals[row] += Σ_g offsets[g, row] · sums[g], for the 64 rows of a tile; all fp32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals_, at_totals, offsets_, sums_, at_sums, num_groups_ = args
        totals_type, offsets_type, sums_type = (signature.args[i] for i in (0, 2, 3))
        places = [
            pointer(context, builder, totals_type, totals_, builder.add(at_totals, _at(VECTOR_ROWS * i)), _SUMS)
            for i in range(PAIR_VECTORS)
        ]
        added = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
        with cgutils.for_range_slice(builder, _at(0), num_groups_, _at(1), I64) as (group, _):
            x = builder.load(pointer(context, builder, sums_type, sums_, builder.add(at_sums, group), F32))
            both = splat(builder, x, _SUMS)
            for i, total in enumerate(added):
                at = builder.add(builder.mul(group, _at(TILE_ROWS)), _at(VECTOR_ROWS * i))
                offset = load_in_order(context, builder, offsets_type, offsets_, at, VECTOR_ROWS)
                builder.store(fma(builder, offset, both, builder.load(total)), total)
        for place, total in zip(places, added, strict=True):
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(totals, types.intp, offsets, sums, types.intp, types.intp), emit
