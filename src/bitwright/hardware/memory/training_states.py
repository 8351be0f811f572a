"""Bits that training keeps of every parameter, and how many GPUs share them.

    parameters      what the model holds; in fp32 they are the masters
    masters         a second fp32 copy in the optimizer, where the model holds 16 bits (DeepSpeed, Megatron)
    copies          of linear weights, in the format that products read; alive from the forward to the backward pass
    gradients       as the backward passes leave them, summed
    moments         of the optimizer
    compensation    what rounding lost, kept for the next update (Kahan)

A parameter of a mixed policy under `torch.autocast` takes 32 + 32 (gradient) + 64 (Adam) bits, and 16 more while a step
runs; DeepSpeed's and Megatron's take 16 + 16 + 32 (master) + 64. Both are 16 bytes without the copy.

Of `d` GPUs that hold the same model shard, ZeRO's stage 1 divides what only the optimizer needs, stage 2 gradients too,
stage 3 (and FSDP) parameters too; then whole parameters are there block by block. Source: S. Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054, figure 1 and section 5: per parameter
and with Adam 2 + 2 + 12 bytes, 2 + 2 + 12/d, 2 + (2 + 12)/d, (2 + 2 + 12)/d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from bitwright.errors import HardwareError
from bitwright.hardware.sizes import raise_if_negative

#: Optimizer → numbers that it keeps of each parameter. Adafactor's are fewer than one (a row and a column of sums of a
#: matrix) and count as none.
MOMENTS: Mapping[str, int] = MappingProxyType(
    {
        "adamw": 2,
        "adam": 2,
        "nadam": 2,
        "adagrad": 1,
        "rmsprop": 1,
        "lion": 1,
        "sgd-momentum": 1,
        "sgd": 0,
        "adafactor": 0,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBits:
    """Bits per parameter of each state; copies are per weight of the decoder's linear layers, and of the head.

    Raises:
        HardwareError: a negative number of bits.
    """

    parameters: float = 32.0
    masters: float = 0.0
    copies: float = 0.0
    head_copies: float = 0.0
    gradients: float = 32.0
    #: All moments together: 64 for AdamW in fp32.
    moments: float = 64.0
    compensation: float = 0.0

    def __post_init__(self) -> None:
        raise_if_negative(**{field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def bytes_per_parameter(self) -> float:
        """Of all states together, the copies for products not among them."""
        kept = (self.parameters, self.masters, self.gradients, self.moments, self.compensation)
        return sum(kept) / 8


#: State → the first ZeRO stage that divides it.
SHARDED_FROM: Mapping[str, int] = MappingProxyType(
    {
        "masters": 1,
        "moments": 1,
        "compensation": 1,
        "gradients": 2,
        "parameters": 3,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How many GPUs there are and what they share.

    Raises:
        HardwareError: sizes that do not fit each other.
    """

    num_gpus: int = 1
    #: ZeRO stage over the GPUs that hold the same model shard: 0 (every one holds all) to 3 (FSDP).
    zero: int = 0
    #: GPUs that divide every matrix among them.
    tensor_parallel: int = 1
    #: Whether they also divide the tokens of what is not a matrix product (norms, residual stream, dropout).
    is_sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.tensor_parallel < 1 or self.num_gpus % self.tensor_parallel:
            raise HardwareError(
                f"{self.num_gpus} GPUs with tensor parallelism over {self.tensor_parallel}; every group has the same "
                "size, so the first is a multiple of the second: correct one of them"
            )
        if self.zero not in (0, 1, 2, 3):
            raise HardwareError(f"ZeRO stage {self.zero}; there are 0 (nothing is shared), 1, 2 and 3 (FSDP)")

    @property
    def data_parallel(self) -> int:
        """GPUs that hold the same shard of the model and see different tokens."""
        return self.num_gpus // self.tensor_parallel

    def sharers(self, state: str) -> int:
        """Data-parallel GPUs that divide a state among them: 1 where each holds it all."""
        return self.data_parallel if self.zero >= SHARDED_FROM[state] else 1
