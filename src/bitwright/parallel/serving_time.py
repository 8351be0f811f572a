"""How long a decoder takes to read a prompt and to say a token, on one device or several.

    decode     every weight is read once a step, whatever the batch; the cache of every sequence once; a collective of
               `batch · h` values after attention and after the MLP of every layer; a launch for every kernel
    prefill    the same products with as many rows as there are prompt tokens, and causal attention among them

Kernels of decode are bound by moving, so a step takes (weights + caches) / bandwidth and what starting ten kernels a
layer costs, which is most of it for small models on fast devices: an A100 reads Llama-2-7B in 7.9 ms and says a token
in 9.5. Weights that are unpacked on their way reach less of the bandwidth (`packed_share`): int4 is 1.9 times as fast
as bf16 there, not 4. Of a mixture of experts a step reads those that some token visits, E·(1-(1-k/E)^batch) of them.

The largest batch follows from what is left of memory beside weights: `largest_batch`. Everything is *predicted*.
Source: R. Pope et al., "Efficiently Scaling Transformer Inference", arXiv:2211.05102; pytorch-labs/gpt-fast for the
figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from bitwright import formats
from bitwright.errors import ParallelError
from bitwright.hardware.device import Device
from bitwright.hardware.memory import kv_cache_bytes, workspace_bytes
from bitwright.hardware.model_shape import ModelShape
from bitwright.hardware.roofline import compute_format, matmul_tflops
from bitwright.parallel.efficiency import Efficiency
from bitwright.parallel.gemm_time import gemm_time
from bitwright.parallel.network import Network

#: Kernels of a layer beside its four products: two norms with additions, rotation, cache, attention, gate.
_OTHER_KERNELS = 6
#: Share of memory that an engine fills.
MEMORY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingJob:
    """A decoder that serves.

    Raises:
        ParallelError: sizes that do not fit each other.
    """

    shape: ModelShape
    device: Device
    efficiency: Efficiency
    #: None: one device.
    network: Network | None = None
    tp: int = 1
    #: Stored bits of a weight, with its share of scales, of linear layers and of the head.
    weight_bits: float = 16.0
    head_bits: float = 16.0
    kv_bits: float = 16.0
    #: In which products run.
    compute: str = "bf16"
    #: Share of the bandwidth that weights of fewer bits than products take reach; 1 where they are multiplied as they
    #: are stored.
    packed_share: float = 0.75
    batch: int = 1
    #: Tokens of each sequence that the cache holds.
    context: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.shape.num_heads % self.tp:
            raise ParallelError(f"tp {self.tp} does not divide {self.shape.num_heads} heads; give a divisor")
        if self.tp > 1 and self.network is None:
            raise ParallelError(f"tp {self.tp} needs a network; say what joins the devices")
        if self.batch < 1 or self.context < 1:
            raise ParallelError(f"batch {self.batch}, context {self.context}; both are at least 1")

    @property
    def weight_bytes(self) -> float:
        """Of linear layers and head, on one device: what a step reads."""
        shape = self.shape
        rest = shape.read_by_head * self.head_bits + shape.other_parameters * 16
        return (shape.linear_weights * self.weight_bits + rest) / 8 / self.tp

    @property
    def held_bytes(self) -> float:
        """Of all weights on one device, an embedding beside the head included."""
        beside = self.shape.embedding_weights if self.shape.head_weights else 0
        return self.weight_bytes + beside * self.head_bits / 8 / self.tp

    @property
    def cache_bytes(self) -> float:
        """Of one sequence, on one device."""
        shape = self.shape
        whole = kv_cache_bytes(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_tokens=self.context,
            value_bits=self.kv_bits,
        )
        return whole / min(self.tp, shape.num_kv_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingTime:
    """The predicted time of one step, and its parts."""

    seconds: float
    #: "weights" (the products), "attention", "collectives", "launches" → seconds.
    parts: Mapping[str, float]
    status: Literal["predicted"] = "predicted"


def decode_time(job: ServingJob) -> ServingTime:
    """Return the predicted time of one token of every sequence."""
    weights, kernels = _products(job, job.batch)
    bandwidth = job.efficiency.memory_share * job.device.memory_gb_per_s * 1e9
    attention = job.batch * job.cache_bytes / bandwidth
    return _time(job, weights, attention, kernels, job.batch)


def prefill_time(job: ServingJob) -> ServingTime:
    """Return the predicted time of reading `batch` prompts of `context` tokens."""
    shape, tokens = job.shape, job.batch * job.context
    weights, kernels = _products(job, tokens)
    # Products of codes leave attention in 16 bits.
    unit, _ = compute_format(job.device, job.compute if _bits(job.compute) == 16 else "bf16")
    flops = 2 * shape.num_layers * shape.num_heads * shape.head_dim * job.batch * job.context**2 / job.tp
    rate = matmul_tflops(job.device, unit) * 1e12 * job.efficiency.attention_forward_share
    return _time(job, weights, flops / rate, kernels, tokens)


def largest_batch(job: ServingJob) -> int:
    """Return how many sequences of `context` tokens fit beside the weights; 0 where the weights do not fit."""
    free = job.device.memory_bytes * MEMORY_SHARE - job.held_bytes - workspace_bytes(job.device.kind)
    return max(0, math.floor(free / job.cache_bytes))


def _products(job: ServingJob, rows: int) -> tuple[float, int]:
    """Seconds of all products without their launches, and how many kernels there are."""
    shape, tp = job.shape, job.tp
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim // tp
    kv, columns = max(1, shape.num_kv_heads * shape.head_dim // tp), max(1, shape.intermediate_size // tp)
    visited, each = 1, rows
    if shape.num_experts > 1:
        idle = (1 - shape.experts_per_token / shape.num_experts) ** rows
        visited = max(1, round(shape.num_experts * (1 - idle)))
        each = max(1, rows * shape.experts_per_token // visited)
    sizes = (
        (rows, queries + 2 * kv, hidden, 1),
        (rows, hidden, queries, 1),
        (each, (1 + shape.is_gated) * columns, hidden, visited),
        (each, hidden, columns, visited),
    )
    layer = sum(_product(job, *size, job.weight_bits) for size in sizes)
    head = _product(job, job.batch, math.ceil(shape.vocab_size / tp), hidden, 1, job.head_bits)
    return shape.num_layers * layer + head, shape.num_layers * (len(sizes) + _OTHER_KERNELS) + 1


def _product(job: ServingJob, m: int, n: int, k: int, count: int, bits: float) -> float:
    is_packed = bits < _bits(job.compute)
    time = gemm_time(
        job.device,
        job.efficiency,
        m=m,
        n=n,
        k=k,
        count=count,
        format=job.compute,
        w_bits=bits / job.packed_share if is_packed else bits,
    )
    return time.seconds - job.efficiency.launch_s


def _bits(format: str) -> int:
    return formats.FORMATS[format].bits


def _time(job: ServingJob, weights: float, attention: float, kernels: int, rows: int) -> ServingTime:
    collectives = 0.0
    if job.tp > 1:
        assert job.network is not None
        num_bytes = rows * job.shape.hidden_size * 2
        collectives = 2 * job.shape.num_layers * job.network.seconds("all_reduce", num_bytes, ranks=job.tp)
    parts = {
        "weights": weights,
        "attention": attention,
        "collectives": collectives,
        "launches": kernels * job.efficiency.launch_s,
    }
    return ServingTime(seconds=sum(parts.values()), parts=MappingProxyType(parts))
