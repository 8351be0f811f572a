"""A collective told step by step: who sends what to whom, what every rank holds after it, bytes by rank, the result.

`explain` gives records, and `cli/comm_explain.py` prints them. The result comes from the interpreter that tests run,
the bytes from the one that counts; the closed form stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bitwright.catalog import nearest_name_hint
from bitwright.comms.closed_forms import CLOSED_FORMS
from bitwright.comms.collectives import ALGORITHMS, COLLECTIVES, schedule, usual_algorithm
from bitwright.comms.count import Counts, count
from bitwright.comms.schedule import Schedule, Transfer
from bitwright.comms.simulate import Change, Values, run, simulate
from bitwright.comms.wire import WireFormat
from bitwright.errors import CommsError, UnknownName


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One transfer, with where its slice lies and what it carries."""

    source: int
    destination: int
    #: Elements [start, stop) of the sender's buffer.
    start: int
    stop: int
    reduces: bool
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What happens at once, and what every rank holds then."""

    moves: tuple[Move, ...]
    buffers: Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One collective on given data."""

    schedule: Schedule
    start: Values
    steps: tuple[Step, ...]
    #: What each rank holds in the end: its vector, or its shard after a reduce-scatter.
    result: tuple[tuple[float, ...], ...]
    counts: Counts
    bytes_per_element: float
    spelled_steps: str
    spelled_busiest: str
    #: ‖result − that of fp64‖ / ‖that of fp64‖, where numbers travel rounded.
    relative_error: float | None


def collective_name(text: str) -> str:
    """Return the collective of a name as people write it: "allreduce", "all-reduce", "AllReduce".

    Raises:
        UnknownName: no collective is called so.
    """
    bare = {name.replace("_", ""): name for name in COLLECTIVES} | {"p2p": "send_recv", "alltoall": "all_to_all"}
    written = text.strip().lower().replace("-", "").replace("_", "")
    if written not in bare:
        hint = nearest_name_hint(written, list(bare))
        raise UnknownName(f"unknown collective {text!r}{hint} Known: {', '.join(COLLECTIVES)}")
    return bare[written]


def textbook_data(num_ranks: int, length: int | None = None) -> Values:
    """Return [1, 2, 3, …] · k for ranks k = 1, 2, …: float64 [ranks, length], a number for each rank unless given."""
    return np.outer(np.arange(1, num_ranks + 1), np.arange(1, (length or num_ranks) + 1)).astype(np.float64)


def parse_data(text: str, num_ranks: int) -> Values:
    """Return the buffers that "1,2,3,4;2,4,6,8;…" spells: rows between semicolons, one for each rank.

    A last row of "…" (or "...") goes on as the two before it began.

    Raises:
        CommsError: no number, rows of different lengths, or another number of rows than ranks.
    """
    rows: list[list[float]] = []
    written = [row.strip() for row in text.strip().rstrip(";").split(";")]
    for index, row in enumerate(written):
        if row in ("…", "..."):
            if index < 2 or index != len(written) - 1:
                raise CommsError(f"'…' in {text!r} goes on from the two rows before it; write two, and it last")
            change = np.subtract(rows[-1], rows[-2])
            rows += [list(np.add(rows[-1], change * more)) for more in range(1, num_ranks - index + 1)]
            continue
        try:
            rows.append([float(word) for word in row.split(",")])
        except ValueError as error:
            raise CommsError(f"row {index} of the data, {row!r}, has no numbers; write 1,2,3,4;2,4,6,8") from error
        if len(rows[-1]) != len(rows[0]):
            raise CommsError(
                f"row {index} of the data has {len(rows[-1])} numbers and row 0 has {len(rows[0])}; give every rank "
                "as many"
            )
    if len(rows) != num_ranks:
        raise CommsError(f"data of {len(rows)} rows for {num_ranks} ranks; give one row for each rank")
    return np.array(rows)


def explain(
    op: str,
    algorithm: str | None,
    num_ranks: int,
    data: npt.ArrayLike | None = None,
    *,
    ranks_per_node: int | None = None,
    num_segments: int = 2,
    wire: WireFormat | None = None,
) -> Explanation:
    """Run one collective step by step.

    Args:
        op: one of `COLLECTIVES`.
        algorithm: one of `algorithms_of(op)`; a ring unless given.
        num_ranks: 1 or more.
        data: a row for each rank; `textbook_data` unless given.
        ranks_per_node, num_segments: as in `schedule`.
        wire: how numbers travel and are kept; None: exactly.

    Raises:
        CommsError, UnknownName: as `schedule` and `simulate` do.
    """
    made = schedule(
        op, algorithm or usual_algorithm(op), num_ranks, ranks_per_node=ranks_per_node, num_segments=num_segments
    )
    given = np.array(textbook_data(num_ranks) if data is None else data, dtype=np.float64)
    exact = simulate(made, given)
    start = given if wire is None else wire.rounded(given).astype(np.float64)
    steps = tuple(_steps(made, start, wire))
    final = steps[-1].buffers if steps else start
    kept = _kept(made, final)
    error = None if wire is None else _relative_error(kept, _kept(made, exact))
    form = CLOSED_FORMS[op, made.algorithm]
    return Explanation(
        schedule=made,
        start=start,
        steps=steps,
        result=kept,
        counts=count(made, given.shape[1]),
        bytes_per_element=4.0 if wire is None else wire.bits_per_number / 8,
        spelled_steps=form.spelled_steps,
        spelled_busiest=form.spelled_busiest,
        relative_error=error,
    )


def description(name: str) -> str:
    """Return the line of an algorithm."""
    return ALGORITHMS[name].description


def _steps(made: Schedule, start: Values, wire: WireFormat | None) -> Sequence[Step]:
    length = start.shape[1]
    halves = 2 if made.op == "all_to_all" else 1
    buffers = np.concatenate([start, np.zeros_like(start)], axis=1) if halves == 2 else start.copy()
    bounds = made.bounds(halves * length)
    found = []
    for step in made.steps():
        moves = tuple(_move(item, buffers, bounds) for item in step if bounds[item.first] < bounds[item.stop])
        buffers = run(step, buffers.copy(), bounds, None if wire is None else _in_fp64(wire))
        found.append(Step(moves=moves, buffers=buffers[:, -length:] if halves == 2 else buffers))
    return found


def _in_fp64(wire: WireFormat) -> Change:
    return lambda values: wire.rounded(values).astype(np.float64)


def _move(item: Transfer, buffers: Values, bounds: Sequence[int]) -> Move:
    start, stop = bounds[item.first], bounds[item.stop]
    return Move(
        source=item.source,
        destination=item.destination,
        start=start,
        stop=stop,
        reduces=item.reduces,
        values=tuple(float(value) for value in buffers[item.source, start:stop]),
    )


def _kept(made: Schedule, buffers: Values) -> tuple[tuple[float, ...], ...]:
    length = buffers.shape[1]
    rows = []
    for rank, row in enumerate(buffers):
        start, stop = made.shard(rank, length) if made.op == "reduce_scatter" else (0, length)
        rows.append(tuple(float(value) for value in row[start:stop]))
    return tuple(rows)


def _relative_error(found: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> float:
    a, b = (np.concatenate([np.asarray(row) for row in rows]) for rows in (found, exact))
    norm = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / norm if norm else 0.0
