"""Scales and offsets of packed multiplication, emitted as LLVM vectors: widened to fp32, and added where they add."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bitwright.quantize.backends.cpu.lanes import F32, I64, load_in_order, pointer, splat
from bitwright.quantize.backends.cpu.matmul_expand import FLOATS, Expander, at, load_numbers, muladd
from bitwright.quantize.backends.cpu.matmul_layout import PAIR_VECTORS, TILE_ROWS, VECTOR_ROWS, pair_bytes

#: Groups whose scales are widened together: as many as the widest unit fills up to.
GROUPS = 8


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
    how: Any,
) -> Any:
    """What is stored for `count` groups of a tile's rows, from `first` on, times `unit`, to `out`, fp32 [groups, 64].

    source: numbers [tiles, groups, 64] of 16 or 32 bits; or bytes: codes in tiles, whose columns are groups, filled up
    as columns are. `first` is a multiple of GROUPS; `out` has place for as many.
    """

    def store(context: Any, builder: Any, place: Any, values: Any, factor: Any, index: Any) -> None:
        address = pointer(context, builder, out, place, index, FLOATS)
        builder.store(builder.fmul(values, factor), address, align=4)

    def numbers(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_, tile_, num_groups_, first_, count_, _, out_, unit_, _ = args
        begin = builder.mul(builder.add(builder.mul(tile_, num_groups_), first_), at(TILE_ROWS))
        factor = splat(builder, unit_, FLOATS)
        end = builder.mul(count_, at(TILE_ROWS))
        with cgutils.for_range_slice(builder, at(0), end, at(VECTOR_ROWS), I64) as (index, _):
            values = load_numbers(context, builder, source, source_, builder.add(begin, index))
            store(context, builder, out_, values, factor, index)
        return context.get_dummy_value()

    def codes(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_, tile_, num_groups_, first_, count_, table_, out_, unit_, _ = args
        expander = Expander(context, builder, (source, source_), (table, table_), how)
        factor = splat(builder, unit_, FLOATS)

        def pairs_of_groups(groups: Any) -> Any:
            step = 2 * expander.num_pairs
            whole = builder.add(groups, at(step - 1))
            return builder.mul(builder.sdiv(whole, at(step)), at(step // 2))

        before = builder.add(builder.mul(tile_, pairs_of_groups(num_groups_)), builder.sdiv(first_, at(2)))
        begin = builder.mul(before, at(pair_bytes(expander.bits)))
        end = pairs_of_groups(count_)
        with cgutils.for_range_slice(builder, at(0), end, at(expander.num_pairs), I64) as (pair, _):
            byte = builder.add(begin, builder.mul(pair, at(pair_bytes(expander.bits))))
            for i, both in enumerate(expander.floats(byte)):
                row = builder.mul(builder.add(pair, at(i // PAIR_VECTORS)), at(2 * TILE_ROWS))
                for column, values in enumerate(both):
                    index = builder.add(row, at(column * TILE_ROWS + i % PAIR_VECTORS * VECTOR_ROWS))
                    store(context, builder, out_, values, factor, index)
        return context.get_dummy_value()

    is_bytes = source.dtype == types.uint8
    integers = (types.intp,) * 4
    return types.void(source, *integers, table, out, types.float32, how), codes if is_bytes else numbers


@intrinsic(prefer_literal=True)
def add_offsets(
    typing_context: Any, totals: Any, totals_position: Any, offsets: Any, sums: Any, sums_position: Any, num_groups: Any
) -> Any:
    """totals[row] += Σ_g offsets[g, row] · sums[g], for the 64 rows of a tile; all fp32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals_, at_totals, offsets_, sums_, at_sums, num_groups_ = args
        places = [
            pointer(context, builder, totals, totals_, builder.add(at_totals, at(VECTOR_ROWS * i)), FLOATS)
            for i in range(PAIR_VECTORS)
        ]
        added = [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in places]
        with cgutils.for_range_slice(builder, at(0), num_groups_, at(1), I64) as (group, _):
            x = builder.load(pointer(context, builder, sums, sums_, builder.add(at_sums, group), F32))
            both = splat(builder, x, FLOATS)
            for i, total in enumerate(added):
                index = builder.add(builder.mul(group, at(TILE_ROWS)), at(VECTOR_ROWS * i))
                offset = load_in_order(context, builder, offsets, offsets_, index, VECTOR_ROWS)
                builder.store(muladd(builder, offset, both, builder.load(total)), total)
        for place, total in zip(places, added, strict=True):
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(totals, types.intp, offsets, sums, types.intp, types.intp), emit
