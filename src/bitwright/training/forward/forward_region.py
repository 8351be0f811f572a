"""The region that a forward pass runs in: autocast, islands, and how products of fp32 are computed.

    fp32          nothing is cast; GPUs are told to multiply fp32 as fp32 (convolutions would take tf32 by default)
    tf32          nothing is cast; GPUs may read 10 fraction bits, and where they cannot, operands are rounded to them
    fp16, bf16    torch.autocast in that dtype, and the islands that it leaves out

Autocast covers the forward pass only: a backward pass computes in the dtypes that the forward pass has chosen, and
under autocast would cast its own sums. How fp32 is multiplied holds for both. So do islands, which act where autocast
is on: activation checkpointing computes a forward pass again in the middle of a backward pass, under autocast.

Autocast casts an fp32 weight once in a forward pass. Where it is used a thousand times, its gradients of all uses are
added up at that copy, in 16 bits: a sum of equal ones stops at 256 in bf16, at 2048 in fp16. Cast for each use anew
(`casts_once=False`), they are widened first. The losses are the same bits, and so are gradients of what is used once;
memory is not, since the backward pass keeps every copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from bitwright.training.forward.islands import Islands
from bitwright.training.forward.operations import MATRIX_UNITS
from bitwright.training.forward.rounded_products import rounded_products

#: Formats that autocast casts to.
AUTOCAST_DTYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Formats that are fp32 in memory → what torch calls the products.
_FP32_PRODUCTS: Mapping[str, str] = {"fp32": "ieee", "tf32": "tf32"}


def forward_region(
    compute: str, device_type: str, *, emulates: bool = False, casts_once: bool = True
) -> AbstractContextManager[object]:
    """A forward pass under a policy's compute format; for whoever has no backward pass, such as an evaluation.

    Args:
        compute: "fp32", "tf32", "fp16" or "bf16".
        device_type: kind of device that the model is on, as torch calls it.
        emulates: round operands of products to `compute`, which the device does not (`TrainingRun.emulates`).
        casts_once: cast a weight once, however often it is used.
    """
    stack = ExitStack()
    stack.enter_context(step_region(compute, device_type, emulates=emulates))
    stack.enter_context(autocast_region(compute, device_type, casts_once=casts_once))
    return stack


def autocast_region(compute: str, device_type: str, *, casts_once: bool = True) -> AbstractContextManager[object]:
    """Autocast in a policy's compute format; nothing under formats that are fp32 in memory."""
    dtype = AUTOCAST_DTYPES.get(compute)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype, cache_enabled=casts_once)


@contextmanager
def step_region(compute: str, device_type: str, *, emulates: bool = False) -> Iterator[None]:
    """What surrounds forward and backward passes alike: islands, and how fp32 is multiplied."""
    with ExitStack() as stack:
        precision = _FP32_PRODUCTS.get(compute)
        if precision is not None and device_type in MATRIX_UNITS:
            stack.enter_context(_set_products(precision))
        if emulates:
            stack.enter_context(rounded_products(compute))
        if compute in AUTOCAST_DTYPES:
            stack.enter_context(Islands(compute, device_type))
        yield


@contextmanager
def _set_products(precision: str) -> Iterator[None]:
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for backend in backends:
            stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
            backend.fp32_precision = precision
        yield
