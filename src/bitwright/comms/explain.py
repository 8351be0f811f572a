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
from bitwright.comms.collectives import ALGORITHMS, COLLECTIVES, num_chunks, schedule, usual_algorithm
from bitwright.comms.count import Counts, count
from bitwright.comms.schedule import Layout, Schedule, Transfer
from bitwright.comms.simulate import Change, Values, run, simulate
from bitwright.comms.sizes import spell_count
from bitwright.comms.wire import WireFormat
from bitwright.errors import CommsError, UnknownName

#: Ranks, and numbers of all steps and messages, that are followed one by one: seconds, and some 100 MB.
MAX_RANKS = 128
_MAX_NUMBERS = 1 << 24
#: Pieces of a pipeline unless told otherwise.
_NUM_SEGMENTS = 2


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
    #: What has to divide the length for `spelled_busiest` to give the bytes; None: it gives them.
    has_to_divide: int | None
    #: Why the result is not finite; None: it is, or numbers travel exactly.
    why_not_finite: str | None
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
        CommsError: no number, rows of different lengths, another number of rows than ranks, or too many ranks.
    """
    _raise_if_too_many(num_ranks)
    rows: list[list[float]] = []
    written = [row.strip() for row in text.strip().rstrip(";").split(";")]
    for index, row in enumerate(written):
        if row in ("…", "..."):
            if index < 2 or index != len(written) - 1:
                raise CommsError(f"'…' in {text!r} goes on from the two rows before it; write two, and it last")
            with np.errstate(over="ignore", invalid="ignore"):
                change = np.subtract(rows[-1], rows[-2])
                rows += [list(np.add(rows[-1], change * more)) for more in range(1, num_ranks - index + 1)]
            continue
        rows.append([_number(word.strip(), index) for word in row.split(",")])
        if len(rows[-1]) != len(rows[0]):
            raise CommsError(
                f"rank {index}'s row of the data has {spell_count(len(rows[-1]), 'number')} and rank 0's has "
                f"{len(rows[0])}; give every rank as many"
            )
    if len(rows) != num_ranks:
        raise CommsError(
            f"data of {spell_count(len(rows), 'row')} for {spell_count(num_ranks, 'rank')}; give one row for each rank"
        )
    return np.array(rows)


def _number(word: str, rank: int) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise CommsError(
            f"rank {rank}'s row of the data has {word!r} where a number is due; write 1,2,3,4;2,4,6,8"
        ) from error


def explain(
    op: str,
    algorithm: str | None,
    num_ranks: int,
    data: npt.ArrayLike | None = None,
    *,
    ranks_per_node: int | None = None,
    num_segments: int | None = None,
    wire: WireFormat | None = None,
) -> Explanation:
    """Run one collective step by step.

    Args:
        op: one of `COLLECTIVES`.
        algorithm: one of `algorithms_of(op)`; a ring unless given.
        num_ranks: 1 to `MAX_RANKS`.
        data: a row for each rank; `textbook_data` unless given.
        ranks_per_node, num_segments: as in `schedule`, where the algorithm has a use for them; two segments unless
            given, or one where the data are too short.
        wire: how numbers travel and are kept; None: exactly.

    Raises:
        CommsError, UnknownName: as `schedule` and `simulate` do; more ranks, numbers or segments than there can be;
            nodes or segments that change nothing.
    """
    _raise_if_too_many(num_ranks)
    name = algorithm or usual_algorithm(op)
    given = np.array(textbook_data(num_ranks) if data is None else data, dtype=np.float64)
    layout = _layout(op, name, num_ranks, given.shape[-1], ranks_per_node, num_segments)
    form = CLOSED_FORMS[op, name]
    if given.shape[-1] * (form.num_steps(num_ranks, layout) * num_ranks + form.total(num_ranks, layout)) > _MAX_NUMBERS:
        raise CommsError(
            f"{spell_count(num_ranks, 'rank')} of {spell_count(given.shape[-1], 'number')} hold and send more than "
            f"{_MAX_NUMBERS:,} numbers step by step, which is the most that is followed; give fewer"
        )
    made = schedule(op, name, num_ranks, ranks_per_node=ranks_per_node, num_segments=layout.num_segments)
    exact = simulate(made, given)
    start = given if wire is None else wire.rounded(given).astype(np.float64)
    steps = tuple(_steps(made, start, wire))
    final = steps[-1].buffers if steps else start
    kept = _kept(made, final)
    expected = _kept(made, exact)
    counts = count(made, given.shape[1])
    is_exact = num_ranks == 1 or form.busiest(num_ranks, layout) * given.shape[1] == counts.busiest
    return Explanation(
        schedule=made,
        start=start,
        steps=steps,
        result=kept,
        counts=counts,
        bytes_per_element=4.0 if wire is None else wire.bits_per_number / 8,
        spelled_steps=form.spelled_steps,
        spelled_busiest=form.spelled_busiest,
        has_to_divide=None if is_exact else made.num_chunks,
        why_not_finite=None if wire is None else _why_not_finite(given, start, kept, expected, wire),
        relative_error=None if wire is None else _relative_error(kept, expected),
    )


def description(name: str) -> str:
    """Return the line of an algorithm."""
    return ALGORITHMS[name].description


def _raise_if_too_many(num_ranks: int) -> None:
    if num_ranks > MAX_RANKS:
        raise CommsError(
            f"{num_ranks:,} ranks are more than can be followed message by message, {MAX_RANKS} ranks at most; give "
            "fewer, or ask what so many take: bitwright comm time"
        )


def _layout(
    op: str, name: str, num_ranks: int, length: int, ranks_per_node: int | None, num_segments: int | None
) -> Layout:
    """What an algorithm gets to know, none of which may change nothing."""
    per_node = ranks_per_node if ALGORITHMS[name].needs_nodes else None
    one, two = (num_chunks(op, name, num_ranks, ranks_per_node=per_node, num_segments=m) for m in (1, 2))
    if ranks_per_node is not None and not ALGORITHMS[name].needs_nodes:
        aware = ", ".join(other for other, known in ALGORITHMS.items() if known.needs_nodes)
        raise CommsError(
            f"{name} knows no nodes, and {spell_count(ranks_per_node, 'rank')} a node change nothing; leave that "
            f"out, or take {aware}"
        )
    if num_segments is not None and one == two:
        raise CommsError(
            f"{op} by {name} is no pipeline, and {spell_count(num_segments, 'segment')} change nothing; leave that out"
        )
    most = max(1, length // one)
    if num_segments is not None and num_segments > most:
        raise CommsError(
            f"{spell_count(length, 'number')} make {spell_count(most, 'segment')} at most by {name}, not "
            f"{num_segments:,}; ask for fewer, or give every rank more numbers"
        )
    pieces = min(_NUM_SEGMENTS, most) if num_segments is None else num_segments
    return Layout(ranks_per_node=per_node or num_ranks, num_segments=pieces)


def _why_not_finite(
    given: Values,
    start: Values,
    found: Sequence[Sequence[float]],
    exact: Sequence[Sequence[float]],
    wire: WireFormat,
) -> str | None:
    if all(np.isfinite(row).all() for row in found):
        return None
    if not np.isfinite(given).all() and not all(np.isfinite(row).all() for row in exact):
        return "the data has NaN or ∞, and so has the result"
    largest = f"{wire.largest:,.0f}" if wire.largest < 1e9 else f"{wire.largest:.2g}"
    limit = f"{wire.name}, whose largest number is {largest}{'' if wire.scheme.scaling is None else ' under its scale'}"
    if not np.isfinite(start[np.isfinite(given)]).all():
        return f"the data are finite, but beyond {limit}"
    return f"a sum is beyond {limit}; the data are finite"


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
    with np.errstate(over="ignore", invalid="ignore"):
        norm, error = np.linalg.norm(b), np.linalg.norm(a - b)
        return float(error / norm) if norm else 0.0
