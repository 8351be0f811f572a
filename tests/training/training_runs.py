"""A tiny causal language model under a policy, for tests that train it: the same bits from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitwright.training.data.batches import Batches
from bitwright.training.data.token_rows import TokenRows
from bitwright.training.fine_tuning.schedules import make_schedule
from bitwright.training.prepare import prepare
from bitwright.training.run import TrainingRun

VOCABULARY = 260


def random_rows(num_rows: int = 24, length: int = 16, seed: int = 0) -> TokenRows:
    """Tokens that follow each other by a rule, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCABULARY, (num_rows, 1), generator=generator)
    step = torch.randint(1, 4, (num_rows, 1), generator=generator)
    ids = ((first + step * torch.arange(length)) % VOCABULARY).int()
    return TokenRows(source="rule", input_ids=ids, labels=ids.clone(), padding=None, hash=f"rule-{num_rows}-{seed}")


def with_dropout(model: Any, share: float = 0.1) -> Any:
    """Let attention draw random numbers while it trains."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = share
    return model


def new_run(
    make_tiny_model: Callable[..., Any], policy: str, *, seed: int = 0, steps: int = 10, **options: Any
) -> TrainingRun:
    """A run of a new model with AdamW and a schedule."""
    model = with_dropout(make_tiny_model("llama", seed)).requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = make_schedule(optimizer, "cosine", steps=steps, warmup_steps=2)
    return prepare(model, optimizer, policy=policy, scheduler=schedule, max_grad_norm=1.0, **options)


def take_steps(run: TrainingRun, batches: Batches, num_steps: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for _ in range(num_steps):
        with run.step() as step:
            for _ in range(run.accumulate):
                step.backward(run.model(**next(batches)).loss)
        assert step.result is not None
        losses.append(step.result.loss)
    return losses
