"""tf32 on devices that do not have it: linear layers whose operands are rounded to 10 fraction bits, forward and back.

    y = r(x) · r(W)ᵀ + b        dx = r(g) · r(W)        dW = r(g)ᵀ · r(x)

with r rounding to nearest, ties to even, and fp32 sums: what a matrix unit for tf32 computes, up to the order of the
sum. Products of attention, which is no linear layer, stay fp32; this is there to see what tf32 does to a run, not to be
fast. Layers that have a forward of their own are left as they are.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import TensorScheme

_TF32 = TensorScheme(format="tf32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tf32Layers:
    """Layers that round their operands, until `remove` is called."""

    modules: tuple[nn.Linear, ...]

    def remove(self) -> None:
        """Give every layer its own forward back."""
        for module in self.modules:
            module.__dict__.pop("forward", None)


def install_tf32(model: nn.Module) -> Tf32Layers:
    """Let the linear layers of a model round their operands to tf32."""
    modules = tuple(
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
    )
    for module in modules:
        module.__dict__["forward"] = MethodType(_forward, module)
    return Tf32Layers(modules=modules)


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    found: Tensor = _Rounded.apply(input, self.weight)
    return found if self.bias is None else found + self.bias


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        x, w = fake_quantize(x_MK, _TF32), fake_quantize(w_NK, _TF32)
        context.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, w = context.saved_tensors
        g = fake_quantize(gradients[0], _TF32)
        return g @ w, g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])
