"""tf32 on a processor: operands of every product have 10 fraction bits, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.training.forward.forward_region import forward_region, step_region
from bitwright.training.forward.operation_table import operation_table
from bitwright.training.forward.rounded_products import rounded_products
from bitwright.training.integrations.loop_driver import LoopDriver
from bitwright.training.policy import policy_named
from bitwright.training.prepare import prepare


def to_tf32(x: Tensor) -> Tensor:
    """Round to nearest even on the bits: 13 fraction bits of fp32 go."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def close(a: Tensor | None, b: Tensor) -> bool:
    """Up to the order of a sum, which is far below a step of tf32."""
    return a is not None and torch.allclose(a, b, rtol=2e-6, atol=2e-6)


def test_the_three_products_of_a_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    x = torch.randn(2, 8, 64, requires_grad=True)
    g = torch.randn(2, 8, 48)
    with rounded_products("tf32"):
        y = layer(x)
        y.backward(g)
    rounded_x, rounded_w, rounded_g = to_tf32(x.detach()), to_tf32(layer.weight.detach()), to_tf32(g)
    assert close(y, F.linear(rounded_x, rounded_w, layer.bias)) and not close(y, layer(x))
    assert close(x.grad, rounded_g @ rounded_w)
    assert close(layer.weight.grad, rounded_g.reshape(-1, 48).T @ rounded_x.reshape(-1, 64))
    assert close(layer.bias.grad, g.sum((0, 1)))


#: Product of a [4, 8, 16] and b [4, 16, 12] → the same of fp64 numbers.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "bmm": torch.bmm,
    "baddbmm": lambda a, b: torch.baddbmm(torch.zeros((), dtype=a.dtype), a, b),
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "mm": lambda a, b: torch.mm(a[0], b[0]),
    "addmm": lambda a, b: torch.addmm(torch.zeros((), dtype=a.dtype), a[0], b[0]),
    "addmm_": lambda a, b: a.new_zeros(8, 12).addmm_(a[0], b[0]),
    "conv1d": lambda a, b: F.conv1d(a, b.transpose(0, 2)[:, :8, :3]),
    "conv2d": lambda a, b: F.conv2d(a[None], b[:, :4, None, :2].transpose(0, 1)),
}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_every_product(name: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 16, 12, requires_grad=True)
    product = PRODUCTS[name]
    g = torch.randn(product(a, b).shape)
    with rounded_products("tf32"):
        y = product(a, b)
        y.backward(g)
    exact_a, exact_b = (to_tf32(x.detach()).double().requires_grad_(True) for x in (a, b))
    expected = product(exact_a, exact_b)
    expected.backward(to_tf32(g).double())
    assert close(y, expected.float()) and not close(y, product(a, b))
    assert exact_a.grad is not None and close(a.grad, exact_a.grad.float())
    assert exact_b.grad is not None and close(b.grad, exact_b.grad.float())


def test_the_bias_of_a_convolution_is_no_product() -> None:
    torch.manual_seed(0)
    layer, x, g = nn.Conv1d(4, 6, 3), torch.randn(2, 4, 9), torch.randn(2, 6, 7)
    with rounded_products("tf32"):
        layer(x).backward(g)
    assert layer.bias is not None and close(layer.bias.grad, g.sum((0, 2)))
    assert not close(layer.bias.grad, to_tf32(g).sum((0, 2)))


def test_attention_is_two_products() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    with rounded_products("tf32"):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k = (to_tf32(x * 16**-0.25) for x in (q, k))  # torch scales both before it multiplies
    scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    assert close(found, to_tf32(scores.softmax(-1)) @ to_tf32(v))


def test_what_is_not_fp32_is_left_alone() -> None:
    a = torch.randn(8, 8, dtype=torch.float64)
    exact = a @ a
    with rounded_products("tf32"):
        assert torch.equal(a @ a, exact)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_run_rounds_what_no_layer_does(architecture: str, make_tiny_model: Callable[..., Any]) -> None:
    """GPT-2's layers are none of torch's, and attention is no layer."""
    ids = torch.arange(32).reshape(2, 16)
    model = make_tiny_model(architecture).requires_grad_(True).eval()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="tf32", device="x86-amx")
    assert run.emulates and any("attention's too, and convolutions round their operands" in n for n in run.notes)
    with run.step() as step:
        loss = model(input_ids=ids, labels=ids).loss
        step.backward(loss)
    with torch.no_grad():
        exact = float(model(input_ids=ids, labels=ids).loss)
        with rounded_products("tf32"):
            expected = float(model(input_ids=ids, labels=ids).loss)
        with LoopDriver(run).forward():
            assert float(model(input_ids=ids, labels=ids).loss) == expected
    assert run.last is not None and run.last.loss == pytest.approx(expected, rel=1e-6)
    assert run.last.loss != exact


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


def test_the_facts_of_a_gpu_do_not_make_a_processor_round() -> None:
    """So they are emulated there too, and it is said."""
    model = nn.Linear(64, 64)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="tf32", device="a100-sxm")
    assert run.emulates and any("round their operands to tf32" in note for note in run.notes)
    plain = nn.Linear(4, 4)
    assert not prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0), policy="fp32", device="a100-sxm").emulates


def test_the_table_says_who_sees_to_it() -> None:
    def who(device_type: str) -> set[tuple[str, str]]:
        rows = operation_table(policy_named("tf32"), device_type)
        return {(row.format, row.by) for row in rows if row.section == "operations" and row.format == "tf32"}

    assert who("cuda") == {("tf32", "torch")} and who("cpu") == {("tf32", "bitwright")}


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


def test_a_region_rounds_where_it_is_asked_to() -> None:
    torch.manual_seed(0)
    a = torch.randn(8, 8)
    with forward_region("tf32", "cpu", emulates=True):
        assert close(a @ a, to_tf32(a) @ to_tf32(a))
    with forward_region("tf32", "cpu"):
        assert torch.equal(a @ a, torch.mm(a, a))
