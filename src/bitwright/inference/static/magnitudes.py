"""All magnitudes of a value, however many tokens there are: counts on a fine logarithmic grid, and the largest exactly.

    bin of x      floor(128 · log2 |x|)        a bin is half a percent wide, from 2⁻⁴⁰ to 2³²; zeros are counted apart

A scale by min/max needs the largest magnitude alone. One by a percentile or the least squared error needs all of them:
from the grid they are off by half a bin at most, over every token that was asked for, in memory that does not grow.
Rejected: keeping a sample (the largest numbers are few, and are what a percentile is about).

Legend: H heads (1 outside attention), N bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Bins of an octave, and the octaves.
_PER_OCTAVE = 128
_LOWEST, _HIGHEST = -40, 32
_NUM_BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE


@dataclass(kw_only=True, slots=True, eq=False)
class Magnitudes:
    """What was seen of one value, head by head."""

    #: int64 [H, N].
    counts_HN: Tensor
    #: Zeros and numbers below the lowest bin, int64 [H].
    zeros_H: Tensor
    #: fp32 [H].
    amax_H: Tensor
    num_tokens: int = 0

    @staticmethod
    def of(num_heads: int) -> Magnitudes:
        """Nothing yet."""
        return Magnitudes(
            counts_HN=torch.zeros(num_heads, _NUM_BINS, dtype=torch.int64),
            zeros_H=torch.zeros(num_heads, dtype=torch.int64),
            amax_H=torch.zeros(num_heads),
        )

    def add(self, x_HTD: Tensor) -> None:
        """Take in numbers [H, T, D]."""
        magnitudes = x_HTD.detach().abs().float().flatten(1).cpu()
        self.num_tokens += x_HTD.shape[1]
        if magnitudes.numel() == 0:
            return
        self.amax_H = torch.maximum(self.amax_H, magnitudes.amax(1))
        places = (magnitudes.log2() * _PER_OCTAVE).floor() - _LOWEST * _PER_OCTAVE
        for head, of_head in enumerate(places):
            inside = of_head[of_head >= 0].clamp(max=_NUM_BINS - 1).long()
            self.counts_HN[head] += torch.bincount(inside, minlength=_NUM_BINS)
            self.zeros_H[head] += of_head.numel() - inside.numel()

    def percentile(self, percent: float) -> Tensor:
        """The magnitude that `percent` of all numbers reach up to, fp32 [H]; 100 is the largest, exactly."""
        if percent == 100:
            return self.amax_H.clone()
        reached_HN = self.zeros_H.unsqueeze(-1) + self.counts_HN.cumsum(-1)
        wanted_H = reached_HN[:, -1].double() * percent / 100
        place_H = torch.searchsorted(reached_HN.double(), wanted_H.unsqueeze(-1)).squeeze(-1).clamp(max=_NUM_BINS - 1)
        upper_H = torch.exp2((place_H.double() + 1) / _PER_OCTAVE + _LOWEST).float()
        return torch.minimum(upper_H, self.amax_H)

    def numbers(self, head: int) -> tuple[Tensor, Tensor]:
        """The middles of the bins that hold anything, fp32, and how many they hold, fp64."""
        counts = self.counts_HN[head]
        places = counts.nonzero().squeeze(-1)
        middles = torch.exp2((places.double() + 0.5) / _PER_OCTAVE + _LOWEST).float()
        return torch.minimum(middles, self.amax_H[head]), counts[places].double()
