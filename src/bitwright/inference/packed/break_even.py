"""How often a call may overflow before rounding inputs stops to pay, measured.

With t the times of a call,

    (1 − f) · t_narrow + f · (t_narrow + t_few) = t_wide        f* = (t_wide − t_narrow) / t_few
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.inference.hysteresis import DEFAULT_FALLBACK

if TYPE_CHECKING:
    from bitwright.inference.packed.weight import PackedWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Medians of interleaved measurements of one matrix, and the rate that follows."""

    #: Tokens of a call.
    num_tokens: int
    #: All rows rounded; all rows wide; the few rows that fall back.
    narrow_s: float
    wide_s: float
    few_s: float

    @property
    def rate(self) -> float:
        """Share of calls with an overflow at which rounding inputs stops to pay, 0 … 1; 0: it never pays."""
        return min(1.0, max(0.0, (self.wide_s - self.narrow_s) / self.few_s))


def measure_break_even(weight: PackedWeight, num_tokens: int, *, repeats: int = 9, seed: int = 0) -> BreakEven:
    """Time a matrix that rounds its inputs, with and without the rounding.

    Args:
        weight: of a model that runs under a plan.
        num_tokens: rows of a call.
        repeats: calls of each kind, one after the other in turn.
        seed: of the inputs.

    Raises:
        SchemeError: it does not round its inputs.
    """
    inputs = weight.inputs
    if inputs is None or inputs.activations is None:
        raise SchemeError("this matrix does not round its inputs, so nothing falls back; measure one that does")
    device = next(weight.buffers()).device
    generator = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(num_tokens, weight.shape[1], generator=generator).to(device)
    settings = None if weight.fallback is None else weight.fallback.settings
    few = min(num_tokens, max(1, (settings or DEFAULT_FALLBACK).max_fallbacks_per_batch))
    calls: dict[str, Callable[[], Tensor]] = {
        "narrow": lambda: weight.narrow(inputs.change(x_MK)),
        "wide": lambda: weight.wide(inputs.change(x_MK)),
        "few": lambda: weight.wide(inputs.change(x_MK[:few])),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            seconds[name].append(_seconds(call, device))
    medians = {name: median(found[1:]) for name, found in seconds.items()}
    return BreakEven(num_tokens=num_tokens, narrow_s=medians["narrow"], wide_s=medians["wide"], few_s=medians["few"])


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    started_s = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started_s
