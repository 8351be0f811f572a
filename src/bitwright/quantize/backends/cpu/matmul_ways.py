"""Which way a product goes: by the dtype of x, the format of the codes and what the processor has; and why.

    x        bf16: dot products of pairs of bf16, where the processor has them and bf16 holds every value of the codes;
             else fp32 products, half as many a cycle. fp16 and fp32 are fp32 products too: as exact sums of two and
             three bf16 they would take as many dot products, or half as many again
    tokens   what happens to a run of codes (`matmul`), and how many columns of x share what is expanded
    rows     as many at a time as registers hold sums: 64 with 4 columns, 32 with 8; 16 in registers of 256 bits

Codes that one permutation expands are best expanded in registers, for any number of tokens; those that take more, once,
to the first cache, beyond 16 tokens. Where groups have 32 columns and fewer, codes are multiplied by their scales then,
if the product of any two is exact: in the 8 bits of bf16, E2M1 codes under E4M3 scales and all under powers of two
are. Limits were measured (`benchmarks/inference.py matmul`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from bitwright.formats import FloatFormat, Format
from bitwright.formats.decode import value_table
from bitwright.quantize.backends.cpu.features import DOT_PRODUCTS, WIDE_REGISTERS
from bitwright.quantize.backends.cpu.matmul import DIRECT, EXPANDED, RUN_LANES, SCALED
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS, constant
from bitwright.quantize.backends.cpu.matmul_numbers import (
    Expansion,
    Kind,
    floats_expansion,
    pairs_expansion,
    why_no_pairs,
)

#: More tokens than there are.
_ANY = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What is done up to a number of tokens."""

    tokens: int = _ANY
    mode: int
    #: Columns of x of a block, and vectors of 16 rows that their sums are kept of.
    columns: int
    vectors: int


