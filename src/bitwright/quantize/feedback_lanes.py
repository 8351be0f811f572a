"""One column of error feedback in all lanes at once: the two steps that the time goes into, as LLVM vectors.

A lane is one row under one of the scales that are tried for it. From column to column the work of a lane depends on
what came before, so lanes, and not columns, are what is done side by side (`backends/cpu/lanes.py` says why LLVM has to
be told). Arrays hold LANES numbers for each column, fp32 and contiguous.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bitwright.quantize.backends.cpu.lanes import F32, call, fma, load, maximum, minimum, pointer, splat

#: Numbers that are worked on side by side.
LANES = 16
_VECTOR = ir.VectorType(F32, LANES)


def _load(context: Any, builder: Any, array_type: Any, array: Any, column: Any) -> Any:
    index = builder.mul(column, ir.Constant(column.type, LANES))
    return load(context, builder, array_type, array, index, LANES)


def _store(context: Any, builder: Any, array_type: Any, array: Any, column: Any, values: Any) -> None:
    index = builder.mul(column, ir.Constant(column.type, LANES))
    builder.store(values, pointer(context, builder, array_type, array, index, _VECTOR), align=4)


@intrinsic
def round_column(
    typing_context: Any, tried: Any, code: Any, inverse: Any, shift: Any, column: Any, lowest: Any, highest: Any
) -> Any:
    """code[column] = the whole number nearest to (tried[column] − shift) · inverse, from the lowest to the highest."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tried_, code_, inverse_, shift_, column_, lowest_, highest_ = args
        zero = ir.Constant(column_.type, 0)
        aim = _load(context, builder, signature.args[0], tried_, column_)
        aim = builder.fsub(aim, _load(context, builder, signature.args[3], shift_, zero))
        aim = builder.fmul(aim, _load(context, builder, signature.args[2], inverse_, zero))
        nearest = call(builder, f"llvm.rint.v{LANES}f32", _VECTOR, [aim])
        nearest = maximum(builder, splat(builder, lowest_, _VECTOR), nearest)
        nearest = minimum(builder, splat(builder, highest_, _VECTOR), nearest)
        _store(context, builder, signature.args[1], code_, column_, nearest)
        return context.get_dummy_value()

    return types.void(tried, code, inverse, shift, column, lowest, highest), emit


@intrinsic
def feed_column(
    typing_context: Any,
    tried: Any,
    target: Any,
    code: Any,
    damage: Any,
    scale: Any,
    shift: Any,
    feedback: Any,
    pivots: Any,
    column: Any,
    stop: Any,
) -> Any:
    """Given the codes of a column: add what they do to `damage`, and its errors to what later columns aim at.

    value = code · scale + shift; damage += pivot (tried − value)²; tried[k] += (target − value) feedback[column, k] for
    the columns k that come after it, up to `stop`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of = dict(
            zip(
                ("tried", "target", "code", "damage", "scale", "shift", "feedback", "pivots", "column", "stop"),
                zip(signature.args, args, strict=True),
                strict=True,
            )
        )
        column_, stop_ = of["column"][1], of["stop"][1]
        zero = ir.Constant(column_.type, 0)

        def lanes(name: str, index: Any) -> Any:
            return _load(context, builder, *of[name], index)

        value = fma(builder, lanes("code", column_), lanes("scale", zero), lanes("shift", zero))
        off = builder.fsub(lanes("tried", column_), value)
        pivot = builder.load(pointer(context, builder, *of["pivots"], column_, F32))
        weighted = builder.fmul(off, splat(builder, pivot, _VECTOR))
        _store(context, builder, *of["damage"], zero, fma(builder, weighted, off, lanes("damage", zero)))
        error = builder.fsub(lanes("target", column_), value)
        width = context.make_array(of["feedback"][0])(context, builder, of["feedback"][1]).shape
        row = builder.mul(column_, builder.extract_value(width, 1))
        after = builder.add(column_, ir.Constant(column_.type, 1))
        with cgutils.for_range_slice(builder, after, stop_, ir.Constant(column_.type, 1), column_.type) as (k, _):
            share = builder.load(pointer(context, builder, *of["feedback"], builder.add(row, k), F32))
            moved = fma(builder, error, splat(builder, share, _VECTOR), lanes("tried", k))
            _store(context, builder, *of["tried"], k, moved)
        return context.get_dummy_value()

    return types.void(tried, target, code, damage, scale, shift, feedback, pivots, column, stop), emit
