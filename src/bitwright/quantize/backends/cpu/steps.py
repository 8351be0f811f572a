"""The steps of kernels, each an intrinsic function of Numba: a block of W numbers from array to array."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bitwright.quantize.backends.cpu.lanes import (
    ANY,
    EXACT,
    F32,
    I8,
    I16,
    I32,
    I64,
    MAGNITUDE_MASK,
    NUMBERS,
    all_lanes,
    call,
    fma,
    is_streaming,
    load,
    load_in_order,
    pointer,
    splat,
    store,
    to,
)
from bitwright.quantize.backends.cpu.rounding import emit_decode, emit_encode, emit_round

#: Numbers that `scaled_blocks`, `decoded_blocks` and the functions of packing look at together.
BLOCK = 64


@intrinsic(prefer_literal=True)
def round_block(
    typing_context: Any, x: Any, index: Any, out: Any, grid: Any, width: Any, is_bounded: Any, known: Any, streams: Any
) -> Any:
    """``out[index : index + W] = round(x[…])``. is_bounded: no rounded magnitude exceeds the largest number."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_type, _, out_type, grid_type, *_ = signature.args
        values = load(context, builder, x_type, args[0], args[1], width.literal_value)
        rounded = emit_round(context, builder, grid_type, args[3], values, values, bool(is_bounded.literal_value))
        store(context, builder, out_type, args[2], args[1], rounded, known.literal_value, is_streaming(streams))
        return context.get_dummy_value()

    return types.void(x, types.intp, out, grid, width, is_bounded, known, streams), emit


