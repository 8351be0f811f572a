"""Which share of a run's gradients the gradient format of each policy would flush to zero.

Looked at are the gradients of outputs of linear layers in an fp32 run, every twentieth step. A policy with a recipe
rounds them by its scheme for the backward product, scales included; any other in the format that it computes in; under
a loss scale they are multiplied by its first value before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from small_runs import UNGUARDED, Look
from torch import Tensor, nn

from bitwright.quantize import TensorScheme, fake_quantize
from bitwright.training.policy import policy_named

EVERY = 20
#: Rows and columns are filled up with zeros to these before schemes with blocks see them.
_MULTIPLE = 128


class LostGradients:
    """Watches an fp32 run for some policies; `shares` are what it saw."""

    def __init__(self, policies: tuple[str, ...]) -> None:
        self._rules = {name: _rule(name) for name in policies}
        self._flushed: defaultdict[str, int] = defaultdict(int)
        self._num = 0
        self._step = 0

    def __call__(self, model: nn.Module) -> Look:
        """Look at a model's gradients from now on."""
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
                module.register_full_backward_pre_hook(self._see)

        def look(step: int) -> None:
            self._step = step + 1

        return look

    @torch.no_grad()
    def _see(self, module: nn.Module, gradients: Any) -> None:
        if self._step % EVERY:
            return
        g_MN = gradients[0].detach().float().flatten(0, -2)
        due = g_MN != 0
        self._num += int(due.sum())
        for name, (scheme, scale) in self._rules.items():
            rounded = fake_quantize(_filled(g_MN * scale), scheme)[: g_MN.shape[0], : g_MN.shape[1]]
            self._flushed[name] += int((due & (rounded == 0)).sum())

    @property
    def shares(self) -> dict[str, float]:
        """Policy → share of the gradients other than zero that become zero."""
        return {name: self._flushed[name] / max(self._num, 1) for name in self._rules}


def _rule(name: str) -> tuple[TensorScheme, float]:
    if name == UNGUARDED:
        return TensorScheme(format="fp16"), 1.0
    policy = policy_named(name)
    scale = 1.0 if policy.loss_scale is None else policy.loss_scale.initial
    if policy.products is None:
        return TensorScheme(format=policy.compute), scale
    return policy.products.operands["dgrad_g"].scheme, scale


def _filled(g_MN: Tensor) -> Tensor:
    rows, columns = (-size % _MULTIPLE for size in g_MN.shape)
    return nn.functional.pad(g_MN, (0, columns, 0, rows))
