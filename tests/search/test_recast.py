"""The numbers of autocast, without the copies of weights that it holds for the backward pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
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


#: A copy of 2²⁵ weights in bf16 is 64 MiB, for which a fresh process has no room, and which goes back once freed.
_RUN = """
import sys, torch
from torch.nn.functional import linear
from bitwright.search.recast import recasting
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 2**10
weight = torch.randn(1 << 12, 1 << 13)
def plain(x, other=None):
    return linear(x, weight if other is None else other)
def held(run):
    x = torch.randn(2, 1 << 13, requires_grad=True)
    before = resident()
    with torch.autocast("cpu"):
        y = run(x)
    grown = resident() - before
    y.sum().backward()
    return grown
held(plain)
print(held(plain if sys.argv[1] == "held" else lambda x: recasting(plain, x, weight)))
"""


@pytest.mark.parametrize(("copy", "least", "most"), [("held", 50, 80), ("cast again", -20, 20)])
def test_no_copy_is_held_between_the_passes(copy: str, least: float, most: float) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, copy], capture_output=True, text=True, check=True)
    assert least < float(done.stdout) < most