@intrinsic(prefer_literal=True)
def amax_bits_of_block(typing_context: Any, x: Any, index: Any, width: Any) -> Any:
    """The word of the largest magnitude of ``x[index : index + W]``; above that of Inf where there is a NaN."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = load(context, builder, signature.args[0], args[0], args[1], width.literal_value)
        magnitudes = builder.and_(to(builder, values, I32), all_lanes(MAGNITUDE_MASK, values.type))
        if width.literal_value == 1:
            return builder.extract_element(magnitudes, ir.Constant(I32, 0))
        return call(builder, f"llvm.vector.reduce.umax.v{width.literal_value}i32", I32, [magnitudes])

    return types.uint32(x, types.intp, width), emit


#: How many blocks `amax_bits_of_blocks` looks at.
NUM_BLOCKS = 16


def _halves(builder: Any, a: Any, b: Any) -> Any:
    """max of neighbours within a, then within b: as many lanes as a has."""
    count = a.type.count
    even, odd = (
        builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, count), list(range(start, 2 * count, 2))))
        for start in (0, 1)
    )
    return builder.select(builder.icmp_unsigned(">", even, odd), even, odd)


def _folded(builder: Any, lanes: Any) -> Any:
    """max of the two halves."""
    half = lanes.type.count // 2
    undefined = ir.Constant(lanes.type, ir.Undefined)
    low, high = (
        builder.shuffle_vector(
            lanes, undefined, ir.Constant(ir.VectorType(I32, half), list(range(start, start + half)))
        )
        for start in (0, half)
    )
    return builder.select(builder.icmp_unsigned(">", low, high), low, high)


@intrinsic(prefer_literal=True)
def amax_bits_of_blocks(typing_context: Any, x: Any, index: Any, found: Any, first: Any, width: Any) -> Any:
    """``found[first : first + 16]`` = `amax_bits_of_block` of 16 consecutive blocks; W is a power of two, at least 2.

    Sixteen reductions share their shuffles: two vectors of half-reduced lanes make one.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = []
        for block in range(NUM_BLOCKS):
            start = builder.add(args[1], ir.Constant(args[1].type, block * width.literal_value))
            values = load(context, builder, signature.args[0], args[0], start, width.literal_value)
            magnitudes = builder.and_(to(builder, values, I32), all_lanes(MAGNITUDE_MASK, values.type))
            while magnitudes.type.count > NUM_BLOCKS:
                magnitudes = _folded(builder, magnitudes)
            lanes.append(magnitudes)
        num_lanes = lanes[0].type.count
        while num_lanes > 1:
            lanes = [_halves(builder, a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
            num_lanes //= 2
        joined = lanes[0]
        if len(lanes) == 2:
            both = ir.Constant(ir.VectorType(I32, NUM_BLOCKS), list(range(NUM_BLOCKS)))
            joined = builder.shuffle_vector(lanes[0], lanes[1], both)
        builder.store(joined, pointer(context, builder, signature.args[2], args[2], args[3], joined.type), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, found, types.intp, width), emit


#: How `scaled_block` divides. By the division of the processor, which is right for every scale.
DIVIDE = 0
#: By the rounded reciprocal and one correction (Markstein 1990, theorem 5): with r = RN(1/s) and q = RN(x · r), RN(q +
#: (x − q · s) · r) is the correctly rounded x / s, provided that x − q · s is exact. For scales from 2^−60 to 2^60 it
#: is, save where |x / s| < 2^−60, which rounds to zero all the same; only the sign of −0 is lost. A division costs ten
#: cycles, this three.
CORRECTED = 1
#: No division: times a reciprocal that is given (delayed scaling), or is exact (powers of two from 2^−60 to 2^60).
MULTIPLY = 2
#: The same of a power of two, and codes have at most 8 significant bits: values are exact in bf16.
SHORT_CODES = 3


def _divide(builder: Any, values: Any, scale: Any, inverse: Any, method: int) -> Any:
    """values / scale, correctly rounded."""
    if method == DIVIDE:
        return builder.fdiv(values, scale)
    quotient = builder.fmul(values, inverse)
    if method in (MULTIPLY, SHORT_CODES):
        return quotient
    remainder = fma(builder, builder.fneg(quotient), scale, values)
    return fma(builder, remainder, inverse, quotient)


#: How far ahead `scaled_block` asks for what the next run of groups will read, in bytes.
PREFETCH_BYTES = 8192


def _prefetch(context: Any, builder: Any, array_type: Any, array: Any, index: Any, width: int) -> None:
    """Ask for the cache lines PREFETCH_BYTES after a block (a hint: it may lie beyond the end)."""
    item_bytes = array_type.dtype.bitwidth // 8
    for line in range(0, width * item_bytes, 64):
        ahead = builder.add(index, ir.Constant(index.type, (PREFETCH_BYTES + line) // item_bytes))
        address = pointer(context, builder, array_type, array, ahead, I8)
        void = ir.FunctionType(ir.VoidType(), [address.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, void, "llvm.prefetch.p0")
        builder.call(function, [address, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])


def _quantize_lanes(
    context: Any, builder: Any, signature: Any, args: Any, scales: Any, width: int, method: int, streams: bool
) -> None:
    """Load, divide, round, multiply and store; or store codes, where `out` holds bytes."""
    x_type, out_type, grid_type = signature.args[0], signature.args[2], signature.args[6]
    gives_bytes = out_type.dtype == types.uint8
    take = load if gives_bytes or x_type.dtype == out_type.dtype else load_in_order
    values = take(context, builder, x_type, args[0], args[1], width)
    if out_type.dtype == types.uint16 and x_type.dtype != types.uint16 and width > 1:
        values = _shuffled(builder, values, _split_order(width))
    scale, inverse, multiplier = (scales(position, values.type) for position in (3, 4, 5))
    quotient = _divide(builder, values, scale, inverse, method)
    if gives_bytes:
        codes = builder.trunc(
            emit_encode(context, builder, grid_type, args[6], quotient, values), ir.VectorType(I8, width)
        )
        if x_type.dtype == types.uint16 and width > 1:
            codes = _in_order(builder, codes)
        builder.store(codes, pointer(context, builder, out_type, args[2], args[1], codes.type), align=1)
    else:
        codes = emit_round(context, builder, grid_type, args[6], quotient, values, True)
        known = {DIVIDE: ANY, MULTIPLY: ANY, SHORT_CODES: EXACT}.get(method, NUMBERS)
        store(context, builder, out_type, args[2], args[1], builder.fmul(codes, multiplier), known, streams)
    if method != DIVIDE:
        _prefetch(context, builder, x_type, args[0], args[1], width)


def _split_order(width: int) -> list[int]:
    """Elements as lanes of a bf16 block hold them: even ones, then odd ones."""
    return [*range(0, width, 2), *range(1, width, 2)]


def _shuffled(builder: Any, lanes: Any, order: list[int]) -> Any:
    """Lane j: lanes[order[j]]."""
    mask = ir.Constant(ir.VectorType(I32, len(order)), order)
    return builder.shuffle_vector(lanes, ir.Constant(lanes.type, ir.Undefined), mask)


def _in_order(builder: Any, lanes: Any) -> Any:
    """Undo the order of a bf16 block."""
    half = lanes.type.count // 2
    return _shuffled(builder, lanes, [place // 2 + half * (place % 2) for place in range(2 * half)])


def _spread(context: Any, builder: Any, array_type: Any, array: Any, first: Any, size: int, is_split: bool) -> Any:
    """A number for each lane of a block of 64: array[first + element // size]."""
    vector = ir.VectorType(F32, BLOCK // size)
    numbers = builder.load(pointer(context, builder, array_type, array, first, vector), align=4)
    order = _split_order(BLOCK) if is_split else list(range(BLOCK))
    return _shuffled(builder, numbers, [element // size for element in order])


@intrinsic(prefer_literal=True)
def scaled_block(
    typing_context: Any,
    x: Any,
    index: Any,
    out: Any,
    scale: Any,
    inverse: Any,
    multiplier: Any,
    grid: Any,
    width: Any,
    method: Any,
    streams: Any,
) -> Any:
    """``out[index : index + W] = round(x[…] / scale) · multiplier``, by one of the methods of division.

    Where `out` holds bytes they are the codes, 0 for NaN.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def scales(position: int, like: Any) -> Any:
            return splat(builder, args[position], like)

        _quantize_lanes(
            context, builder, signature, args, scales, width.literal_value, method.literal_value, is_streaming(streams)
        )
        return context.get_dummy_value()

    number = types.float32
    return types.void(x, types.intp, out, number, number, number, grid, width, method, streams), emit


@intrinsic(prefer_literal=True)
def scaled_blocks(
    typing_context: Any,
    x: Any,
    index: Any,
    out: Any,
    scale: Any,
    inverse: Any,
    multiplier: Any,
    grid: Any,
    first: Any,
    size: Any,
    method: Any,
    streams: Any,
) -> Any:
    """`scaled_block` of 64 numbers in groups of `size` (8, 16, 32), whose scales start at ``scale[first]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_type, out_type = signature.args[0].dtype, signature.args[2].dtype
        is_split = out_type == types.uint16 or (x_type == types.uint16 and out_type != types.float32)

        def scales(position: int, like: Any) -> Any:
            array_type, array = signature.args[position], args[position]
            return _spread(context, builder, array_type, array, args[7], size.literal_value, is_split)

        _quantize_lanes(context, builder, signature, args, scales, BLOCK, method.literal_value, is_streaming(streams))
        return context.get_dummy_value()

    return types.void(x, types.intp, out, scale, inverse, multiplier, grid, types.intp, size, method, streams), emit


def _joined(builder: Any, low: Any, high: Any, bits: int) -> Any:
    """high · 2^bits + low."""
    return builder.or_(low, builder.shl(high, all_lanes(bits, high.type, high.type.element)))


def _every_other(builder: Any, lanes: Any) -> tuple[Any, Any]:
    """Even and odd lanes."""
    undefined, half = ir.Constant(lanes.type, ir.Undefined), lanes.type.count // 2
    mask = ir.VectorType(I32, half)
    even, odd = (
        builder.shuffle_vector(lanes, undefined, ir.Constant(mask, list(range(start, 2 * half, 2)))) for start in (0, 1)
    )
    return even, odd


def _alternated(builder: Any, even: Any, odd: Any) -> Any:
    """Undo `_every_other`."""
    count = even.type.count
    order = [place // 2 + count * (place % 2) for place in range(2 * count)]
    return builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, 2 * count), order))


@intrinsic(prefer_literal=True)
def pack_block(typing_context: Any, codes: Any, index: Any, packed: Any, position: Any, bits: Any) -> Any:
    """64 codes, one a byte, to 8 · bits bytes of the bitstream: eight codes make one integer of 8 · bits bits."""
    width = bits.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bytes_type = ir.VectorType(I8, BLOCK)
        lanes = builder.load(pointer(context, builder, signature.args[0], args[0], args[1], bytes_type), align=1)
        if width < 8:
            lanes = builder.zext(lanes, ir.VectorType(I16, BLOCK))
            lanes = _joined(builder, *_every_other(builder, lanes), width)
            lanes = builder.zext(lanes, ir.VectorType(I32, BLOCK // 2))
            lanes = _joined(builder, *_every_other(builder, lanes), 2 * width)
            lanes = builder.zext(lanes, ir.VectorType(I64, BLOCK // 4))
            lanes = _joined(builder, *_every_other(builder, lanes), 4 * width)
            lanes = builder.bitcast(lanes, bytes_type)
            kept = [8 * word + byte for word in range(8) for byte in range(width)]
            undefined = ir.Constant(bytes_type, ir.Undefined)
            lanes = builder.shuffle_vector(lanes, undefined, ir.Constant(ir.VectorType(I32, len(kept)), kept))
        builder.store(lanes, pointer(context, builder, signature.args[2], args[2], args[3], lanes.type), align=1)
        return context.get_dummy_value()

    return types.void(codes, types.intp, packed, types.intp, bits), emit


@intrinsic(prefer_literal=True)
def unpack_block(typing_context: Any, packed: Any, position: Any, codes: Any, index: Any, bits: Any) -> Any:
    """Undo `pack_block`."""
    width = bits.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = ir.VectorType(I8, 8 * width)
        lanes = builder.load(pointer(context, builder, signature.args[0], args[0], args[1], stored), align=1)
        if width < 8:
            # every eight codes to a word of their own; bytes beyond theirs are cleared by the masks below
            places = [width * word + min(byte, width - 1) for word in range(8) for byte in range(8)]
            undefined = ir.Constant(stored, ir.Undefined)
            lanes = builder.shuffle_vector(lanes, undefined, ir.Constant(ir.VectorType(I32, BLOCK), places))
            lanes = builder.bitcast(lanes, ir.VectorType(I64, 8))
            for element, num_bits in ((I32, 4 * width), (I16, 2 * width), (I8, width)):
                mask = all_lanes((1 << num_bits) - 1, lanes.type, lanes.type.element)
                shift = all_lanes(num_bits, lanes.type, lanes.type.element)
                narrow = ir.VectorType(element, lanes.type.count)
                low = builder.trunc(builder.and_(lanes, mask), narrow)
                high = builder.trunc(builder.and_(builder.lshr(lanes, shift), mask), narrow)
                lanes = _alternated(builder, low, high)
        builder.store(lanes, pointer(context, builder, signature.args[2], args[2], args[3], lanes.type), align=1)
        return context.get_dummy_value()

    return types.void(packed, types.intp, codes, types.intp, bits), emit


def _decode_lanes(
    context: Any, builder: Any, signature: Any, args: Any, multiplier: Any, width: int, streams: bool
) -> None:
    """Load codes, one a byte, decode, multiply and store."""
    codes_type, _, out_type, _, _, code_type, *_ = signature.args
    stored = ir.VectorType(I8, width)
    lanes = builder.load(pointer(context, builder, codes_type, args[0], args[1], stored), align=1)
    if out_type.dtype == types.uint16 and width > 1:
        lanes = _shuffled(builder, lanes, _split_order(width))
    values = emit_decode(context, builder, code_type, args[5], builder.zext(lanes, ir.VectorType(I32, width)))
    values = builder.fmul(values, multiplier(values.type))
    store(context, builder, out_type, args[2], args[3], values, ANY, streams)


@intrinsic(prefer_literal=True)
def decoded_block(
    typing_context: Any,
    codes: Any,
    index: Any,
    out: Any,
    position: Any,
    multiplier: Any,
    code: Any,
    width: Any,
    streams: Any,
) -> Any:
    """``out[position : position + W] = value of codes[index : index + W] · multiplier``, one code a byte."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def spread(like: Any) -> Any:
            return splat(builder, args[4], like)

        _decode_lanes(context, builder, signature, args, spread, width.literal_value, is_streaming(streams))
        return context.get_dummy_value()

    return types.void(codes, types.intp, out, types.intp, types.float32, code, width, streams), emit


@intrinsic(prefer_literal=True)
def decoded_blocks(
    typing_context: Any,
    codes: Any,
    index: Any,
    out: Any,
    position: Any,
    multipliers: Any,
    code: Any,
    first: Any,
    size: Any,
    streams: Any,
) -> Any:
    """`decoded_block` of 64 codes in groups of `size`, whose multipliers start at ``multipliers[first]``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def spread(like: Any) -> Any:
            is_split = signature.args[2].dtype == types.uint16
            return _spread(context, builder, signature.args[4], args[4], args[6], size.literal_value, is_split)

        _decode_lanes(context, builder, signature, args, spread, BLOCK, is_streaming(streams))
        return context.get_dummy_value()

    return types.void(codes, types.intp, out, types.intp, multipliers, code, types.intp, size, streams), emit
