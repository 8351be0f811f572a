"""Clip search: give up the range of a few outliers so that all others are resolved finer.

For every group the range is shrunk by each ratio of a fixed grid, and the one with the least expected output error wins:

    min over r of  Σ_j E[x_j²] · (Q_r(w)_j − w_j)²

E[x_j²] is the second moment of the input column that weight j multiplies: the diagonal of A = E[x xᵀ], that is, the
output error if input columns were uncorrelated. The gradient of an output row scales its whole row, so it has no say here.
Ratio 1 is in the grid, and the first of equals wins: a group is never worse than rounded to nearest.

Rejected: a search by unweighted error (blind to the columns that matter), and one ratio per tensor (what a group gains is
its own). Only formats with uniform steps gain from it: floating codes resolve small values anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats import IntFormat
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.quantize import quantize, to_codes, to_groups, to_values
from bitwright.quantize.scaling import find_scales
from bitwright.quantize.scheme import TensorScheme

#: Ratios tried; 1 first, so that ties keep the full range.
SHRINK_GRID = (1.0, 0.96, 0.92, 0.875, 0.84, 0.8, 0.76, 0.72, 0.68, 0.62, 0.56, 0.5)
#: Weights per piece of work: intermediates of this many fp32 numbers stay in the cache of a core.
_CHUNK_WEIGHTS = 1 << 17


@dataclass(frozen=True, slots=True)
class ClipSearch:
    """Range per group by least squares weighted with the inputs' second moment."""

    name: str = "clip"
    description: str = "range of each group shrunk for the least error weighted by the input's second moment"
    needs_data: bool = True

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Integer codes of at most 4 bits: above, nothing is left to gain."""
        number = formats.get(scheme.format)
        return scheme.scaling is not None and isinstance(number, IntFormat) and number.bits <= 4

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, second_moment_K: Tensor | None) -> QTensor:
        """Codes of fp32 [N, K] given E[x²] of its K inputs.

        Raises:
            SchemeError: no second moment was given.
        """
        if second_moment_K is None:
            raise SchemeError("clip search needs the second moment of the inputs; calibrate first, or use rounding rtn")
        rows = weight_NK.shape[0]
        step = max(1, _CHUNK_WEIGHTS // max(1, weight_NK.shape[1]))
        best = [
            best_shrink(weight_NK[start : start + step], scheme, second_moment_K) for start in range(0, rows, step)
        ]
        return quantize(weight_NK, scheme, shrink=torch.cat(best))


def best_shrink(weight_NK: Tensor, scheme: TensorScheme, second_moment_K: Tensor) -> Tensor:
    """The ratio of each group [N, G, 1] with the least weighted squared error."""
    assert scheme.scaling is not None
    grouped = to_groups(weight_NK, scheme.scaling.granularity)
    importance = _group_importance(second_moment_K, scheme, grouped)
    best_error = torch.full_like(grouped[..., :1], torch.inf)
    best = torch.ones_like(best_error)
    for ratio in SHRINK_GRID:
        scales = find_scales(grouped, scheme.format, scheme.scaling, ratio)
        difference = to_values(to_codes(grouped, scales, scheme), scales, scheme).sub_(grouped)
        error = difference.square_().mul_(importance).sum(-1, keepdim=True)
        better = error < best_error
        best = torch.where(better, torch.full_like(best, ratio), best)
        best_error = torch.where(better, error, best_error)
    return best


def _group_importance(second_moment_K: Tensor, scheme: TensorScheme, grouped: Tensor) -> Tensor:
    """E[x²] laid out as the groups of one row, [1, G, g]; the filling of a short last group counts nothing."""
    assert scheme.scaling is not None
    missing = grouped.shape[1] * grouped.shape[2] - second_moment_K.numel()
    padded = torch.cat([second_moment_K, second_moment_K.new_zeros(missing)]) if missing else second_moment_K
    return padded.reshape(1, grouped.shape[1], grouped.shape[2])


ROUNDINGS = (ClipSearch(),)
