"""Arithmetic on many fp32 lanes at once, emitted as LLVM vectors: the vocabulary of every kernel in this folder.

Left to itself, LLVM turns a loop over 16 or 32 numbers into vectors only behind checks that cost more than the loop. So
a *block* of W numbers is one LLVM vector here (W is a constant of the call; LLVM splits it into whatever registers the
processor has), and the loops of `elementwise`, `tiles` and `packing` step from block to block.

Arrays hold fp32 as float32, bf16 as uint16 and fp16 as int16, since NumPy has no bf16 and Numba no arithmetic on fp16:
`load` widens, `store` narrows to nearest even. Both are exact about everything but one thing: lanes of a bf16 block lie
in registers as all even, then all odd elements, because a 32-bit word holds two and splits with one shift and one mask.
Whatever is done lane by lane, or to all lanes, cannot tell; where codes or scales meet lanes, `steps` sorts them.

Results larger than the caches are *streamed*: written past them, since a cache line would be read before it is written
otherwise, which costs a third of all traffic.

Bits and floats are turned into each other by bit-cast instructions, never through two views of one array, which the
optimiser may reorder.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()

#: Bytes that memory moves together.
CACHE_LINE = 64

MAGNITUDE_MASK = 0x7FFFFFFF
SIGN_MASK = 0x80000000
EXPONENT_MASK = 0x7F800000


def splat(builder: Any, value: Any, like: ir.Type) -> Any:
    """A scalar in every lane of the vector type `like`."""
    vector = ir.VectorType(value.type, like.count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, like.count), [0] * like.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def all_lanes(value: float, like: ir.Type, element: ir.Type = I32) -> ir.Constant:
    """The same constant in every lane."""
    return ir.Constant(ir.VectorType(element, like.count), [ir.Constant(element, value)] * like.count)


def to(builder: Any, value: Any, element: ir.Type) -> Any:
    """The bits of all lanes as another type of the same width."""
    return builder.bitcast(value, ir.VectorType(element, value.type.count))


def call(builder: Any, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    """An LLVM intrinsic function."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c of fp32 lanes, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: ir.Type) -> Any:
    """Where element `index` of an array lies, as a pointer to `pointee`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    """W elements as fp32 lanes (bf16: the even ones, then the odd ones)."""
    element = array_type.dtype
    if element == types.uint16 and width > 1:
        words_type = ir.VectorType(I32, width // 2)
        words = builder.load(pointer(context, builder, array_type, array, index, words_type), align=2)
        even = builder.shl(words, all_lanes(16, words_type))
        odd = builder.and_(words, all_lanes(0xFFFF0000, words_type))
        lanes = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        return to(builder, builder.shuffle_vector(even, odd, lanes), F32)
    return load_in_order(context, builder, array_type, array, index, width)


def load_in_order(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> Any:
    """W consecutive elements as fp32 lanes."""
    element = array_type.dtype
    stored = {types.float32: F32, types.uint16: I16, types.int16: F16}[element]
    vector = ir.VectorType(stored, width)
    raw = builder.load(pointer(context, builder, array_type, array, index, vector), align=element.bitwidth // 8)
    if element == types.float32:
        return raw
    if element == types.int16:
        return builder.fpext(raw, ir.VectorType(F32, width))
    wide = builder.zext(raw, ir.VectorType(I32, width))
    return to(builder, builder.shl(wide, all_lanes(16, wide.type)), F32)


#: What is known of the values that are narrowed to bf16: nothing; that they are no NaN; that they are bf16 already.
ANY, NUMBERS, EXACT = 0, 1, 2


def _bf16_in_upper_half(builder: Any, values: Any, known: int) -> Any:
    """fp32 words whose upper halves are the nearest bf16, ties to even; NaN stays NaN."""
    bits = to(builder, values, I32)
    if known == EXACT:
        return bits
    odd = builder.and_(builder.lshr(bits, all_lanes(16, bits.type)), all_lanes(1, bits.type))
    rounded = builder.add(bits, builder.add(odd, all_lanes(0x7FFF, bits.type)))
    if known == NUMBERS:
        return rounded
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.select(is_nan, builder.or_(bits, all_lanes(0x400000, bits.type)), rounded)


def is_streaming(streams: Any) -> bool:
    """Whether an argument says that results go past the caches: where they do not, its type is that of None."""
    return not isinstance(streams, types.NoneType)


def write(builder: Any, lanes: Any, place: Any, align: int, streams: bool) -> None:
    """Store lanes; where they stream, past the caches: whole cache lines to an address that is a multiple of 64."""
    stored = builder.store(lanes, place, align=CACHE_LINE if streams else align)
    if streams:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


def store(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, values: Any, known: int, streams: bool
) -> None:
    """Lanes in the order of `load` to W elements."""
    element, width = array_type.dtype, values.type.count
    if element == types.float32:
        stored = values
    elif element == types.int16:
        stored = builder.fptrunc(values, ir.VectorType(F16, width))
    else:
        words = _bf16_in_upper_half(builder, values, known)
        if width == 1:
            stored = builder.trunc(builder.lshr(words, all_lanes(16, words.type)), ir.VectorType(I16, 1))
        else:
            half = ir.VectorType(I32, width // 2)
            undefined = ir.Constant(words.type, ir.Undefined)
            even, odd = (
                builder.shuffle_vector(words, undefined, ir.Constant(half, list(range(start, start + width // 2))))
                for start in (0, width // 2)
            )
            kept = odd if known == EXACT else builder.and_(odd, all_lanes(0xFFFF0000, half))
            stored = builder.or_(kept, builder.lshr(even, all_lanes(16, half)))
    place = pointer(context, builder, array_type, array, index, stored.type)
    write(builder, stored, place, element.bitwidth // 8, streams)


def minimum(builder: Any, bound: Any, value: Any) -> Any:
    """The smaller one; NaN in `value` stays."""
    return builder.select(builder.fcmp_ordered("<", bound, value), bound, value)


def maximum(builder: Any, bound: Any, value: Any) -> Any:
    """The larger one; NaN in `value` stays."""
    return builder.select(builder.fcmp_ordered(">", bound, value), bound, value)


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The word of an fp32 number."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """The fp32 number of a word."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)
