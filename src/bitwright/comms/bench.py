"""Measured times of collectives between real processes, in the columns of nccl-tests.

    size, count, type, operation, algorithm | time, algbw = S/t, busbw = f · S/t, #wrong

`library` is what the backend itself offers (Gloo on CPUs, NCCL on GPUs); any other algorithm is one of our schedules as
messages. Time is that of the slowest rank, the mean over repetitions after a warm-up. Every number of the result is
compared with the exact one on every rank: what is not within the rounding of its type, NaN above all, counts as wrong.

Bytes are those of numbers of the type; a format with scales moves 3 % more. On GPUs all numbers stay there, and a clock
is read when what was started before it is done.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright import formats
from bitwright.comms.collectives import algorithms_of, schedule
from bitwright.comms.peers import Peers
from bitwright.comms.run_schedule import run_schedule
from bitwright.comms.wire import WireFormat, wire_format
from bitwright.comms.wire_bytes import BUS_FACTORS
from bitwright.errors import CommsError

LIBRARY = "library"
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
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
class BenchSettings:
    """What to measure.

    Raises:
        CommsError: nothing to measure, or an algorithm that does not do a collective.
        UnknownName: no such collective or format.
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    algorithms: tuple[str, ...]
    ranks_per_node: int | None = None
    #: Put a NaN into the data of this rank, to see that it is counted.
    nan_rank: int | None = None

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            wire_format(dtype)
        for op in self.ops:
            able = (LIBRARY, *algorithms_of(op))
            wrong = [name for name in self.algorithms if name not in able]
            if wrong and len(self.ops) == 1:
                raise CommsError(f"algorithm '{wrong[0]}' does no {op}; use some of {', '.join(able)}")
        if not (self.ops and self.sizes and self.dtypes and self.algorithms):
            raise CommsError("nothing to measure; name a collective, a size, a type and an algorithm")

    def jobs(self) -> Iterator[tuple[str, str, str, int]]:
        """(op, dtype, algorithm, bytes) in the order of measuring; what does not go together is left out."""
        for op in self.ops:
            for dtype in self.dtypes:
                for algorithm in self.algorithms:
                    if algorithm == LIBRARY and dtype not in _TYPES:
                        continue
                    if algorithm == LIBRARY or algorithm in algorithms_of(op):
                        for size in self.sizes:
                            yield op, dtype, algorithm, size

    def as_dict(self) -> dict[str, object]:
        """What ranks compare before they start."""
        names = ("ops", "sizes", "dtypes", "algorithms", "ranks_per_node")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}


def parse_sizes(text: str, factor: int = 4) -> tuple[int, ...]:
    """Return the bytes that "8B..256MiB" (every power of `factor` between) or "1KiB,3MiB" spells.

    Raises:
        CommsError: no size, or a range that goes down.
    """
    low, dots, high = text.partition("..")
    if not dots:
        return tuple(_parse_size(word) for word in text.split(","))
    size, last = _parse_size(low), _parse_size(high)
    if last < size:
        raise CommsError(f"sizes {text!r} go down; write the smaller one first")
    found = []
    while size < last:
        found.append(size)
        size *= factor
    return (*found, last)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = "" if match is None else match[2].upper()
    if match is None or (unit or "B") not in _UNITS or float(match[1]) <= 0:
        raise CommsError(f"size {text.strip()!r} cannot be read; write 8B, 64KiB or 256MiB")
    return int(float(match[1]) * _UNITS[unit or "B"])


def run_bench(
    settings: BenchSettings, peers: Peers, on_row: Callable[[Measurement], None] = lambda row: None
) -> tuple[Measurement, ...]:
    """Measure all that was asked for, on every rank alike.

    Args:
        settings: the same on all ranks.
        peers: joined.
        on_row: told of each measurement.

    Raises:
        CommsError: ranks that were asked for different things, or one that failed; it is named.
    """
    peers.agree(settings.as_dict())
    found = []
    for op, dtype, algorithm, size in settings.jobs():
        measured = _measure(op, dtype, algorithm, size, settings, peers)
        if measured is not None:
            found.append(measured)
            on_row(measured)
    return tuple(found)


def _measure(
    op: str, dtype: str, algorithm: str, size: int, settings: BenchSettings, peers: Peers
) -> Measurement | None:
    wire = wire_format(dtype)
    n = peers.size
    count = size * 8 // formats.FORMATS[wire.scheme.format].bits
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        count -= count % n
    if count == 0:
        return None
    device = peers.device
    given = _data(count, peers.rank).to(device)
    if settings.nan_rank == peers.rank:
        given[0] = float("nan")
    run = _library(op, given, wire) if algorithm == LIBRARY else _schedule(op, algorithm, given, wire, settings, n)
    run = _finished(run, device)
    what = f"{op} of {size} bytes by {algorithm} in {dtype}"
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
        num_bytes=count * formats.FORMATS[wire.scheme.format].bits // 8,
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
    match op:
        case "all_reduce":
            return torch.stack([_data(count, other) for other in range(n)]).sum(0)
        case "reduce_scatter":
            total = torch.stack([_data(count, other) for other in range(n)]).sum(0)
            return total.chunk(n)[rank]
        case "all_gather":
            return torch.cat([_data(count, other).chunk(n)[other] for other in range(n)])
        case "all_to_all":
            return torch.cat([_data(count, other).chunk(n)[rank] for other in range(n)])
        case _:
            return _data(count, 0)


def _schedule(
    op: str, algorithm: str, given: Tensor, wire: WireFormat, settings: BenchSettings, n: int
) -> Callable[[], Tensor]:
    made = schedule(op, algorithm, n, ranks_per_node=settings.ranks_per_node)
    start, stop = made.shard(dist.get_rank(), given.numel()) if op == "reduce_scatter" else (0, given.numel())
    is_told = op != "send_recv" or dist.get_rank() == n - 1

    def run() -> Tensor:
        found = run_schedule(made, given, wire=wire)[start:stop]
        return found if is_told else found.new_empty(0)

    return run


def _library(op: str, given: Tensor, wire: WireFormat) -> Callable[[], Tensor]:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = given.to(_TYPES[wire.name])
    shard = x.chunk(n)[rank].clone()

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


def as_json(rows: tuple[Measurement, ...], backend: str, ranks_per_node: int | None) -> dict[str, Any]:
    """What `comm fit` reads."""
    return {
        "schema": 1,
        "backend": backend,
        "num_ranks": rows[0].num_ranks if rows else 0,
        "ranks_per_node": ranks_per_node,
        "rows": [
            {name: getattr(row, name) for name in Measurement.__slots__}
            | {"algbw_gb_per_s": row.algbw_gb_per_s, "busbw_gb_per_s": row.busbw_gb_per_s}
            for row in rows
        ],
    }
