"""What a weight should aim at when its inputs already carry the errors of earlier ones.

A matrix whose output should be W x reads x + δ instead. The weight that comes nearest to the output it should have had,
in the damage that `seen.py` weighs errors with, is a regression on what it reads now:

    min over V of  Σ_w tr Δ_w (B ∘ G_w G_wᵀ) Δ_wᵀ,   Δ_w = V X̃_wᵀ − W X_wᵀ

    →   V = W + W C H⁻¹,      C = Σ_w (X_w − X̃_w)ᵀ (B ∘ G_w G_wᵀ) X̃_w

with B and H of `seen.py`, H of the inputs X̃ that it reads now, its diagonal raised as for error feedback. What a few
thousand tokens say of the regression is not trusted all the way: SHRINKAGE of the change is made. (SmolLM2-135M, int4
in groups of 128, 8,192 tokens: KL on other text 0.0569 with all of the change, 0.0539 with 0.6 of it, 0.0552 with 0.4.)
V is then rounded with feedback under the same H. (Li et al., GPTAQ, arXiv:2504.02692: the idea with plain moments.)

A matrix whose output is added to a running sum can also make up for what that sum already lacks: with D the sum as
meant less the sum as it is, W X_w becomes W X_w + D_w, and D enters beside (X_w − X̃_w) Wᵀ.

Legend: T tokens, N outputs, K inputs, W windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.quantize.seen import Seen

#: The share of the regression's change that is made.
SHRINKAGE = 0.6


@torch.no_grad()
def compensated(weight_NK: Tensor, seen: Seen, intended_TK: Tensor, lacking_TN: Tensor | None = None) -> Tensor:
    """The weight to aim at, fp32 [N, K].

    Args:
        weight_NK: the weight as loaded, fp32.
        seen: the inputs that it reads now, and the gradients at its outputs.
        intended_TK: the inputs that it was meant to read, token by token.
        lacking_TN: what the sum that its output is added to lacks, token by token; None: nothing.
    """
    _, mixed_TK = seen.mixed
    missing_TK = (intended_TK.float() - seen.x_TK.float()).to(mixed_TK.dtype)
    wanted_NK = weight_NK @ (missing_TK.T @ mixed_TK).float()
    if lacking_TN is not None:
        wanted_NK += (lacking_TN.to(mixed_TK.dtype).T @ mixed_TK).float()
    if not bool(torch.isfinite(wanted_NK).all()):
        return weight_NK
    return weight_NK + SHRINKAGE * torch.linalg.solve(seen.weighted.matrix_KK, wanted_NK.T).T
