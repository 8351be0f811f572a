"""Column factors that a checkpoint has in its norms, found again: what AWQ and SmoothQuant did, as a transform.

They multiply a matrix's columns by s and divide the norm before by s:

    W x = (W s)(x / s)        x / s = what the checkpoint's norm gives

The codes are those of W s. So a norm whose weights differ from the reference's tells s, column by column, and each
matrix that reads it (`folding.py` sees which) has a transform with these factors. They are measured on the norm's
output, so that it does not matter how a norm uses its weight.

Where AWQ scales the rows of one matrix and the columns of the next, codes of both have it in them and nothing is left
to find: their product is right as it stands.

Legend: K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitwright.models.norm_readers import norms_seen
from bitwright.quantize.fitted import Fitted


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedScales:
    """What changed parameters beside the matrices mean."""

    #: Module → the change of its inputs.
    transforms: Mapping[str, Fitted] = field(default_factory=dict)
    #: Parameter → why no plan can express its change.
    refused: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
def find_folded_scales(model: nn.Module, changed: Mapping[str, Tensor]) -> FoldedScales:
    """What parameters of norms that differ from the model's say of the matrices behind them.

    Args:
        model: the reference, fp32.
        changed: parameter → the checkpoint's values, fp32, in the parameter's shape.
    """
    if not changed:
        return FoldedScales()
    norms = norms_seen(model)
    transforms: dict[str, Fitted] = {}
    refused: dict[str, str] = {}
    for norm_name in dict.fromkeys(name.rpartition(".")[0] for name in changed):
        parts = {name: value for name, value in changed.items() if name.rpartition(".")[0] == norm_name}
        norm = norms.get(norm_name)
        if norm is None or norm.output is None:
            refused |= {name: "it differs from the reference's, and a plan changes matrices only" for name in parts}
            continue
        inside = {name.rpartition(".")[2]: value for name, value in parts.items()}
        output = torch.func.functional_call(norm.module, inside, norm.arguments)
        factors_K = _factors(norm.output, output)
        if factors_K is None:
            refused |= {name: "it differs from the reference's by more than factors of the columns" for name in parts}
            continue
        transforms |= {reader: Fitted(column_scales_K=factors_K) for reader in norm.readers}
    return FoldedScales(transforms=transforms, refused=refused)


def _factors(of_reference: Tensor, of_checkpoint: Tensor) -> Tensor | None:
    """What the checkpoint's outputs [..., K] are to be multiplied by; None where that is not one factor a column."""
    reference_TK = of_reference.reshape(-1, of_reference.shape[-1])
    checkpoint_TK = of_checkpoint.reshape(-1, of_checkpoint.shape[-1])
    most_T = checkpoint_TK.abs().argmax(dim=0, keepdim=True)  # least disturbed by rounding
    factors_K = (reference_TK.gather(0, most_T) / checkpoint_TK.gather(0, most_T)).squeeze(0)
    if not bool((torch.isfinite(factors_K) & (factors_K > 0)).all()):
        return None
    return factors_K if torch.allclose(checkpoint_TK * factors_K, reference_TK, rtol=1e-4, atol=1e-6) else None
