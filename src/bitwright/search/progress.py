"""How long work says how far it is, without knowing who listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stage(Protocol):
    """One stage of work in progress."""

    def advance(self, steps: int = 1) -> None:
        """So many more steps are done."""


class Progress(Protocol):
    """Shows stages; the command line draws bars, a service writes rows."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Stage]:
        """A stage of `total` steps, shown while the context is open."""


class _SilentStage:
    def advance(self, steps: int = 1) -> None:
        pass


class Silent:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        yield _SilentStage()
