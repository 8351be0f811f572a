"""Operands around the smallest numbers of fp32 and bf16: scales stay finite, and products are those of the codes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitwright.quantize.delayed_scaling import DelayedScaling, current_inv_scale
from bitwright.quantize.operand import quantize_operand
from bitwright.quantize.quantize import quantize
from bitwright.training.products.low_precision_linear import install
from bitwright.training.recipes import FP8_BLOCK, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4

RECIPES = {"delayed": FP8_DELAYED, "current": FP8_CURRENT, "block": FP8_BLOCK, "mxfp8": MXFP8, "nvfp4": NVFP4}
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amax", [1e-36, 1e-38, 1e-39, 1e-40])
def test_small_inputs_and_gradients_are_not_flushed(name: str, dtype: torch.dtype, amax: float) -> None:
    """Sums of 256 of them are normal numbers again."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    installed = install(nn.Sequential(layer), RECIPES[name], {"0": "x"})
    x = (amax * (torch.rand(64, 256) + 0.5)).to(dtype).requires_grad_(True)
    g = (amax * (torch.rand(64, 256) + 0.5)).to(dtype)
    y = layer(x)
    y.backward(g)
    assert x.grad is not None
    w = layer.weight.detach().double()
    for found, exact in ((y.detach(), x.detach().double() @ w.T), (x.grad, g.double() @ w)):
        assert float(((found.double() - exact).abs() / exact).max()) < 0.15
    installed.remove()


@pytest.mark.parametrize("name", ["block", "mxfp8"])
@pytest.mark.parametrize("amax", [1.0, 1e-20, 3e-37, 1e-38, 1e-40, 0.0])
def test_lifted_numbers_are_the_codes(name: str, amax: float) -> None:
    torch.manual_seed(0)
    scheme = RECIPES[name].forward_x.scheme
    x = amax * torch.randn(8, 256)
    x[3] = 0.0
    operand, codes = quantize_operand(x, scheme), quantize(x, scheme)
    assert torch.equal(operand.values(), codes.dequantize())
    numbers = operand.numbers.float().abs()
    assert operand.numbers.dtype == torch.bfloat16 and not bool(((numbers > 0) & (numbers < 2.0**-126)).any())
    if amax >= 1e-20:
        assert float(operand.scale) == 1.0


def test_delayed_scales_follow_transformer_engine() -> None:
    """The old scale where amax is 0, Inf or NaN; the largest fp32 number where the quotient is none."""
    amax = torch.tensor([1.0, 0.0, torch.inf, torch.nan, 1e-38, 1e-45, 3e38])
    state = DelayedScaling("fp8_e4m3", len(amax), history_length=1)
    state.inv_scale.fill_(7.0)
    state.record(amax)
    state.update()
    expected = torch.tensor([448.0, 7.0, 7.0, 7.0, LARGEST, LARGEST, 448 / 3e38])
    assert torch.equal(state.inv_scale, expected)
    assert bool(torch.isfinite(state.scale).all() and (state.scale > 0).all())
    current = current_inv_scale(amax, "fp8_e4m3")
    assert torch.equal(current, torch.where(expected == 7, 1.0, expected))


def test_histories_that_overflow_the_scale_give_codes_all_the_same() -> None:
    """Step after step under a scale of the largest fp32 number: code = x · 3.4e38."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    installed = install(nn.Sequential(layer), FP8_DELAYED, {"0": "x"})
    x = 1e-38 * (torch.rand(16, 64) + 0.5)
    for _ in range(3):
        y = layer(x)
        y.sum().backward()
        installed.end_step()
        exact = x.double() @ layer.weight.detach().double().T
        assert float((y.detach().double() - exact).norm() / exact.norm()) < 0.1
    (state,) = (kind for kind in installed.state_dict()["delayed"].values() if "0.forward_x" in kind["operands"])
    assert float(state["inv_scale"][state["operands"].index("0.forward_x")]) == LARGEST
