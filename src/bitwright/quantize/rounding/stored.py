"""Codes, or scales, that a plan holds and no rounding of one weight finds: a plan names them to have them read from it.

    learned     found once it is known what every site gets, each with the errors of all others at work: a search
                chooses schemes with the other roundings, then `search/refine.py` improves the codes of what was chosen
    imported    found by somebody else, and read from a checkpoint (`export/importer.py`)
    shared      scales in units of a tensor scale that several matrices share (`export/shared_scales.py`); codes follow

A search never tries them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCodes:
    """Codes and scales that are there already."""

    name: str
    description: str
    #: What an error says to who asks for them of one weight: the rule, and the next step.
    why_not: str
    needs_data: bool = True
    keeps_codes: bool = True

    def applies_to(self, scheme: TensorScheme) -> bool:
        """Never by itself."""
        return False

    def tried_by_default(self, scheme: TensorScheme) -> bool:
        """No."""
        return False

    def quantize(self, weight_NK: Tensor, scheme: TensorScheme, seen: Seen | None) -> QTensor:
        """Raise SchemeError: no weight is rounded so."""
        raise SchemeError(self.why_not)


LEARNED = StoredCodes(
    name="learned",
    description="codes and scales improved together, after every site has its scheme; --effort high",
    why_not="codes are learned for a whole model at once, after its schemes are chosen; search with --effort high, or "
    "round with gradient_aware",
)
IMPORTED = StoredCodes(
    name="imported",
    description="codes and scales of a checkpoint that was made elsewhere; bitwright import",
    why_not="imported codes are read from a checkpoint, not found; run bitwright import, or round with gradient_aware",
)
SHARED = StoredCodes(
    name="shared",
    description="to nearest, under a tensor scale that is shared with the matrices that an engine computes at once",
    why_not="tensor scales are shared by several matrices of a plan, not found from one; use "
    "bitwright.export.share_tensor_scales, or round with rtn",
    keeps_codes=False,
)

ROUNDINGS = (LEARNED, IMPORTED, SHARED)
