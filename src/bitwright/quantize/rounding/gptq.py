"""GPTQ: errors of earlier columns are made up for by later ones, all tokens and outputs counting alike.

    H = E[x xᵀ]

Source: Frantar et al., arXiv:2210.17323: scales of round-to-nearest, columns in their order. It is here to compare
with, and leaves aside what `gradient_aware` knows; a search tries it only when it is told to.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.error_feedback import Effort, can_feed_back, feed_back
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen

_EFFORT = Effort(search_scales=False, num_refinements=0)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Error feedback under the plain second moment of the inputs."""

    name: str = "gptq"
    description: str = "errors of earlier columns made up for by later ones, weighted by the input's second moment"
    needs_data: bool = True
    keeps_codes: bool = True

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Codes of at most 8 bits under scales of rows or groups."""
        return can_feed_back(scheme)

    def tried_by_default(self, scheme: TensorScheme) -> bool:
        """No: it is here to compare with."""
        return False

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, seen: Seen | None) -> QTensor:
        """Codes of fp32 [N, K].

        Raises:
            SchemeError: nothing was seen.
        """
        if seen is None:
            raise SchemeError("gptq needs the inputs of the matrix; calibrate first, or use rounding rtn")
        return feed_back(weight_NK, scheme, seen.plain, _EFFORT)


ROUNDINGS = (Gptq(),)
