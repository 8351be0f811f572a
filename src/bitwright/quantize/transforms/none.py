"""No transform: the tensor is quantised as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.quantize.fitted import UNCHANGED, Fitted
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.transforms import Inputs


@dataclass(frozen=True, slots=True)
class NoTransform:
    """The identity."""

    name: str = "none"
    description: str = "the tensor as it is"
    needs_data: bool = False
    parts: frozenset[str] = frozenset()

    def why_not(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Never: any scheme."""
        return None

    def fit(self, weight_NK: Tensor, scheme: Scheme, seen: Inputs | None) -> Fitted:
        """Nothing to fit."""
        return UNCHANGED


TRANSFORMS = (NoTransform(),)
