"""Dot products of codes and columns of x, emitted as LLVM vectors: the steps that `matmul` loops over.

    pairs       each 32-bit lane has two weights of a row, bf16, and x is the same pair in all lanes:
                acc + w₁x₁ + w₀x₀ (vdpbf16ps), products exact; numbers below 2^−126 count as zero there
    floats      the same in fp32, a column at a time: acc + w x, on processors of any kind

x says which: it is uint32 in pairs, or fp32. What is expanded beforehand (`expand_groups`) is such an array too, a lane
for each row: [pairs of columns, 1 or 2, 64].

Sums of a group stay in registers, and their products with scales are added up there for as many groups as one call has:
with eight columns to a group, memory in between would take as long as all products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bitwright.quantize.backends.cpu.lanes import F32, I32, I64, call, load_in_order, pointer, splat
from bitwright.quantize.backends.cpu.matmul_expand import FLOATS, PAIRS, Expander, at, muladd, pair_of_floats
from bitwright.quantize.backends.cpu.matmul_layout import (
    PAIR_VECTORS,
    TILE_ROWS,
    VECTOR_ROWS,
    VECTOR_WORDS,
    pair_bytes,
)

_ZEROS = ir.Constant(FLOATS, [ir.Constant(F32, 0.0)] * VECTOR_ROWS)


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


def _takes_pairs(x: Any) -> bool:
    """Whether an array holds pairs of bf16, and not fp32 numbers."""
    return bool(x.dtype == types.uint32)


def _for(builder: Any, end: Any, step: int, body: Callable[[Any], None]) -> None:
    with cgutils.for_range_slice(builder, at(0), end, at(step), I64) as (index, _):
        body(index)


@intrinsic(prefer_literal=True)
def expand_groups(
    typing_context: Any,
    codes: Any,
    position: Any,
    num_groups: Any,
    num_pairs: Any,
    table: Any,
    out: Any,
    scales: Any,
    scales_position: Any,
    how: Any,
) -> Any:
    """Codes of groups of so many pairs of columns of a tile, from byte `position` on, to `out`: see above.

    scales: fp32 [groups, 64] that multiply them, to numbers that are exact in bf16 where pairs are asked for; or None.
    """
    has_scales = isinstance(scales, types.Array)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes_, position_, num_groups_, num_pairs_, table_, out_, scales_, at_scales, _ = args
        expander = Expander(context, builder, (codes, codes_), (table, table_), how)
        halves = 1 if _takes_pairs(out) else 2

        def scaled(weights: list[list[list[Any]]], group: Any) -> list[list[list[Any]]]:
            begin = builder.add(at_scales, builder.mul(group, at(TILE_ROWS)))
            places = [builder.add(begin, at(VECTOR_ROWS * i)) for i in range(PAIR_VECTORS)]
            factors = [load_in_order(context, builder, scales, scales_, place, VECTOR_ROWS) for place in places]
            products = [
                [[builder.fmul(x, s) for x, s in zip(of_half, factors, strict=True)] for of_half in of_pair]
                for of_pair in weights
            ]
            if halves == 2:
                return products
            return [[[pair_of_floats(builder, *both) for both in zip(*of_pair, strict=True)]] for of_pair in products]

        def group(index: Any) -> None:
            first = builder.mul(index, num_pairs_)
            end = builder.add(first, num_pairs_)
            with cgutils.for_range_slice(builder, first, end, at(expander.num_pairs), I64) as (pair, _):
                byte = builder.add(position_, builder.mul(pair, at(pair_bytes(expander.bits))))
                weights = scaled(_floats(expander, byte), index) if has_scales else _weights(expander, byte, out)
                for i, of_pair in enumerate(weights):
                    begin = builder.mul(builder.add(pair, at(i)), at(halves * TILE_ROWS))
                    for part, lanes in enumerate(lanes for of_half in of_pair for lanes in of_half):
                        place = builder.add(begin, at(part * VECTOR_ROWS))
                        builder.store(lanes, pointer(context, builder, out, out_, place, lanes.type), align=4)

        _for(builder, num_groups_, 1, group)
        return context.get_dummy_value()

    return types.void(codes, *(types.intp,) * 3, table, out, scales, types.intp, how), emit


def _weights(expander: Expander, byte: Any, x: Any, *, prefetches: bool = True) -> list[list[list[Any]]]:
    """Weights of a unit as x takes them: of each pair of columns, once or for either column, four vectors."""
    if _takes_pairs(x):
        pairs = [expander.builder.bitcast(pair, PAIRS) for pair in expander.pairs(byte, prefetches=prefetches)]
        return [[pairs[i : i + PAIR_VECTORS]] for i in range(0, len(pairs), PAIR_VECTORS)]
    return _floats(expander, byte, prefetches=prefetches)


def _floats(expander: Expander, byte: Any, *, prefetches: bool = True) -> list[list[list[Any]]]:
    """The same as fp32 numbers."""
    floats = expander.floats(byte, prefetches=prefetches)
    return [
        [[both[column] for both in floats[i : i + PAIR_VECTORS]] for column in (0, 1)]
        for i in range(0, len(floats), PAIR_VECTORS)
    ]


def _multiplied(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + the products of weights and x."""
    if weights.type == FLOATS:
        return muladd(builder, weights, x, sums)
    pairs = [builder.bitcast(operand, _BF16_PAIRS) for operand in (weights, x)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [sums, *pairs])


