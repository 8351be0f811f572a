"""A model of which every rank holds the whole, and whose gradients are averaged in the format that they are kept in.

torch's DistributedDataParallel exchanges gradients in the dtype of their parameters. Gradients of bf16 parameters are
kept in fp32 here (`gradient_storage.py`), and would be rounded to bf16 on their way. So models with narrow parameters
are wrapped in this instead: when a backward pass has ended, all gradients are laid end to end, added up over the ranks
and divided by their number, in fp32. A parameter without a gradient on this rank (an expert that no token reached)
counts as zeros, so that ranks never wait for each other.

The exchange begins when the backward pass is over, not while it runs: DDP hides most of it, this does not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: Elements that are sent at once: 128 MiB of fp32.
_BUCKET_ELEMENTS = 2**25


class Replicated(nn.Module):
    """Averages a model's gradients over the ranks at the end of each backward pass.

    Args:
        module: the same on every rank; parameters and buffers of the first one are sent to all.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        #: Whether the next backward pass exchanges gradients.
        self.exchanges = True
        self._is_due = False
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._note)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As the model's own."""
        return self.module(*arguments, **keywords)

    def _note(self, parameter: Tensor) -> None:
        """Let the exchange follow the backward pass that is running."""
        if self.exchanges and not self._is_due:
            self._is_due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._exchange)

    def _exchange(self) -> None:
        self._is_due = False
        bucket: list[Tensor] = []
        num_elements = 0
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            bucket.append(parameter.grad)
            num_elements += parameter.numel()
            if num_elements >= _BUCKET_ELEMENTS:
                _average(bucket)
                bucket, num_elements = [], 0
        _average(bucket)


def _average(gradients: list[Tensor]) -> None:
    """Replace each by its mean over the ranks; the sum is fp32."""
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