_ONE_TOKEN = Step(tokens=1, mode=DIRECT, columns=1, vectors=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Course:
    """What is done, by number of tokens, and from where on with codes that scales were multiplied into, if they are."""

    steps: tuple[Step, ...]
    scaled_beyond: int
    scaled: Step

    def with_scales(self) -> tuple[Step, ...]:
        """The steps where codes are multiplied by their scales."""
        before = [step for step in self.steps if step.tokens < self.scaled_beyond]
        last = next(step for step in self.steps if step.tokens >= self.scaled_beyond)
        return (*before, dataclasses.replace(last, tokens=self.scaled_beyond), self.scaled)


#: With registers of 512 bits: codes that one permutation expands, and others; with narrower ones.
_PERMUTED = _Course(
    steps=(_ONE_TOKEN, Step(mode=DIRECT, columns=4, vectors=4)),
    scaled_beyond=32,
    scaled=Step(mode=SCALED, columns=4, vectors=4),
)
_COMPOSED = _Course(
    steps=(
        _ONE_TOKEN,
        Step(tokens=4, mode=DIRECT, columns=4, vectors=4),
        Step(tokens=16, mode=DIRECT, columns=8, vectors=2),
        Step(mode=EXPANDED, columns=4, vectors=4),
    ),
    scaled_beyond=8,
    scaled=Step(mode=SCALED, columns=4, vectors=4),
)
_NARROW = _Course(
    steps=(_ONE_TOKEN, Step(mode=EXPANDED, columns=4, vectors=1)),
    scaled_beyond=8,
    scaled=Step(mode=SCALED, columns=4, vectors=1),
)
_ONE_PERMUTATION = (Kind.WORDS, Kind.FLOATS)
#: Columns of a group up to which it is small.
_SMALL_GROUP = 32
#: Bits of a significand, the hidden one too.
_BF16_BITS, _FP32_BITS = 8, 24
#: Wider scales are taken to be of any size; what is surely no problem for the exponents of bf16.
_SCALE_BITS, _USUAL = 8, 2.0**60


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """How codes of a format are multiplied with x of a dtype on a processor."""

    expansion: Expansion
    #: The same where scales are multiplied into codes.
    scaled_expansion: Expansion
    #: x and codes are pairs of bf16; else fp32 numbers.
    takes_pairs: bool
    #: By number of tokens.
    steps: tuple[Step, ...]
    #: Why these products.
    reason: str

    @property
    def run_pairs(self) -> int:
        """Pairs of columns that are expanded together, to the first cache."""
        return RUN_LANES // TILE_ROWS // (1 if self.takes_pairs else 2)

    def step(self, tokens: int) -> Step:
        """What is done with so many tokens."""
        return next(step for step in self.steps if tokens <= step.tokens)

    def spelled(self, tokens: int) -> str:
        """For people: what is done with so many tokens, and why."""
        step = self.step(tokens)
        block = f"{tokens} tokens, {step.columns} at a time"
        once = f"once, to the first cache, {2 * self.run_pairs} columns at a time"
        where = {
            DIRECT: f"in registers for {block}",
            EXPANDED: f"{once}, for {block}",
            SCALED: f"{once} and times their scales, for {block}",
        }[step.mode]
        expansion = self.scaled_expansion if step.mode == SCALED else self.expansion
        return f"{expansion.spelled} {where}; {self.reason}"


@cache
def way_of(
    number: Format, scale: Format | None, group_columns: int, dtype: torch.dtype, features: frozenset[str]
) -> Way:
    """Return the way of codes in groups of so many columns under such scales; `why_no_numbers` has said None."""
    reason = _why_no_pairs(number, dtype, features)
    takes_pairs = reason is None
    floats = floats_expansion(number, features)
    expansion = pairs_expansion(number) if takes_pairs else floats
    if not features >= WIDE_REGISTERS:
        course = _NARROW
    else:
        course = _PERMUTED if expansion.kind in _ONE_PERMUTATION else _COMPOSED
    is_scaled = group_columns <= _SMALL_GROUP and _is_exact(number, scale, _BF16_BITS if takes_pairs else _FP32_BITS)
    return Way(
        expansion=expansion,
        scaled_expansion=floats,
        takes_pairs=takes_pairs,
        steps=course.with_scales() if is_scaled else course.steps,
        reason="dot products of bf16" if reason is None else f"fp32 products: {reason}",
    )


def scales_vary(scale: Format) -> bool:
    """Whether some scales of a format are so large or small that products with them leave the exponents of bf16."""
    if scale.bits > _SCALE_BITS:
        return True
    magnitudes = np.abs(value_table(scale))
    magnitudes = magnitudes[np.isfinite(magnitudes) & (magnitudes != 0)]
    return bool(magnitudes.max() > _USUAL or magnitudes.min() < 1 / _USUAL)


def _why_no_pairs(number: Format, dtype: torch.dtype, features: frozenset[str]) -> str | None:
    if dtype != torch.bfloat16:
        return f"x is {str(dtype).removeprefix('torch.')}"
    if missing := DOT_PRODUCTS - features:
        return f"the processor has no dot products of bf16 ({', '.join(sorted(missing))})"
    return why_no_pairs(number, features)


def _is_exact(number: Format, scale: Format | None, bits: int) -> bool:
    """Whether codes times scales are exact in numbers of so many bits (of usual exponents, which kernels see to)."""
    if scale is None:
        return False
    of_scale = _significand_bits(scale)
    return _significand_bits(number) + (0 if of_scale == 1 else of_scale) <= bits


def _significand_bits(number: Format) -> int:
    """Bits from the first to the last one that is set, of the value that has most."""
    if isinstance(number, FloatFormat):
        return number.fraction_bits + 1
    fractions = np.abs(np.frexp(value_table(number))[0])
    return max(_FP32_BITS - _trailing_zeros(int(fraction * 2**_FP32_BITS)) for fraction in fractions)


def _trailing_zeros(number: int) -> int:
    return _FP32_BITS if number == 0 else (number & -number).bit_length() - 1


def constants_of(expansion: Expansion | None) -> tuple[Any, Any]:
    """An expansion as kernels are compiled for it: bits and code."""
    if expansion is None:
        return constant(0), constant(0)
    return constant(expansion.bits), constant(expansion.code)
