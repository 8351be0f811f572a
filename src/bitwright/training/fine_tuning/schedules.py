"""The learning rate over the steps of a run, as a share of the highest.

    up      (step + 1) / (warmup + 1) for the first `warmup` steps
    then    from 1 at the end of the warm-up to `final_share` at the last step, along one of SCHEDULES

Steps that are skipped do not count: the schedule moves with the updates (`run.py`). Cosine: Loshchilov and Hutter,
arXiv:1608.03983, without restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bitwright.catalog import nearest_name_hint
from bitwright.errors import UnknownName

#: Name → (share of the way from the warm-up's end to the last step, 0 … 1) → share of the way down that is left.
SCHEDULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    }
)


def schedule_factor(kind: str, step: int, *, steps: int, warmup_steps: int, final_share: float) -> float:
    """Return the share of the learning rate at a step, 0 being the first.

    Raises:
        UnknownName: there is no such schedule; the nearest name is suggested.
    """
    raise_if_unknown_schedule(kind)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return final_share + (1.0 - final_share) * SCHEDULES[kind](done)


def raise_if_unknown_schedule(kind: str) -> None:
    """Raise UnknownName unless SCHEDULES has it."""
    if kind not in SCHEDULES:
        raise UnknownName(
            f"unknown schedule {kind!r}{nearest_name_hint(kind, list(SCHEDULES))} Known schedules: "
            f"{', '.join(SCHEDULES)}"
        )


def make_schedule(
    optimizer: Optimizer, kind: str, *, steps: int, warmup_steps: int = 0, final_share: float = 0.0
) -> LambdaLR:
    """Return a scheduler of torch that follows `schedule_factor`."""
    raise_if_unknown_schedule(kind)
    return LambdaLR(
        optimizer,
        lambda step: schedule_factor(kind, step, steps=steps, warmup_steps=warmup_steps, final_share=final_share),
    )
