"""What the processor that kernels are compiled for can do, by the names that LLVM has for it."""

from __future__ import annotations

from functools import cache

from numba.core.registry import cpu_target

#: Registers of sixteen fp32 numbers, 32 of them, and permutations of those.
WIDE_REGISTERS = frozenset({"avx512f"})
#: Permutations of eight fp32 numbers.
EIGHT_FLOATS = frozenset({"avx2"})
#: Permutations of words within a register and across two.
WORD_PERMUTATIONS = frozenset({"avx512f", "avx512bw"})
#: Permutations of bytes across two registers.
BYTE_PERMUTATIONS = frozenset({"avx512f", "avx512bw", "avx512vbmi"})
#: Any of these converts fp16 to fp32.
HALF_CONVERSIONS = frozenset({"f16c", "avx512f", "neon", "fp-armv8", "zvfh"})
#: Dot products of pairs of bf16.
DOT_PRODUCTS = frozenset({"avx512f", "avx512bf16"})


@cache
def processor_features() -> frozenset[str]:
    """Features that Numba compiles for; its settings may name fewer than the processor has."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
