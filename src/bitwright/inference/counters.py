"""Plain counts of what rounding inputs would lose, taken before the cast (`quantize/static_scales.py`).

    per_million      overflows ÷ rounded values · 10⁶
    fallback_rate    tokens with an overflow ÷ tokens: what a server that falls back to a wider format would run twice

Counts add: over calls, over matrices, over texts.
"""

from __future__ import annotations

from dataclasses import dataclass

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
