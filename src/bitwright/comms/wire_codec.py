"""Tensors as the bytes that travel under a format of the wire, and back: what `wire` says in NumPy, with real bytes.

    bytes = encode(x, wire)           x fp32 [L] → uint8 [wire.num_bytes(L)]: codes, then the fp32 scale of each block
    x_hat = decode(bytes, wire, L)

Everything travels as bytes, so that a backend need not know the format; values are those of `WireFormat.rounded`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitwright.comms.wire import WireFormat
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.quantize import pack, unpack

#: Format without a scale → torch's type of it.
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def encode(x_L: Tensor, wire: WireFormat) -> Tensor:
    """Return the bytes of a vector.

    Args:
        x_L: fp32 [L], on any device.
        wire: how it travels.

    Returns:
        uint8 [wire.num_bytes(L)], contiguous.
    """
    plain = _PLAIN.get(wire.scheme.format)
    if plain is not None:
        return x_L.to(plain).contiguous().view(torch.uint8)
    if x_L.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x_L.device)
    packed = pack(x_L[None], wire.scheme)
    assert packed.scales is not None
    scales = packed.scales.flatten()
    # Codes of a block that is not finite say nothing; its scale does.
    blocks = scales.numel()
    is_lost = ~torch.isfinite(_amax_by_block(x_L, blocks))
    scales = torch.where(is_lost, torch.full_like(scales, float("nan")), scales)
    return torch.cat([packed.codes.flatten(), scales.contiguous().view(torch.uint8)])


def decode(content: Tensor, wire: WireFormat, length: int) -> Tensor:
    """Return the vector that bytes stand for: uint8 [wire.num_bytes(length)] → fp32 [length]."""
    plain = _PLAIN.get(wire.scheme.format)
    if plain is not None:
        return content.view(plain).float()
    if length == 0:
        return torch.empty(0, device=content.device)
    packed = PackedTensor(
        scheme=wire.scheme,
        shape=(1, length),
        codes=content[:length].reshape(1, length),
        scales=content[length:].clone().view(torch.float32).reshape(1, -1),
        offsets=None,
        tensor_scale=None,
    )
    return unpack(packed)[0]


def _amax_by_block(x_L: Tensor, blocks: int) -> Tensor:
    """Largest magnitude of each block, NaN where one of its numbers is; the last block may be short."""
    size = -(-x_L.numel() // blocks) if blocks == 1 else 128
    padded = torch.nn.functional.pad(x_L, (0, blocks * size - x_L.numel()))
    return padded.reshape(blocks, size).abs().amax(dim=1)
