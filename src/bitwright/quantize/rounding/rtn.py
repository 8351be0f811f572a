"""Round to nearest: every weight takes the nearest code under scales that just cover its group."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.quantize.moment import InputMoment
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.quantize import quantize
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """Nearest code, no data."""

    name: str = "rtn"
    description: str = "nearest code under the scale that covers the group; needs no data"
    #: Whether the codes depend on calibration data, so that a plan must store what was found.
    needs_data: bool = False

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Any scheme."""
        return True

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, moment: InputMoment | None) -> QTensor:
        """Codes of fp32 [N, K]; the inputs' moment is not looked at."""
        return quantize(weight_NK, scheme)


ROUNDINGS = (RoundToNearest(),)
