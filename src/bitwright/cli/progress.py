"""Progress on stderr: bars with the time left on a terminal, one line a stage elsewhere.

Implements the protocol ``bitwright.search.progress.Progress``. stdout stays free for what was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class _Stage:
    def __init__(self, bars: RichProgress | None, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, steps: int = 1) -> None:
        if self._bars is not None:
            self._bars.advance(self._task, steps)


class Bars:
    """Shows every stage of a run. A context manager: on leaving, the bars stay as they are."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._bars: RichProgress | None = None
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bars = RichProgress(
                TextColumn("{task.description:<22}"),
                BarColumn(bar_width=22),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Say what is waited for while the context is open: a spinner on a terminal, elsewhere one line, once."""
        if self._bars is not None:
            task = self._bars.add_task(message, total=None)
            yield
            self._bars.remove_task(task)
            return
        if message not in self._said:
            self._said.add(message)
            self._console.print(message, markup=False, highlight=False)
        yield

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[_Stage]:
        """Show a stage of ``total`` steps while the context is open."""
        if self._bars is not None:
            yield _Stage(self._bars, self._bars.add_task(name, total=total))
            return
        started_s = time.perf_counter()
        self._console.print(f"{name} …", markup=False, highlight=False)
        yield _Stage(None, TaskID(0))
        elapsed_s = time.perf_counter() - started_s
        self._console.print(f"{name}: done in {elapsed_s:.1f} s", markup=False, highlight=False)
