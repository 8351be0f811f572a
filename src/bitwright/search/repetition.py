"""Does a plan make long generations go round in circles?

Greedy continuations of a few prompts from held-out text; the share of 4-grams that already occurred earlier in the same
continuation (Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020, section 6: seq-rep-4). Compare
it with the reference's own share, not with zero: small models repeat themselves in any precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bitwright.search.continuation import continuation
from bitwright.search.progress import Stage
from bitwright.search.text import TextSet

NUM_PROMPTS = 8
PROMPT_TOKENS = 32
NEW_TOKENS = 64
_GRAM = 4


@torch.no_grad()
def repetition(model: nn.Module, text: TextSet, stage: Stage) -> float:
    """Share of repeated 4-grams in greedy continuations of the text's first sequences, 0 … 1.

    `stage` is advanced by one per new token.
    """
    length = text.input_ids.shape[1]
    prompts = text.input_ids[:NUM_PROMPTS, : max(1, min(PROMPT_TOKENS, length // 2))]
    continuations = greedy(model, prompts, NEW_TOKENS, stage)
    return sum(repeated_share(row.tolist(), _GRAM) for row in continuations) / len(continuations)


def greedy(model: nn.Module, prompts: Tensor, num_new_tokens: int, stage: Stage) -> Tensor:
    """The most likely continuation token by token, int64 [prompts, num_new_tokens]."""
    return continuation(model, prompts, num_new_tokens, lambda logits: logits.argmax(-1, keepdim=True), stage)


def repeated_share(tokens: Sequence[int], gram: int) -> float:
    """Share of n-grams that occurred before: 1 − distinct / all; 0 where there is none."""
    grams = [tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
