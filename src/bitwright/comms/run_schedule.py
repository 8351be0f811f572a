"""The interpreter of schedules over torch.distributed: the same transfers as messages between processes.

Each rank goes through the steps it takes part in. In a step it posts all its receives and sends as one group, waits for
them, and only then adds or copies what came: the order of `simulate`, so that results are equal to it bit for bit.
Slices travel as bytes (`wire_codec`). Under a format with scales each slice finds its own, so that a number that is
passed on may be rounded once more than in `simulate`, and ranks may differ in a last place; the hooks of DDP (`hooks`)
cut where blocks end, and do not.

It runs over any backend with point-to-point messages. NCCL runs what is not grouped in the order in which it was
posted, so that two ranks that both receive first would wait for each other for ever; in a group the order does not
matter. Gloo knows no groups, and there receives come first: what tells the sender that it may begin would otherwise
queue behind this rank's own data, and the two directions would follow one another. NCCL pays no heed to tags, so that
messages between two ranks are posted in the same order at both ends.

A library's own collectives are faster where they exist. This is for algorithms that they do not have, for networks
under study, and as a proof of the schedules. Source: NVIDIA's NCCL user guide, group calls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bitwright.comms.schedule import Schedule, Transfer
from bitwright.comms.wire import WIRE_FORMATS, WireFormat
from bitwright.comms.wire_codec import decode, encode
from bitwright.errors import CommsError


def run_schedule(
    schedule: Schedule,
    buffer_L: Tensor,
    *,
    wire: WireFormat | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Take part in a collective, and return this rank's buffer after it.

    Args:
        schedule: over as many ranks as the group has; an all-to-all takes a multiple of that many elements.
        buffer_L: fp32 [L] of this rank, equally long on all; it stays as it is.
        wire: how numbers travel and sums are kept; None: fp32.
        group: of the processes; all of them unless given. Over NCCL its ranks must have done some collective before,
            since not all of them take part in each step.

    Raises:
        CommsError: another number of ranks, or a tensor that is no fp32 vector.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != schedule.num_ranks:
        raise CommsError(f"a schedule of {schedule.num_ranks} ranks was run by {size}; make one of {size}")
    if buffer_L.dtype != torch.float32 or buffer_L.dim() != 1:
        raise CommsError(
            f"a buffer of {buffer_L.dtype} {list(buffer_L.shape)}; schedules move fp32 vectors: flatten and convert it"
        )
    chosen = wire or WIRE_FORMATS["fp32"]
    length = buffer_L.numel()
    buffer = decode(encode(buffer_L, chosen), chosen, length)
    if schedule.op == "all_to_all":
        buffer = torch.cat([buffer, torch.zeros_like(buffer)])
    bounds = schedule.bounds(buffer.numel())
    for step in schedule.steps():
        mine = [item for item in step if rank in (item.source, item.destination)]
        if mine:
            _run_step(mine, rank, buffer, bounds, chosen, group)
    return buffer[-length:] if schedule.op == "all_to_all" and length else buffer


def _run_step(
    items: list[Transfer],
    rank: int,
    buffer: Tensor,
    bounds: tuple[int, ...],
    wire: WireFormat,
    group: dist.ProcessGroup | None,
) -> None:
    receives, sends = [], []
    arriving: list[tuple[Transfer, Tensor, int | None]] = []
    for index, item in enumerate(items):
        own = buffer[bounds[item.first] : bounds[item.stop]]
        length, tag = own.numel(), _tag(items, index)
        if item.source == item.destination:
            arriving.append((item, own.clone(), None))
        elif item.destination == rank and length:
            content = torch.empty(wire.num_bytes(length), dtype=torch.uint8, device=buffer.device)
            receives.append(dist.P2POp(dist.irecv, content, group=group, group_peer=item.source, tag=tag))
            arriving.append((item, content, length))
        elif item.source == rank and length:
            to = item.destination
            sends.append(dist.P2POp(dist.isend, encode(own, wire), group=group, group_peer=to, tag=tag))
    # Kept until all is through: a send reads its bytes until then.
    grouped = [*receives, *sends]
    for work in dist.batch_isend_irecv(grouped) if grouped else ():
        work.wait()
    found: dict[tuple[int, bool], list[tuple[int, Tensor]]] = {}
    for item, content, received in arriving:
        values = content if received is None else decode(content, wire, received)
        found.setdefault((item.at, item.reduces), []).append((item.source, values))
    for (at, reduces), parts in found.items():
        place = buffer[bounds[at] : bounds[at] + parts[0][1].numel()]
        if not reduces:
            place.copy_(parts[-1][1])
            continue
        ordered = [part for _, part in sorted([*parts, (rank, place.clone())], key=lambda pair: pair[0])]
        total = ordered[0]
        for part in ordered[1:]:
            total = total + part
        place.copy_(decode(encode(total, wire), wire, total.numel()))


def _tag(items: list[Transfer], index: int) -> int:
    """The number of this message among those of its two ranks in a step: the same at both ends."""
    item = items[index]
    return sum(other[1:3] == item[1:3] for other in items[:index])
