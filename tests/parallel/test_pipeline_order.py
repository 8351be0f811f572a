"""Orders of pipelines: every pass once, and the bubbles that papers state."""

from __future__ import annotations

from collections import Counter

import pytest

from bitwright.errors import ParallelError
from bitwright.parallel.pipeline_order import Pass, pass_times, stage_order


def orders(schedule: str, stages: int, interleave: int, m: int) -> list[list[Pass]]:
    return [
        stage_order(schedule, stage=i, stages=stages, interleave=interleave, micro_batches=m)  # type: ignore[arg-type]
        for i in range(stages)
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("stages", "interleave", "m"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (4, 2, 8), (3, 4, 6), (8, 2, 16)]
)
def test_every_pass_runs_once_and_the_bubble_is_the_published_one(
    schedule: str, stages: int, interleave: int, m: int
) -> None:
    found = orders(schedule, stages, interleave, m)
    counts = Counter((p.is_backward, p.micro_batch, p.part) for order in found for p in order)
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * m * stages * interleave
    parts = stages * interleave
    times = pass_times(found, [1 / interleave] * parts, [2 / interleave] * parts)
    end = max(entry.end_s for entry in times)
    # Narayanan et al., arXiv:2104.04473, 2.2: bubble (p-1)/m of the ideal time, over v where chunks are interleaved.
    if schedule == "1f1b":
        assert end == pytest.approx(3 * m + 3 * (stages - 1) / interleave)
    else:
        assert end >= 3 * m


def test_1f1b_holds_no_more_micro_batches_than_there_are_stages_behind() -> None:
    for stage, order in enumerate(orders("1f1b", 4, 1, 16)):
        held = most = 0
        for entry in order:
            held += -1 if entry.is_backward else 1
            most = max(most, held)
        assert most == 4 - stage


def test_unequal_stages_wait_for_the_slowest() -> None:
    times = pass_times(orders("1f1b", 2, 1, 10), [1.0, 2.0], [1.0, 2.0])
    # Σ of a micro-batch + (m - 1) · slowest.
    assert max(entry.end_s for entry in times) == pytest.approx(6 + 9 * 4)


def test_zero_bubble_is_not_drawn() -> None:
    with pytest.raises(ParallelError, match=r"schedule zero-bubble splits backward passes .*--fix schedule=1f1b"):
        orders("zero-bubble", 4, 1, 8)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    stuck = [[Pass(is_backward=True, micro_batch=0, part=0)], [Pass(is_backward=True, micro_batch=0, part=1)]]
    with pytest.raises(ParallelError, match="wait for each other"):
        pass_times(stuck, [1, 1], [1, 1])
