"""How to serve a decoder on a cluster: over how many GPUs, how many sequences at once, and what each choice takes.

    answers = serving_choices(ServingRequest(shape=…, topology=topology("h100x8"), context=4096, batches=(1, 32)))

A *replica* is `tp` GPUs of one node that hold the model together; nodes and what is left of them hold further replicas,
which do not talk. More GPUs a replica make a token faster and leave more memory for caches, and cost two all-reduces a
layer; more sequences read the weights for more tokens at once. So one end of the table is the fastest token, the other
the most tokens of a GPU. Times are `serving_time`, memory is weights, caches and the workspace; all *predicted*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitwright.comms.topology import Topology
from bitwright.errors import ParallelError
from bitwright.hardware.device import Device
from bitwright.hardware.memory import workspace_bytes
from bitwright.hardware.model_shape import ModelShape
from bitwright.parallel.efficiency import efficiency_of
from bitwright.parallel.job import device_of, raise_if_no_device, raise_if_not_modelled, raise_if_too_long
from bitwright.parallel.network import ClusterNetwork
from bitwright.parallel.serving_time import (
    MEMORY_SHARE,
    ServingJob,
    ServingTime,
    decode_time,
    largest_batch,
    prefill_time,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRequest:
    """What is to be served, and on what.

    Raises:
        ParallelError: a size is not positive, the model is not modelled (`raise_if_not_modelled`) or has fewer
            positions, or the cluster's device is not known.
    """

    shape: ModelShape
    topology: Topology
    #: Tokens of each sequence: read as a prompt, and held while a token is said.
    context: int
    #: Sequences at once; beside them the most that fit.
    batches: tuple[int, ...]
    #: GPUs of a replica; empty: every power of two that divides the heads, up to a node.
    tps: tuple[int, ...] = ()
    #: None: the one that the topology names.
    device: Device | None = None
    #: As in `ServingJob`.
    weight_bits: float = 16.0
    kv_bits: float = 16.0
    compute: str = "bf16"

    def __post_init__(self) -> None:
        raise_if_not_modelled(self.shape)
        for name, sizes in (("context", (self.context,)), ("batch", self.batches), ("tp", self.tps)):
            for size in sizes:
                if size < 1:
                    raise ParallelError(f"{name} is {size}; give 1 or more")
        raise_if_too_long(self.shape, self.context)
        raise_if_no_device(self.topology, self.device)

    @property
    def used_device(self) -> Device:
        """The device that serves."""
        return device_of(self.topology, self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingChoice:
    """One way to serve."""

    tp: int
    batch: int
    #: On each GPU.
    memory_bytes: float
    #: Replicas that the cluster holds.
    replicas: int
    #: Reading all prompts of the batch.
    prefill: ServingTime
    #: One token of every sequence.
    decode: ServingTime

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """While tokens are said."""
        return self.batch / self.decode.seconds / self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """What fits, by GPUs of a replica and sequences; and what does not."""

    choices: tuple[ServingChoice, ...]
    #: (tp, batch, bytes that a GPU lacks).
    too_large: tuple[tuple[int, int, float], ...]
    #: (tp, most sequences of the context that fit; 0 where the weights alone do not).
    largest: tuple[tuple[int, int], ...]
    device: Device
    efficiency_reason: str

    @property
    def fastest(self) -> ServingChoice:
        """The one that says a token soonest."""
        return min(self.choices, key=lambda choice: choice.decode.seconds)

    @property
    def busiest(self) -> ServingChoice:
        """The one that says most tokens with a GPU."""
        return max(self.choices, key=lambda choice: choice.tokens_per_s_per_gpu)


def plan_serving(request: ServingRequest) -> ServingPlan:
    """Return what every choice takes.

    Raises:
        ParallelError: GPUs of a replica that do not divide the heads, or are more than a node has.
        HardwareError: the device has no unit for the products.
    """
    device = request.used_device
    efficiency, reason = efficiency_of(device)
    usable = MEMORY_SHARE * device.memory_bytes
    choices, too_large, largest = [], [], []
    for tp in _sizes(request):
        job = ServingJob(
            shape=request.shape,
            device=device,
            efficiency=efficiency,
            network=ClusterNetwork(topology=request.topology),
            tp=tp,
            weight_bits=request.weight_bits,
            kv_bits=request.kv_bits,
            compute=request.compute,
            context=request.context,
        )
        most = largest_batch(job)
        largest.append((tp, most))
        for batch in sorted({*request.batches, *([most] if most else [])}):
            memory = job.held_bytes + batch * job.cache_bytes + workspace_bytes(device.kind)
            if batch > most:
                too_large.append((tp, batch, memory - usable))
                continue
            own = replace(job, batch=batch)
            choices.append(
                ServingChoice(
                    tp=tp,
                    batch=batch,
                    memory_bytes=memory,
                    replicas=request.topology.counts[0]
                    // tp
                    * (request.topology.num_ranks // request.topology.counts[0]),
                    prefill=prefill_time(own),
                    decode=decode_time(own),
                )
            )
    return ServingPlan(
        choices=tuple(choices),
        too_large=tuple(too_large),
        largest=tuple(largest),
        device=device,
        efficiency_reason=reason,
    )


def _sizes(request: ServingRequest) -> tuple[int, ...]:
    node = request.topology.counts[0]
    beyond = [tp for tp in request.tps if tp > node]
    if beyond:
        raise ParallelError(
            f"tp {beyond[0]} is more than the {node} GPUs of a node of {request.topology.spelled}, and its collectives "
            f"lie on the path of every token; give at most {node}"
        )
    powers = [1 << power for power in range(node.bit_length()) if 1 << power <= node]
    return request.tps or tuple(tp for tp in powers if request.shape.num_heads % tp == 0)
