"""Imported codes: somebody else found them, and a checkpoint holds them (`export/importer.py`).

A search never tries them. A plan names them so that its codes are read from its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import Seen


@dataclass(frozen=True, slots=True)
class ImportedCodes:
    """Codes and scales of a checkpoint."""

    name: str = "imported"
    description: str = "codes and scales of a checkpoint that was made elsewhere; bitwright import"
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
        raise SchemeError(
            "imported codes are read from a checkpoint, not found; run bitwright import, or round with gradient_aware"
        )


ROUNDINGS = (ImportedCodes(),)
