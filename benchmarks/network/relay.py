"""Hold every frame for a while: a relay between two ports of a bridge, one queue in each direction.

    python relay.py up0 down0 0.005

Both ports are TAP devices that exist already. Frames keep their order, since all are held equally long.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_MAX_FRAME = 65_600


def open_tap(name: str) -> int:
    """Attach to a TAP device, and return its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP_NO_PI))
    return device


def main() -> None:
    near, far, delay_s = open_tap(sys.argv[1]), open_tap(sys.argv[2]), float(sys.argv[3])
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    for device in (near, far):
        selector.register(device, selectors.EVENT_READ)
    queues: dict[int, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}
    other = {near: far, far: near}
    while True:
        first = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait = None if first is None else max(0.0, first - time.monotonic())
        for key, _ in selector.select(wait):
            _read_all(key.fd, queues[other[key.fd]], delay_s)
        now = time.monotonic()
        for device, queue in queues.items():
            while queue and queue[0][0] <= now:
                try:
                    os.write(device, queue[0][1])
                except BlockingIOError:
                    break
                queue.popleft()


def _read_all(device: int, queue: deque[tuple[float, bytes]], delay_s: float) -> None:
    while True:
        try:
            frame = os.read(device, _MAX_FRAME)
        except BlockingIOError:
            return
        queue.append((time.monotonic() + delay_s, frame))


if __name__ == "__main__":
    main()
