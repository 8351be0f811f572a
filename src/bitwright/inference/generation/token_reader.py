"""Tokens on their way to the host and back: read when they are there, never waited for.

On a CPU they are there. From a GPU they are copied by a stream of their own into memory that does not move, while the
next step runs already: what is read at step t is what was chosen at step t − 1, and its copy has long ended. So text
streams, and stop tokens are seen, one step late. A prompt goes to a GPU in the same way, while the host goes on.

Times are taken on the device's own line of time (`DeviceClock`): a host that waited for the end of a prompt, to look at
its watch, would leave the device without the first step of decoding.
"""

from __future__ import annotations

import time
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


class StreamCalls:
    """What of torch is called for copies beside the computation; tests put a record of the calls in its place."""

    def new_stream(self, device: torch.device) -> Any:
        """A stream beside the current one."""
        return torch.Stream(device=device)

    def current_stream(self, device: torch.device) -> Any:
        """Where the model runs."""
        return torch.accelerator.current_stream(device)

    def fixed_memory(self, like: Tensor) -> Tensor:
        """Memory of the host that does not move."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def new_mark(self, device: torch.device) -> Any:
        """A moment on the device's line of time, once it is recorded."""
        return torch.Event(device=device, enable_timing=True)


class TokenReader:
    """Hands numbers of a device to the host.

    Args:
        device: where they are.
        lag: steps that the host hears late; None: 0 on a CPU, else 1.
        calls: how copies are asked for.
    """

    def __init__(self, device: torch.device, lag: int | None = None, calls: StreamCalls | None = None) -> None:
        is_here = device.type == "cpu"
        self.lag = (0 if is_here else 1) if lag is None else lag
        self._calls = StreamCalls() if calls is None else calls
        self._stream: Any = None if is_here else self._calls.new_stream(device)
        self._device = device
        self._sent: deque[_Sent] = deque()

    def send(self, numbers: Tensor) -> None:
        """Start to bring integers of any shape."""
        if self._stream is None:
            self._sent.append(_Sent(numbers=numbers.detach(), event=None))
            return
        self._stream.wait_stream(self._calls.current_stream(self._device))
        with self._stream:
            arriving = self._calls.fixed_memory(numbers)
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


def bring(numbers: Tensor, device: torch.device, calls: StreamCalls | None = None) -> Tensor:
    """Numbers on a device: themselves where they are, else under way from memory that does not move."""
    if numbers.device.type == device.type:
        return numbers
    fixed = (StreamCalls() if calls is None else calls).fixed_memory(numbers)
    return fixed.copy_(numbers).to(device, non_blocking=True)


class DeviceClock:
    """Seconds between moments of a device, which are told when it has come to them.

    Args:
        device: whose.
        calls: how moments are marked.
    """

    def __init__(self, device: torch.device, calls: StreamCalls | None = None) -> None:
        self._device = device
        self._calls = StreamCalls() if calls is None else calls
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now, behind all that the device was asked for."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
            return
        event = self._calls.new_mark(self._device)
        event.record(self._calls.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> tuple[float, ...]:
        """Between one mark and the next; waits for the last of them."""
        if self._device.type == "cpu":
            return tuple(end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False))
        self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return tuple(begin.elapsed_time(end) / 1000 for begin, end in pairs)
