"""tf32 on a processor: operands have 10 fraction bits, in the forward pass and in both products of the backward "
"pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitwright.training.forward.forward_region import step_region
from bitwright.training.forward.tf32_layers import install_tf32
from bitwright.training.prepare import prepare


def to_tf32(x: Tensor) -> Tensor:
    """Round to nearest even on the bits: 13 fraction bits of fp32 go."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def test_the_three_products_are_of_rounded_operands() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    x = torch.randn(2, 8, 64, requires_grad=True)
    g = torch.randn(2, 8, 48)
    install_tf32(layer)
    y = layer(x)
    y.backward(g)
    rounded_x, rounded_w, rounded_g = to_tf32(x.detach()), to_tf32(layer.weight.detach()), to_tf32(g)
    assert torch.equal(y, nn.functional.linear(rounded_x, rounded_w) + layer.bias)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert torch.allclose(x.grad, rounded_g @ rounded_w, rtol=1e-6, atol=1e-6)
    expected = rounded_g.reshape(-1, 48).T @ rounded_x.reshape(-1, 64)
    assert torch.allclose(layer.weight.grad, expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(layer.bias.grad, g.sum((0, 1)), rtol=1e-6)


def test_a_run_says_that_it_is_emulated_and_can_be_closed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    exact = float(model(torch.ones(1, 16)).detach())
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="tf32", device="x86-amx")
    assert any("emulated: x86-amx has no matrix unit for tf32" in note for note in run.notes)
    with run.step() as step:
        loss = model(torch.ones(1, 16)).square().mean()
        step.backward(loss)
    assert step.result is not None and step.result.level == "tf32"
    rounded = float(loss.detach().sqrt())
    assert rounded != abs(exact) and abs(rounded - abs(exact)) < 1e-2
    run.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_gpu_is_told_for_as_long_as_a_step_lasts() -> None:
    """Convolutions take tf32 by default, also where fp32 is asked for; what was set before comes back."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    for compute, precision in (("tf32", "tf32"), ("fp32", "ieee")):
        with step_region(compute, "cuda"):
            assert (matmul.fp32_precision, conv.fp32_precision) == (precision, precision)
        assert (matmul.fp32_precision, conv.fp32_precision) == before
    with step_region("bf16", "cuda"):
        assert (matmul.fp32_precision, conv.fp32_precision) == before
