"""Sums in low precision: micro-batches, rows of an embedding, norms, and the check itself; the kind, over lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitwright.training.gradient_storage import keep_gradients_fp32
from bitwright.training.gradients import unscale_and_check
from bitwright.training.prepare import prepare
from bitwright.training.processes import distributed
from bitwright.training.processes.ranks import Ranks
from bitwright.training.processes.replicated import Replicated


@pytest.mark.parametrize("num", [3, 64, 700])
def test_micro_batches(num: int) -> None:
    """The error of a sum in bf16 grows with its length; that of one in fp32 stays at its terms' own rounding."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8).bfloat16()
    plain = nn.Linear(16, 8).bfloat16()
    plain.load_state_dict(layer.state_dict())
    keep_gradients_fp32(layer)
    inputs = [torch.rand(4, 16).bfloat16() for _ in range(num)]
    exact = torch.zeros(8, 16, dtype=torch.float64)
    for x in inputs:
        layer(x).sum().backward()
        plain(x).sum().backward()
        exact += x.double().sum(0).bfloat16().double()
    ours = float((layer.weight.grad.double() - exact).norm() / exact.norm())  # type: ignore[union-attr]
    theirs = float((plain.weight.grad.double() - exact).norm() / exact.norm())  # type: ignore[union-attr]
    assert ours < 2e-6 and (num < 64 or theirs > 5e-3)


@pytest.mark.parametrize("num", [300, 5000])
def test_equal_rows_of_an_embedding(num: int) -> None:
    """Torch's CPU kernel adds the gradients of one word in bf16, and stops where a term is below half a step."""

    def gradient(keeps: bool) -> float:
        embedding = nn.Embedding(2, 1).bfloat16()
        if keeps:
            keep_gradients_fp32(embedding)
        embedding(torch.zeros(num, dtype=torch.long)).sum().backward()
        return float(embedding.weight.grad[0])  # type: ignore[index]

    assert gradient(True) == num and gradient(False) < num


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num", [70_000, 1_000_003])
def test_the_check_does_not_overflow_itself(dtype: torch.dtype, num: int) -> None:
    """Seventy thousand ones are Inf as a sum in fp16, and 256 as one in bf16."""
    assert torch.ones(70_000).half().sum(dtype=torch.float16).isinf()
    weight = nn.Parameter(torch.zeros(num, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    check = unscale_and_check([("weight", weight)])
    assert check.norm == pytest.approx(num**0.5, rel=1e-5)


@pytest.mark.parametrize("value", [60_000.0, 1e-7])
def test_norms_of_fp16_gradients_at_both_ends(value: float) -> None:
    weight = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    weight.grad = torch.full_like(weight, value)
    exact = float(weight.grad.double().norm())
    assert unscale_and_check([("weight", weight)]).norm == pytest.approx(exact, rel=1e-5)


def test_many_parameters_are_added_as_exactly_as_one() -> None:
    gradients = torch.full((10_000,), 0.1)
    named = []
    for index, part in enumerate(gradients.split(10)):
        weight = nn.Parameter(torch.zeros(10))
        weight.grad = part.clone()
        named.append((f"p{index}", weight))
    assert unscale_and_check(named).norm == pytest.approx(10.0, rel=1e-6)


# --- over ranks -------------------------------------------------------------------------------------------------------


def test_gradients_of_a_thousand_ranks_are_averaged_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hop by hop, as a ring adds; in bf16 a thousand ones would end at 256."""

    def add_other_ranks(flat: torch.Tensor) -> None:
        for _ in range(999):
            flat.add_(1.0)

    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", add_other_ranks)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1000)
    layer = nn.Linear(4, 1, bias=False).bfloat16()
    keep_gradients_fp32(layer)
    Replicated(layer)(torch.ones(1, 4).bfloat16()).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 4]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fsdp_is_told_to_add_in_fp32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(distributed, "fully_shard", lambda _, **options: told.append(options))
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)).to(dtype)
    distributed.spread(model, "fsdp2", Ranks(world_size=2))
    assert len(told) == 2
    for options in told:  # unless told otherwise it adds in the parameters' dtype
        assert dtype == torch.float32 or options["mp_policy"].reduce_dtype == torch.float32


# --- of losses --------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    """A sum of losses of 2.3 in bf16 stands still at 1024, and says that their mean is 1.02."""
    assert sum([torch.tensor(2.296875).bfloat16()] * 1000) == 1024
    model = nn.Linear(1, 1).requires_grad_(True)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="bf16-pure-sr", accumulate=1000)
    with run.step() as step:
        for _ in range(1000):
            step.backward(model(torch.ones(1, 1)).sum() * 0.0 + torch.tensor(2.296875).bfloat16())
    assert run.last is not None and run.last.loss == pytest.approx(2.296875, rel=1e-6)
