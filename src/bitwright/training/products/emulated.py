"""Products of codes without matrix units for them: codes in bf16, which holds them, and fp32 sums.

    y = round(scale of a · scale of b · Σ_s a[r, s] · b[q, s])        rounded once, to the output's format

The operands' numbers are exact in bf16 (`quantize/operand.py`), so are their products in fp32; what a unit for FP8 or
FP4 gives differs by the order of the fp32 sum alone. How the fp32 sum is had:

    a CPU, bf16 output     oneDNN's bf16 product with the scales as its alpha, which multiplies the fp32 sum
    a CPU, other outputs   an fp32 product of the same numbers: torch's bf16 product on a CPU has no fp32 output. A
                           gradient of fp32 weights goes this way; half as fast
    a GPU                  bf16 matrix units with fp32 output

One scale a tensor can be alpha; one a row multiplies the fp32 sum afterwards. A CPU without bf16 products takes the
fp32 way throughout. Two scales whose product is no normal number of fp32 (operands around 1e−38) multiply the sum in
fp64 on a CPU: the result may be a normal number all the same.

Legend: R rows of a, Q rows of b, S what is summed over.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.quantize.operand import Operand, quantize_operand
from bitwright.training.product_recipe import OperandRule

_LEAST_NORMAL = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True, slots=True)
class EmulatedProducts:
    """Rounds operands, and multiplies them."""

    name: str = "emulated"

    def operand(self, x_RS: Tensor, rule: OperandRule, seed: int | None) -> Operand:
        """Codes of a matrix whose scales are found on it."""
        return quantize_operand(x_RS, rule.scheme, rounding=rule.rounding, seed=seed)

    def scaled(self, found: Operand, rule: OperandRule) -> Operand:
        """Codes under a scale that was known, as they are multiplied."""
        return found

    def transposed(self, operand: Operand) -> Operand:
        """The same codes from the other side."""
        return operand.transposed

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a · bᵀ, [R, Q] in `dtype`.

        Args:
            a, b: [R, S] and [Q, S].
            dtype: of the output.
            bias: [Q], added before the output is rounded, in `dtype` itself.
        """
        is_narrow = a.numbers.dtype == b.numbers.dtype == torch.bfloat16
        is_scalar = a.scale.dim() == b.scale.dim() == 0
        is_cpu = a.numbers.device.type == "cpu"
        is_small = is_cpu and is_scalar and 0 < a.scale.item() * b.scale.item() < _LEAST_NORMAL
        if is_cpu and dtype == torch.bfloat16 and is_narrow and is_scalar and not is_small and _has_bf16():
            return _multiply_in_bf16(a, b, bias)
        total = _sum_of_products(a.numbers, b.numbers, is_narrow)
        if is_small:
            total = total.double().mul_(a.scale.item() * b.scale.item()).float()
        else:
            total *= a.scale * (b.scale if is_scalar or b.scale.dim() == 0 else b.scale.t())
        if bias is not None:
            total += bias.to(dtype)
        return total.to(dtype)


def _multiply_in_bf16(a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
    """oneDNN multiplies the fp32 sum by alpha, adds the bias, and rounds."""
    alpha: Any = float(np.float32(a.scale.item()) * np.float32(b.scale.item()))
    if bias is None:
        nothing = a.numbers.new_empty(1)
        return torch.addmm(nothing, a.numbers, b.numbers.t(), beta=0, alpha=alpha)
    return torch.addmm(bias.bfloat16(), a.numbers, b.numbers.t(), alpha=alpha)


def _sum_of_products(a: Tensor, b: Tensor, is_narrow: bool) -> Tensor:
    """fp32 sums, [R, Q]."""
    if is_narrow and a.device.type == "cuda":
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return torch.mm(a.float(), b.float().t())


@functools.cache
def _has_bf16() -> bool:
    """Whether the processor multiplies bf16 with fp32 sums."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
