"""How codes are found, one file an algorithm; each module defines ROUNDINGS."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen


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

    @property
    def keeps_codes(self) -> bool:
        """Whether a plan must store the codes themselves; False: they are the nearest ones under the stored scales."""

    def tried_by_default(self, scheme: TensorScheme) -> bool:
        """Whether a search tries it under `scheme` unless it is told what to try."""

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Whether this rounding can give other codes than round-to-nearest under `scheme`."""

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, seen: Seen | None) -> QTensor:
        """Codes of fp32 [N, K], given what calibration saw of it (None where no data is at hand)."""
