"""What collectives hide behind, and what they cost all the same.

Two things at once are not `max(compute, collective)`: kernels of collectives take processors and memory bandwidth, so
products run γ times slower meanwhile. While a collective of M seconds runs, M/γ seconds of work get done:

    both(C, M) = max(M, C + M·(1 - 1/γ))

γ is 1.3 to 1.4 on an H100 (pytorch/pytorch issue 179937), 1.76 for products on an A100 (NVIDIA/nccl issue 1428). An
8192³ product of 1.6 ms beside a 64 MiB all-gather of 1.35 ms took 2.02 ms (pytorch/pytorch 172714): γ = 1.4 gives 1.99.

FSDP prefetches one layer ahead. All-gathers and reduce-scatters use one communicator and so queue behind each other:

    forward     AG₀ + Σ both(Cᵢ, AGᵢ₊₁)        backward    Σ both(2Cᵢ, AGᵢ₋₁ + RSᵢ₊₁) + RS₀

DDP reduces buckets as the backward pass fills them, last layer first; bucket j starts at max(ready_j, end_{j-1}), and
what ends after the backward pass is exposed: at least the last bucket. Only the last micro-batch's backward pass hides
anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: How much slower products run beside a collective.
CONTENTION = 1.4


def both_s(compute_s: float, collective_s: float, contention: float = CONTENTION) -> float:
    """Return the seconds of work and a collective that run side by side."""
    return max(collective_s, compute_s + collective_s * (1 - 1 / contention))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A bucket of gradients: when it is full, when its collective runs; seconds from the backward pass's start."""

    ready_s: float
    start_s: float
    end_s: float


def ddp_buckets(
    backward_s: float,
    num_bytes: float,
    bucket_bytes: float,
    collective_s: Callable[[float], float],
    contention: float = CONTENTION,
) -> tuple[Bucket, ...]:
    """Return the buckets of a backward pass whose gradients come evenly.

    Args:
        backward_s: of the pass, alone.
        num_bytes, bucket_bytes: of all gradients, and of one bucket.
        collective_s: bytes → seconds of their collective.
        contention: how much slower products run beside a collective.
    """
    if num_bytes <= 0:
        return ()
    count = max(1, round(num_bytes / bucket_bytes))
    each = collective_s(num_bytes / count)
    stretched = both_s(backward_s, min(count * each, backward_s), contention)
    found: list[Bucket] = []
    end = 0.0
    for index in range(count):
        ready = stretched * (index + 1) / count
        start = max(ready, end)
        end = start + each
        found.append(Bucket(ready_s=ready, start_s=start, end_s=end))
    return tuple(found)


def ddp_exposed_s(
    backward_s: float,
    num_bytes: float,
    bucket_bytes: float,
    collective_s: Callable[[float], float],
    contention: float = CONTENTION,
) -> float:
    """Return the seconds that reducing gradients adds to a backward pass."""
    buckets = ddp_buckets(backward_s, num_bytes, bucket_bytes, collective_s, contention)
    return buckets[-1].end_s - backward_s if buckets else 0.0


def fsdp_exposed_s(
    forward_s: float,
    backward_s: float,
    gather_s: float,
    scatter_s: float,
    num_layers: int,
    contention: float = CONTENTION,
) -> float:
    """Return the seconds that gathering and scattering add to one forward and backward pass.

    Args:
        forward_s, backward_s: of one layer, alone.
        gather_s, scatter_s: of one layer's parameters and gradients.
        num_layers: of the model, all alike.
        contention: as in `both_s`.
    """
    rest = num_layers - 1
    forward = gather_s + rest * both_s(forward_s, gather_s, contention) + forward_s
    backward = rest * both_s(backward_s, gather_s + scatter_s, contention) + backward_s + scatter_s
    return forward + backward - num_layers * (forward_s + backward_s)
