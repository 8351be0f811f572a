"""Codes in tiles to numbers in registers, emitted as LLVM vectors: 16 rows of two columns at a time.

What is expanded is a *code vector* (`matmul_layout`): a 32-bit lane for each of 16 rows, the code of the even column in
its lower half, that of the odd one in its upper half. It becomes

    a pair      the same lanes, two bf16 each, as dot products of bf16 take them
    floats      two vectors of 16 fp32 numbers: the even column, the odd column

in the way that `matmul_numbers` has found for the format. Permutations look at as many bits of an index as their table
has entries: what stands above a code of fewer bits picks a copy. All other ways cut codes out by shifts and masks.

Rejected: re-biasing exponents by one multiplication (subnormal numbers of fp32 in between cost 150 cycles each on some
processors), magic numbers (bf16 has too few bits).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from bitwright.quantize.backends.cpu.features import HALF_CONVERSIONS, processor_features
from bitwright.quantize.backends.cpu.lanes import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    all_lanes,
    call,
    load_in_order,
    pointer,
    splat,
    to,
)
from bitwright.quantize.backends.cpu.matmul_layout import VECTOR_ROWS, VECTOR_WORDS, Piece, unit_of
from bitwright.quantize.backends.cpu.matmul_numbers import Kind

VECTOR_BYTES = 2 * VECTOR_WORDS
#: How far ahead codes are asked for: a product at batch 1 takes a seventh less time than without; 1 and 16 KiB ahead,
#: a tenth less.
PREFETCHED_BYTES = 4096
BYTES = ir.VectorType(I8, VECTOR_BYTES)
WORDS = ir.VectorType(I16, VECTOR_WORDS)
PAIRS = ir.VectorType(I32, VECTOR_ROWS)
FLOATS = ir.VectorType(F32, VECTOR_ROWS)
_EIGHT_LANES = ir.VectorType(I32, VECTOR_ROWS // 2)
_EIGHT_FLOATS = ir.VectorType(F32, VECTOR_ROWS // 2)
#: Ways that give pairs of bf16; fp32 numbers are their halves.
_OF_PAIRS = frozenset({Kind.WORDS, Kind.BYTES, Kind.MIRRORED_BYTES, Kind.STORED_BF16})
#: Bits of a lane that a column has.
_COLUMN_BITS = 16
_FRACTION_BITS, _SIGN_BIT = 23, 31


def at(number: int) -> ir.Constant:
    """An index."""
    return ir.Constant(I64, number)


def floats_of_pair(builder: Any, pair: Any) -> tuple[Any, Any]:
    """The fp32 numbers of pairs of bf16: of the even column, of the odd one."""
    lanes = builder.bitcast(pair, PAIRS)
    upper = all_lanes(0xFFFF0000, PAIRS)
    return to(builder, builder.shl(lanes, all_lanes(16, PAIRS)), F32), to(builder, builder.and_(lanes, upper), F32)


def pair_of_floats(builder: Any, even: Any, odd: Any) -> Any:
    """Undo `floats_of_pair`, of numbers that bf16 holds; 32-bit lanes."""
    upper_words = [word for i in range(1, VECTOR_WORDS, 2) for word in (i, VECTOR_WORDS + i)]
    mask = ir.Constant(ir.VectorType(I32, VECTOR_WORDS), upper_words)
    even, odd = (builder.bitcast(x, WORDS) for x in (even, odd))
    return builder.bitcast(builder.shuffle_vector(even, odd, mask), PAIRS)


class Expander:
    """Emits the expansion of codes of one array, by a table that is loaded here, once.

    codes, table: type and value of the arrays. how: type of two constants, bits and `Expansion.code`.
    """

    def __init__(self, context: Any, builder: Any, codes: tuple[Any, Any], table: tuple[Any, Any], how: Any) -> None:
        self.context, self.builder, self.codes, self.table = context, builder, codes, table
        self.bits, code = (constant.count for constant in how.types)
        self.kind, self.fraction_bits, self.unit = Kind(min(code, Kind.FIELDS)), code - Kind.FIELDS, unit_of(self.bits)
        self.num_pairs = self.unit.num_pairs
        self.registers = self._registers()

    def pairs(self, position: Any, *, prefetches: bool = True) -> list[Any]:
        """Pairs of bf16 of a whole unit from byte `position` on, four vectors for each pair of columns; of codes that
        bf16 holds."""
        if self.kind not in _OF_PAIRS:
            return [pair_of_floats(self.builder, *both) for both in self.floats(position, prefetches=prefetches)]
        vectors = self._vectors(position, prefetches)
        if self.kind in (Kind.BYTES, Kind.MIRRORED_BYTES):
            return [words for vector in vectors for words in self._bytes_looked_up(vector)]
        codes = self._code_vectors(vectors)
        return codes if self.kind == Kind.STORED_BF16 else [self._words_looked_up(code) for code in codes]

    def floats(self, position: Any, *, prefetches: bool = True) -> list[tuple[Any, Any]]:
        """The same as fp32 numbers of the even and of the odd column."""
        if self.kind in _OF_PAIRS:
            return [floats_of_pair(self.builder, pair) for pair in self.pairs(position, prefetches=prefetches)]
        codes = [self.builder.bitcast(code, PAIRS) for code in self._code_vectors(self._vectors(position, prefetches))]
        return [(self._numbers(code, 0), self._numbers(code, _COLUMN_BITS)) for code in codes]

    # --- codes ---

    def _vectors(self, position: Any, prefetches: bool) -> list[Any]:
        """The words of the units that hold whole pairs of columns."""
        builder, (array_type, array) = self.builder, self.codes
        count = self.unit.num_vectors * self.unit.repeats
        places = [builder.add(position, at(VECTOR_BYTES * i)) for i in range(count)]
        for place in places if prefetches else []:
            self._prefetch(builder.add(place, at(PREFETCHED_BYTES)))
        return [
            builder.load(pointer(self.context, builder, array_type, array, place, WORDS), align=1) for place in places
        ]

    def _prefetch(self, index: Any) -> None:
        """Ask for a cache line; one that does not exist is no error."""
        place = pointer(self.context, self.builder, *self.codes, index, I8)
        function_type = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(self.builder.module, function_type, "llvm.prefetch.p0")
        self.builder.call(prefetch, [place, *(ir.Constant(I32, number) for number in (0, 3, 1))])

    def _code_vectors(self, vectors: list[Any]) -> list[Any]:
        """Codes at the lowest bits of their words; above those that lie in one piece stands whatever it may be."""
        size = self.unit.num_vectors
        return [
            self._code(vectors[repeat * size :], pieces)
            for repeat in range(self.unit.repeats)
            for pieces in self.unit.codes
        ]

    def _code(self, vectors: list[Any], pieces: tuple[Piece, ...]) -> Any:
        code = self._piece(vectors, pieces[0], len(pieces) == 1)
        for piece in pieces[1:]:
            code = self.builder.or_(code, self._piece(vectors, piece, False))
        return code

    def _piece(self, vectors: list[Any], piece: Piece, is_whole: bool) -> Any:
        words, by = vectors[piece.vector], piece.shift - piece.target
        if by:
            shift = self.builder.lshr if by > 0 else self.builder.shl
            words = shift(words, all_lanes(abs(by), WORDS, I16))
        if is_whole:
            return words
        return self.builder.and_(words, all_lanes(((1 << piece.num_bits) - 1) << piece.target, WORDS, I16))

    # --- tables ---

    def _registers(self) -> list[Any]:
        match self.kind:
            case Kind.WORDS:
                return self._load(WORDS, 1 if self.bits < 6 else 2)
            case Kind.BYTES | Kind.MIRRORED_BYTES:
                return self._load(BYTES, 8 if self.kind == Kind.BYTES else 4)
            case Kind.FLOATS:
                return self._load(FLOATS, 1)
            case Kind.EIGHT_FLOATS:
                return self._load(_EIGHT_FLOATS, 2)
            case Kind.FIELDS:
                splats = [splat(self.builder, self._entry(at(i)), FLOATS) for i in range(3)]
                return [to(self.builder, splats[0], I32), to(self.builder, splats[1], I32), splats[2]]
            case _:
                return []

    def _load(self, vector: Any, count: int) -> list[Any]:
        array_type, array = self.table
        step = VECTOR_BYTES // (array_type.dtype.bitwidth // 8) if vector != _EIGHT_FLOATS else vector.count
        places = [pointer(self.context, self.builder, array_type, array, at(step * i), vector) for i in range(count)]
        return [self.builder.load(place, align=1) for place in places]

    def _entry(self, index: Any) -> Any:
        return self.builder.load(pointer(self.context, self.builder, *self.table, index, F32))

    def _words_looked_up(self, codes: Any) -> Any:
        if len(self.registers) == 1:
            return call(self.builder, "llvm.x86.avx512.permvar.hi.512", WORDS, [self.registers[0], codes])
        first, second = self.registers
        return call(self.builder, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, [first, codes, second])

    def _bytes_looked_up(self, words: Any) -> list[Any]:
        """The two code vectors of 8 bits in a vector."""
        builder, table = self.builder, self.registers
        codes = builder.bitcast(words, BYTES)

        def looked_up(i: int) -> Any:
            return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, [table[i], codes, table[i + 1]])

        if self.kind == Kind.MIRRORED_BYTES:  # low bytes, high bytes
            low, high = looked_up(0), looked_up(2)
            high = builder.or_(high, builder.and_(codes, all_lanes(-128, BYTES, I8)))
        else:  # low bytes of either half of the codes, high bytes of either half
            is_upper = builder.icmp_signed("<", codes, all_lanes(0, BYTES, I8))
            low = builder.select(is_upper, looked_up(2), looked_up(0))
            high = builder.select(is_upper, looked_up(6), looked_up(4))
        low, high = builder.bitcast(low, WORDS), builder.bitcast(high, WORDS)
        eight = all_lanes(8, WORDS, I16)
        first = builder.or_(builder.and_(low, all_lanes(0xFF, WORDS, I16)), builder.shl(high, eight))
        second = builder.or_(builder.lshr(low, eight), builder.and_(high, all_lanes(0xFF00, WORDS, I16)))
        return [first, second]

    # --- fp32 numbers of codes that begin at bit `shift` of their lanes ---

    def _numbers(self, lanes: Any, shift: int) -> Any:
        builder, bits = self.builder, self.bits
        match self.kind:
            case Kind.FLOATS:
                index = builder.lshr(lanes, all_lanes(shift, PAIRS)) if shift else lanes
                return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, [self.registers[0], index])
            case Kind.EIGHT_FLOATS:
                return self._eight_looked_up(lanes, shift)
            case Kind.SIGNED:
                top = builder.shl(lanes, all_lanes(32 - bits - shift, PAIRS))
                return builder.sitofp(builder.ashr(top, all_lanes(32 - bits, PAIRS)), FLOATS)
            case Kind.UNSIGNED:
                return builder.sitofp(self._cut(lanes, shift, 0, bits), FLOATS)
            case Kind.STORED_FP16:
                words = builder.trunc(builder.lshr(lanes, all_lanes(shift, PAIRS)), ir.VectorType(I16, VECTOR_ROWS))
                return builder.fpext(to(builder, words, F16), FLOATS)
            case Kind.FIELDS:
                return self._fields(lanes, shift)
            case _:
                return self._read(self._cut(lanes, shift, 0, bits))

    def _eight_looked_up(self, lanes: Any, shift: int) -> Any:
        """Among the lower eight and among the upper eight; the fourth bit of a code picks one."""
        builder, undefined = self.builder, ir.Constant(PAIRS, ir.Undefined)
        halves = []
        for first in (0, VECTOR_ROWS // 2):
            picked = ir.Constant(_EIGHT_LANES, list(range(first, first + VECTOR_ROWS // 2)))
            eight = builder.shuffle_vector(lanes, undefined, picked)
            index = builder.lshr(eight, all_lanes(shift, _EIGHT_LANES)) if shift else eight
            low, high = (
                call(builder, "llvm.x86.avx2.permps", _EIGHT_FLOATS, [table, index]) for table in self.registers
            )
            fourth = builder.shl(eight, all_lanes(28 - shift, _EIGHT_LANES))
            is_upper = builder.icmp_signed("<", fourth, all_lanes(0, _EIGHT_LANES))
            halves.append(builder.select(is_upper, high, low))
        return builder.shuffle_vector(*halves, ir.Constant(PAIRS, list(range(VECTOR_ROWS))))

    def _cut(self, lanes: Any, shift: int, target: int, num_bits: int) -> Any:
        """`num_bits` bits of each lane from `shift` on, moved to `target`."""
        by = shift - target
        if by:
            lanes = (self.builder.lshr if by > 0 else self.builder.shl)(lanes, all_lanes(abs(by), PAIRS))
        return self.builder.and_(lanes, all_lanes(((1 << num_bits) - 1) << target, PAIRS))

    def _fields(self, lanes: Any, shift: int) -> Any:
        placed = self._cut(lanes, shift, _FRACTION_BITS - self.fraction_bits, self.bits - 1)
        sign = self._cut(lanes, shift + self.bits - 1, _SIGN_BIT, 1)
        return _of_fields(self.builder, placed, sign, *self.registers)

    def _read(self, codes: Any) -> Any:
        values: Any = ir.Constant(FLOATS, ir.Undefined)
        for i in range(VECTOR_ROWS):
            lane = ir.Constant(I32, i)
            index = self.builder.zext(self.builder.extract_element(codes, lane), I64)
            values = self.builder.insert_element(values, self._entry(index), lane)
        return values


def _of_fields(builder: Any, placed: Any, sign: Any, offset: Any, last: Any, minus_two_hidden: Any) -> Any:
    """fp32 numbers of exponents and fractions that are where fp32 has them, and signs; see `matmul_numbers`."""
    normal = to(builder, builder.add(placed, offset), F32)
    two = ir.Constant(FLOATS, [ir.Constant(F32, 2.0)] * VECTOR_ROWS)
    is_subnormal = builder.icmp_signed("<", placed, all_lanes(1 << _FRACTION_BITS, PAIRS))
    finite = builder.select(is_subnormal, muladd(builder, normal, two, minus_two_hidden), normal)
    beyond = builder.sext(builder.icmp_signed(">", placed, last), PAIRS)
    specials = builder.and_(beyond, all_lanes(0xFF << _FRACTION_BITS, PAIRS))
    return to(builder, builder.or_(builder.or_(to(builder, finite, I32), specials), sign), F32)


def load_numbers(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """16 numbers of fp32, bf16 or fp16 from `index` on, as fp32; by arithmetic where nothing converts fp16."""
    if array_type.dtype != types.int16 or processor_features() & HALF_CONVERSIONS:
        return load_in_order(context, builder, array_type, array, index, VECTOR_ROWS)
    words = builder.load(pointer(context, builder, array_type, array, index, ir.VectorType(I16, VECTOR_ROWS)), align=2)
    lanes = builder.zext(words, PAIRS)
    placed = builder.shl(builder.and_(lanes, all_lanes(0x7FFF, PAIRS)), all_lanes(13, PAIRS))
    sign = builder.shl(builder.and_(lanes, all_lanes(0x8000, PAIRS)), all_lanes(16, PAIRS))
    hidden = ir.Constant(FLOATS, [ir.Constant(F32, -(2.0**-14))] * VECTOR_ROWS)
    offset, last = all_lanes(112 << _FRACTION_BITS, PAIRS), all_lanes(0x7BFF << 13, PAIRS)
    return _of_fields(builder, placed, sign, offset, last, hidden)


def muladd(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c of fp32 lanes: rounded once where the processor does so in one instruction."""
    return call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])
