"""How much an error of a weight matters: the second moment of the inputs that it multiplies, near the diagonal.

An error row e of one output turns tokens x_t into output errors eᵀx_t. Weighted by how strongly each token's output
moves the loss, w_t = ‖g_t‖² / mean ‖g‖² (g_t: the gradient at the outputs), the expected damage is

    E[w (eᵀ x)²] = eᵀ H e,        H = E[w x xᵀ]  [K, K]

Groups of a scheme are at most BLOCK columns wide, so their errors meet only blocks of H on its diagonal, and only those
are kept: K · BLOCK numbers, not K². With w = 1 this is the plain second moment. Weighting by tokens took a quarter to a
third off the predicted KL of 4-bit groups (docs/decisions/0003).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Width of a kept block, columns; every power of two up to it is a possible group size.
BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InputMoment:
    """Blocks of H = E[w x xᵀ] along its diagonal."""

    #: fp32 [ceil(K / BLOCK), BLOCK, BLOCK]; rows and columns beyond K are zero.
    blocks: Tensor

    @staticmethod
    def of(x_TK: Tensor, weights_T: Tensor | None = None) -> InputMoment:
        """Estimate from tokens: fp32 inputs [T, K], and their weights [T] (all one if left out)."""
        num_tokens, columns = x_TK.shape
        missing = -columns % BLOCK
        padded = torch.cat([x_TK, x_TK.new_zeros(num_tokens, missing)], dim=1) if missing else x_TK
        x_BTI = padded.reshape(num_tokens, -1, BLOCK).transpose(0, 1)
        weighted = x_BTI if weights_T is None else x_BTI * (weights_T / weights_T.mean().clamp(min=1e-30)).unsqueeze(-1)
        return InputMoment(blocks=torch.bmm(weighted.transpose(1, 2), x_BTI) / num_tokens)

    def damage(self, error: Tensor) -> Tensor:
        """eᵀ H e of every group: errors fp32 [G, N, g], groups first → [G, N, 1].

        Groups that do not tile a block (a whole row) are weighted by the diagonal of H alone. The filling of a short
        last group counts nothing.
        """
        num_groups, _, width = error.shape
        if BLOCK % width == 0:
            blocks = self._group_blocks(width)[:num_groups]
            return torch.linalg.vecdot(torch.bmm(error, blocks), error).unsqueeze(-1)
        diagonal = torch.diagonal(self.blocks, dim1=1, dim2=2).reshape(-1)
        needed = num_groups * width
        if diagonal.numel() < needed:
            diagonal = torch.cat([diagonal, diagonal.new_zeros(needed - diagonal.numel())])
        return (error.square() * diagonal[:needed].reshape(num_groups, 1, width)).sum(-1, keepdim=True)

    def _group_blocks(self, width: int) -> Tensor:
        """The sub-blocks of `width` columns along the diagonal, [groups, width, width]."""
        per_block = BLOCK // width
        tiles = self.blocks.reshape(-1, per_block, width, per_block, width)
        return torch.diagonal(tiles, dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, width, width)
