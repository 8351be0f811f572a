"""What a model computes in where it runs packed: the dtype that its checkpoint has, and why.

most weights bf16 or fp16                that
fp32 or codes, on a CPU with bf16        bf16: weights were made for 16 bits or less, and products take half the time
else                                     fp32
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from bitwright.inference.modes import spell_dtype
from bitwright.models.loaded import DTYPE_FORMATS, LoadedModel

#: Dtypes that models compute in.
_COMPUTED = {DTYPE_FORMATS[dtype]: dtype for dtype in (torch.bfloat16, torch.float16)}


def settle_dtype(model: nn.Module | LoadedModel, asked: torch.dtype | None) -> tuple[torch.dtype, str]:
    """The dtype, and the reason for it."""
    if asked is not None:
        return asked, "asked for"
    stored = _stored_format(model)
    if stored in _COMPUTED:
        return _COMPUTED[stored], f"the checkpoint is in {stored}"
    module = model.model if isinstance(model, LoadedModel) else model
    device = next(iter(module.parameters())).device
    has_bf16 = torch.cpu._is_avx512_bf16_supported() if device.type == "cpu" else torch.cuda.is_bf16_supported()
    if has_bf16:
        return torch.bfloat16, f"the checkpoint is in {stored}, and this {device.type} multiplies bf16"
    return torch.float32, f"the checkpoint is in {stored}, and this {device.type} does not multiply bf16"


def _stored_format(model: nn.Module | LoadedModel) -> str:
    """The format of most parameters."""
    weights: Counter[str] = Counter()
    if isinstance(model, LoadedModel):
        for name, parameter in model.model.named_parameters():
            weights[model.loaded_format.get(name, "fp32")] += parameter.numel()
    else:
        for parameter in model.parameters():
            weights[spell_dtype(parameter.dtype)] += parameter.numel()
    return weights.most_common(1)[0][0]
