"""One rank of `overlap.py`: DDP steps whose gradients travel while the backward pass goes on, timed event by event.

    RANK=… WORLD_SIZE=… python overlap_worker.py jobs.json out.json

A layer's work is a wait of given length, so that it takes no processor from the ranks beside it: what is measured is
how exchanges hide behind work, on machines with fewer processors than ranks too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Waits(torch.autograd.Function):
    """A layer's product that takes so long, and twice of it on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(seconds)
        return x + weight[0, 0] * 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, torch.ones(ctx.shape), None


class _Layer(nn.Module):
    def __init__(self, num_bytes: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, num_bytes // 4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Waits.apply(x, self.weight, self.seconds)


class _Watched:
    """A communication hook that notes when buckets are full and when they are through."""

    def __init__(self) -> None:
        self.events: list[dict[str, float]] = []
        self.begun = 0.0

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        event = {"ready_s": time.perf_counter() - self.begun, "num_bytes": 4.0 * bucket.buffer().numel()}
        self.events.append(event)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            event["end_s"] = time.perf_counter() - self.begun
            return future.value()[0]

        return work.get_future().then(done)


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types themselves
    return state.start(bucket)


def all_reduces(sizes: list[int], repeats: int) -> list[dict[str, float]]:
    """Seconds of the library's own all-reduce, for the model."""
    found = []
    for size in sizes:
        buffer = torch.zeros(size // 4)
        dist.all_reduce(buffer)

        def once(buffer: Tensor = buffer) -> float:
            begun = time.perf_counter()
            dist.all_reduce(buffer)
            return time.perf_counter() - begun

        found.append({"num_bytes": size, "time_s": _slowest(once, repeats)})
    return found


def _slowest(work: Callable[[], float], repeats: int) -> float:
    """Seconds that the slowest rank says, the median of so many."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        span = torch.tensor([work()])
        dist.all_reduce(span, op=dist.ReduceOp.MAX)
        times.append(float(span))
    return statistics.median(times)


def train_step(job: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds of the backward passes of a step with the exchange and alone, and the events of the last exchange."""
    layers = nn.Sequential(*(_Layer(job["layer_bytes"], job["layer_s"]) for _ in range(job["num_layers"])))
    bucket_mib = job["bucket_bytes"] / (1 << 20)
    model = DistributedDataParallel(layers, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    watched = _Watched()
    model.register_comm_hook(watched, _hook)
    x = torch.zeros(1, requires_grad=True)

    def step(exchanges: bool = True) -> float:
        spent = 0.0
        for micro in range(job["micro_batches"]):
            is_last = exchanges and micro == job["micro_batches"] - 1
            model.require_backward_grad_sync = is_last and job["overlap"]
            loss = model(x).sum()
            if is_last:
                watched.events = []
            watched.begun = time.perf_counter()
            loss.backward()
            if is_last and not job["overlap"]:
                for layer in layers:
                    assert layer.weight.grad is not None
                    dist.all_reduce(layer.weight.grad)
            spent += time.perf_counter() - watched.begun
        return spent

    step()  # the first pass makes buckets in the order of use
    time_s = _slowest(step, repeats)
    events = watched.events
    alone_s = _slowest(lambda: step(exchanges=False), max(3, repeats // 2))
    return {**job, "time_s": time_s, "alone_s": alone_s, "events": events}


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found: dict[str, Any] = {"all_reduces": all_reduces(jobs["sizes"], jobs["repeats"])}
    found["steps"] = []
    for number, job in enumerate(jobs["steps"]):
        found["steps"].append(train_step(job, jobs["repeats"]))
        if dist.get_rank() == 0:
            print(f"  {number + 1}/{len(jobs['steps'])} {found['steps'][-1]['time_s']:.2f} s a step", flush=True)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
