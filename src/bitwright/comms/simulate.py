"""The interpreter of schedules in NumPy: what every rank holds in the end.

Buffers are the rows of one matrix, [ranks, length]. Within a step all transfers read the buffers as they were before
it; what arrives to be added is added in the order of ranks, the receiver's own numbers at its place among them.

    settle    what a sum becomes where it is kept, and travels on: rounded to bf16, say (`wire`); None: nothing

Transfers of one step and length are moved by one operation of arrays, so that 1,024 ranks take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from bitwright.comms.schedule import Schedule, Transfer
from bitwright.comms.sizes import spell_count
from bitwright.errors import CommsError

Values = npt.NDArray[np.floating]
Change = Callable[[Values], Values]


def simulate(schedule: Schedule, buffers_NL: npt.ArrayLike, *, settle: Change | None = None) -> Values:
    """Run a schedule, and return the buffers of all ranks after it, [ranks, length].

    Args:
        schedule: over N ranks.
        buffers_NL: what each rank starts with: its vector; for an all-gather only its shard of it counts; for an
            all-to-all N shards, of which the result has N others in their place.
        settle: values [count, length] → values of that shape; see the module.

    Raises:
        CommsError: another number of rows than ranks.
    """
    buffers = np.array(buffers_NL)
    if buffers.ndim != 2 or len(buffers) != schedule.num_ranks:
        raise CommsError(
            f"buffers of shape {list(buffers.shape)} for {spell_count(schedule.num_ranks, 'rank')}; give one row for "
            "each rank"
        )
    if not np.issubdtype(buffers.dtype, np.floating):
        buffers = buffers.astype(np.float64)
    length = buffers.shape[1]
    if schedule.op == "all_to_all":
        if length % schedule.num_ranks:
            raise CommsError(
                f"an all-to-all of {spell_count(length, 'element')} over {schedule.num_ranks} ranks; take a multiple "
                "of the ranks"
            )
        doubled = np.concatenate([buffers, np.zeros_like(buffers)], axis=1)
        return run(schedule.transfers, doubled, schedule.bounds(2 * length), settle)[:, length:]
    return run(schedule.transfers, buffers, schedule.bounds(length), settle)


def run(
    transfers: Iterable[Transfer],
    buffers: Values,
    bounds: Sequence[int],
    settle: Change | None = None,
) -> Values:
    """Change buffers [ranks, length] in place, step by step, and return them; `bounds` is where chunks start."""
    # What overflows is ∞ and ∞ − ∞ is NaN, for ranks as here: a result, and no accident of the interpreter.
    with np.errstate(over="ignore", invalid="ignore"):
        for _, step in groupby(transfers, key=lambda transfer: transfer.step):
            _run_step(list(step), buffers, bounds, settle)
    return buffers


def _run_step(step: list[Transfer], buffers: Values, bounds: Sequence[int], settle: Change | None) -> None:
    kinds: dict[tuple[int, bool, bool], list[Transfer]] = {}
    arrivals: dict[tuple[int, int], int] = {}
    for item in step:
        arrivals[item.destination, item.at] = arrivals.get((item.destination, item.at), 0) + item.reduces
    for item in step:
        size = bounds[item.stop] - bounds[item.first]
        kinds.setdefault((size, item.reduces, arrivals[item.destination, item.at] > 1), []).append(item)
    # All is read before anything is written.
    read = []
    for (size, reduces, is_shared), items in kinds.items():
        if size > 0:
            sent = buffers[_places([(item.source, bounds[item.first]) for item in items], size)]
            read.append((items, reduces, is_shared, sent))
    for items, reduces, is_shared, values in read:
        if is_shared:
            _add_in_order(items, values, buffers, bounds, settle)
            continue
        places = _places([(item.destination, bounds[item.at]) for item in items], values.shape[1])
        if reduces:
            total = buffers[places] + values
            buffers[places] = total if settle is None else settle(total)
        else:
            buffers[places] = values


def _places(starts: list[tuple[int, int]], size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices of slices of one size that start at (row, column): rows [count, 1] and columns [count, size]."""
    rows, columns = np.array(starts, dtype=np.intp).T
    return rows[:, None], columns[:, None] + np.arange(size)


def _add_in_order(
    items: list[Transfer], values: Values, buffers: Values, bounds: Sequence[int], settle: Change | None
) -> None:
    """Several arrivals at one place: added by rank, the receiver's own numbers among them."""
    by_place: dict[tuple[int, int], list[tuple[int, Values]]] = {}
    for item, value in zip(items, values, strict=True):
        by_place.setdefault((item.destination, bounds[item.at]), []).append((item.source, value))
    for (rank, start), found in by_place.items():
        size = len(found[0][1])
        own = buffers[rank, start : start + size].copy()
        parts = [part for _, part in sorted([*found, (rank, own)], key=lambda pair: pair[0])]
        total = parts[0].copy()
        for part in parts[1:]:
            total = total + part
        buffers[rank, start : start + size] = total if settle is None else settle(total[None])[0]
