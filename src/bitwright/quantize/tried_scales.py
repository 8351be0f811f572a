"""The scales that a search tries for a group, in a fixed order.

First the plain scale of round-to-nearest, so that no group is ever worse for the search; then, for each ratio of a
grid, the range shrunk by it. Symmetric integers are tried with full-range scales: those reach one code further on the
side of the group's extreme value, at the price of a scale that can be negative (value = code · scale all the same).
Codes of more than four bits lose little to outliers, and are tried with few ratios.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import IntFormat
from bitwright.quantize.granularity import is_filling, to_groups
from bitwright.quantize.scaling import Scales, find_scales, full_range_scales
from bitwright.quantize.scheme import TensorScheme

#: Ratios of the range that are tried.
SHRINK_GRID = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64, 0.6, 0.55, 0.5)
#: How many of them for codes of more than four bits.
_FEW = 4


def tried_scales(weight_NK: Tensor, scheme: TensorScheme, *, search: bool = True) -> Iterator[Scales]:
    """Stored scales [R, G, 1] of a matrix; without `search`, the first of them alone."""
    assert scheme.scaling is not None
    granularity = scheme.scaling.granularity
    groups = to_groups(weight_NK, granularity)
    yield find_scales(groups, scheme.format, scheme.scaling, filling=is_filling(weight_NK, granularity))
    if search:
        yield from shrunk_scales(groups, scheme)


def shrunk_scales(groups: Tensor, scheme: TensorScheme) -> Iterator[Scales]:
    """Stored scales [..., 1] of groups [..., g], range by range; the plain scale is not among them."""
    assert scheme.scaling is not None
    if not scheme.scaling.needs_amax_alone:
        return  # such a rule has searched already
    number = formats.FORMATS[scheme.format]
    # a group's scales depend on its two ends alone, which are sought once
    ends = torch.cat(torch.aminmax(groups, dim=-1, keepdim=True), dim=-1) if groups.numel() else groups
    for ratio in SHRINK_GRID if number.bits <= 4 else SHRINK_GRID[:_FEW]:
        if scheme.scaling.symmetry == "symmetric" and isinstance(number, IntFormat):
            yield full_range_scales(ends, scheme.format, scheme.scaling, ratio)
        elif ratio != 1.0:
            yield find_scales(ends, scheme.format, scheme.scaling, ratio)
