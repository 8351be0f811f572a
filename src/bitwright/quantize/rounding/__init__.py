"""How codes are found, one file an algorithm; each module defines ROUNDINGS."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from bitwright.quantize.moment import InputMoment
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme


@runtime_checkable
class Rounding(Protocol):
    """What every rounding is: a way from a weight to codes of a given scheme."""

    @property
    def name(self) -> str:
        """As plans and the command line write it."""

    @property
    def description(self) -> str:
        """One line for tables."""

    @property
    def needs_data(self) -> bool:
        """Whether the codes depend on calibration data, so that a plan must store what was found."""

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Whether this rounding can give other codes than round-to-nearest under `scheme`."""

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, moment: InputMoment | None) -> QTensor:
        """Codes of fp32 [N, K], given the second moment of its inputs (None where no data is at hand)."""
