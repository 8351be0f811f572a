"""Which token comes next: the likeliest, or one drawn from the prediction. No choice waits for the device.

    greedy      argmax
    drawn       softmax(logits / temperature), cut to the fewest tokens that hold `top_p` of it (Holtzman et al.,
                arXiv:1904.09751, section 3.1), then one draw of a generator with a seed of its own

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        DataError: a temperature below 0, or a share outside (0, 1].
    """

    #: 0: the likeliest token.
    temperature: float = 0.0
    #: Share of the probability that is drawn from.
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise DataError(f"temperature is {self.temperature}; give 0 for the likeliest token, or a positive number")
        if not 0 < self.top_p <= 1:
            raise DataError(f"top_p is {self.top_p}; give the share of the probability to draw from, in (0, 1]")


class Chooser:
    """Chooses token after token.

    Args:
        sampling: how.
        device: where logits are.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device=device).manual_seed(sampling.seed)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """The next token of each sequence, int64 [B, 1]."""
        if self._sampling.temperature == 0:
            return logits_BV.argmax(-1, keepdim=True)
        probabilities = (logits_BV.float() / self._sampling.temperature).softmax(-1)
        if self._sampling.top_p == 1:
            return torch.multinomial(probabilities, 1, generator=self._generator)
        ordered, places = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(before >= self._sampling.top_p, 0.0)  # the first one is always kept
        return places.gather(-1, torch.multinomial(kept, 1, generator=self._generator))
