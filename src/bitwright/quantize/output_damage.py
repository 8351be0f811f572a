"""What a candidate change of variables does to a matrix's outputs: the error that a fit minimises.

    damage = E_t[ w_t ‖ Q(W') Q(x'_t) − W x_t ‖² ]        w_t: weights of the tokens; Q(x') = x' where it is not rounded

Weights are rounded to nearest under the scheme's own scales: whichever rounding runs in the end starts from there. Some
tokens and some rows are looked at, evenly spread; a fit has a handful of numbers to choose, so few are enough.

Tokens are split in two: from the first half of the text come the factors and the static scale that are tried, on the
second they are judged. Judged on their own tokens, factors that bring every column to one amax look best, and then
saturate on the next text. (Every other token would not do: the first of each sequence, unlike all others in many
models, would always fall to the same half.)

Legend: T tokens, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.quantize.fitted import UNCHANGED, Fitted
from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.static_scales import find_static_scale, round_input

#: Tokens that changes are judged on, and learned from, and rows that are looked at, of larger numbers of them.
NUM_JUDGED_TOKENS = 256
NUM_LEARNED_TOKENS = 1024
NUM_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """Some rows of a weight and some of its inputs, on which changes are tried."""

    scheme: Scheme
    #: fp32 [N, K].
    weight_NK: Tensor
    #: Inputs that changes are learned from, fp32 [T, K].
    learned_TK: Tensor
    #: Inputs that they are judged on, fp32 [T, K], and the weights of those tokens, fp32 [T].
    judged_TK: Tensor
    judged_weights_T: Tensor

    @staticmethod
    def of(weight_NK: Tensor, x_TK: Tensor, token_weights_T: Tensor | None, scheme: Scheme) -> Trial:
        """Take every n-th row and token; a single token is learned from and judged on."""
        weights_T = torch.ones(x_TK.shape[0]) if token_weights_T is None else token_weights_T
        half = x_TK.shape[0] // 2
        judged = slice(half, None, _odd_stride(x_TK.shape[0] - half, NUM_JUDGED_TOKENS))
        return Trial(
            scheme=scheme,
            weight_NK=weight_NK[:: -(-weight_NK.shape[0] // NUM_ROWS)],
            learned_TK=x_TK[: max(half, 1) : _odd_stride(half, NUM_LEARNED_TOKENS)].float(),
            judged_TK=x_TK[judged].float(),
            judged_weights_T=weights_T[judged].float(),
        )

    def damage(self, fitted: Fitted) -> float:
        """Weighted squared error of the outputs under a change."""
        weights, activations = self.scheme.weights, self.scheme.activations
        assert weights is not None
        changed_TK = fitted.input(self.judged_TK)
        if activations is not None:
            static = self.scheme.static_activations
            scale = find_static_scale(fitted.input(self.learned_TK), activations) if static else None
            changed_TK = round_input(changed_TK, activations, scale)
        error_TN = changed_TK @ fake_quantize(fitted.weight(self.weight_NK), weights).T
        error_TN -= self.judged_TK @ self.weight_NK.T
        return float(self.judged_weights_T @ error_TN.square().sum(-1))

    def best(self, alphas: Sequence[float], factors: Callable[[Tensor, float], Fitted]) -> float | None:
        """The α whose factors, made from the inputs to learn from, do the least damage; None: no change is better."""
        tried: list[tuple[float | None, Fitted]] = [(None, UNCHANGED)]
        tried += [(alpha, factors(self.learned_TK, alpha)) for alpha in alphas]
        return min(tried, key=lambda pair: self.damage(pair[1]))[0]


def _odd_stride(num_tokens: int, wanted: int) -> int:
    """Step that leaves about `wanted` of `num_tokens`: odd, to meet all places of sequences, whose lengths are even."""
    return max(1, -(-num_tokens // wanted)) | 1
