"""Kernels are compiled when they are first called, for seconds, and kept on disk: whoever waits should know why.

The command line shows a spinner (`announcing`); otherwise one line goes to the log of this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_LOG = logging.getLogger(__name__)
MESSAGE = "preparing CPU kernels (compiled once, then kept on disk)"


@contextmanager
def _log(message: str) -> Iterator[None]:
    _LOG.info(message)
    yield


class _Announcer:
    """What surrounds the first call of each kernel and type of array."""

    def __init__(self) -> None:
        self.show: Callable[[str], AbstractContextManager[object]] = _log
        self.seen: set[tuple[object, ...]] = set()


_ANNOUNCER = _Announcer()


@contextmanager
def announcing(show: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """While the context is open, let `show(message)` surround what may take seconds, in place of a line in the log."""
    before, _ANNOUNCER.show = _ANNOUNCER.show, show
    try:
        yield
    finally:
        _ANNOUNCER.show = before


def run(kernel: Any, *arguments: Any) -> Any:
    """Call a kernel; say so if this is the first time with such arguments."""
    # arrays first, of which two may be of several dtypes
    key = (kernel, arguments[0].dtype, arguments[1].dtype, *map(type, arguments[2:]))
    if key in _ANNOUNCER.seen:
        return kernel(*arguments)
    with _ANNOUNCER.show(MESSAGE):
        result = kernel(*arguments)
    _ANNOUNCER.seen.add(key)
    return result
