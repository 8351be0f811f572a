"""What a candidate change of variables does to a matrix's outputs: the error that a fit minimises.

    damage = E_t[ w_t ‖ Q(W') Q(x'_t) − W x_t ‖² ]        w_t: weights of the tokens; Q(x') = x' where it is not rounded

Weights are rounded to nearest under the scheme's own scales: whichever rounding runs in the end starts from there. Some
tokens and some rows are looked at, evenly spread; a fit has a handful of numbers to choose, so few are enough.

Legend: T tokens, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.quantize.fitted import Fitted
from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.static_scales import find_static_scale, round_input

#: Tokens and rows that are looked at, of larger numbers of them.
NUM_TOKENS = 256
NUM_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """Some rows of a weight and some of its inputs, on which changes are tried."""

    #: fp32 [N, K].
    weight_NK: Tensor
    #: fp32 [T, K].
    x_TK: Tensor
    #: fp32 [T].
    token_weights_T: Tensor
    scheme: Scheme

    @staticmethod
    def of(weight_NK: Tensor, x_TK: Tensor, token_weights_T: Tensor | None, scheme: Scheme) -> Trial:
        """Take every n-th row and token."""
        every_row = -(-weight_NK.shape[0] // NUM_ROWS)
        # an odd stride meets all places of sequences, whose lengths are even
        every_token = -(-x_TK.shape[0] // NUM_TOKENS) | 1
        weights_T = torch.ones(x_TK.shape[0]) if token_weights_T is None else token_weights_T
        return Trial(
            weight_NK=weight_NK[::every_row],
            x_TK=x_TK[::every_token].float(),
            token_weights_T=weights_T[::every_token].float(),
            scheme=scheme,
        )

    def damage(self, fitted: Fitted) -> float:
        """Weighted squared error of the outputs under a change."""
        weights, activations = self.scheme.weights, self.scheme.activations
        assert weights is not None
        changed_TK = fitted.input(self.x_TK)
        if activations is not None:
            scale = find_static_scale(changed_TK, activations) if self.scheme.static_activations else None
            changed_TK = round_input(changed_TK, activations, scale)
        error_TN = changed_TK @ fake_quantize(fitted.weight(self.weight_NK), weights).T
        error_TN -= self.x_TK @ self.weight_NK.T
        return float(self.token_weights_T @ error_TN.square().sum(-1))

    def best(self, changes: Iterable[Fitted]) -> Fitted:
        """The least damaging change; the first of equals."""
        return min(changes, key=self.damage)
