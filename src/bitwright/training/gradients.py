"""Gradients between the backward pass and the optimizer: divided by the loss scale, checked, clipped.

    check = unscale_and_check(model.named_parameters(), scale)     g ← g / scale, in place; finite? how long?
    if check.reason is None:
        clip(model.named_parameters(), max_norm, check)            g ← g · min(1, max_norm / (norm + 1e−6))

The check sees gradients *after* the division, in fp32. torch.amp.GradScaler looks before it: a scale whose inverse is
Inf passes, and makes weights NaN. The norm is torch's `clip_grad_norm_`, bit for bit, as long as squares fit into fp32.
Where they do not (torch's norm of finite gradients of 1e20 is Inf, its factor 0, and the gradients become zeros), it is
summed in fp64. A norm that is not finite clips nothing: the step has to be skipped, and the first parameter that is
not finite is named. Norms of bf16 gradients are summed and kept in fp32.

*Fused optimizers.* GradScaler gives a fused optimizer `grad_scale` and `found_inf`, so that the kernel divides and
skips. Here every optimizer, fused or not, is called with gradients that are already divided, checked and clipped, or is
not called at all: clipping needs the norm before the kernel runs, and skipping in the kernel would leave schedulers and
counters to guess. The price is one wait for the device a step. A fused optimizer that still has `found_inf` set is in
the hands of a GradScaler, which is refused (`raise_if_scaled_elsewhere`).

Source: torch 2.13, `nn/utils/clip_grad.py` and `amp/grad_scaler.py`; pytorch/pytorch#46849.
Rejected: the max norm scaled into every sum (Blue 1978), which reads gradients twice in each step for what happens in
none of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import TrainingError

#: Where sums of squares in fp32 neither overflow nor lose what counts.
_LEAST_NORM, _LARGEST_NORM = 2.0**-50, 2.0**63
#: What torch adds to a norm before dividing by it.
_CLIP_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How ranks that hold different parts of the gradients agree: both take and return a 0-d fp64 tensor."""

    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCheck:
    """What is known of the gradients of one step, once they are unscaled."""

    #: Length of all gradients together; None where they are not finite.
    norm: float | None
    #: Why the step has to be skipped; None: it has not.
    reason: str | None
    #: First parameter whose gradient is not finite, if it is on this rank.
    parameter: str | None
    #: Parameters that have a gradient.
    num_gradients: int

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken."""
        return self.reason is None


@torch.no_grad()
def unscale_and_check(
    named_parameters: Iterable[tuple[str, Tensor]], scale: float = 1.0, *, reduction: Reduction | None = None
) -> GradientCheck:
    """Divide gradients by the loss scale, in place, and say whether all of them are finite, and how long they are.

    Args:
        named_parameters: (name, parameter); those without a gradient are passed over. Gradients are dense, of any
            shape, fp32 or bf16.
        scale: what the loss was multiplied by.
        reduction: where each rank holds a part of the gradients (FSDP): all then come to the same result.

    Raises:
        TrainingError: a gradient is sparse, or in fp16 and to be unscaled.
    """
    names, gradients = _gradients_of(named_parameters)
    inverse = _inverse(scale)
    if not math.isfinite(inverse):
        return GradientCheck(
            norm=None,
            reason=f"the loss scale {scale:g} has no inverse in fp32: gradients cannot be divided by it",
            parameter=None,
            num_gradients=len(gradients),
        )
    if inverse != 1.0:
        _raise_if_fp16(names, gradients)
        _multiply(gradients, inverse)
    norms, total = _fast_norm(gradients)
    if reduction is not None:
        total = math.sqrt(_reduced(total * total, gradients, reduction.sum))
    if _LEAST_NORM <= total <= _LARGEST_NORM:
        return GradientCheck(norm=total, reason=None, parameter=None, num_gradients=len(gradients))
    return _checked_slowly(names, gradients, norms, reduction)


@torch.no_grad()
def clip(named_parameters: Iterable[tuple[str, Tensor]], max_norm: float, check: GradientCheck) -> float:
    """Shorten gradients to `max_norm`, in place, where they are longer.

    Args:
        named_parameters: those that were checked.
        max_norm: positive; Inf clips nothing.
        check: what `unscale_and_check` said of them.

    Returns:
        The factor that gradients were multiplied by, at most 1.

    Raises:
        TrainingError: the norm is not finite, so that clipping would turn gradients into NaN or zeros; or `max_norm` is
            not positive.
    """
    if not max_norm > 0:
        raise TrainingError(f"max_grad_norm is {max_norm}; give a positive number, or None to clip nothing")
    if check.norm is None:
        raise TrainingError(f"gradients cannot be clipped: {check.reason}; skip the step")
    if math.isinf(max_norm):
        return 1.0
    factor = _clip_factor(max_norm, check.norm)
    if factor < 1.0:
        _multiply(_gradients_of(named_parameters)[1], factor)
    return min(factor, 1.0)


def raise_if_scaled_elsewhere(optimizer: Any) -> None:
    """Refuse an optimizer that a torch.amp.GradScaler works on.

    Raises:
        TrainingError: `grad_scale` or `found_inf` is set.
    """
    found = [name for name in ("grad_scale", "found_inf") if getattr(optimizer, name, None) is not None]
    if found:
        raise TrainingError(
            f"the optimizer has {' and '.join(found)} set, by a torch.amp.GradScaler; leave the scaler out: the run "
            "scales the loss and skips steps itself"
        )


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: of a DTensor its local tensor, of any other the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- norms ------------------------------------------------------------------------------------------------------------


def _fast_norm(gradients: list[Tensor]) -> tuple[list[float], float]:
    """Norm of each gradient and of all, fp32 sums as in torch; Inf where a square is too large."""
    if not gradients:
        return [], 0.0
    found: dict[int, Tensor] = {}
    for group in _alike(gradients):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        found.update(zip(map(id, group), torch._foreach_norm(group, 2, dtype=wide), strict=True))
    stacked = torch.stack([found[id(gradient)].to(gradients[0].device, torch.float32) for gradient in gradients])
    total = torch.linalg.vector_norm(stacked, 2)
    *norms, total_norm = torch.cat([stacked, total.reshape(1)]).tolist()
    return norms, total_norm


def _checked_slowly(
    names: list[str], gradients: list[Tensor], norms: list[float], reduction: Reduction | None
) -> GradientCheck:
    """Tell gradients that are not finite from those whose squares are too large or too small for fp32."""
    # a finite norm is that of finite numbers; only the others are read again
    suspects = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
    bad = next((i for i in suspects if not _is_finite(gradients[i])), None)
    is_bad = float(bad is not None)
    if reduction is not None:
        is_bad = _reduced(is_bad, gradients, reduction.max)
    if is_bad:
        where = "on another rank" if bad is None else f"of {names[bad]}"
        return GradientCheck(
            norm=None,
            reason=f"the gradient {where} is not finite",
            parameter=None if bad is None else names[bad],
            num_gradients=len(gradients),
        )
    squares = math.fsum(float(torch.linalg.vector_norm(g, 2, dtype=torch.float64)) ** 2 for g in gradients)
    if reduction is not None:
        squares = _reduced(squares, gradients, reduction.sum)
    return GradientCheck(norm=math.sqrt(squares), reason=None, parameter=None, num_gradients=len(gradients))


def _is_finite(gradient: Tensor) -> bool:
    lowest, largest = torch.aminmax(gradient)  # both are NaN where one number is
    return bool(torch.isfinite(lowest) & torch.isfinite(largest))


def _reduced(value: float, gradients: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> float:
    device = gradients[0].device if gradients else "cpu"
    return float(reduce(torch.tensor(value, dtype=torch.float64, device=device)))


def _clip_factor(max_norm: float, norm: float) -> float:
    """As torch computes it, in fp32, where the norm is one of fp32's."""
    if norm > _LARGEST_NORM:
        return max_norm / (norm + _CLIP_EPS)
    return float(max_norm / (torch.tensor(norm, dtype=torch.float32) + _CLIP_EPS))


