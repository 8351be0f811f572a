"""Codes and scales: what a quantised tensor is, and back to values.

Legend: N rows, K columns, R rows of scales (N of them, save for blocks and per tensor), G groups of a row.

The codes of a `QTensor` are kept as the *values* that they stand for (−8 … 7, or a number of fp4_e2m1), in fp32, since
emulation and scoring need values; packing them into bits is storage, not numerics (`pack.py`). In a group that holds
NaN or Inf everything is NaN: scale, offset and codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.quantize.granularity import spread
from bitwright.quantize.scaling import Scales
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QTensor:
    """A matrix as codes, scales and offsets."""

    scheme: TensorScheme
    #: Values of the codes, fp32 [N, K].
    codes_NK: Tensor
    #: What multiplies codes, fp32 [R, G] ([1, 1] per tensor): stored scales times 2^element_exponent; None without
    #: scaling.
    scales_NG: Tensor | None = None
    #: Zero points (integers as fp32) or minima, [R, G]; None where symmetric.
    offsets_NG: Tensor | None = None
    #: Second-level scale, fp32 0-d; None unless the scheme has one.
    tensor_scale: Tensor | None = None
    #: Whether the codes are the nearest ones under the scales; those of error feedback are not.
    follows_from_scales: bool = True

    @property
    def scales(self) -> Scales:
        """Stored scales and offsets, [R, G, 1], as `quantize` takes them."""
        assert self.scales_NG is not None
        return Scales(
            scale=self.scales_NG.unsqueeze(-1),
            offset=None if self.offsets_NG is None else self.offsets_NG.unsqueeze(-1),
            tensor_scale=self.tensor_scale,
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [N, K] by the formula of the scheme's symmetry: fp32 arithmetic, narrowed to `dtype` at the end."""
        return self._values().to(dtype)

    def _values(self) -> Tensor:
        scaling = self.scheme.scaling
        if scaling is None:
            return self.codes_NK
        assert self.scales_NG is not None
        scales = self.scales_NG if self.tensor_scale is None else self.scales_NG * self.tensor_scale
        rows, columns = self.codes_NK.shape
        scale_NK = spread(scales, rows, columns, scaling.granularity)
        if self.offsets_NG is None:
            return self.codes_NK * scale_NK
        offset_NK = spread(self.offsets_NG, rows, columns, scaling.granularity)
        if scaling.symmetry == "zero_point":
            return (self.codes_NK - offset_NK) * scale_NK
        return self.codes_NK * scale_NK + offset_NK
