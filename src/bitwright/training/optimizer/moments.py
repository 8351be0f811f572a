"""An optimizer's moments between two steps: in fp32, in bf16, or in fp16 under a scale per state.

They are widened to fp32 when a step begins and narrowed when it ends; the optimizer never sees anything else.

    bf16    has fp32's range but 8 significant bits: with β₂ = 0.999 a second moment would lose a thousandth of itself
            each step, and rounded to nearest never does. Rounded stochastically it decays on average.
    fp16    11 significant bits, but 40 binary orders of magnitude: g = 1e−4 has g² = 1e−8, which fp16 has only as
            a subnormal, and 1e−5 squared is 0. No one scale serves g and g². So every state of every parameter has its
            own power of two, found at each step, that puts its largest magnitude between 2¹⁴ and 2¹⁵.

A second moment that becomes zero under a first moment that does not divides by eps alone: the weight jumps. Where a
state has no negative number, what is positive is therefore never stored as less than the smallest positive code.

Legend: a *run* is the part of a parameter that one piece covers (`stand_ins.py`); each has its own scale.

Source: warner-benjamin/optimi#15 (per-state scales); Dettmers et al., 8-bit Optimizers, arXiv:2110.02861 (why it is
the second moment that must not vanish). Rejected: the square root of the second moment, which halves the range it
needs but is biased once it is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import TensorScheme

#: Formats that moments can be kept in, and how torch stores them.
MOMENT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
#: A scaled state's largest magnitude lies below 2 to this power, half of fp16's range: rounding cannot overflow.
_TOP_EXPONENT = 15
#: A scale's exponent stays where the scale and its inverse are both fp32 numbers of full precision.
_LEAST_EXPONENT = -126
_SMALLEST_FP16 = 2.0**-24


def find_scales(runs: list[Tensor]) -> Tensor:
    """Powers of two, fp32 [runs], under which each run's amax is below 2^15; 1 where it is 0 or not finite."""
    return _scales(*_extremes(runs))


def _extremes(runs: list[Tensor]) -> tuple[Tensor, Tensor]:
    lowest, largest = zip(*(torch.aminmax(run) for run in runs), strict=True)
    return torch.stack(lowest), torch.stack(largest)


def _scales(lowest: Tensor, largest: Tensor) -> Tensor:
    amax = torch.maximum(-lowest, largest)
    exponent = torch.frexp(amax).exponent - _TOP_EXPONENT
    scales = torch.ldexp(torch.ones_like(amax), exponent.clamp(min=_LEAST_EXPONENT))
    return torch.where((amax > 0) & torch.isfinite(amax), scales, 1.0)


def round_runs(flat: Tensor, runs: list[Tensor], format: str, rounding: str, seed: int) -> Tensor | None:
    """Round the fp32 values of several runs to a format, in place: to numbers that the format's dtype holds exactly.

    Args:
        flat: fp32 [n]; the runs one behind the other.
        runs: views of it.
        format: a name in `MOMENT_DTYPES`.
        rounding, seed: as `quantize` takes them.

    Returns:
        The scales, fp32 [runs], by which what is now in `flat` has to be multiplied; None for formats that need none.
    """
    scales = None
    if format == "fp16":
        lowest, largest = _extremes(runs)
        scales = _scales(lowest, largest)
        for run, scale, low in zip(runs, scales.unbind(), lowest.unbind(), strict=True):
            run.mul_(1 / scale)
            run.masked_fill_((run > 0) & (run < _SMALLEST_FP16) & (low >= 0), _SMALLEST_FP16)
    if format != "fp32":
        round_values(flat, format, rounding, seed)
    return scales


def round_values(flat: Tensor, format: str, rounding: str, seed: int) -> None:
    """Round fp32 numbers to a format, in place, still as fp32: element i draws word i of the seed."""
    fake_quantize(flat, TensorScheme(format=format), rounding=rounding, seed=seed, out=flat)
