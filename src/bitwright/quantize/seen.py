"""What calibration saw of one matrix, as roundings and transforms look at it: inputs x, and gradients g at the outputs.

An error E of the weight shifts the text's log-likelihood by Σ_t g_tᵀ E x_t. Squared and averaged with the outputs taken
for independent, every row e of E does the damage eᵀ H e with one H of all rows:

    H = Σ_w X_wᵀ (G_w G_wᵀ) X_w / Σ_t ‖g_t‖²      windows w of 32 tokens, X_w [32, K] and G_w [32, N] their x and g

A weight's error is the same at every token, so the products of neighbouring tokens (off the diagonal of G_w G_wᵀ) count
as they do in scoring (`search/score.py`); with windows of one token H is E[w x xᵀ], w_t = ‖g_t‖² / mean ‖g‖². Without
gradients (at the output head) H = E[x xᵀ], which is also what plain GPTQ takes.

Everything is formed when it is first asked for, and dropped with the object.

Legend: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bitwright.quantize.curvature import Curvature
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.moment import InputMoment

#: Tokens whose errors are summed before squaring (docs/decisions/0002).
WINDOW_TOKENS = 32
#: Columns of H formed at once: the other half follows by symmetry.
_BLOCK_COLUMNS = 384


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """Inputs of a matrix, token by token, and the gradients at its outputs."""

    #: Floats [T, K], in the order of the text.
    x_TK: Tensor
    #: Floats [T, N]: gradient of the text's log-likelihood at the outputs; None: tokens and outputs count alike.
    g_TN: Tensor | None = None

    @cached_property
    def token_weights_T(self) -> Tensor | None:
        """‖g_t‖², fp32 [T]; None where there are no gradients."""
        return None if self.g_TN is None else self.g_TN.float().square().sum(-1)

    @cached_property
    def moment(self) -> InputMoment:
        """Blocks of E[w x xᵀ] along its diagonal."""
        return InputMoment.of(self.x_TK.float(), self.token_weights_T)

    @cached_property
    def plain(self) -> Curvature:
        """E[x xᵀ], whatever the outputs do."""
        x_TK = self.x_TK.float()
        return Curvature.of(_symmetric_product(x_TK, x_TK) / max(1, x_TK.shape[0]))

    @cached_property
    def weighted(self) -> Curvature:
        """H as the module's opening has it."""
        if self.g_TN is None:
            return self.plain
        x_TK = self.x_TK.float()
        g_WtN, x_WtK = windows(self.g_TN), windows(x_TK)
        products_Wtt = torch.bmm(g_WtN.float(), g_WtN.float().transpose(1, 2))
        total = float(products_Wtt.diagonal(dim1=1, dim2=2).sum())
        mixed_TK = torch.bmm(products_Wtt, x_WtK).flatten(0, 1) / max(total, 1e-30)
        return Curvature.of(_symmetric_product(x_WtK.flatten(0, 1), mixed_TK))

    def changed(self, fitted: Fitted) -> Seen:
        """The same tokens as the changed weight of a transform sees them."""
        if fitted.is_identity:
            return self
        return Seen(x_TK=fitted.input(self.x_TK.float()), g_TN=self.g_TN)


def windows(values_TD: Tensor) -> Tensor:
    """Cut [T, D] into [W, WINDOW_TOKENS, D], the last window filled up with zeros."""
    missing = -values_TD.shape[0] % WINDOW_TOKENS
    if missing:
        values_TD = torch.cat([values_TD, values_TD.new_zeros(missing, values_TD.shape[1])])
    return values_TD.reshape(-1, WINDOW_TOKENS, values_TD.shape[1])


def _symmetric_product(left_TK: Tensor, right_TK: Tensor) -> Tensor:
    """leftᵀ right, which is known to be symmetric: only blocks on and below the diagonal are multiplied."""
    columns = left_TK.shape[1]
    product_KK = torch.empty(columns, columns)
    for start in range(0, columns, _BLOCK_COLUMNS):
        stop = min(columns, start + _BLOCK_COLUMNS)
        product_KK[start:stop, :stop] = left_TK[:, start:stop].T @ right_TK[:, :stop]
        product_KK[:start, start:stop] = product_KK[start:stop, :start].T
    return product_KK