@intrinsic(prefer_literal=True)
def multiply_groups(
    typing_context: Any,
    source: Any,
    position: Any,
    num_groups: Any,
    num_pairs: Any,
    table: Any,
    x: Any,
    x_position: Any,
    totals: Any,
    totals_position: Any,
    scales: Any,
    scales_position: Any,
    how: Any,
    columns: Any,
    vectors: Any,
) -> Any:
    """totals[m, row] += Σ_g scales[g, row] · Σ codes · x, over groups of `num_pairs` pairs of columns of a tile.

    source: codes, uint8, from byte `position` on; or what `expand_groups` gave, from the pair `position` on. x: from
    `x_position` on, [pairs, 1 or 2, M]. totals: fp32 [M, 64]; scales: fp32 [groups, 64]. M is `columns`; `vectors` of
    the four vectors of rows are held at once, all of them where codes are the source.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_, position_, num_groups_, num_pairs_, table_, x_, at_x, totals_, at_totals, scales_, at_scales, *_ = args
        num_columns, num_vectors, halves = columns.count, vectors.count, 1 if _takes_pairs(x) else 2
        is_codes = source.dtype == types.uint8
        expander = Expander(context, builder, (source, source_), (table, table_), how) if is_codes else None
        step = 1 if expander is None else expander.num_pairs
        lanes_of_x, lane_of_x = (PAIRS, I32) if halves == 1 else (FLOATS, F32)
        each = [(m, i) for m in range(num_columns) for i in range(num_vectors)]
        sums, added = ({place: cgutils.alloca_once(builder, FLOATS) for place in each} for _ in range(2))

        def of_codes(pair: Any, strip: Any) -> list[list[list[Any]]]:
            assert expander is not None
            byte = builder.add(position_, builder.mul(pair, at(pair_bytes(expander.bits))))
            return [
                [vectors_[strip * num_vectors : (strip + 1) * num_vectors] for vectors_ in weights]
                for weights in _weights(expander, byte, x, prefetches=strip == 0)
            ]

        def of_run(pair: Any, strip: Any) -> list[list[list[Any]]]:
            first = builder.add(
                builder.mul(builder.add(position_, pair), at(halves * TILE_ROWS)),
                builder.mul(strip, at(num_vectors * VECTOR_ROWS)),
            )
            places = [[at(half * TILE_ROWS + VECTOR_ROWS * i) for i in range(num_vectors)] for half in range(halves)]
            return [
                [
                    [
                        builder.load(
                            pointer(context, builder, source, source_, builder.add(first, place), lanes_of_x), align=4
                        )
                        for place in of_half
                    ]
                    for of_half in places
                ]
            ]

        def multiply_pair(pair: Any, weights: list[list[list[Any]]]) -> None:
            for i, of_pair in enumerate(weights):
                begin = builder.add(at_x, builder.mul(builder.add(pair, at(i)), at(halves * num_columns)))
                for half, of_half in enumerate(of_pair):
                    for m in range(num_columns):
                        where = builder.add(begin, at(half * num_columns + m))
                        one = builder.load(pointer(context, builder, x, x_, where, lane_of_x))
                        both = splat(builder, one, lanes_of_x)
                        for place, lanes in enumerate(of_half):
                            total = _multiplied(builder, builder.load(sums[m, place]), lanes, both)
                            builder.store(total, sums[m, place])

        def multiply_rows(strip: Any, of_pair: Callable[[Any, Any], list[list[list[Any]]]]) -> None:
            """Of the rows of some vectors."""
            first_row = at(strip * num_vectors * VECTOR_ROWS) if isinstance(strip, int) else None
            first_row = first_row or builder.mul(strip, at(num_vectors * VECTOR_ROWS))
            begin = builder.add(at_totals, first_row)
            places = {
                (m, i): pointer(
                    context, builder, totals, totals_, builder.add(begin, at(TILE_ROWS * m + VECTOR_ROWS * i)), FLOATS
                )
                for m, i in each
            }
            for place in each:
                builder.store(builder.load(places[place], align=4), added[place])

            def group(index: Any) -> None:
                for place in each:
                    builder.store(_ZEROS, sums[place])
                first = builder.mul(index, num_pairs_)
                end = builder.add(first, num_pairs_)
                with cgutils.for_range_slice(builder, first, end, at(step), I64) as (pair, _):
                    multiply_pair(pair, of_pair(pair, strip))
                of_scale = builder.add(builder.add(at_scales, builder.mul(index, at(TILE_ROWS))), first_row)
                for i in range(num_vectors):
                    where = builder.add(of_scale, at(VECTOR_ROWS * i))
                    scale = load_in_order(context, builder, scales, scales_, where, VECTOR_ROWS)
                    for m in range(num_columns):
                        of_group, before = builder.load(sums[m, i]), builder.load(added[m, i])
                        builder.store(muladd(builder, of_group, scale, before), added[m, i])

            _for(builder, num_groups_, 1, group)
            for place in each:
                builder.store(builder.load(added[place]), places[place], align=4)

        num_strips = PAIR_VECTORS // num_vectors
        if is_codes:
            for strip in range(num_strips):
                multiply_rows(strip, of_codes)
        else:
            _for(builder, at(num_strips), 1, lambda strip: multiply_rows(strip, of_run))
        return context.get_dummy_value()

    integers = (types.intp,) * 3
    arguments = (source, *integers, table, x, types.intp, totals, types.intp, scales, types.intp)
    return types.void(*arguments, how, columns, vectors), emit
