"""SmoothQuant: columns in which inputs are large are divided down, and the weights take the factor.

Some input columns are a hundred times larger than the others on every token; one scale per token or tensor then leaves
the others a few codes. The difficulty is shared with the weights, whose columns are alike:

    s_j = amax|x_j|^α / amax|w_j|^(1−α)        x'_j = x_j / s_j        w'_j = w_j · s_j

Source: Xiao et al., SmoothQuant, arXiv:2211.10438, equation 4. There one α (½) serves a whole model; here every matrix
takes the one of a grid, or none, that damages its outputs least (`output_damage.py`).

Columns that no token or no row touches keep their scale. Factors have a geometric mean of 1: a common one is the
scales' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.output_damage import Trial
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.transforms import Inputs

#: Shares of the difficulty that move to the weights.
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """Column factors from the largest inputs and weights."""

    name: str = "smoothquant"
    description: str = "large input columns divided down, weights multiplied up: for rounded activations"
    needs_data: bool = True
    parts: frozenset[str] = frozenset({"column_scales"})

    def why_not(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Activations have to be rounded under a scale."""
        if scheme.activations is None or scheme.activations.scaling is None:
            return f"{scheme.name} rounds no activations under a scale, and smoothing serves nothing else"
        return None

    def fit(self, weight_NK: Tensor, scheme: Scheme, seen: Inputs | None) -> Fitted:
        """The least damaging α, or factors of 1 where none is better.

        Raises:
            SchemeError: no inputs were seen.
        """
        if seen is None:
            raise SchemeError("smoothquant needs the inputs of the matrix; calibrate first, or use transform hadamard")
        trial = Trial.of(weight_NK, seen.x_TK, seen.token_weights_T, scheme)
        amax_w_K = weight_NK.abs().amax(0)
        alpha = trial.best(ALPHAS, lambda x_TK, alpha: _smoothed(x_TK, amax_w_K, alpha))
        if alpha is None:
            return Fitted(column_scales_K=torch.ones(weight_NK.shape[1]))
        return _smoothed(seen.x_TK, amax_w_K, alpha)


def _smoothed(x_TK: Tensor, amax_w_K: Tensor, alpha: float) -> Fitted:
    log_s_K = alpha * x_TK.abs().amax(0).float().log() - (1 - alpha) * amax_w_K.log()
    used = torch.isfinite(log_s_K)
    mean = torch.where(used, log_s_K, 0.0).sum() / used.sum().clamp(min=1)
    return Fitted(column_scales_K=torch.where(used, log_s_K - mean, 0.0).exp())


TRANSFORMS = (SmoothQuant(),)
