"""The loss on text that is not trained on, with its error.

    loss = Σ nll / Σ tokens over the rows,   error = √(R/(R−1) · Σ_rows (nll_row − loss · tokens_row)²) / Σ tokens

Tokens of one row depend on each other, rows do not, so the error is that of a ratio of sums over rows (Cochran,
"Sampling Techniques", §6.4); ± twice the error is about a 95 % interval. Log-probabilities are taken in fp32 from the
logits as the policy computes them, and added up in fp64: a sum kept in bf16 stops growing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitwright.training.data.batches import as_batch
from bitwright.training.data.token_rows import IGNORED, TokenRows
from bitwright.training.processes.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLoss:
    """What was measured."""

    #: Nats per token.
    loss: float
    #: One standard error of it; NaN of a single row.
    error: float
    num_tokens: int
    num_rows: int


def measure_validation_loss(
    model: nn.Module,
    rows: TokenRows,
    *,
    batch: int,
    device: torch.device,
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    ranks: Ranks | None = None,
) -> ValidationLoss:
    """Run a causal language model over all rows without gradients; it is in training mode again afterwards if it was.

    Args:
        model: called with `input_ids` (and `attention_mask`), gives `logits`.
        rows: what is measured.
        batch: rows at once.
        device: where the model is.
        forward: gives the context of one forward pass: the policy's.
        ranks: each measures its share of the batches, and the sums are exchanged.
    """
    ranks = Ranks() if ranks is None else ranks
    was_training = model.training
    model.eval()
    sums = torch.zeros(rows.num_rows, 2, dtype=torch.float64)
    try:
        # Every rank calls the model equally often: one that lies in pieces on all of them is put together in each call.
        stride = batch * ranks.world_size
        for first in range(0, rows.num_rows, stride):
            start = min(first + ranks.rank * batch, rows.num_rows - 1)
            chosen = slice(start, min(start + batch, rows.num_rows))
            found = _row_sums(model, rows, chosen, device, forward)
            if first + ranks.rank * batch < rows.num_rows:
                sums[chosen] = found
    finally:
        model.train(was_training)
    return _estimate(ranks.sum_of(sums.to(device)).cpu())


def _row_sums(
    model: nn.Module,
    rows: TokenRows,
    chosen: slice,
    device: torch.device,
    forward: Callable[[], AbstractContextManager[object]],
) -> Tensor:
    """(nll, tokens) of each row, fp64 [rows, 2]."""
    inputs = {name: value.to(device) for name, value in as_batch(rows, chosen).items()}
    labels = inputs.pop("labels")[:, 1:]
    with torch.no_grad(), forward():
        logits = model(**inputs).logits[:, :-1]
    nll = nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return torch.stack([nll.double().sum(dim=1), (labels != IGNORED).double().sum(dim=1)], dim=1).cpu()


def _estimate(sums: Tensor) -> ValidationLoss:
    nll, tokens = sums.T
    num_rows, total = len(nll), float(tokens.sum())
    loss = float(nll.sum()) / total
    spread = float(((nll - loss * tokens) ** 2).sum())
    error = math.sqrt(spread * num_rows / (num_rows - 1)) / total if num_rows > 1 else math.nan
    return ValidationLoss(loss=loss, error=error, num_tokens=int(total), num_rows=num_rows)
