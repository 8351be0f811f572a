"""One rank of `run.py`: messages between pairs, then every schedule at every size; rank 0 writes the times.

    RANK=… WORLD_SIZE=… python worker.py jobs.json out.json

A time is that of the slowest rank, the median over repetitions. Results are checked before anything is timed.
"""

from __future__ import annotations

import json
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


def timed(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the slowest rank, the median of so many."""
    found = []
    for _ in range(repeats):
        dist.barrier()
        begun = time.perf_counter()
        work()
        span = torch.tensor([time.perf_counter() - begun])
        dist.all_reduce(span, op=dist.ReduceOp.MAX)
        found.append(float(span))
    return statistics.median(found)


def message(source: int, destination: int, num_bytes: int, repeats: int) -> float:
    """Seconds of one message, half of one there and back."""
    rank = dist.get_rank()
    content = torch.zeros(num_bytes, dtype=torch.uint8)

    def work() -> None:
        if rank == source:
            dist.send(content, destination)
            dist.recv(content, destination)
        elif rank == destination:
            dist.recv(content, source)
            dist.send(content, source)

    work()
    return timed(work, repeats) / 2


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
        seconds = message(job["source"], job["destination"], job["num_bytes"], jobs["repeats"])
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
