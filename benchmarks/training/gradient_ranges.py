"""What formats would make of a run's gradients: shares that become zero or too large, per 100 steps.

Looked at are the gradients that low precision rounds: those of the outputs of linear layers, which the backward pass
multiplies, and those of their weights, which it gives. Every tenth step each tensor's histogram is taken (one pass),
and every format is held against it:

    fp16                  as it is
    fp16 × 2^16           under the usual first loss scale
    bf16                  as it is
    fp8_e5m2, fp8_e4m3    largest magnitude of the tensor on the format's largest number
    fp8_e5m2, delayed     the same by the largest of all steps before this one

The run that is looked at computes in bf16, which has fp32's range. Of the forward pass the largest output of a linear
layer is kept, every step: what decides whether a run in fp16 meets an Inf.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from small_runs import Look
from torch import Tensor, nn

from bitwright.quantize.range_shares import RangeShares, range_shares, scale_to_largest
from bitwright.quantize.statistics import TensorStatistics, measure_statistics

EVERY = 10
PERIOD = 100
FORMATS = ("fp16", "fp16 × 2^16", "bf16", "fp8_e5m2", "fp8_e5m2, delayed", "fp8_e4m3")
KINDS = ("outputs", "weights")


class GradientRanges:
    """Watches a run; `rows` are what it saw."""

    def __init__(self) -> None:
        self._found: defaultdict[tuple[int, str, str], list[RangeShares]] = defaultdict(list)
        self._largest: dict[tuple[str, str], float] = {}
        self._outputs: defaultdict[int, float] = defaultdict(float)
        self._step = 0

    def __call__(self, model: nn.Module) -> Look:
        """Look at a model's gradients from now on."""
        linear = {
            name: module
            for name, module in model.named_modules()
            if getattr(module, "weight", None) is not None and module.weight.dim() == 2 and not _is_embedding(module)
        }
        for name, module in linear.items():
            module.register_forward_hook(self._see_forward)
            module.register_full_backward_pre_hook(lambda _, gradients, name=name: self._see_output(name, gradients))
        weights = {name: module.weight for name, module in linear.items()}

        def look(step: int) -> None:
            for name, weight in weights.items():
                if weight.grad is not None:
                    self._see("weights", name, weight.grad)
            self._step = step + 1

        return look

    def _see_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        period = self._step // PERIOD
        self._outputs[period] = max(self._outputs[period], float(torch.linalg.vector_norm(output.detach(), torch.inf)))

    def _see_output(self, name: str, gradients: Any) -> None:
        self._see("outputs", name, gradients[0])

    def _see(self, kind: str, name: str, gradient: Tensor) -> None:
        before = self._largest.get((kind, name))
        if self._step % EVERY == 0:
            found = measure_statistics(gradient.detach().contiguous(), threads=1)
            amax = found.amax
            for format in FORMATS:
                self._found[self._step // PERIOD, kind, format].append(_shares(found, format, before))
        else:
            amax = float(torch.linalg.vector_norm(gradient.detach(), torch.inf))
        self._largest[kind, name] = max(before or 0.0, amax)

    @property
    def largest_outputs(self) -> list[float]:
        """The largest magnitude that a linear layer gave in each 100 steps."""
        periods = sorted({period for period, _, _ in self._found})  # validation comes after the last of them
        return [self._outputs[period] for period in periods]

    def rows(self) -> list[dict[str, Any]]:
        """For every 100 steps, kind and format: the shares of all numbers other than zero."""
        rows = []
        for (period, kind, format), shares in self._found.items():
            total = sum(shares[1:], start=shares[0])
            others = max(1.0 - total.zero, 1e-300)
            rows.append(
                {
                    "steps": [period * PERIOD, (period + 1) * PERIOD],
                    "gradients_of": kind,
                    "format": format,
                    "flushed": total.flushed / others,
                    "subnormal": total.subnormal / others,
                    "overflowed": total.overflow / others,
                    "numbers": total.num,
                }
            )
        return rows


def _shares(found: TensorStatistics, format: str, before: float | None) -> RangeShares:
    name, _, rest = format.partition(" ")
    name = name.rstrip(",")
    if rest == "× 2^16":
        scale = 2.0**-16
    elif rest == "delayed":
        scale = scale_to_largest(before or found.amax, name)
    else:
        scale = scale_to_largest(found.amax, name) if name.startswith("fp8") else 1.0
    return range_shares(found.histogram, name, scale)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
