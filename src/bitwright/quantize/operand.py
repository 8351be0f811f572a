"""A matrix as products of codes see it: numbers that are multiplied, and scales that wait for the sum.

    value = number · scale

A scale that all of a row share (one a tensor, one a row) leaves the sum: numbers are the codes, and the scale waits for
the product. Scales of groups cannot, and are multiplied into the codes: exactly, in bf16, where the significands of a
code and a scale have 8 bits together (all codes of 8 bits under powers of two; E2M1 under E4M3 scales); else in fp32,
rounded there. The tensor scale of two levels leaves the sum in any case.

Processors take bf16 numbers below 2^−126 for zeros. Where all scales of a matrix are so small that its numbers could be
among those, the power of two of the largest scale stays outside.

So a product in bf16 with fp32 sums, times both scales, is the product that matrix units make of codes, up to the order
of the sum. Codes of 8 bits and fewer are numbers of bf16.

Legend: N rows, K columns, which the product sums over; R × G scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats import FloatFormat, Format, IntFormat
from bitwright.quantize.granularity import spread
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.quantize import quantize
from bitwright.quantize.scaling import exact_power_of_two, floor_log2
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.select import select_delayed, select_scaled

#: Bits of a significand, the hidden one too.
_BF16_BITS, _FP32_BITS = 8, 24
#: Scales below it are lifted: the smallest code of 8 bits, E5M2's, is 2^−16.
SMALL_SCALE = 2.0**-110
#: Rules that give powers of two.
_POWERS = ("ocp_floor", "round_up", "power_of_two")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operand:
    """One side of a product."""

    #: [N, K]: bf16, or fp32 where bf16 does not hold them.
    numbers: Tensor
    #: fp32, 0-d or [N, 1]: what multiplies the numbers.
    scale: Tensor

    @property
    def transposed(self) -> Operand:
        """The transposed matrix; its scale is one for all."""
        assert self.scale.dim() == 0
        return Operand(numbers=self.numbers.t(), scale=self.scale)

    def values(self) -> Tensor:
        """What they stand for, fp32 [N, K]."""
        return self.numbers.float() * self.scale


def quantize_operand(
    x_NK: Tensor, scheme: TensorScheme, *, rounding: str = "nearest_even", seed: int | None = None
) -> Operand:
    """Round a matrix to codes, for a product over its columns.

    Args:
        x_NK: fp32, bf16 or fp16 [N, K].
        scheme: with a symmetric scaling.
        rounding, seed: as in `quantize`, whose codes these are.

    Raises:
        SchemeError: as `quantize`, or the scheme has offsets or no scaling.
        UnknownName: no such rounding.
    """
    if scheme.scaling is None or scheme.scaling.symmetry != "symmetric":
        raise SchemeError(f"an operand of {scheme}; products of codes need scales and no offsets: choose such a scheme")
    write = getattr(select_scaled(scheme, x_NK.device.type, x_NK.dtype).module, "operand", None)
    if write is None or x_NK.numel() == 0:
        return operand_of(quantize(x_NK, scheme, rounding=rounding, seed=seed))
    found: Operand = write(x_NK, scheme, rounding=rounding, seed=seed)
    return found


def scale_operand(x_NK: Tensor, format_name: str, inv_scale: Tensor) -> tuple[Operand, Tensor]:
    """Round a matrix to codes under one scale that is known, and find its largest magnitude on the way.

    Args:
        x_NK: fp32, bf16 or fp16 [N, K].
        format_name: of the codes, at most 8 bits.
        inv_scale: fp32 0-d: code = x · inv_scale, saturating, as in `DelayedScaling`.

    Returns:
        The operand, whose scale is 1 / inv_scale; and max |x|, fp32 0-d: NaN if there is one, 0 of nothing.
    """
    number = formats.FORMATS[format_name]
    backend = select_delayed(format_name, x_NK.device.type, x_NK.dtype).module
    write = getattr(backend, "codes_with_amax", None)
    if write is not None and x_NK.numel():
        codes, amax = write(x_NK, number, inv_scale)
    else:
        one = torch.ones((), device=x_NK.device)
        codes, amax = backend.scale_with_amax(x_NK.float() * inv_scale, number, one)
        codes, amax = codes.to(operand_dtype(number)), x_NK.abs().amax().float() if x_NK.numel() else amax
    return Operand(numbers=codes, scale=1 / inv_scale), amax


def operand_of(q: QTensor) -> Operand:
    """The operand that a quantised matrix is."""
    scaling, number = q.scheme.scaling, formats.FORMATS[q.scheme.format]
    assert scaling is not None and q.scales_NG is not None
    codes = q.codes_NK.to(operand_dtype(number))
    if scaling.granularity.scope in ("tensor", "row"):
        scale = q.scales_NG if q.tensor_scale is None else q.scales_NG * q.tensor_scale
        if scaling.granularity.scope == "tensor":
            return Operand(numbers=codes, scale=scale[0, 0])
        return Operand(numbers=codes, scale=scale if scale.numel() else scale.new_ones(codes.shape[0], 1))
    rows, columns = codes.shape
    if not folds_in_bf16(q.scheme) or q.tensor_scale is not None:
        scales = q.scales_NG.to(torch.bfloat16 if folds_in_bf16(q.scheme) else torch.float32)
        one = torch.ones((), device=codes.device)
        outside = one if q.tensor_scale is None else q.tensor_scale
    else:
        lifted = _lift(q.scales_NG)
        scales, outside = (q.scales_NG * lifted).to(torch.bfloat16), 1 / lifted
    return Operand(numbers=codes * spread(scales, rows, columns, scaling.granularity), scale=outside)


def _lift(scales_NG: Tensor) -> Tensor:
    """A power of two, 0-d, that takes numbers under these scales out of bf16's subnormals; 1 unless all are small."""
    one = torch.ones((), device=scales_NG.device)
    if scales_NG.numel() == 0:
        return one
    largest = scales_NG.amax()
    is_small = (largest > 0) & (largest < SMALL_SCALE)
    return torch.where(is_small, exact_power_of_two(-floor_log2(torch.where(is_small, largest, one))), one)


@cache
def folds_in_bf16(scheme: TensorScheme) -> bool:
    """Whether bf16 holds every code of a scheme times its stored scale (of a usual exponent)."""
    scaling = scheme.scaling
    assert scaling is not None
    gives_powers = scaling.rule in _POWERS and not scaling.tensor_scale
    scale_bits = 1 if gives_powers else _significand(formats.FORMATS[scaling.scale_format])
    code_bits = _significand(formats.FORMATS[scheme.format])
    return code_bits + (scale_bits if scale_bits > 1 else 0) <= _BF16_BITS


def _significand(number: Format) -> int:
    """Bits that hold every significand, the hidden one too."""
    match number:
        case FloatFormat():
            return number.fraction_bits + 1
        case IntFormat():
            return number.bits
        case _:
            return _FP32_BITS


def operand_dtype(number: Format) -> torch.dtype:
    """What codes are multiplied in: bf16 where it holds them, else fp32."""
    return torch.bfloat16 if _significand(number) <= _BF16_BITS else torch.float32
