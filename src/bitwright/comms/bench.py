"""Measured times of collectives between real processes, in the columns of nccl-tests.

    size, count, type, operation, algorithm | time, algbw = S/t, busbw = f · S/t, #wrong

`library` is what the backend itself offers (Gloo on CPUs, NCCL on GPUs); any other algorithm is one of our schedules as
messages. Time is that of the slowest rank, the mean over repetitions after a warm-up. Every number of the result is
compared with the exact one on every rank: what is not within the rounding of its type, NaN above all, counts as wrong.
What was asked for and does not go together is refused where nothing is left, and else told with its reason; so are
sizes that the memory of some machine does not hold for all its ranks.

Bytes are those of numbers of the type; a format with scales moves 3 % more. On GPUs all numbers stay there, and a clock
is read when what was started before it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright import formats
from bitwright.catalog import nearest_name_hint
from bitwright.comms.collectives import ALGORITHMS, algorithms_of, schedule, usual_algorithm
from bitwright.comms.peers import Peers
from bitwright.comms.run_schedule import run_schedule
from bitwright.comms.schedule import Schedule
from bitwright.comms.wire import WireFormat, wire_format
from bitwright.comms.wire_bytes import BUS_FACTORS
from bitwright.errors import CommsError, UnknownName

LIBRARY = "library"
#: Collectives whose data are a shard for each rank.
_SHARED_OUT = ("all_gather", "reduce_scatter", "all_to_all")
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: fp32 copies of a rank's data that live at once, the exact result and what it is made from among them.
_COPIES = 12
#: Share of the memory that is available now which all ranks of a machine may fill.
_USABLE_SHARE = 0.9
#: Seconds of measuring that a size is given, and most repetitions of it.
_TARGET_S = 0.3
_MAX_REPEATS = 50
#: What one rounding may be off by, relative to the largest number of its block.
_TOLERANCES = {
    "fp32": 1e-6,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
    "int8": 2.0**-7,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One collective of one size."""

    op: str
    dtype: str
    algorithm: str
    num_ranks: int
    num_bytes: int
    count: int
    time_s: float
    num_wrong: int

    @property
    def algbw_gb_per_s(self) -> float:
        """S/t."""
        return self.num_bytes / self.time_s / 1e9

    @property
    def busbw_gb_per_s(self) -> float:
        """f · S/t."""
        return self.algbw_gb_per_s * BUS_FACTORS[self.op](self.num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Something that was asked for and not measured."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What was measured, and what was not."""

    rows: tuple[Measurement, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """What to measure.

    Raises:
        CommsError: nothing to measure, or an algorithm that does none of the collectives.
        UnknownName: no such collective, algorithm or format.
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    #: Empty: the backend's own, and a schedule for types that it does not add up.
    algorithms: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    #: Put a NaN into the data of this rank, to see that it is counted.
    nan_rank: int | None = None

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            wire_format(dtype)
        if not (self.ops and self.sizes and self.dtypes):
            raise CommsError("nothing to measure; name a collective, a size and a type")
        able = {LIBRARY, *(name for op in self.ops for name in algorithms_of(op))}
        for name in self.algorithms:
            if name != LIBRARY and name not in ALGORITHMS:
                hint = nearest_name_hint(name, [LIBRARY, *ALGORITHMS])
                raise UnknownName(f"unknown algorithm {name!r}{hint} Known: {LIBRARY}, {', '.join(ALGORITHMS)}")
            if name not in able:
                raise CommsError(
                    f"algorithm '{name}' does no {' or '.join(self.ops)}; use some of {', '.join(sorted(able))}"
                )
        with_nodes = [name for name in self.algorithms if name != LIBRARY and ALGORITHMS[name].needs_nodes]
        if (self.ranks_per_node is None) != (not with_nodes):
            raise CommsError(
                f"algorithm '{with_nodes[0]}' goes along nodes; say how many ranks each has (--ranks-per-node)"
                if with_nodes
                else f"{self.ranks_per_node} ranks a node change nothing: no algorithm that was asked for knows nodes"
            )
        if not self.groups():
            raise CommsError(f"nothing to measure: {'; '.join(f'{o.what}: {o.reason}' for o in self.left_out())}")

    def groups(self) -> tuple[tuple[str, str, str], ...]:
        """(op, dtype, algorithm) in the order of measuring, of what goes together."""
        return tuple(found for found in self._asked() if _why_not(*found) is None)

    def left_out(self) -> tuple[LeftOut, ...]:
        """What does not go together, and what was chosen in its place."""
        asked = [(found, _why_not(*found)) for found in self._asked()]
        found = [LeftOut(what=_spelled(*names), reason=why) for names, why in asked if why is not None]
        if not self.algorithms:
            for op, dtype, algorithm in self.groups():
                if algorithm != LIBRARY:
                    reason = f"{_why_not(op, dtype, LIBRARY)}; measured by {algorithm} instead"
                    found.append(LeftOut(what=_spelled(op, dtype, LIBRARY), reason=reason))
        return tuple(found)

    def _asked(self) -> Iterator[tuple[str, str, str]]:
        for op in self.ops:
            for dtype in self.dtypes:
                own = LIBRARY if _why_not(op, dtype, LIBRARY) is None else usual_algorithm(op)
                for algorithm in self.algorithms or (own,):
                    yield op, dtype, algorithm

    def as_dict(self) -> dict[str, object]:
        """What ranks compare before they start."""
        names = ("ops", "sizes", "dtypes", "algorithms", "ranks_per_node")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}


def _why_not(op: str, dtype: str, algorithm: str) -> str | None:
    if algorithm == LIBRARY:
        return None if dtype in _TYPES else f"the backend's own collectives know {', '.join(_TYPES)} only"
    return None if algorithm in algorithms_of(op) else f"'{algorithm}' does no {op}"


def _spelled(op: str, dtype: str, algorithm: str) -> str:
    return f"{op} in {dtype} by {algorithm}"


def run_bench(settings: BenchSettings, peers: Peers, on_row: Callable[[Measurement], None] = lambda row: None) -> Bench:
    """Measure all that was asked for, on every rank alike.

    Args:
        settings: the same on all ranks.
        peers: joined.
        on_row: told of each measurement.

    Raises:
        CommsError: ranks that were asked for different things, ranks that do not fill nodes, sizes that are all too
            small or too large, or a rank that failed; it is named.
    """
    peers.agree(settings.as_dict())
    usable = _usable_bytes(peers)
    schedules = {
        (op, algorithm): schedule(op, algorithm, peers.size, ranks_per_node=settings.ranks_per_node)
        for op, _, algorithm in settings.groups()
        if algorithm != LIBRARY
    }
    rows, left_out = [], list(settings.left_out())
    for op, dtype, algorithm in settings.groups():
        for size in settings.sizes:
            count = _count(op, size, wire_format(dtype), peers.size)
            if count == 0:
                shared = f"a number for each of {peers.size} ranks" if op in _SHARED_OUT else "one number"
                reason = f"they do not make {shared}"
                left_out.append(LeftOut(what=f"{_spelled(op, dtype, algorithm)}, {size} bytes", reason=reason))
                continue
            wanted = _COPIES * 4 * count
            if wanted > usable:
                wanted_gib, usable_gib = (peers.local_size * x / 2**30 for x in (wanted, usable))
                reason = (
                    f"the {peers.local_size} ranks of a machine take about {wanted_gib:,.2f} GiB (of each {_COPIES} "
                    f"copies of {count:,} numbers in fp32), and {usable_gib:,.2f} GiB are available"
                )
                left_out.append(LeftOut(what=f"{_spelled(op, dtype, algorithm)}, {size} bytes", reason=reason))
                continue
            row = _measure(op, dtype, algorithm, count, settings, peers, schedules.get((op, algorithm)))
            rows.append(row)
            on_row(row)
    if not rows:
        raise CommsError(f"nothing was measured: {left_out[-1].what}: {left_out[-1].reason}; give other sizes")
    return Bench(rows=tuple(rows), left_out=tuple(left_out))


def _usable_bytes(peers: Peers) -> float:
    """Memory that each rank may fill, of the machine that has least; the same on all ranks, so that none waits."""
    least = torch.tensor([_USABLE_SHARE * _available_bytes() / peers.local_size], device=peers.device)
    peers.run("comparing memory", lambda: dist.all_reduce(least, op=dist.ReduceOp.MIN))
    return float(least)


def _available_bytes() -> float:
    """Memory of this machine that is free or can be freed; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    told = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * int(told[0]) if told else float("inf")


def _count(op: str, size: int, wire: WireFormat, num_ranks: int) -> int:
    """Numbers in so many bytes; of what is cut into shards, as many for each rank."""
    count = size * 8 // formats.FORMATS[wire.scheme.format].bits
    return count - count % num_ranks if op in _SHARED_OUT else count


def _measure(
    op: str,
    dtype: str,
    algorithm: str,
    count: int,
    settings: BenchSettings,
    peers: Peers,
    made: Schedule | None,
) -> Measurement:
    wire = wire_format(dtype)
    n = peers.size
    num_bytes = count * formats.FORMATS[wire.scheme.format].bits // 8
    device = peers.device
    given = _data(count, peers.rank).to(device)
    if settings.nan_rank == peers.rank:
        given[0] = float("nan")
    run = _finished(_library(op, given, wire) if made is None else _schedule(made, given, wire), device)
    what = f"{op} of {num_bytes} bytes by {algorithm} in {dtype}"
    result: list[Tensor] = []
    peers.run(what, lambda: result.append(run()))
    wrong = _num_wrong(result[0].cpu(), _exact(op, count, n, peers.rank), dtype)
    repeats = torch.tensor([1.0], device=device)
    started = time.perf_counter()
    peers.run(what, run)
    once = time.perf_counter() - started
    repeats[0] = max(1, min(_MAX_REPEATS, int(_TARGET_S / max(once, 1e-6))))
    peers.run(what, lambda: dist.broadcast(repeats, 0))
    times = torch.zeros(1, device=device)

    def measure() -> None:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(int(repeats)):
            run()
        times[0] = (time.perf_counter() - begun) / float(repeats)

    peers.run(what, measure)
    totals = torch.tensor([float(wrong)], device=device)
    peers.run(what, lambda: (dist.all_reduce(times, op=dist.ReduceOp.MAX), dist.all_reduce(totals)))
    return Measurement(
        op=op,
        dtype=dtype,
        algorithm=algorithm,
        num_ranks=n,
        num_bytes=num_bytes,
        count=count,
        time_s=float(times),
        num_wrong=int(totals),
    )


def _finished(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The same, not over before the device is through."""
    if device.type != "cuda":
        return run

    def run_and_wait() -> Tensor:
        found = run()
        torch.cuda.synchronize(device)
        return found

    return run_and_wait


def _data(count: int, rank: int) -> Tensor:
    """Small integers, so that sums are exact in 8 bits of significand."""
    return ((torch.arange(count) * 7 + rank * 3) % 11 - 5).float()


def _exact(op: str, count: int, n: int, rank: int) -> Tensor:
    # One rank's data at a time: those of all of them would be more than the exchange itself takes.
    match op:
        case "all_reduce" | "reduce_scatter":
            total = _data(count, 0)
            for other in range(1, n):
                total += _data(count, other)
            return total if op == "all_reduce" else total.chunk(n)[rank]
        case "all_gather":
            return torch.cat([_data(count, other).chunk(n)[other].clone() for other in range(n)])
        case "all_to_all":
            return torch.cat([_data(count, other).chunk(n)[rank].clone() for other in range(n)])
        case _:
            return _data(count, 0)


def _schedule(made: Schedule, given: Tensor, wire: WireFormat) -> Callable[[], Tensor]:
    rank = dist.get_rank()
    start, stop = made.shard(rank, given.numel()) if made.op == "reduce_scatter" else (0, given.numel())
    is_told = made.op != "send_recv" or rank == made.num_ranks - 1

    def run() -> Tensor:
        found = run_schedule(made, given, wire=wire)[start:stop]
        return found if is_told else found.new_empty(0)

    return run


def _library(op: str, given: Tensor, wire: WireFormat) -> Callable[[], Tensor]:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = given.to(_TYPES[wire.name])
    shard = x.tensor_split(n)[rank].clone()  # empty on some ranks, of fewer numbers than ranks

    def run() -> Tensor:
        match op:
            case "all_reduce":
                total = x.clone()
                dist.all_reduce(total)
                return total
            case "all_gather":
                out = torch.empty_like(x)
                dist.all_gather_single(out, shard)
                return out
            case "reduce_scatter":
                out = torch.empty_like(shard)
                dist.reduce_scatter_single(out, x)
                return out
            case "all_to_all":
                out = torch.empty_like(x)
                dist.all_to_all_single(out, x)
                return out
            case "broadcast":
                out = x.clone()
                dist.broadcast(out, 0)
                return out
            case _:
                return _send_recv(x, rank, n)

    return run


def _send_recv(x: Tensor, rank: int, n: int) -> Tensor:
    if rank == 0 and n > 1:
        dist.send(x, n - 1)
    if rank < n - 1:
        return x.new_empty(0)
    out = x.clone()
    if n > 1:
        dist.recv(out, 0)
    return out


def _num_wrong(found: Tensor, exact: Tensor, dtype: str) -> int:
    """Numbers that are not what they have to be; NaN is none of them."""
    if found.numel() == 0:
        return 0
    near = 4 * _TOLERANCES[dtype] * float(exact.abs().max().clamp(min=1))
    return int((~((found.float() - exact).abs() <= near)).sum())


def as_json(found: Bench, backend: str, ranks_per_node: int | None) -> dict[str, Any]:
    """What `comm fit` reads."""
    return {
        "schema": 1,
        "backend": backend,
        "num_ranks": found.rows[0].num_ranks,
        "ranks_per_node": ranks_per_node,
        "rows": [
            {name: getattr(row, name) for name in Measurement.__slots__}
            | {"algbw_gb_per_s": row.algbw_gb_per_s, "busbw_gb_per_s": row.busbw_gb_per_s}
            for row in found.rows
        ],
        "left_out": [{"what": item.what, "reason": item.reason} for item in found.left_out],
    }
