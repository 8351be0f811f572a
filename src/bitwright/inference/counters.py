"""Plain counts of what rounding inputs would lose, taken before the cast (`quantize/static_scales.py`).

    per_million      overflows ÷ rounded values · 10⁶
    fallback_rate    tokens with an overflow ÷ tokens: what a server that falls back to a wider format would run twice

Counts add: over calls, over matrices, over texts.

A model that runs packed keeps `RunCounters`: what fell back to a wider format, what was padded, and what was expanded,
as plain numbers that a server may export (`metrics`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.static_scales import overflows


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflows:
    """What was rounded, and how much of it lay beyond the format's range."""

    num_values: int = 0
    num_overflows: int = 0
    #: A token is one row of inputs.
    num_tokens: int = 0
    num_overflowed_tokens: int = 0

    @property
    def per_million(self) -> float:
        """Overflows per million rounded values; 0 where none were rounded."""
        return 1e6 * self.num_overflows / max(1, self.num_values)

    @property
    def fallback_rate(self) -> float:
        """Share of tokens with at least one overflow, 0 … 1."""
        return self.num_overflowed_tokens / max(1, self.num_tokens)

    def __add__(self, other: Overflows) -> Overflows:
        return Overflows(
            num_values=self.num_values + other.num_values,
            num_overflows=self.num_overflows + other.num_overflows,
            num_tokens=self.num_tokens + other.num_tokens,
            num_overflowed_tokens=self.num_overflowed_tokens + other.num_overflowed_tokens,
        )


#: Matrix name → counts.
Counters = dict[str, Overflows]


def count_overflows(x: Tensor, scheme: TensorScheme, scale: Tensor | None = None) -> Overflows:
    """Counts of one call: inputs [..., K] about to be rounded, under a static `scale` or none."""
    beyond = overflows(x, scheme, scale)
    rows = 0 if beyond is None else int(beyond.reshape(-1, x.shape[-1]).any(-1).sum())
    return Overflows(
        num_values=x.numel(),
        num_overflows=0 if beyond is None else int(beyond.sum()),
        num_tokens=x.numel() // max(1, x.shape[-1]),
        num_overflowed_tokens=rows,
    )


@dataclass(kw_only=True, slots=True)
class FallbackCounts:
    """What one matrix, or one kind of value, met, and what was done about it (`fallback.py`); grows with every call."""

    calls: int = 0
    tokens: int = 0
    #: Inputs beyond the format's range, and tokens with at least one.
    overflows: int = 0
    overflowed_tokens: int = 0
    #: Tokens that were computed again by themselves.
    token_fallbacks: int = 0
    #: Calls that were sent to the wide format as a whole, since more tokens overflowed than are computed again.
    batch_fallbacks: int = 0
    #: Calls that ran wide because calls before them had overflowed.
    held_calls: int = 0
    #: How often the matrix was held, or let go.
    switches: int = 0

    def add(self, **counts: int) -> None:
        """Add to the counts of these names."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)


@dataclass(kw_only=True, slots=True)
class PaddingCounts:
    """Numbers that kernels were given, and how many of them were filling (`packed/padding.py`)."""

    calls: int = 0
    values: int = 0
    padded_values: int = 0

    @property
    def padded_share(self) -> float:
        """Share of filling, 0 … 1."""
        return self.padded_values / max(1, self.values)


@dataclass(kw_only=True, slots=True)
class RunCounters:
    """Everything that a packed model counts; plain numbers that only grow."""

    #: Name of a matrix, or of a value site (with "/<operand>" where it has several) → what fell back there.
    fallbacks: dict[str, FallbackCounts] = field(default_factory=dict)
    padding: PaddingCounts = field(default_factory=PaddingCounts)
    #: "<parameter> by <function>" → how often packed weights were expanded for a function that is no product.
    expansions: Counter[str] = field(default_factory=Counter)
    #: Steps of generation of which the host heard late that something had overflowed in them, and those that were run
    #: again in the wide format for it.
    overflowed_steps: int = 0
    repeated_steps: int = 0

    def metrics(self) -> dict[str, int]:
        """Name → count, over all matrices: what a server exports."""
        total: Counter[str] = Counter()
        for counts in self.fallbacks.values():
            for name in FallbackCounts.__dataclass_fields__:
                total[f"fallback_{name}"] += getattr(counts, name)
        total["padding_values"] += self.padding.values
        total["padding_padded_values"] += self.padding.padded_values
        total["expansions"] += sum(self.expansions.values())
        total["overflowed_steps"] += self.overflowed_steps
        total["repeated_steps"] += self.repeated_steps
        return dict(total)
