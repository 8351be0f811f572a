"""The numbers of autocast, without the copies of weights that it holds for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitwright.search.recast import recasting

ROWS, COLUMNS, TOKENS = 48, 32, 7


def operation_of(kind: str, weight: Tensor, bias: Tensor) -> Callable[..., Tensor]:
    def run(x: Tensor, other: Tensor | None = None) -> Any:
        own = weight if other is None else other
        if kind == "linear":
            return F.linear(x, own, bias)
        if kind == "addmm":
            return torch.addmm(bias, x, own.T)
        return torch.einsum("tk,nk->tn", x, own)

    return run


@pytest.mark.parametrize("kind", ["linear", "addmm", "einsum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_autocasts(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(ROWS, COLUMNS), torch.randn(ROWS)
    operation, found = operation_of(kind, weight, bias), []
    x_TK, g_TN = torch.randn(TOKENS, COLUMNS, dtype=dtype), torch.randn(TOKENS, ROWS)
    for run in (operation, lambda x: recasting(operation, x, weight)):
        x = x_TK.clone().requires_grad_()
        with torch.autocast("cpu"):
            y = run(x)
            y.backward(g_TN.to(y.dtype))
        found.append((y.detach(), x.grad))
    (plain, plain_grad), (ours, our_grad) = found
    assert ours.dtype == plain.dtype == torch.bfloat16 and torch.equal(ours, plain)
    assert our_grad is not None and plain_grad is not None and torch.equal(our_grad, plain_grad)


def test_without_autocast_the_operation_is_as_it_was() -> None:
    weight, x = torch.randn(ROWS, COLUMNS), torch.randn(TOKENS, COLUMNS, requires_grad=True)
    assert torch.equal(recasting(lambda x, w=weight: F.linear(x, w), x, weight), F.linear(x, weight))


def test_no_copy_is_held_between_the_passes() -> None:
    """A copy of 2²⁵ weights in bf16 is 64 MiB, which the C library gives back as soon as it is free."""
    weight = torch.randn(1 << 12, 1 << 13)
    copy_bytes = 2 * weight.numel()

    def held(run: Callable[[Tensor], Tensor]) -> int:
        x = torch.randn(2, 1 << 13, requires_grad=True)
        before = resident_bytes()
        with torch.autocast("cpu"):
            y = run(x)
        grown = resident_bytes() - before
        y.sum().backward()
        return grown

    def plain(x: Tensor, other: Tensor | None = None) -> Tensor:
        return F.linear(x, weight if other is None else other)

    held(plain)
    assert held(plain) > 0.8 * copy_bytes
    assert held(lambda x: recasting(plain, x, weight)) < 0.3 * copy_bytes


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
