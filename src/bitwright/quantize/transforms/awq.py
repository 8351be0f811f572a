"""Activation-aware scaling: weights that meet large inputs are multiplied up before rounding, and so rounded finer.

A code step is the same for all weights of a group. Multiplying a column by s and dividing its input divides the error
that the column adds to the output by s, as long as the group's largest weight does not grow:

    s_j = (mean |x_j|)^α        α in 0 … 1 by the least damage to the outputs (`output_damage.py`)

Source: Lin et al., AWQ, arXiv:2306.00978, equations 4 and 5. There the damage is unweighted and s is folded into the
layer before; here tokens count by their weights, and as activations are not rounded nothing changes at run time: what
runs is the effective weight (`transforms/__init__.py`).

Factors have a geometric mean of 1; columns that no token touches keep their scale.
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

#: Exponents that are tried; 0 is no change.
ALPHAS = tuple(i / 10 for i in range(1, 11))
#: Wider codes leave nothing to gain.
_WIDEST_BITS = 4


@dataclass(frozen=True, slots=True)
class ActivationAware:
    """Column factors from the mean magnitude of the inputs."""

    name: str = "awq"
    description: str = "weights that meet large inputs multiplied up before rounding: for weights alone, 4 bits or less"
    needs_data: bool = True
    parts: frozenset[str] = frozenset({"column_scales"})

    def why_not(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Weights of few bits under scales, activations as they are."""
        if scheme.weights is None or scheme.weights.scaling is None:
            return f"{scheme.name} stores weights without scales: factors would change nothing"
        if scheme.activations is not None:
            return f"{scheme.name} rounds activations too, which smoothquant takes into account and this does not"
        if scheme.weights.nominal_bits > _WIDEST_BITS:
            return f"codes of {scheme.weights.nominal_bits} bits leave nothing to gain; {_WIDEST_BITS} is the most"
        return None

    def fit(self, weight_NK: Tensor, scheme: Scheme, seen: Inputs | None) -> Fitted:
        """The least damaging α, or factors of 1 where none is better.

        Raises:
            SchemeError: no inputs were seen.
        """
        if seen is None:
            raise SchemeError("awq needs the inputs of the matrix; calibrate first, or use transform hadamard")
        trial = Trial.of(weight_NK, seen.x_TK, seen.token_weights_T, scheme)
        alpha = trial.best(ALPHAS, _scaled)
        return Fitted(column_scales_K=torch.ones(weight_NK.shape[1])) if alpha is None else _scaled(seen.x_TK, alpha)


def _scaled(x_TK: Tensor, alpha: float) -> Fitted:
    magnitude_K = x_TK.abs().mean(0, dtype=torch.float32)
    used = magnitude_K > 0
    log_K = torch.where(used, magnitude_K, 1.0).log()
    mean = log_K.sum() / used.sum().clamp(min=1)
    return Fitted(column_scales_K=torch.where(used, alpha * (log_K - mean), 0.0).exp())


TRANSFORMS = (ActivationAware(),)
