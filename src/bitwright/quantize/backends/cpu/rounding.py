"""How lanes are rounded to a format, encoded and decoded, by the kind of its record in `grids`.

A number c >= 0 of exponent e lies on a grid of step s = 2^(max(e, emin) − fraction_bits). With M = 2^23 · s, whose ulp
is s, the sum c + M is rounded to a multiple of s by the addition itself, ties to even, and c + M − M is the result
(Dekker 1971). The exponent of M follows from that of c by one integer addition, and the low bits of c + M are the
significand that a code holds. Formats with the exponent field of fp32 leave no room for M and are rounded as integers.

Every function takes and gives LLVM values: numbers in lanes, and the fields of a record as scalars. The sign of a float
result is that of `signs`: the numbers themselves, or what they were before a division that makes −0 into +0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from bitwright.quantize.backends.cpu.grids import (
    CODEBOOK_VALUES,
    CodebookCode,
    CodebookGrid,
    FloatCode,
    FloatGrid,
    IntCode,
    IntGrid,
    OneZeroGrid,
    RangeGrid,
    WideGrid,
)
from bitwright.quantize.backends.cpu.lanes import (
    EXPONENT_MASK,
    F32,
    I32,
    MAGNITUDE_MASK,
    SIGN_MASK,
    all_lanes,
    maximum,
    minimum,
    splat,
    to,
)


def _fields(context: Any, builder: Any, grid_type: Any, grid: Any) -> list[Any]:
    """The fields of a record; of an array, the address of its numbers."""
    fields = [builder.extract_value(grid, position) for position in range(len(grid_type))]
    return [
        context.make_array(kind)(context, builder, field).data if isinstance(kind, types.Array) else field
        for kind, field in zip(grid_type, fields, strict=True)
    ]


def _on_grid(builder: Any, fields: list[Any], values: Any) -> tuple[Any, Any, Any]:
    """|x| cut at the limit, its exponent field (at least emin), and M: see the module docstring."""
    shift, emin_bits, limit = (splat(builder, field, values.type) for field in fields[:3])
    magnitude = to(builder, builder.and_(to(builder, values, I32), all_lanes(MAGNITUDE_MASK, values.type)), F32)
    cut = minimum(builder, limit, magnitude)
    exponent = builder.and_(to(builder, cut, I32), all_lanes(EXPONENT_MASK, values.type))
    exponent = builder.select(builder.icmp_unsigned(">", exponent, emin_bits), exponent, emin_bits)
    # of NaN: some number, and NaN + number is NaN
    return cut, exponent, to(builder, builder.add(exponent, shift), F32)


def _round_float(builder: Any, fields: list[Any], values: Any, signs: Any, is_bounded: bool) -> Any:
    cut, _, magic = _on_grid(builder, fields, values)
    rounded = builder.fsub(builder.fadd(cut, magic), magic)
    if not is_bounded:
        largest, beyond = (splat(builder, field, values.type) for field in fields[3:5])
        rounded = builder.select(builder.fcmp_ordered(">", rounded, largest), beyond, rounded)
    sign = builder.and_(to(builder, signs, I32), all_lanes(SIGN_MASK, values.type))
    return to(builder, builder.or_(to(builder, rounded, I32), sign), F32)


def _round_float_to_one_zero(builder: Any, fields: list[Any], values: Any, signs: Any, is_bounded: bool) -> Any:
    rounded = _round_float(builder, fields, values, signs, is_bounded)
    return builder.fadd(rounded, all_lanes(0.0, values.type, F32))


def _round_wide(builder: Any, fields: list[Any], values: Any, signs: Any, is_bounded: bool) -> Any:
    dropped, limit = (splat(builder, field, values.type) for field in fields)
    bits = to(builder, values, I32)
    one = all_lanes(1, bits.type)
    unit = builder.shl(one, dropped)
    magnitude = builder.and_(bits, all_lanes(MAGNITUDE_MASK, bits.type))
    odd = builder.and_(builder.lshr(magnitude, dropped), one)
    below_half = builder.sub(builder.lshr(unit, one), one)
    rounded = builder.add(magnitude, builder.add(below_half, odd))
    rounded = builder.and_(rounded, builder.sub(all_lanes(0, bits.type), unit))
    rounded = builder.select(builder.icmp_unsigned("<", rounded, limit), rounded, limit)
    rounded = builder.or_(rounded, builder.and_(bits, all_lanes(SIGN_MASK, bits.type)))
    is_nan = builder.fcmp_unordered("uno", values, values)
    return to(builder, builder.select(is_nan, bits, rounded), F32)


def _round_int(builder: Any, fields: list[Any], values: Any, signs: Any, is_bounded: bool) -> Any:
    low, high = (splat(builder, field, values.type) for field in fields[:2])
    cut = maximum(builder, low, minimum(builder, high, values))
    magic = all_lanes(1.5 * 2**23, values.type, F32)
    return builder.fsub(builder.fadd(cut, magic), magic)


def _round_range(builder: Any, fields: list[Any], values: Any, signs: Any, is_bounded: bool) -> Any:
    low, high = (splat(builder, field, values.type) for field in fields)
    return maximum(builder, low, minimum(builder, high, values))


def _codebook_lanes(builder: Any, table: Any, first: int, num: int, like: ir.Type) -> list[Any]:
    """Numbers of a table (its address) from `first` on, each in all lanes."""
    places = [builder.gep(table, [ir.Constant(I32, first + i)]) for i in range(num)]
    return [splat(builder, builder.load(place), like) for place in places]


def _choose(builder: Any, table: Any, values: Any, first: int) -> Any:
    """Of the 16 numbers of a table from `first` on, that of the interval which a value lies in."""
    bounds = _codebook_lanes(builder, table, 0, CODEBOOK_VALUES - 1, values.type)
    found, *others = _codebook_lanes(builder, table, first, CODEBOOK_VALUES, values.type)
    for bound, other in zip(bounds, others, strict=True):
        found = builder.select(builder.fcmp_ordered(">", values, bound), other, found)
    return found


def _round_codebook(builder: Any, fields: list[Any], values: Any, signs: Any, is_bounded: bool) -> Any:
    found = _choose(builder, fields[0], values, CODEBOOK_VALUES - 1)
    return builder.select(builder.fcmp_unordered("uno", values, values), values, found)


_ROUND: dict[type, Callable[..., Any]] = {
    FloatGrid: _round_float,
    OneZeroGrid: _round_float_to_one_zero,
    WideGrid: _round_wide,
    IntGrid: _round_int,
    RangeGrid: _round_range,
    CodebookGrid: _round_codebook,
}


def emit_round(context: Any, builder: Any, grid_type: Any, grid: Any, values: Any, signs: Any, is_bounded: bool) -> Any:
    """`values` on `grid`, with the signs of `signs` where it keeps −0; `is_bounded`: its limit is its largest."""
    emit = _ROUND[grid_type.instance_class]
    return emit(builder, _fields(context, builder, grid_type, grid), values, signs, is_bounded)


def _encode_float(builder: Any, fields: list[Any], values: Any) -> Any:
    cut, exponent, magic = _on_grid(builder, fields, values)
    shift, emin_bits = (splat(builder, field, values.type) for field in fields[:2])
    # M's low bits are zeros, so that c + M counts in them: the significand of the result, carry and all
    significand = builder.sub(to(builder, builder.fadd(cut, magic), I32), to(builder, magic, I32))
    binade = builder.lshr(builder.sub(exponent, emin_bits), builder.lshr(shift, all_lanes(23, values.type)))
    return builder.add(binade, significand)


def _code_sign(builder: Any, fields: list[Any], signs: Any) -> Any:
    sign = builder.and_(to(builder, signs, I32), all_lanes(SIGN_MASK, signs.type))
    return builder.lshr(sign, splat(builder, fields[5], signs.type))


def _encode_signed_float(builder: Any, fields: list[Any], values: Any, signs: Any) -> Any:
    return builder.or_(_encode_float(builder, fields, values), _code_sign(builder, fields, signs))


def _encode_float_to_one_zero(builder: Any, fields: list[Any], values: Any, signs: Any) -> Any:
    magnitude = _encode_float(builder, fields, values)
    is_zero = builder.icmp_unsigned("==", magnitude, all_lanes(0, magnitude.type))
    return builder.select(is_zero, magnitude, builder.or_(magnitude, _code_sign(builder, fields, signs)))


def _encode_int(builder: Any, fields: list[Any], values: Any, signs: Any) -> Any:
    low, high, mask = (splat(builder, field, values.type) for field in fields)
    cut = maximum(builder, low, minimum(builder, high, values))
    # the low bits of 1.5 · 2^23 + n are those of n in two's complement
    return builder.and_(to(builder, builder.fadd(cut, all_lanes(1.5 * 2**23, values.type, F32)), I32), mask)


def _encode_codebook(builder: Any, fields: list[Any], values: Any, signs: Any) -> Any:
    codes = _choose(builder, fields[0], values, 2 * CODEBOOK_VALUES - 1)
    return builder.fptoui(codes, ir.VectorType(I32, values.type.count))


_ENCODE: dict[type, Callable[..., Any]] = {
    FloatGrid: _encode_signed_float,
    OneZeroGrid: _encode_float_to_one_zero,
    IntGrid: _encode_int,
    CodebookGrid: _encode_codebook,
}


def emit_encode(context: Any, builder: Any, grid_type: Any, grid: Any, values: Any, signs: Any) -> Any:
    """The code of every lane, 0 of NaN."""
    codes = _ENCODE[grid_type.instance_class](builder, _fields(context, builder, grid_type, grid), values, signs)
    return builder.select(builder.fcmp_unordered("uno", values, values), all_lanes(0, codes.type), codes)


def _decode_float(builder: Any, fields: list[Any], codes: Any) -> Any:
    sign_shift, fraction_shift, factor, num_finite, first_special, one_zero = (
        splat(builder, field, codes.type) for field in fields
    )
    sign = builder.and_(builder.shl(codes, sign_shift), all_lanes(SIGN_MASK, codes.type))
    magnitude = builder.lshr(
        builder.and_(builder.shl(codes, sign_shift), all_lanes(MAGNITUDE_MASK, codes.type)), sign_shift
    )
    value = builder.fmul(to(builder, builder.shl(magnitude, fraction_shift), F32), factor)
    nan = all_lanes(float("nan"), codes.type, F32)
    special = builder.select(builder.icmp_unsigned("==", magnitude, num_finite), first_special, nan)
    value = builder.select(builder.icmp_unsigned("<", magnitude, num_finite), value, special)
    value = to(builder, builder.or_(to(builder, value, I32), sign), F32)
    zero = all_lanes(0, codes.type)
    says_nan = builder.and_(sign, builder.shl(one_zero, all_lanes(31, codes.type)))
    is_negative_zero = builder.and_(
        builder.icmp_unsigned("==", magnitude, zero), builder.icmp_unsigned("!=", says_nan, zero)
    )
    return builder.select(is_negative_zero, nan, value)


def _decode_int(builder: Any, fields: list[Any], codes: Any) -> Any:
    sign_bit = splat(builder, fields[0], codes.type)
    return builder.sitofp(builder.sub(builder.xor(codes, sign_bit), sign_bit), ir.VectorType(F32, codes.type.count))


def _decode_codebook(builder: Any, fields: list[Any], codes: Any) -> Any:
    """A tree of selections, one level a bit."""
    level = _codebook_lanes(builder, fields[0], 0, CODEBOOK_VALUES, codes.type)
    bit = 1
    while len(level) > 1:
        is_set = builder.icmp_unsigned("!=", builder.and_(codes, all_lanes(bit, codes.type)), all_lanes(0, codes.type))
        level = [builder.select(is_set, odd, even) for even, odd in zip(level[::2], level[1::2], strict=True)]
        bit <<= 1
    return level[0]


_DECODE: dict[type, Callable[..., Any]] = {
    FloatCode: _decode_float,
    IntCode: _decode_int,
    CodebookCode: _decode_codebook,
}


def emit_decode(context: Any, builder: Any, code_type: Any, code: Any, codes: Any) -> Any:
    """The value of every code."""
    return _DECODE[code_type.instance_class](builder, _fields(context, builder, code_type, code), codes)
