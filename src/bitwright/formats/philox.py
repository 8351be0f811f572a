"""Random bits that depend on (seed, index) alone: Philox4x32-10, the same on every machine and in every backend.

A block is a keyed bijection of a counter of four 32-bit words. Ten rounds, each with two 32 × 32 → 64-bit products:

    (hi0, lo0) = 0xD2511F53 · c0        c0' = hi1 ^ c1 ^ k0        k0' = k0 + 0x9E3779B9
    (hi1, lo1) = 0xCD9E8D57 · c2        c1' = lo1                  k1' = k1 + 0xBB67AE85
                                        c2' = hi0 ^ c3 ^ k1
                                        c3' = lo0

Here the counter is the position of an element in its row-major flattened array and the key is the seed, so that
elements may be drawn in any order and in any number of threads. Triton's ``tl.randint(seed, offset)`` is word 0 of the
same block.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, §3.3
(Philox-4×32-10).
Rejected: NumPy's generators, since what they draw depends on how many numbers were drawn before, and no GPU has them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Return one block of four random words per counter.

    Args:
        counter: four uint64 arrays of shapes that broadcast, each element below 2**32, least significant word first.
        key: two integers below 2**32.

    Returns:
        Four uint64 arrays, each element below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_words(seed: int, num_words: int) -> npt.NDArray[np.uint32]:
    """Return the random word of every index 0, 1, …: uint32 ``[num_words]``.

    Args:
        seed: below 2**64; its halves are the key, least significant first.
        num_words: how many.
    """
    index = np.arange(num_words, dtype=np.uint64)
    zero = np.zeros((), dtype=np.uint64)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    return philox4x32((index & _LOW, index >> _HALF, zero, zero), key)[0].astype(np.uint32)
