"""Round to nearest: every weight takes the nearest code under scales that just cover its group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.quantize import quantize
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """Nearest code, no data."""

    name: str = "rtn"
    description: str = "nearest code under the scale that covers the group; needs no data"
    needs_data: bool = False
    keeps_codes: bool = False

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Any scheme."""
        return True

    def tried_by_default(self, scheme: TensorScheme) -> bool:
        """Always."""
        return True

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, seen: Seen | None) -> QTensor:
        """Codes of fp32 [N, K]; what was seen is not looked at."""
        return quantize(weight_NK, scheme)


ROUNDINGS = (RoundToNearest(),)
