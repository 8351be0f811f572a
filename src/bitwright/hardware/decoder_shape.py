"""The sizes of a decoder that its latency and its memory follow from, as its config names them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bitwright.errors import HardwareError


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """The sizes of a decoder that its latency and memory follow from.

    Raises:
        HardwareError: a size is not positive.
    """

    num_layers: int
    hidden_size: int
    #: Columns of the down projection (of one expert, times those that a token visits).
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    #: Weights of all decoder linears that one token is multiplied by; the head is not among them.
    active_weights: int

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not size > 0:
                raise HardwareError(f"{field.name} is {size}, but every size of a decoder is positive; correct it")

    @property
    def elementwise_values(self) -> int:
        """Values that a layer's elementwise operations read or write per token; see latency.py."""
        rotated = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return 10 * self.hidden_size + 3 * self.intermediate_size + rotated
