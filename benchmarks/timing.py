"""Times that can be compared: the same machine, the same minutes, one call of each in turn.

What a machine does besides, and how warm it is, changes within seconds. So everything that is set against each other is
called in turn, a b c a b c …, and medians are taken over the turns: a drift hits all of them. The first turns are not
counted. There is no rest between calls: threads that fell asleep, and a processor that slowed down, would be measured
instead of the calls (a memcpy of 1 Mi numbers takes four times as long after 3 ms of rest).

What a call returns is dropped within its time: giving memory back belongs to the price of having allocated it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Turns before any is counted.
WARM_UP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one call, over its turns."""

    median_ms: float
    min_ms: float
    max_ms: float
    repetitions: int

    def times(self, factor: float) -> Timing:
        """The time of `factor` times as much work, if it takes as many times as long."""
        return Timing(
            median_ms=self.median_ms * factor,
            min_ms=self.min_ms * factor,
            max_ms=self.max_ms * factor,
            repetitions=self.repetitions,
        )


def in_turn(calls: Mapping[str, Callable[[], object]], repetitions: int, warm_up: int = WARM_UP) -> dict[str, Timing]:
    """Time calls against each other: `repetitions` turns, each calling all in order."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    collects = gc.isenabled()
    gc.disable()
    try:
        for turn in range(warm_up + repetitions):
            for name, call in calls.items():
                start = time.perf_counter_ns()
                call()
                end = time.perf_counter_ns()
                if turn >= warm_up:
                    taken[name].append((end - start) / 1e6)
    finally:
        if collects:
            gc.enable()
    return {
        name: Timing(median_ms=statistics.median(times), min_ms=min(times), max_ms=max(times), repetitions=len(times))
        for name, times in taken.items()
    }
