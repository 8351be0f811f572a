"""The interpreter of schedules that only counts: bytes and messages by rank and by level, steps.

`across(ranks_per_unit)` counts what leaves units of consecutive ranks, such as nodes: what their network cards carry.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.comms.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a schedule moves."""

    num_steps: int
    #: Rank → elements that it sends, and receives.
    sent: tuple[int, ...]
    received: tuple[int, ...]
    #: Rank → messages that it sends.
    num_messages: tuple[int, ...]

    @property
    def total(self) -> int:
        """Elements sent by all ranks."""
        return sum(self.sent)

    @property
    def busiest(self) -> int:
        """Elements sent by the rank that sends most."""
        return max(self.sent, default=0)


def count(schedule: Schedule, length: int) -> Counts:
    """Return what a schedule moves for buffers of so many elements; moves within a rank count nothing."""
    return _counted(schedule, length, 1)


def across(schedule: Schedule, length: int, ranks_per_unit: int) -> Counts:
    """Return the same between units of consecutive ranks: one figure for each unit."""
    return _counted(schedule, length, ranks_per_unit)


def _counted(schedule: Schedule, length: int, per_unit: int) -> Counts:
    num_units = -(-schedule.num_ranks // per_unit)
    sent, received, messages = ([0] * num_units for _ in range(3))
    bounds = schedule.bounds(2 * length if schedule.op == "all_to_all" else length)
    for item in schedule.transfers:
        source, destination = item.source // per_unit, item.destination // per_unit
        if source != destination:
            size = bounds[item.stop] - bounds[item.first]
            sent[source] += size
            received[destination] += size
            messages[source] += 1
    return Counts(
        num_steps=schedule.num_steps, sent=tuple(sent), received=tuple(received), num_messages=tuple(messages)
    )
