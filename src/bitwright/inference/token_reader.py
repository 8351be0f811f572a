"""Tokens on their way to the host: read when they are there, never waited for.

On a CPU they are there. From a GPU they are copied by a stream of their own into memory that does not move, while the
next step runs already: what is read at step t is what was chosen at step t − 1, and its copy has long ended. So text
streams, and stop tokens are seen, one step late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sent:
    """Numbers under way: where they arrive, and what tells that they have."""

    numbers: Tensor
    event: Any


class TokenReader:
    """Hands numbers of a device to the host.

    Args:
        device: where they are.
        lag: steps that the host hears late; None: 0 on a CPU, else 1.
    """

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        is_here = device.type == "cpu"
        self.lag = (0 if is_here else 1) if lag is None else lag
        self._stream: Any = None if is_here else torch.Stream(device=device)
        self._device = device
        self._sent: deque[_Sent] = deque()

    def send(self, numbers: Tensor) -> None:
        """Start to bring integers of any shape."""
        if self._stream is None:
            self._sent.append(_Sent(numbers=numbers.detach(), event=None))
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            arriving = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            arriving.copy_(numbers, non_blocking=True)
            numbers.record_stream(self._stream)
            self._sent.append(_Sent(numbers=arriving, event=self._stream.record_event()))

    def read(self) -> list[int]:
        """The oldest numbers that were sent, as a list."""
        sent = self._sent.popleft()
        if sent.event is not None:
            sent.event.synchronize()  # of the copy of a step ago
        found: list[int] = sent.numbers.reshape(-1).numpy().tolist()
        return found

    def forget(self, num_last: int) -> None:
        """Never read what was sent last."""
        for _ in range(num_last):
            self._sent.pop()
