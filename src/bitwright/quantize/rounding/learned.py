"""Learned codes: found once it is known what every site gets, each with the errors of all others at work.

No weight can be rounded so on its own: a search chooses schemes with the other roundings, and `search/refine.py` then
improves the codes of what was chosen. A plan names them so that their codes are read from its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen


@dataclass(frozen=True, slots=True)
class LearnedCodes:
    """Codes and scales of a whole assignment."""

    name: str = "learned"
    description: str = "codes and scales improved together, after every site has its scheme; --effort high"
    needs_data: bool = True
    keeps_codes: bool = True

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Never by itself."""
        return False

    def tried_by_default(self, scheme: TensorScheme) -> bool:
        """No."""
        return False

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, seen: Seen | None) -> QTensor:
        """Raise SchemeError: codes are learned for a whole assignment."""
        raise SchemeError(
            "codes are learned for a whole model at once, after its schemes are chosen; search with --effort high, or "
            "round with gradient_aware"
        )


ROUNDINGS = (LearnedCodes(),)
