"""Off means absent: under bf16-mixed a run is a plain loop around torch.autocast, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.training.prepare import prepare

STEPS = 6


def batches(num: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 256, (2, 24), generator=generator) for _ in range(num)]
    return [{"input_ids": row, "labels": row} for row in rows]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def plain(
    model: nn.Module,
    rows: list[dict[str, torch.Tensor]],
    *,
    accumulate: int,
    max_norm: float | None,
    autocast: bool = True,
) -> list[float]:
    """The loop of torch's documentation."""
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        for row in rows[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**row).loss
            losses.append(loss.item())
            (loss / accumulate).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def ours(
    model: nn.Module,
    rows: list[dict[str, torch.Tensor]],
    *,
    accumulate: int,
    max_norm: float | None,
    policy: str = "bf16-mixed",
    one_block: bool = True,
) -> list[float]:
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run = prepare(model, optimizer, policy=policy, accumulate=accumulate, max_grad_norm=max_norm, scheduler=scheduler)
    losses = []
    if one_block:
        for step in range(STEPS):
            with run.step() as block:
                for row in rows[step * accumulate : (step + 1) * accumulate]:
                    loss = model(**row).loss
                    losses.append(loss.item())
                    block.backward(loss)
    else:
        for row in rows:
            with run.step() as block:
                loss = model(**row).loss
                losses.append(loss.item())
                block.backward(loss)
    assert run.counters.updates == STEPS and run.counters.skipped == 0 and run.pending == 0
    return losses


def trained(make_tiny_model: Callable[..., Any], architecture: str) -> tuple[nn.Module, nn.Module]:
    model = make_tiny_model(architecture).requires_grad_(True).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, copy.deepcopy(model)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("one_block", [True, False], ids=["one block a step", "one block a micro-batch"])
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (1, 0.5), (3, None), (3, 0.5)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_bf16_mixed_is_autocast(
    make_tiny_model: Callable[..., Any], architecture: str, accumulate: int, max_norm: float | None, one_block: bool
) -> None:
    here, there = trained(make_tiny_model, architecture)
    rows = batches(STEPS * accumulate)
    found = ours(here, rows, accumulate=accumulate, max_norm=max_norm, one_block=one_block)
    assert found == plain(there, rows, accumulate=accumulate, max_norm=max_norm)
    assert same_weights(here, there)
    assert found[-1] != found[0]


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "phi3"])
def test_bf16_mixed_is_autocast_for_other_models(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    here, there = trained(make_tiny_model, architecture)
    rows = batches(STEPS)
    assert ours(here, rows, accumulate=1, max_norm=1.0) == plain(there, rows, accumulate=1, max_norm=1.0)
    assert same_weights(here, there)


def test_fp32_is_a_loop_without_autocast(make_tiny_model: Callable[..., Any]) -> None:
    here, there = trained(make_tiny_model, "llama")
    rows = batches(STEPS)
    found = ours(here, rows, accumulate=1, max_norm=1.0, policy="fp32")
    assert found == plain(there, rows, accumulate=1, max_norm=1.0, autocast=False)
    assert same_weights(here, there)


def test_eager_attention_too(make_tiny_model: Callable[..., Any]) -> None:
    """Its softmax is a function of its own, which the CPU's autocast leaves in bf16."""
    here, there = trained(make_tiny_model, "gpt2")
    for model in (here, there):
        model.set_attn_implementation("eager")
    rows = batches(STEPS)
    assert ours(here, rows, accumulate=1, max_norm=None) == plain(there, rows, accumulate=1, max_norm=None)


def test_fp16_mixed_is_a_gradscaler_where_nothing_overflows(make_tiny_model: Callable[..., Any]) -> None:
    """The same scale, the same losses up to what islands do better, and no step skipped once it has settled."""
    here, there = trained(make_tiny_model, "llama")
    rows = batches(STEPS)
    optimizer = adamw(there)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for row in rows:
        with torch.autocast("cpu", torch.float16):
            loss = there(**row).loss
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    run = prepare(here, adamw(here), policy="fp16-mixed")
    assert run.scaler is not None
    run.scaler.scale = 1024.0
    found = []
    for row in rows:
        with run.step() as step:
            step.backward(here(**row).loss)
        assert step.result is not None and step.result.skipped is None and step.result.scale == 1024.0
        found.append(step.result.loss)
    assert found == pytest.approx(losses, rel=2e-3)
