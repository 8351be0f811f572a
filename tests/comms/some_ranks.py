"""What processes of a Gloo group do for `test_processes`: each check returns numbers, and rank 0 writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.comms.collectives import COLLECTIVES, algorithms_of, schedule
from bitwright.comms.hooks import all_reduce_amax, num_gradient_bytes, register
from bitwright.comms.run_schedule import run_schedule
from bitwright.comms.simulate import simulate
from bitwright.comms.wire import WIRE_FORMATS
from bitwright.errors import CommsError

#: How the hooks are compared: (format, with feedback).
HOOKS = (("fp32", False), ("bf16", False), ("fp16", False), ("fp8_e4m3", False), ("fp8_e4m3", True), ("int8", True))
STEPS = 30


def schedules_agree(size: int, rank: int) -> list[str]:
    """Every schedule by messages against the one in NumPy, bit for bit; what differs is named.

    Under formats with scales a slice finds its own, so that they agree within a few roundings.
    """
    wrong = []
    for op in COLLECTIVES:
        for algorithm in algorithms_of(op):
            for name, length in (("fp32", 37), ("bf16", 37), ("fp16", 3), ("int8", 300)):
                if op == "all_to_all":
                    length = size * 5
                wire = WIRE_FORMATS[name]
                made = schedule(op, algorithm, size, ranks_per_node=2 if size % 2 == 0 else None)
                given = np.random.default_rng(1).standard_normal((size, length)).astype(np.float32)
                wanted = simulate(made, wire.rounded(given), settle=wire.rounded)
                found = run_schedule(made, torch.from_numpy(given[rank]), wire=wire)
                start, stop = made.shard(rank, length) if op == "reduce_scatter" else (0, length)
                near = 0.05 * np.abs(wanted).max() if name == "int8" else 0.0
                if not np.abs(found.numpy() - wanted[rank])[start:stop].max(initial=0) <= near:
                    wrong.append(f"{op} {algorithm} {name} at rank {rank}")
    return wrong


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 4))


def train(size: int, rank: int, wire: str | None, feedback: bool) -> dict[str, object]:
    """Train a small model on rank's share of each batch; ranks None: all of it in one process."""
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.004)
    hook = None if wire is None else register(ddp, wire=wire, error_feedback=feedback)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    teacher = torch.randn(24, 4, generator=generator)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16 * size, 24, generator=generator)
        mine = x[rank * 16 : (rank + 1) * 16]
        loss = (ddp(mine) - mine @ teacher).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    all_weights = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(all_weights, weights)
    return {
        "losses": losses,
        "is_equal_on_all_ranks": all(torch.equal(weights, other) for other in all_weights),
        "sent_bytes": 0 if hook is None else hook.sent_bytes,
        "least_bytes": 0 if wire is None else STEPS * num_gradient_bytes(net, wire, size),
    }


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(wrong, schedules_agree(size, rank))
    found: dict[str, object] = {"wrong": [line for lines in wrong for line in lines]}
    found["plain"] = train(size, rank, None, False)
    for wire, feedback in HOOKS:
        found[f"{wire} {feedback}"] = train(size, rank, wire, feedback)
    amaxes = all_reduce_amax([torch.tensor(float(rank)), torch.tensor(float("nan") if rank == 1 else 1.0)])
    found["amax"] = [float(amax) for amax in amaxes]
    try:
        run_schedule(schedule("all_reduce", "ring", size + 1), torch.zeros(4))
    except CommsError as error:
        found["refused"] = str(error)
    if rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
