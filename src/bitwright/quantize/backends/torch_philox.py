"""Philox4x32-10 in torch's int64: the random bits of `formats/philox.py`, drawn on any device.

The counter is the position of an element, the key the seed. int64 has no room for the product of two 32-bit words, so
that the counter is multiplied in halves of 16 bits: with c = 2^16 · h + l,

    c · M = 2^16 · (h · M + ((l · M) >> 16)) + ((l · M) mod 2^16)

and no term reaches 2^49. Word 0 of a block is what is drawn.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011,
§3.3.
Rejected: products that wrap around, which torch does not promise for signed integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32, _LOW_16 = 0xFFFFFFFF, 0xFFFF


def random_words(seed: int, index: Tensor) -> Tensor:
    """Return the random word of every position: int64 in [0, 2^32), the shape of `index`.

    Args:
        seed: in [0, 2^64); its halves are the key, least significant first.
        index: int64, not negative, any shape.
    """
    k0, k1 = seed & _LOW_32, seed >> 32
    c0, c1 = index & _LOW_32, index >> 32
    c2 = c3 = torch.zeros_like(index)
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32, (k1 + _KEY_STEPS[1]) & _LOW_32
    return c0


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two 32-bit words."""
    low_half = (word & _LOW_16) * multiplier
    upper = (word >> 16) * multiplier + (low_half >> 16)
    return upper >> 16, ((upper & _LOW_16) << 16) | (low_half & _LOW_16)
