"""Rotations that cancel in a product: Hadamard matrices with random signs, along what is summed over.

    A · Bᵀ = (A R) (B R)ᵀ        R = diag(signs) · H / √w on every w consecutive columns, R Rᵀ = 1

An outlier of a gradient or an activation is spread over w numbers, so that the other numbers of its group are not
rounded to nothing beside it. In training it is worth its price for the operands of wgrad alone (NVFP4), whose tokens
differ most.

Sums and differences in a fixed order (log₂ w rounds of butterflies), so that bits are the same on every machine; a
matrix product, as Transformer Engine does it, leaves their order to a library. Columns are filled up to whole blocks
with zeros, which is exact. Signs are drawn once, from a constant: a rotation has to be the same on both sides, and
random signs are there against patterns in the data, not against chance.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4 and appendix C.

Legend: R rows, S columns, which the product sums over; w numbers of a block.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from bitwright.formats.philox import random_words

#: Of the signs.
_SEED = 0


def rotate(x_RS: Tensor, width: int) -> Tensor:
    """Rotate every `width` consecutive columns; the last block is filled up with zeros.

    Args:
        x_RS: any floating dtype and strides.
        width: a power of two.

    Returns:
        fp32 [R, S'], S' the next multiple of `width`.
    """
    rows, columns = x_RS.shape
    x_SR = x_RS.t().float()  # a matrix that was transposed for the product lies this way round already
    missing = -columns % width
    if missing:
        x_SR = torch.cat([x_SR, x_SR.new_zeros(missing, rows)])
    numbers = x_SR.reshape(-1, width, rows) * _signs(width, x_RS.device)[:, None]
    distance = 1
    while distance < width:
        pairs = numbers.reshape(-1, width // (2 * distance), 2, distance, rows)
        first, second = pairs.unbind(2)
        numbers = torch.stack([first + second, first - second], dim=2)
        distance *= 2
    return (numbers.reshape(columns + missing, rows) * width**-0.5).t()


@cache
def _signs(width: int, device: torch.device) -> Tensor:
    """fp32 [w], 1 and −1."""
    odd = random_words(_SEED, width) & np.uint32(1)
    return torch.from_numpy(1.0 - 2.0 * odd.astype(np.float32)).to(device)
