"""Hadamard rotation: outliers are spread over their neighbours, and what is left looks Gaussian.

With random signs d and a Hadamard matrix H every x'_j = ± Σ_i ± x_i / √K: one large x_i becomes many small ones, in
activations and in weights alike, and a scale per tensor, row or group wastes no codes on it. H costs K · log K
additions a token, or nothing where it can be folded into the matrix before.

Source: QuIP#, arXiv:2402.04396, section 3 (random Hadamard transform); QuaRot, arXiv:2404.00456, section 4.

The signs are drawn from one seed, so that a fit needs no data and is the same on every machine; a plan stores them all
the same. Columns that are no power of two are rotated in blocks (`fitted.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitwright.formats.philox import random_words
from bitwright.quantize.fitted import Fitted, rotation_width
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.transforms import Inputs

#: Of the random signs.
_SEED = 0
#: Narrower blocks mix too few numbers to hide an outlier among them.
SMALLEST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class HadamardRotation:
    """Random signs, then a Hadamard matrix."""

    name: str = "hadamard"
    description: str = "inputs rotated by a Hadamard matrix with random signs, weights back: no outliers are left"
    needs_data: bool = False
    parts: frozenset[str] = frozenset({"signs"})

    def why_not(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Numbers without scales gain nothing; columns must have a power of two in them."""
        if scheme.weights is None or scheme.weights.scaling is None:
            return f"{scheme.name} has no scales that outliers could spoil"
        width = rotation_width(shape[1])
        if width < SMALLEST_WIDTH:
            return f"{shape[1]} columns divide into blocks of {width} only, and {SMALLEST_WIDTH} is the least to rotate"
        return None

    def fit(self, weight_NK: Tensor, scheme: Scheme, seen: Inputs | None) -> Fitted:
        """The same signs for every matrix of K columns, so that matrices with one input agree."""
        odd = random_words(_SEED, weight_NK.shape[1]) & np.uint32(1)
        return Fitted(signs_K=torch.from_numpy(1.0 - 2.0 * odd.astype(np.float32)))


TRANSFORMS = (HadamardRotation(),)
