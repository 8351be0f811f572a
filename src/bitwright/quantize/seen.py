"""What calibration saw of one matrix, as roundings and transforms look at it: inputs x, and gradients g at the outputs.

An error E of the weight shifts the text's log-likelihood by Σ_t g_tᵀ E x_t. Squared and averaged with the outputs taken
for independent, every row e of E does the damage eᵀ H e with one H of all rows:

    H = Σ_w X_wᵀ (B ∘ G_w G_wᵀ) X_w / Σ_t ‖g_t‖²  windows w of n tokens, X_w [n, K] and G_w [n, N] their x and g

A weight's error is the same at every token, so the products of neighbouring tokens (off the diagonal of G_w G_wᵀ) count
as they do in scoring (`search/score.py`). The further apart two tokens are, the less their products say for their
noise, and H, unlike a score, is fitted to: B = 1 − |t − s| / n lets them fade (Bartlett's weights, as Newey and West,
Econometrica 1987, use them; H keeps no negative eigenvalue). With windows of one token H is E[w x xᵀ], w_t = ‖g_t‖² /
mean ‖g‖². Without gradients (at the output head) H = E[x xᵀ], which is also what plain GPTQ takes. Gradients may be
known of the first tokens only: the others then count as these do on average, each for itself.

Everything is formed when it is first asked for, and dropped with the object. Products are formed in bf16 where the
processor has such instructions: x and g are kept in no more, and what a sum of thousands loses lies far below what the
sample of tokens leaves open.

Legend: T tokens, N outputs, K inputs, W windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from bitwright.quantize.curvature import Curvature
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.moment import InputMoment

#: Tokens whose errors are summed before squaring, where predictions are of tokens (docs/decisions/0002).
WINDOW_TOKENS = 32
#: Columns of H formed at once: the other half follows by symmetry.
_BLOCK_COLUMNS = 384
#: Tokens summed before the sum is kept in fp32.
_BLOCK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """Inputs of a matrix, token by token, and the gradients at its outputs."""

    #: Floats [T, K], in the order of the text.
    x_TK: Tensor
    #: Floats [at most T, N]: gradient of the text's log-likelihood at the outputs, of the first tokens; None: tokens
    #: and outputs count alike.
    g_TN: Tensor | None = None
    #: Tokens whose errors are summed before squaring.
    window_tokens: int = WINDOW_TOKENS

    @cached_property
    def token_weights_T(self) -> Tensor | None:
        """‖g_t‖², and its mean where g is not known, fp32 [T]; None where there are no gradients."""
        if self.g_TN is None:
            return None
        known_T = torch.linalg.vecdot(self.g_TN, self.g_TN).float()
        others = self.x_TK.shape[0] - known_T.shape[0]
        return torch.cat([known_T, known_T.mean().expand(others)]) if others else known_T

    @cached_property
    def moment(self) -> InputMoment:
        """Blocks of E[w x xᵀ] along its diagonal."""
        return InputMoment.of(self.x_TK.float(), self.token_weights_T)

    @cached_property
    def plain(self) -> Curvature:
        """E[x xᵀ], whatever the outputs do."""
        x_TK = self.x_TK.to(product_dtype())
        return Curvature.of(_symmetric_product(x_TK, x_TK) / max(1, x_TK.shape[0]))

    @cached_property
    def weighted(self) -> Curvature:
        """H as the module's opening has it."""
        return self.plain if self.g_TN is None else Curvature.of(_symmetric_product(*self.mixed))

    @cached_property
    def mixed(self) -> tuple[Tensor, Tensor]:
        """X, and (B ∘ G_w G_wᵀ) X_w of its windows over Σ_t ‖g_t‖², [T, K] in `product_dtype`; Xᵀ times that is H."""
        x_TK = self.x_TK.to(product_dtype())
        if self.g_TN is None:
            return x_TK, x_TK / max(1, x_TK.shape[0])
        num_known, num_tokens = self.g_TN.shape[0], x_TK.shape[0]
        g_WtN = windows(self.g_TN.to(x_TK.dtype), self.window_tokens)
        products_Wtt = torch.bmm(g_WtN, g_WtN.transpose(1, 2)) * _fading(self.window_tokens).to(x_TK.dtype)
        total = float(products_Wtt.diagonal(dim1=1, dim2=2).sum(dtype=torch.float32))
        mean = max(total, 1e-30) / max(1, num_known)
        known_TK = torch.bmm(products_Wtt, windows(x_TK[:num_known], self.window_tokens)).flatten(0, 1)[:num_known]
        mixed_TK = known_TK.div_(mean * num_tokens)
        return x_TK, torch.cat([mixed_TK, x_TK[num_known:] / num_tokens]) if num_known < num_tokens else mixed_TK

    def changed(self, fitted: Fitted) -> Seen:
        """The same tokens as the changed weight of a transform sees them."""
        if fitted.is_identity:
            return self
        return replace(self, x_TK=fitted.input(self.x_TK.float()))


def windows(values_TD: Tensor, width: int = WINDOW_TOKENS) -> Tensor:
    """Cut [T, D] into [W, width, D], the last window filled up with zeros."""
    missing = -values_TD.shape[0] % width
    if missing:
        values_TD = torch.cat([values_TD, values_TD.new_zeros(missing, values_TD.shape[1])])
    return values_TD.reshape(-1, width, values_TD.shape[1])


@cache
def _fading(width: int) -> Tensor:
    """B: Bartlett's weights of the products of two tokens of a window, fp32 [width, width]."""
    place = torch.arange(width, dtype=torch.float32)
    return 1 - (place[:, None] - place[None, :]).abs() / width


@cache
def product_dtype() -> torch.dtype:
    """bf16 where the processor multiplies it natively, else fp32."""
    capabilities = torch.cpu.get_capabilities()
    return torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32


def _symmetric_product(left_TK: Tensor, right_TK: Tensor) -> Tensor:
    """leftᵀ right, which is known to be symmetric, fp32: only blocks on and below the diagonal are multiplied."""
    num_tokens, columns = left_TK.shape
    product_KK = torch.zeros(columns, columns)
    for first in range(0, num_tokens, _BLOCK_TOKENS):
        tokens = slice(first, first + _BLOCK_TOKENS)
        for start in range(0, columns, _BLOCK_COLUMNS):
            stop = min(columns, start + _BLOCK_COLUMNS)
            product_KK[start:stop, :stop] += left_TK[tokens, start:stop].T @ right_TK[tokens, :stop]
    for start in range(0, columns, _BLOCK_COLUMNS):
        stop = min(columns, start + _BLOCK_COLUMNS)
        product_KK[:start, start:stop] = product_KK[start:stop, :start].T
    return product_KK
