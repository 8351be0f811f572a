"""How many parameters low-rank adapters (LoRA) have: A [rank, in] and B [out, rank] beside every linear of a decoder.

    rank · Σ (in + out)        over q, k, v, out, gate, up, down of every layer (of every expert)

Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685, section 4.1; all linear
layers as T. Dettmers et al., "QLoRA", arXiv:2305.14314, section 4, found to be needed.
"""

from __future__ import annotations

from bitwright.hardware.model_shape import ModelShape
from bitwright.hardware.sizes import raise_if_not_positive


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Return the parameters of adapters of a rank on every linear of the decoder; the head has none.

    Raises:
        HardwareError: the rank is not positive.
    """
    raise_if_not_positive(rank=rank)
    return rank * shape.num_layers * sum(rows + columns for rows, columns in shape.layer_matrices)
