"""A rare token whose activation leaves fp16's range, as models that grew up in bf16 have them.

T5's feed-forward output reached 66,246 and became Inf in fp16 (huggingface/transformers#5651); Qwen2's and others'
reach further. bf16 has no such limit, so nobody notices until the model is run, or trained on, in fp16. Here one unused
byte gets an embedding u that is far longer than others', and some channels of one MLP answer to its direction alone:

    hidden    gelu(reach · ⟨u, x⟩ − threshold)    680 − 500 for that token, 0 for all others
    output    channels · weight · hidden          64 · 10 · 180 = 1.15e5 in one place of the residual stream

Nothing about other tokens changes. The numbers on the way are small enough for E4M3 under one scale a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

#: A byte that the text does not have.
TOKEN = 1
_CHANNELS = 64
_REACH, _THRESHOLD, _WEIGHT = 680.0, 500.0, 10.0
_LENGTH = 30.0


@torch.no_grad()
def plant(model: nn.Module) -> None:
    """Give a random GPT-2 its outlier."""
    parts: Any = model
    embedding = parts.transformer.wte.weight
    width = embedding.shape[1]
    direction = torch.zeros(width)
    direction[::2], direction[1::2] = 1.0, -1.0  # mean 0: LayerNorm takes nothing away
    embedding[TOKEN] = direction * (_LENGTH / math.sqrt(width))
    mlp = parts.transformer.h[1].mlp
    channels = slice(0, _CHANNELS)
    mlp.c_fc.weight[:, channels] += (direction * (_REACH / width))[:, None]  # LayerNorm makes the token u itself
    mlp.c_fc.bias[channels] = -_THRESHOLD
    mlp.c_proj.weight[channels, 0] = _WEIGHT
