"""A model goes on with a text, token by token, with a cache of keys and values.

Which token comes next is the caller's choice: the likeliest (`repetition.py`), or one drawn from the prediction
(`speaker.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.search.progress import Stage

#: Logits fp32 [prompts, vocabulary] → the next token of each, int64 [prompts, 1].
Choose = Callable[[Tensor], Tensor]


@torch.no_grad()
def continuation(model: nn.Module, prompts: Tensor, num_new_tokens: int, choose: Choose, stage: Stage) -> Tensor:
    """Return what follows the prompts [prompts, length], int64 [prompts, num_new_tokens]; one step a token."""
    cache: Any = None
    inputs, produced = prompts, []
    for _ in range(num_new_tokens):
        output = model(input_ids=inputs, cache=cache, use_cache=True)
        cache = output.cache
        inputs = choose(output.logits[:, -1].float())
        produced.append(inputs)
        stage.advance()
    return torch.cat(produced, dim=1)