def _inverse(scale: float) -> float:
    """1 / scale, divided in fp64 and rounded to fp32, as torch does."""
    if scale <= 0:
        return math.inf
    return float(torch.tensor(1.0 / scale, dtype=torch.float64).float())


# --- lists of gradients -----------------------------------------------------------------------------------------------


def _gradients_of(named_parameters: Iterable[tuple[str, Tensor]]) -> tuple[list[str], list[Tensor]]:
    names, gradients = [], []
    for name, parameter in named_parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.strided:
            raise TrainingError(
                f"the gradient of {name} is sparse; gradients are checked and clipped as dense tensors: build the "
                "embedding with sparse=False"
            )
        names.append(name)
        gradients.append(local_part(parameter.grad))
    return names, gradients


def _raise_if_fp16(names: list[str], gradients: list[Tensor]) -> None:
    found = next(
        (name for name, gradient in zip(names, gradients, strict=True) if gradient.dtype == torch.float16), None
    )
    if found is not None:
        raise TrainingError(
            f"the gradient of {found} is in fp16 and would lose its small numbers when divided by the loss scale; "
            "keep trainable parameters in fp32: model.float(), or load it with dtype=torch.float32"
        )


def _multiply(gradients: list[Tensor], factor: float) -> None:
    for group in _alike(gradients):
        # a tensor: a number would be rounded to bf16 first, where gradients are bf16
        torch._foreach_mul_(group, torch.tensor(factor, dtype=torch.float32, device=group[0].device))


def _alike(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Gradients by device and dtype, as torch's multi-tensor kernels want them."""

    def kind(gradient: Tensor) -> tuple[str, str]:
        return str(gradient.device), str(gradient.dtype)

    return [list(group) for _, group in groupby(sorted(gradients, key=kind), key=kind)]
