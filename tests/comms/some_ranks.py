"""What processes of a Gloo group do for `test_processes`: each check returns numbers, and rank 0 writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bitwright.comms.collectives import COLLECTIVES, algorithms_of, schedule
from bitwright.comms.hooks import fsdp_advice, register
from bitwright.comms.run_schedule import run_schedule
from bitwright.comms.simulate import simulate
from bitwright.comms.wire import WIRE_FORMATS
from bitwright.errors import CommsError

#: How the hooks are compared: (format, with feedback).
HOOKS = (("fp32", False), ("bf16", False), ("fp16", False), ("fp8_e4m3", False), ("fp8_e4m3", True), ("int8", True))
STEPS = 25
NUM_TOKENS = 23
#: Ranks that FSDP2 is advised for: gradients are reduced in bf16, and in fp32.
ADVISED = (8, 512)
#: Schedules in whose steps every rank sends and receives.
GROUPED = ("ring", "recursive_doubling", "two_shot")
#: (format, number in the gradient of one rank) under which feedback is watched; 1e6 is past what fp16 reaches.
BAD = (("int8", None), ("fp16", None), ("int8", float("inf")), ("bf16", float("nan")), ("fp16", 1e6))


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


class Decoder(nn.Module):
    """A causal decoder of two layers, which learns to go on with sequences of equal steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.embedding = nn.Embedding(NUM_TOKENS, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, **options) for _ in range(2))
        self.head = nn.Linear(32, NUM_TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids[:, 1:].flatten())


def sequences(count: int, generator: torch.Generator) -> torch.Tensor:
    """Rows that begin anywhere and go on in steps of 1, 2 or 3."""
    first = torch.randint(NUM_TOKENS, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    return (first + step * torch.arange(13)) % NUM_TOKENS


def steps_of(model: nn.Module, size: int, rank: int) -> list[float]:
    """Train a model on rank's share of each batch, the same in all for a number of ranks; losses over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        loss = model(sequences(16 * size, generator)[rank * 16 : (rank + 1) * 16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    return losses


def train(size: int, rank: int, wire: str | None, feedback: bool) -> dict[str, object]:
    """Train under DDP; wire None: its own all-reduce."""
    net = Decoder()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.03)
    hook = None if wire is None else register(ddp, wire=wire, error_feedback=feedback)
    losses = steps_of(ddp, size, rank)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    all_weights = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(all_weights, weights)
    return {
        "losses": losses,
        "is_equal_on_all_ranks": all(torch.equal(weights, other) for other in all_weights),
        "sent_bytes": 0 if hook is None else hook.sent_bytes,
        # Both ways, all shards but one's own.
        "numbers_sent": STEPS * 2 * (size - 1) / size * weights.numel(),
    }


def train_sharded(size: int, rank: int, num_ranks: int) -> dict[str, object]:
    """Train under FSDP2, as it is advised for so many ranks."""
    advice = fsdp_advice(num_ranks)
    net = Decoder()
    for module in (*net.layers, net):
        fully_shard(module, mp_policy=advice.policy)
    losses = steps_of(net, size, rank)
    return {"losses": losses, "kept_in": sorted({str(parameter.dtype) for parameter in net.parameters()})}


def groups_of_a_schedule(op: str, algorithm: str) -> list[list[list[object]]]:
    """In each step of a schedule that this rank takes part in: (kind, peer, tag) of the messages, as posted."""
    found = []
    post = dist.batch_isend_irecv

    def told(operations: list[dist.P2POp]) -> list[dist.Work]:
        found.append([[item.op.__name__, item.group_peer, item.tag] for item in operations])
        return post(operations)

    dist.batch_isend_irecv = told
    try:
        size = dist.get_world_size()
        run_schedule(schedule(op, algorithm, size), torch.ones(4 * size))
    finally:
        dist.batch_isend_irecv = post
    return found


class Fixed(nn.Module):
    """Its loss is linear: whatever its parameters are, its gradients are those of `slopes`."""

    def __init__(self, slopes: list[torch.Tensor]) -> None:
        super().__init__()
        self.slopes = slopes
        self.weights = nn.ParameterList(torch.zeros_like(slope) for slope in slopes)

    def forward(self) -> torch.Tensor:
        return sum((weight * slope).sum() for weight, slope in zip(self.weights, self.slopes, strict=True))


def arrived_and_owed(size: int, rank: int, wire: str, bad: float | None) -> dict[str, object]:
    """What arrives over six steps of the same gradient, and what is still owed; saved and loaded in between.

    DDP cuts its buckets anew after the first backward pass of each of the two. `bad`: one number of rank 1's gradient
    at the second step.
    """
    generator = torch.Generator().manual_seed(3)
    slopes = [torch.randn(size, length, generator=generator) for length in (300, 500, 77)]
    arrived = torch.zeros(877)
    state = None
    finite = []
    resets = 0
    for _ in range(2):
        net = Fixed([slope[rank].clone() for slope in slopes])
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
        hook = register(ddp, wire=wire, error_feedback=True)
        if state is not None:
            hook.load_state_dict(state)
        for step in range(3):
            is_bad = bad is not None and state is None and step == 1 and rank == 1
            net.slopes[1][7] = bad if is_bad else slopes[1][rank, 7]
            net.zero_grad()
            ddp().backward()
            gradient = torch.cat([weight.grad for weight in net.weights])
            arrived += gradient
            finite.append(bool(gradient.isfinite().all()))
        resets += hook.num_reset_blocks
        state = hook.state_dict()
    owed = torch.cat([state["owed"][f"weights.{index}"] for index in range(3)])
    dist.all_reduce(owed)
    exact = 6 * torch.cat([slope.mean(0) for slope in slopes])
    all_resets = torch.zeros(size)
    all_resets[rank] = resets
    dist.all_reduce(all_resets)
    without = {"other format": lambda: hook.load_state_dict({**state, "wire": "fp32"})}
    without["other parameters"] = lambda: hook.load_state_dict(
        {**state, "owed": {"weights.0": state["owed"]["weights.0"]}}
    )
    without["other ranks"] = lambda: hook.load_state_dict({**state, "num_ranks": size + 1})
    return {
        "error": float((arrived + owed - exact).abs().max()),
        "error_without": float((arrived - exact).abs().max()),
        "finite": finite,
        "resets": all_resets.tolist(),
        "refused": {name: refusal(load) for name, load in without.items()},
    }


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except CommsError as error:
        return str(error)
    return ""


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(wrong, schedules_agree(size, rank))
    found: dict[str, object] = {"wrong": [line for lines in wrong for line in lines]}
    groups: list[object] = [None] * size
    dist.all_gather_object(groups, [groups_of_a_schedule("all_reduce", name) for name in GROUPED])
    found["groups"] = groups
    found["plain"] = train(size, rank, None, False)
    for wire, feedback in HOOKS:
        found[f"{wire} {feedback}"] = train(size, rank, wire, feedback)
    for num_ranks in ADVISED:
        found[f"sharded {num_ranks}"] = train_sharded(size, rank, num_ranks)
    for wire, bad in BAD:
        found[f"feedback {wire} {bad}"] = arrived_and_owed(size, rank, wire, bad)
    try:
        run_schedule(schedule("all_reduce", "ring", size + 1), torch.zeros(4))
    except CommsError as error:
        found["refused"] = str(error)
    if rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
