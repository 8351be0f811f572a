"""The times of a run's stages, and its peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bitwright.plan import Run
from bitwright.search.progress import Progress, Stage


@dataclass(kw_only=False)
class Clock:
    """Passes stages on to whoever shows them, and keeps their times."""

    shown: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        begin = time.perf_counter()
        with self.shown.stage(name, total) as stage:
            yield stage
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def run(self, paths: dict[str, str]) -> Run:
        """What happened to be so: never hashed."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Run(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            timings={**self.seconds, "total": time.perf_counter() - self.started},
            paths=paths,
            peak_memory_bytes=peak if sys.platform == "darwin" else peak * 1024,
        )
