"""One loss a token, however tokens fall into micro-batches and ranks.

A model's loss is the mean over the tokens of its micro-batch. A mean of such means weighs a token of a short
conversation more than one of a long one, and a step of four micro-batches differs from one of their union. So the loss
of micro-batch i on one of n ranks, each with m micro-batches, is multiplied by

    w_i = tokens_i · m · n / Σ tokens over all micro-batches and ranks

The run divides by m, ranks average over n, and what remains is Σ nll / Σ tokens. Where all have equally many, w is 1,
and nothing is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bitwright.training.data.token_rows import IGNORED
from bitwright.training.processes.ranks import Ranks


def loss_weights(batches: Sequence[Mapping[str, Tensor]], ranks: Ranks, device: torch.device) -> list[float]:
    """Return w of each micro-batch of this rank.

    Args:
        batches: micro-batches of one step, with `labels`.
        ranks: all that share the step.
        device: where ranks exchange.
    """
    counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches]
    total = int(ranks.sum_of(torch.tensor(float(sum(counts)), device=device)))
    share = len(counts) * ranks.world_size
    return [count * share / total if total else 1.0 for count in counts]
