"""Many processes under torchrun: starting them, spreading a model over them, and when its gradients are exchanged.

    ranks = start("auto")                        # reads what torchrun sets; alone without it
    model = spread(model, "fsdp2", ranks)        # before the optimizer is made
    run = prepare(model, optimizer, …)           # asks `Ranks` what all must agree on

    ddp     every rank holds the whole model; gradients are averaged while the backward pass runs
    fsdp2   every rank holds a piece of each parameter, gradient and moment; a layer is put together when it runs

With either, `batch` sequences on each of n ranks give the gradient of one process with n · batch, up to the order of an
fp32 sum: both average over ranks. Parameters travel in their own dtype (fp32 masters), so what autocast rounds is what
it rounds in one process; gradients travel in the dtype of the parameters.

Micro-batches before the last exchange nothing (`exchange_gradients`). Of FSDP2 a layer is every element of a module
list that stands outermost; what is in none belongs to the root.

Rejected: FSDP2's MixedPrecisionPolicy. It rounds whole layers, norms included, before they run, which is not what
autocast does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bitwright.catalog import nearest_name_hint
from bitwright.comms.rendezvous import missing_variables
from bitwright.errors import TrainingError, UnknownName
from bitwright.training.optimizer.remainder import hand_on, waiting_remainders
from bitwright.training.processes.ranks import Ranks
from bitwright.training.processes.replicated import Replicated

#: Ways to spread a model.
PARALLEL = ("ddp", "fsdp2")


def start(device: str = "auto") -> tuple[Ranks, torch.device]:
    """Join the processes that torchrun started, and choose this one's device.

    Args:
        device: "cpu", "cuda", or "auto": a GPU where there is one.

    Raises:
        TrainingError: a GPU is asked for and not there, or torchrun's variables are incomplete.
    """
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise TrainingError('device is \'cuda\', and torch sees no GPU here; use device = "cpu" or "auto"')
    use_gpu = has_gpu and device != "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        missing = missing_variables()
        if missing:
            raise TrainingError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start the processes "
                "with torchrun --nproc-per-node N"
            )
        if use_gpu:
            torch.cuda.set_device(chosen)
        dist.init_process_group("nccl" if use_gpu else "gloo")
    return Ranks.of_process_group(), chosen


def stop() -> None:
    """Leave the process group, where there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined(device: str = "auto") -> Iterator[tuple[Ranks, torch.device]]:
    """`start`, and at the end `stop`, unless the processes had been joined before.

    Raises:
        TrainingError: as `start`; or another process has left in the middle of an exchange.
    """
    was_joined = dist.is_available() and dist.is_initialized()
    try:
        yield start(device)
    except RuntimeError as error:
        if not _is_of_the_backend(error):
            raise
        raise TrainingError(
            f"another process of this run has ended, or cannot be reached ({str(error).splitlines()[0][:160]}); see "
            "what it said, and start all of them again"
        ) from error
    finally:
        if not was_joined:
            stop()


def _is_of_the_backend(error: RuntimeError) -> bool:
    """Whether an exchange failed; Gloo has no error of its own."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def spread(model: nn.Module, parallel: str, ranks: Ranks) -> nn.Module:
    """Return the model as it is trained on many ranks; itself where this process is alone.

    Args:
        model: on its device, the same on every rank.
        parallel: a name in PARALLEL.
        ranks: all that share it.

    Raises:
        UnknownName: there is no such way.
    """
    if parallel not in PARALLEL:
        raise UnknownName(
            f"unknown way to spread a model {parallel!r}{nearest_name_hint(parallel, list(PARALLEL))} Known: "
            f"{', '.join(PARALLEL)}"
        )
    if ranks.world_size == 1:
        return model
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    is_narrow = any(dtype.itemsize < 4 for dtype in trained)
    if parallel == "ddp":
        return Replicated(model) if is_narrow else DistributedDataParallel(model)
    _shard(model, ranks, is_narrow=is_narrow)
    return model


def _shard(model: nn.Module, ranks: Ranks, *, is_narrow: bool) -> None:
    """Cut a model into pieces, layer by layer; gradients of narrow parameters are added up in fp32."""
    device = next(model.parameters()).device
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (ranks.world_size,))}
    if is_narrow:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    remainders = waiting_remainders(model.named_parameters())
    for layer in (*_outermost_layers(model), model):
        for module in _of_other_dtype(layer):  # a piece is of one dtype: norms beside bf16 weights are their own
            fully_shard(module, **options)
        fully_shard(layer, **options)
    hand_on(remainders, model.named_parameters())


def _of_other_dtype(layer: nn.Module) -> list[nn.Module]:
    """Modules whose own trained parameters have another dtype than most of a layer's."""
    own = {
        module: {p.dtype for p in module.parameters(recurse=False) if p.requires_grad}
        for module in layer.modules()
        if module is layer or not isinstance(module, FSDPModule)
    }
    counts = Counter(dtype for dtypes in own.values() for dtype in dtypes)
    usual = max(counts, key=lambda dtype: counts[dtype], default=None)
    return [module for module, dtypes in own.items() if dtypes and dtypes != {usual} and module is not layer]


def exchange_gradients(model: nn.Module, on: bool) -> None:
    """Say, before a micro-batch runs forward, whether its backward pass exchanges gradients."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif isinstance(model, Replicated):
        model.exchanges = on
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _outermost_layers(child)
