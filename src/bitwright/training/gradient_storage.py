"""Gradients of bf16 parameters, added up in fp32: over micro-batches, and over the rows of an embedding.

A parameter's gradient is stored in the parameter's dtype unless told otherwise. In bf16 that loses whatever is small
against what is already there: of 256 equal gradients that are added one by one, the sum stops growing at 256 times the
first at best, and long before that for unequal ones. Two places add:

    micro-batches    autograd adds to `.grad`. `Tensor.grad_dtype = float32` makes `.grad` fp32: what comes in is
                     widened, then added. 4 bytes a parameter in place of 2.
    embeddings       the backward pass adds the gradients of all tokens that are the same word; "the" occurs thousands
                     of times in a batch. Torch's CPU kernel adds in the dtype of the gradient. Here it adds in fp32.

Matrix products add in fp32 themselves, whatever they are given. A parameter that is used twice (an embedding that is
the output head too) has its gradients added by autograd in `grad_dtype`. Of parameters that lie in pieces on many ranks
(FSDP2) torch adds micro-batches and ranks in fp32 where it is told to (`distributed.py`), and keeps the piece of the
sum in the parameter's dtype, rounded once.

Source: torch 2.13, `Tensor.grad_dtype`; FlagGems#309 and #4295 (embedding), Megatron-LM's
`accumulate_allreduce_grads_in_fp32`.
Rejected: hooks that move each gradient to a buffer of its own; the buffer is then not `.grad`, and clipping, checks and
users that look at `.grad` see nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Parameters narrower than fp32.
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Fp32Gradients:
    """What `keep_gradients_fp32` changed; `remove` takes it back."""

    #: Names of parameters whose gradients are fp32 though they are not.
    parameters: tuple[str, ...]
    #: Names of embeddings whose rows are added in fp32.
    embeddings: tuple[str, ...]
    #: Embeddings that were left alone, with the reason.
    left_alone: tuple[tuple[str, str], ...]
    _model: nn.Module

    def remove(self) -> None:
        """Gradients are in their parameters' dtype again; those that are there are dropped."""
        for name in self.parameters:
            parameter = self._model.get_parameter(name)
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
        for name in self.embeddings:
            self._model.get_submodule(name).__dict__.pop("forward", None)


def keep_gradients_fp32(model: nn.Module) -> Fp32Gradients:
    """Let gradients of narrow trainable parameters be fp32, wherever they are added up.

    Args:
        model: its parameters may be mixed; fp32 ones stay as they are. Nothing is copied, no value changes.
    """
    parameters = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in _NARROW and not hasattr(parameter, "to_local"):
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameters.append(name)
    embeddings, left_alone = [], []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not _is_trained_narrow(module):
            continue
        reason = _why_not_widened(module)
        if reason is None:
            module.__dict__["forward"] = MethodType(_look_up, module)
            embeddings.append(name)
        else:
            left_alone.append((name, reason))
    return Fp32Gradients(tuple(parameters), tuple(embeddings), tuple(left_alone), model)


def _is_trained_narrow(module: nn.Embedding) -> bool:
    return module.weight.requires_grad and module.weight.dtype in _NARROW


def _why_not_widened(module: nn.Embedding) -> str | None:
    if module.sparse:
        return "its gradient is sparse"
    if module.max_norm is not None:
        return "it rescales its rows when they are read (max_norm)"
    if "forward" in module.__dict__ or type(module).forward is not nn.Embedding.forward:
        return "its forward is not torch's"
    return None


def _look_up(module: nn.Embedding, input: Tensor) -> Tensor:
    return _Embedding.apply(module.weight, input, module.padding_idx, module.scale_grad_by_freq)


class _Embedding(torch.autograd.Function):
    """Rows of a table; gradients of equal rows are added in fp32 and stay so."""

    @staticmethod
    def forward(
        context: Any, weight: Tensor, indices: Tensor, padding_index: int | None, scales_by_frequency: bool
    ) -> Tensor:
        context.save_for_backward(indices)
        context.num_rows = weight.shape[0]
        context.padding_index = -1 if padding_index is None else padding_index
        context.scales_by_frequency = scales_by_frequency
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = context.saved_tensors
        total = torch.ops.aten.embedding_dense_backward(
            gradients[0].float(), indices, context.num_rows, context.padding_index, context.scales_by_frequency
        )
        return total, None, None, None
