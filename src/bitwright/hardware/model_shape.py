"""The sizes of a language model that the memory of its training follows from.

Parameters in closed form, for those that are known by name (`model_shapes/*.toml`), with h hidden, q and kv columns of
the heads, f columns of the MLP, V the vocabulary:

    a layer       h·(q + 2kv) + q·h + (3 or 2)·h·f, the MLP once for each expert, and h · experts for their router
    embedding     V·h, and as many for the head where it is not the same
    norms         h each, LayerNorms h more for their shifts: two a layer and one at the end
    biases        one for each output of a matrix, where there are any
    positions     h each, where they are learned
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitwright.hardware.sizes import raise_if_not_positive

Norm = Literal["rms", "layer"]
Biases = Literal["none", "qkv", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder, and how many parameters of each kind it has.

    Raises:
        HardwareError: a size is not positive.
    """

    name: str
    num_layers: int
    hidden_size: int
    #: Columns of the down projection, of one expert.
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    #: Whether the MLP has a gate beside its up projection.
    is_gated: bool
    norm: Norm
    #: Matrices that q, k and v come from: 3, or 1 where they are one.
    num_qkv_matrices: int = 3
    num_experts: int = 1
    experts_per_token: int = 1
    #: Weights of the decoder's linear layers.
    linear_weights: int
    embedding_weights: int
    #: 0 where the head is the embedding.
    head_weights: int
    #: Norms, biases, learned positions, routers.
    other_parameters: int
    #: Most tokens of a sequence that the model has positions for, or was trained on; None: nobody says.
    max_positions: int | None = None
    #: Whether each position is a vector of its own, so that there is none beyond the last.
    has_learned_positions: bool = False

    def __post_init__(self) -> None:
        raise_if_not_positive(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            linear_weights=self.linear_weights,
            embedding_weights=self.embedding_weights,
        )

    @property
    def num_parameters(self) -> int:
        """All of them; a head that is the embedding counts once."""
        return self.linear_weights + self.embedding_weights + self.head_weights + self.other_parameters

    @property
    def read_by_head(self) -> int:
        """Weights that the head multiplies by, its own or the embedding's."""
        return self.head_weights or self.embedding_weights

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of every matrix of one layer, experts included; q, k and v are told apart."""
        hidden, queries, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        up = ((self.intermediate_size, hidden),) * (1 + self.is_gated)
        expert = (*up, (hidden, self.intermediate_size))
        attention = ((queries, hidden), (kv, hidden), (kv, hidden), (hidden, queries))
        return (*attention, *expert * self.num_experts)


def shape_from_sizes(
    *,
    name: str,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int,
    is_gated: bool,
    norm: Norm,
    biases: Biases = "none",
    num_positions: int = 0,
    trained_positions: int | None = None,
    is_head_tied: bool = False,
    num_experts: int = 1,
    experts_per_token: int = 1,
) -> ModelShape:
    """Return the shape of a decoder whose sizes are known, with its parameters counted as above.

    Positions are learned (`num_positions` vectors), or computed, and then `trained_positions` tells how many tokens the
    model has seen at once.

    Raises:
        HardwareError: a size is not positive.
    """
    head_dim = hidden_size // num_heads if head_dim is None else head_dim
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    queries, kv = num_heads * head_dim, kv_heads * head_dim
    matrices = 2 + is_gated
    layer = hidden_size * (queries + 2 * kv) + queries * hidden_size
    layer += num_experts * matrices * hidden_size * intermediate_size
    qkv_biases, other_biases = queries + 2 * kv, 2 * hidden_size + (1 + is_gated) * intermediate_size
    per_layer = {"none": 0, "qkv": qkv_biases, "all": qkv_biases + other_biases}[biases]
    per_layer += hidden_size * num_experts if num_experts > 1 else 0
    norms = (2 * num_layers + 1) * hidden_size * (1 if norm == "rms" else 2)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        is_gated=is_gated,
        norm=norm,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        linear_weights=num_layers * layer,
        embedding_weights=vocab_size * hidden_size,
        head_weights=0 if is_head_tied else vocab_size * hidden_size,
        other_parameters=num_layers * per_layer + norms + num_positions * hidden_size,
        max_positions=num_positions or trained_positions,
        has_learned_positions=num_positions > 0,
    )
