"""What an operand lost on its way to codes: numbers that became zero, and numbers beyond the largest code.

    flushed      was no zero, and its code is one
    overflowed   rounds beyond the largest code, and saturates there
    non-finite   Inf or NaN

Counted where it is asked for: it reads operand and codes once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import FloatFormat, Format


@dataclass(frozen=True, kw_only=True, slots=True)
class LostNumbers:
    """Counts over all that one operand was."""

    #: Numbers, zeros among them.
    num: int = 0
    zeros: int = 0
    flushed: int = 0
    overflowed: int = 0
    non_finite: int = 0

    @property
    def flushed_share(self) -> float:
        """Of all numbers."""
        return self.flushed / max(self.num, 1)

    @property
    def overflowed_share(self) -> float:
        """Of all numbers."""
        return self.overflowed / max(self.num, 1)

    def __add__(self, other: LostNumbers) -> LostNumbers:
        return LostNumbers(
            num=self.num + other.num,
            zeros=self.zeros + other.zeros,
            flushed=self.flushed + other.flushed,
            overflowed=self.overflowed + other.overflowed,
            non_finite=self.non_finite + other.non_finite,
        )


def count_lost(x_RS: Tensor, codes_RS: Tensor, scale_RS: Tensor, format_name: str) -> LostNumbers:
    """Count what became of the numbers of a matrix.

    Args:
        x_RS: before rounding, any floating dtype.
        codes_RS: values of the codes; only zeros are looked at.
        scale_RS: what multiplies them, broadcasting to [R, S].
        format_name: of the codes.
    """
    magnitudes = x_RS.detach().float().abs()
    is_finite = torch.isfinite(magnitudes)
    is_zero = magnitudes == 0
    limit, takes_limit = _limit(formats.FORMATS[format_name])
    ratio = magnitudes / scale_RS
    beyond = (ratio >= limit) if takes_limit else (ratio > limit)
    return LostNumbers(
        num=magnitudes.numel(),
        zeros=int(is_zero.sum()),
        flushed=int(((codes_RS == 0) & ~is_zero & is_finite).sum()),
        overflowed=int((beyond & is_finite).sum()),
        non_finite=int((~is_finite).sum()),
    )


def _limit(number: Format) -> tuple[float, bool]:
    """From where on magnitudes round beyond the largest number, and whether that one does too: ties go to even."""
    largest = float(number.max)
    step = 2.0 ** (number.emax - number.fraction_bits) if isinstance(number, FloatFormat) else 1.0
    return largest + step / 2, round(largest / step) % 2 == 1
