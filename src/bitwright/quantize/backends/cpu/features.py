"""What the processor that kernels are compiled for can do, by the names that LLVM has for it."""

from __future__ import annotations

from functools import cache

from numba.core.registry import cpu_target

#: Permutations of words within a register and across two, and of bytes across two.
PERMUTATIONS = frozenset({"avx512f", "avx512bw", "avx512vbmi"})
#: Dot products of pairs of bf16.
DOT_PRODUCTS = frozenset({"avx512bf16"})


@cache
def processor_features() -> frozenset[str]:
    """Features that Numba compiles for; its settings may name fewer than the processor has."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))


def lacks(needed: frozenset[str]) -> frozenset[str]:
    """Those of the needed features that the processor does not have."""
    return needed - processor_features()
