"""The processes that train one model together, as far as training has to ask them something.

    Ranks()                    this process is alone: every question is answered by itself, nothing is sent
    Ranks.of_process_group()   the default process group of torch.distributed, where there is one

What ranks must agree on, or they drift apart without a word: whether a step is skipped (one rank's Inf is everybody's),
the norm that gradients are clipped by, the amax that scales come from. Everything else follows from equal inputs.

Sums are taken in fp64 and added up in the order of the ranks, so that all of them get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.training.processes.replicated import Replicated


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A group of processes and this one's place in it."""

    rank: int = 0
    world_size: int = 1

    @staticmethod
    def of_process_group() -> Ranks:
        """Return the default process group's, or this process alone where none was started."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def any(self, flag: bool, device: torch.device | str = "cpu") -> bool:
        """Whether the flag is set on some rank."""
        if self.world_size == 1:
            return flag
        found = torch.tensor(float(flag), device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks, NaN where some rank has one."""
        if self.world_size == 1:
            return values
        # A maximum over ranks may lose a NaN; Inf and NaN are told apart by a second number.
        is_nan = values.isnan()
        both = torch.stack([values.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), is_nan.to(values.dtype)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return torch.where(both[1] > 0, torch.nan, both[0])

    def sum_of(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks, fp64, the same bits on each."""
        if self.world_size == 1:
            return values.double()
        parts = [torch.zeros_like(values, dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(parts, values.double().contiguous())
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def gather(self, fact: Any) -> list[Any]:
        """Return what each rank hands over, in their order; anything that can be pickled."""
        if self.world_size == 1:
            return [fact]
        facts: list[Any] = [None] * self.world_size
        dist.all_gather_object(facts, fact)
        return facts

    def wait(self) -> None:
        """Go on when all ranks have come here."""
        if self.world_size > 1:
            dist.barrier()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside what averages its gradients, so that names are those of one process."""
    return model.module if isinstance(model, DistributedDataParallel | Replicated) else model
