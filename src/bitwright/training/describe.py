"""What a run is, in lines: the policy and why, what was decided, what runs where, and the bytes of it.

Bytes are counted on the tensors that are there, not predicted: before the first step an optimizer has no moments yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bitwright.training.forward.forward_region import AUTOCAST_DTYPES
from bitwright.training.processes.ranks import unwrapped

if TYPE_CHECKING:
    from bitwright.training.run import TrainingRun


def describe_run(run: TrainingRun) -> tuple[str, ...]:
    """Return what runs where in a run, why, and how many bytes a parameter takes, as lines of text."""
    policy = run.policy
    rows = [
        ("policy", f"{policy.name}: {policy.description}"),
        ("reason", run.reason),
        *(("note", note) for note in run.notes),
        ("products", policy.level if policy.products is None else f"{policy.level}, the rest {policy.compute}"),
        *(("", line) for line in (run.products.say(policy.compute) if run.products is not None else ())),
        ("in fp32", _say_islands(run)),
        ("update", f"{policy.update}, moments {policy.moments}, gradients {policy.gradients}"),
        ("loss scale", "none" if run.scale is None else f"{run.scale:g}"),
        ("step", _say_step(run)),
        ("memory", _say_memory(run)),
    ]
    width = max(len(title) for title, _ in rows)
    return tuple(f"{title:<{width}}  {text}" for title, text in rows)


def _say_islands(run: TrainingRun) -> str:
    if run.policy.compute not in AUTOCAST_DTYPES:
        return "everything"
    found = Counter(island.why.partition(":")[0] for island in run.islands)
    by_name = [f"{number} × {what}" for what, number in found.items()]
    return ", ".join([f"sums, norms and losses by rule (bitwright train policies {run.policy.name})", *by_name])


def _say_step(run: TrainingRun) -> str:
    settings = run.settings
    clipping = "not clipped" if settings.max_grad_norm is None else f"clipped to a norm of {settings.max_grad_norm:g}"
    micro = "1 micro-batch" if settings.accumulate == 1 else f"{settings.accumulate} micro-batches"
    return f"{micro}, gradients {clipping}"


def _say_memory(run: TrainingRun) -> str:
    """Bytes of a trained parameter, counted."""
    trained = [p for p in unwrapped(run.model).parameters() if p.requires_grad]
    frozen = [p for p in unwrapped(run.model).parameters() if not p.requires_grad]
    count = sum(p.numel() for p in trained)
    parts = {
        "parameters": _bytes(trained),
        "gradients": sum(p.numel() * _gradient_size(p) for p in trained),
        "moments and compensation": sum(_bytes(_tensors(run.optimizer.state.get(p, {}))) for p in trained),
    }
    told = [f"{name} {size / count:.3g}" for name, size in parts.items() if size]
    total = f"{sum(parts.values()) / count:.3g} bytes for each of {count:,} trained parameters ({', '.join(told)})"
    return total if not frozen else f"{total}; {_bytes(frozen):,} bytes of frozen ones"


def _gradient_size(parameter: Tensor) -> int:
    """Bytes of a gradient's number, which may be wider than its parameter's."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return dtype.itemsize


def _tensors(state: dict[str, object]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
