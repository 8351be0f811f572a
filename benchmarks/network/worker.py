"""One rank of `run.py`: messages between pairs, then every schedule at every size; rank 0 writes the times.

    RANK=… WORLD_SIZE=… python worker.py jobs.json out.json

A time is that of the slowest rank, the median over repetitions. Results are checked before anything is timed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bitwright.comms.collectives import schedule
from bitwright.comms.run_schedule import run_schedule

#: Messages between two ranks that are timed one after the other.
IN_A_ROW = 3


def timed(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the slowest rank, the median of so many."""
    return statistics.median(_spans(work, repeats, dist.ReduceOp.MAX))


def exchange(source: int, destination: int, num_bytes: int, repeats: int) -> float:
    """Seconds in which two ranks send each other a message, as a step of a schedule uses a link both ways.

    One way alone is faster, since acknowledgements of what comes in share the way out; and a message after a pause is,
    since what the link has saved passes at once: so several in a row are timed. The two leave the barrier at different
    times, and whoever leaves it last waits for nobody: its time counts.
    """
    rank = dist.get_rank()
    takes_part = rank in (source, destination)
    other = destination if rank == source else source
    content, room = torch.zeros(2, num_bytes, dtype=torch.uint8)

    def work() -> None:
        for _ in range(IN_A_ROW if takes_part else 0):
            coming, going = dist.irecv(room, other), dist.isend(content, other)
            assert coming is not None and going is not None
            coming.wait()
            going.wait()

    work()
    return statistics.median(_spans(work, repeats, dist.ReduceOp.MIN, counts=takes_part)) / IN_A_ROW


def _spans(work: Callable[[], object], repeats: int, of: dist.ReduceOp, counts: bool = True) -> list[float]:
    """Seconds of each repetition: those of one of the ranks that count."""
    found = []
    for _ in range(repeats):
        dist.barrier()
        begun = time.perf_counter()
        work()
        span = torch.tensor([time.perf_counter() - begun if counts else math.inf])
        dist.all_reduce(span, op=of)
        found.append(float(span))
    return found


def check(op: str, found: torch.Tensor) -> None:
    """Raise if a rank did not get what it should: rank r began with r + 1 everywhere."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shards = found[: found.numel() // size * size].view(size, -1)
    total = size * (size + 1) / 2
    is_right = {
        "all_reduce": lambda: bool((found == total).all()),
        "reduce_scatter": lambda: bool((shards[rank] == total).all()),
        "broadcast": lambda: bool((found == 1).all()),
        "all_gather": lambda: bool((shards == torch.arange(1.0, size + 1)[:, None]).all()),
        "all_to_all": lambda: bool((shards == torch.arange(1.0, size + 1)[:, None]).all()),
    }[op]()
    if not is_right:
        raise RuntimeError(f"rank {rank} got a wrong {op}: {found[:8].tolist()}")


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    size, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, list[dict[str, object]]] = {"messages": [], "schedules": []}
    for job in jobs["messages"]:
        seconds = exchange(job["source"], job["destination"], job["num_bytes"], jobs["repeats"])
        found["messages"].append({**job, "time_s": seconds})
    for number, job in enumerate(jobs["schedules"]):
        made = schedule(
            job["op"], job["algorithm"], size, ranks_per_node=jobs["ranks_per_node"], num_segments=jobs["num_segments"]
        )
        length = job["num_bytes"] // 4
        buffer = torch.full((length,), float(rank + 1))
        check(job["op"], run_schedule(made, buffer))
        seconds = timed(lambda: run_schedule(made, buffer), job["repeats"])  # noqa: B023
        found["schedules"].append({**job, "time_s": seconds})
        if rank == 0:
            told = f"{job['op']} by {job['algorithm']}, {job['num_bytes'] >> 10:,} KiB: {seconds:.3f} s"
            print(f"  {number + 1}/{len(jobs['schedules'])} {told}", flush=True)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
