"""Gradient-aware rounding: error feedback for the damage that the loss feels, with scales chosen under feedback.

    H = Σ_w X_wᵀ (G_w G_wᵀ) X_w        (`quantize/seen.py`)

With outputs taken for independent and of one G, rows decouple and plain GPTQ comes out, whatever G is. The gradient
therefore enters through the tokens: those whose outputs move the loss count more. Scales, refinement and the reasons
are in `quantize/error_feedback.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.error_feedback import can_feed_back, effort_for, feed_back
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen


@dataclass(frozen=True, slots=True)
class GradientAware:
    """Error feedback under the gradient-weighted moment, scales and codes refined."""

    name: str = "gradient_aware"
    description: str = "error feedback weighted by how each token moves the loss; scales chosen with it, codes refined"
    needs_data: bool = True
    keeps_codes: bool = True

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Codes of at most 8 bits under scales of rows or groups."""
        return can_feed_back(scheme)

    def tried_by_default(self, scheme: TensorScheme) -> bool:
        """Wherever it applies: 8 bits lose half of their small error, which is what a light plan consists of."""
        return True

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, seen: Seen | None) -> QTensor:
        """Codes of fp32 [N, K].

        Raises:
            SchemeError: nothing was seen.
        """
        if seen is None:
            raise SchemeError("gradient_aware needs inputs and gradients; calibrate first, or use rounding rtn")
        return feed_back(weight_NK, scheme, seen.weighted, effort_for(scheme))


ROUNDINGS = (GradientAware(),)
