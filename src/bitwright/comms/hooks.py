"""Gradients in fewer bits between the ranks of DDP, and what FSDP2 should be told.

    register(ddp_model, wire="fp8_e4m3", error_feedback=True)      # before the first backward pass

A bucket of gradients is all-reduced in two shots: each rank sends shard d to rank d, which adds all contributions in
fp32, in the order of ranks, and sends the mean to all. Both ways the numbers travel in the format of the wire, so that
each is rounded twice whatever the number of ranks (`wire` has the law), and all ranks get the same bits. With error
feedback, what a rank's rounding lost of contributions and of means is added to its next gradient.

On CPUs the hook works in a thread of its own, in the order of buckets, which is the same on all ranks; on GPUs on a
stream of its own. Either way the backward pass goes on. Gradients are divided by the number of ranks before they
travel, so that fp16 does not overflow in the sum.

FSDP2 has no hook: it takes a dtype for its reduce-scatter, which NCCL adds up around a ring (`fsdp_advice`).

(Annotations are not postponed here: DDP compares those of its hooks with the types themselves.)
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from bitwright.comms.wire import BLOCK_SIZE, WireFormat, safe_ranks, wire_format
from bitwright.comms.wire_codec import decode, encode
from bitwright.errors import CommsError


@dataclass(kw_only=True)
class WireHook:
    """State of a communication hook, one for each DDP module: pass it with `reduce_bucket` to `register_comm_hook`.

    What rounding lost is kept by parameter, since DDP cuts its buckets anew after the first backward pass: of each
    contribution by the rank that sent it, of each mean by the rank that added it up. So the means that have arrived and
    what all ranks still owe add up to the means of all gradients. A block whose mean is not finite leaves nothing owed
    on any rank (∞ − ∞ would spoil all later steps), and is counted.
    """

    wire: WireFormat
    group: dist.ProcessGroup | None
    error_feedback: bool
    #: Name → parameter of the module.
    parameters: Mapping[str, Tensor]
    #: Bytes that this rank has sent.
    sent_bytes: int = 0
    #: Name of a parameter → what this rank owes of its gradient, fp32, in the order of memory.
    _owed: dict[str, Tensor] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    #: A number where gradients are, so that a GPU is not waited for in the middle of a backward pass.
    _num_reset: Tensor | None = None
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    def __post_init__(self) -> None:
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def num_reset_blocks(self) -> int:
        """Blocks that were not finite so far, with feedback: the same number on all ranks."""
        return 0 if self._num_reset is None else int(self._num_reset)

    def mean(self, gradient_L: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the mean over ranks of the gradients of parameters, end to end: fp32 [L], the same bits on all."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        length = gradient_L.numel()
        # Shards end where blocks do, so that a scale is found by one rank.
        shard = -(-length // (size * BLOCK_SIZE)) * BLOCK_SIZE
        own_shard = slice(rank * shard, (rank + 1) * shard)
        wanted = torch.zeros(size * shard, device=gradient_L.device)
        wanted[:length] = gradient_L.float() / size
        if self.error_feedback:
            self._add_owed(wanted, parameters)
        sent = torch.stack([encode(part, self.wire) for part in wanted.split(shard)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        total = torch.zeros(shard, device=gradient_L.device)
        for part in received:
            total += decode(part, self.wire, shard)
        own = encode(total, self.wire)
        everywhere = torch.empty(size * own.numel(), dtype=torch.uint8, device=own.device)
        dist.all_gather_single(everywhere, own, group=self.group)
        means = torch.cat([decode(part, self.wire, shard) for part in everywhere.split(own.numel())])
        if self.error_feedback:
            lost = wanted - torch.cat([decode(part, self.wire, shard) for part in sent])
            lost[own_shard] += total - means[own_shard]
            self._owe(lost, means, parameters)
        self.sent_bytes += 2 * (size - 1) * own.numel()
        return means[:length]

    def _add_owed(self, wanted: Tensor, parameters: Sequence[Tensor]) -> None:
        start = 0
        for parameter in parameters:
            owed = self._owed.get(self._names[id(parameter)])
            if owed is not None:
                wanted[start : start + parameter.numel()] += owed
            start += parameter.numel()

    def _owe(self, lost: Tensor, means: Tensor, parameters: Sequence[Tensor]) -> None:
        is_bad = ~means.view(-1, BLOCK_SIZE).isfinite().all(dim=1)
        count = is_bad.sum()
        self._num_reset = count if self._num_reset is None else self._num_reset + count
        lost.view(-1, BLOCK_SIZE).masked_fill_(is_bad[:, None], 0.0)
        start = 0
        for parameter in parameters:
            self._owed[self._names[id(parameter)]] = lost[start : start + parameter.numel()]
            start += parameter.numel()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank owes, for its part of a checkpoint; between two steps."""
        return {
            "wire": self.wire.name,
            "num_ranks": dist.get_world_size(self.group),
            "owed": {name: owed.clone() for name, owed in self._owed.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Owe what the state says.

        Raises:
            CommsError: it was kept under another format, by other ranks, or of other parameters. Nothing has changed
                then.
        """
        size = dist.get_world_size(self.group)
        if state["wire"] != self.wire.name:
            raise CommsError(
                f"what is owed was kept under '{state['wire']}', and gradients travel in '{self.wire.name}' here; go "
                "on in the same format, or begin without it"
            )
        if state["num_ranks"] != size:
            raise CommsError(
                f"what is owed was kept by {state['num_ranks']} ranks, here are {size}; go on with as many, or begin "
                "without it"
            )
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        found = {name: owed.numel() for name, owed in state["owed"].items()}
        differing = sorted(name for name in {*sizes, *found} if sizes.get(name) != found.get(name))
        if found and differing:
            raise CommsError(
                f"what is owed is that of another model: '{differing[0]}' has {found.get(differing[0], 'no')} numbers "
                f"there and {sizes.get(differing[0], 'none')} here; go on with the same model, or begin without it"
            )
        self._owed = {
            name: owed.to(self.parameters[name].device, torch.float32, copy=True)
            for name, owed in state["owed"].items()
        }


def register(model: DistributedDataParallel, *, wire: str = "bf16", error_feedback: bool = False) -> WireHook:
    """Have the gradients of a DDP module travel in a format.

    Args:
        model: before its first backward pass.
        wire: a name in `WIRE_FORMATS`.
        error_feedback: add what rounding lost to the next gradient; it takes a second fp32 copy of all gradients. A
            checkpoint of the run has to have the hook's `state_dict` of every rank.

    Raises:
        CommsError: no DDP module.
        UnknownName: no such format.
    """
    if not isinstance(model, DistributedDataParallel):
        raise CommsError(f"gradients of a {type(model).__name__} do not travel; wrap it in DistributedDataParallel")
    # Of its own, since its collectives run beside those that the model calls itself.
    ranks = dist.get_process_group_ranks(model.process_group)
    state = WireHook(
        wire=wire_format(wire),
        group=dist.new_group(ranks),
        error_feedback=error_feedback,
        parameters={name: value for name, value in model.module.named_parameters() if value.requires_grad},
    )
    model.register_comm_hook(state, reduce_bucket)
    return state


def reduce_bucket(
    state: WireHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch has it where it is built with distributed
) -> torch.futures.Future[Tensor]:
    """The hook: start the all-reduce of a bucket, and promise its mean."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_cuda:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        stream = torch.cuda.Stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        buffer.record_stream(stream)
        with torch.cuda.stream(stream):
            future.set_result(state.mean(buffer, parameters).to(buffer.dtype))
        return future
    future = torch.futures.Future()

    def work() -> None:
        try:
            future.set_result(state.mean(buffer, parameters).to(buffer.dtype))
        except (RuntimeError, CommsError) as error:
            future.set_exception(error)  # type: ignore[arg-type]  # its own documentation passes exceptions

    state._worker.submit(work)
    return future


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpAdvice:
    """What FSDP2 should be told of precision, and why."""

    policy: MixedPrecisionPolicy
    reasons: tuple[str, ...]


def fsdp_advice(num_ranks: int, *, compute: torch.dtype = torch.bfloat16) -> FsdpAdvice:
    """Return the `MixedPrecisionPolicy` for `fully_shard`: parameters travel as they are used, gradients as safe.

    Args:
        num_ranks: over which gradients are reduced.
        compute: dtype of matrix products; parameters are gathered in it.
    """
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(compute)
    if name is None:
        raise CommsError(f"matrix products in {compute} are no dtype of FSDP2; use bfloat16, float16 or float32")
    most = safe_ranks(name, "ring")
    is_safe = name == "fp32" or num_ranks <= most
    reduce = compute if is_safe else torch.float32
    reasons = [f"parameters are gathered in {name}, in which products take them: half the bytes of fp32 at no loss"]
    if name == "fp32":
        reasons = ["nothing is rounded on the way"]
    elif is_safe:
        reasons.append(
            f"gradients are reduced in {name}: a ring's sum over {num_ranks} ranks stays within 2⁻⁷ (to {most})"
        )
    else:
        reasons.append(
            f"gradients are reduced in fp32: a ring's sum in {name} over {num_ranks} ranks is off by more than 2⁻⁷, "
            f"which it holds up to {most}"
        )
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return FsdpAdvice(policy=policy, reasons=tuple(reasons))
