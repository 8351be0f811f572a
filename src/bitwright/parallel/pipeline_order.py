"""In which order each stage of a pipeline runs its passes, and when each starts.

1F1B: stage i of p runs p - i - 1 forward passes, then one forward and one backward in turn, then what is left backward.
Interleaved (v chunks on each stage; chunk c of stage i is part c·p + i of the model): passes go through micro-batches p
at a time, chunk by chunk, and 2·(p - i - 1) + (v - 1)·p of them come first. gpipe: all forward, then all backward.
Source: D. Narayanan et al., arXiv:2104.04473, section 2.2, and Megatron-LM's schedules.

`pass_times` starts each pass when its stage is free and what it needs has arrived: so bubbles are found, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.errors import ParallelError
from bitwright.parallel.layout import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass of one micro-batch through one part of the model."""

    is_backward: bool
    micro_batch: int
    #: Of the model's parts, in the order of the layers: chunk · stages + stage.
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPass:
    """A pass with its start and length."""

    done: Pass
    stage: int
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.start_s + self.duration_s


def stage_order(schedule: Schedule, *, stage: int, stages: int, interleave: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one stage in their order.

    Raises:
        ParallelError: a schedule whose backward passes are split in two, which this order does not tell.
    """
    if schedule.startswith("zero-bubble"):
        raise ParallelError(
            f"schedule {schedule} splits backward passes in two, and which part fills which bubble is its library's "
            "choice, so it is not drawn; draw 1f1b, whose bubbles it fills (--fix schedule=1f1b)"
        )
    total = micro_batches * interleave
    forward = [_nth(k, stage, stages, interleave, is_backward=False) for k in range(total)]
    backward = [_nth(k, stage, stages, interleave, is_backward=True) for k in range(total)]
    if schedule == "gpipe":
        return forward + backward
    first = stages - stage - 1 if interleave == 1 else 2 * (stages - stage - 1) + (interleave - 1) * stages
    first = min(first, total)
    order = forward[:first]
    for k in range(total - first):
        order += [forward[first + k], backward[k]]
    return order + backward[total - first :]


def _nth(k: int, stage: int, stages: int, interleave: int, *, is_backward: bool) -> Pass:
    chunk = (k // stages) % interleave
    if is_backward:
        chunk = interleave - 1 - chunk
    micro_batch = k if interleave == 1 else (k // (stages * interleave)) * stages + k % stages
    return Pass(is_backward=is_backward, micro_batch=micro_batch, part=chunk * stages + stage)


def pass_times(
    orders: Sequence[Sequence[Pass]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: float = 0.0,
) -> list[TimedPass]:
    """Return when every pass starts.

    Args:
        orders: of each stage.
        forward_s, backward_s: of each part of the model.
        hop_s: from the end of a pass to the moment the next stage has what it gave.

    Raises:
        ParallelError: the orders wait for each other.
    """
    stages, parts = len(orders), len(forward_s)
    ends: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * stages
    at = [0] * stages
    found: list[TimedPass] = []
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                current = orders[stage][at[stage]]
                ready = _ready(current, ends, parts, hop_s)
                if ready is None:
                    break
                start = max(free[stage], ready)
                length = (backward_s if current.is_backward else forward_s)[current.part]
                found.append(TimedPass(done=current, stage=stage, start_s=start, duration_s=length))
                free[stage] = start + length
                ends[current.is_backward, current.micro_batch, current.part] = start + length
                at[stage] += 1
                moved = True
        if not moved:
            raise ParallelError("the stages of this order wait for each other; use an order of `stage_order`")
    return sorted(found, key=lambda entry: (entry.start_s, entry.stage))


def _ready(current: Pass, ends: dict[tuple[bool, int, int], float], parts: int, hop_s: float) -> float | None:
    """When what a pass needs is there; None: not yet known."""
    if not current.is_backward:
        if current.part == 0:
            return 0.0
        end = ends.get((False, current.micro_batch, current.part - 1))
        return None if end is None else end + hop_s
    if current.part == parts - 1:
        return ends.get((False, current.micro_batch, current.part))
    end = ends.get((True, current.micro_batch, current.part + 1))
    return None if end is None else end + hop_s
