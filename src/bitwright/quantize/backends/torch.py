"""Every format, mode, rule and scheme with torch operations, on any device: the backend that has no exceptions.

It is what runs where no kernel does, and what kernels are measured against. Each step is one torch operation in fp32,
in the order of `quantize/scaling.py`:

    unit  = (scale · 2^element_exponent) · tensor_scale       NaN where the group holds NaN or Inf
    code  = format(x / unit)                                  a unit of 0 divides like infinity: ±0, or the zero point
    value = code · unit                                       (code − zero_point) · unit, code · unit + minimum

Rounding itself is `torch_rounding` (nearest even) and `torch_modes` (all else).

Legend: N rows, K columns, R × G scales, g elements of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import OVERFLOWS, ROUNDINGS, Format, IntFormat
from bitwright.formats.round import MAX_RANDOM_BITS, find_mode
from bitwright.quantize.backends.torch_modes import round_fp32
from bitwright.quantize.backends.torch_rounding import has_fp32_grid, round_to_format
from bitwright.quantize.granularity import Granularity, from_groups, is_filling, to_groups
from bitwright.quantize.pack import PackedTensor, pack_codes, why_not_pack
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scaling import Scales, find_scales
from bitwright.quantize.scheme import TensorScheme

#: What tensors may be stored in; the arithmetic is fp32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rounds to integers that are clipped later, once a zero point is added: wider than any code.
_WHOLE = IntFormat(name="whole", bits=32, signed=True, source="two's complement")


def why_not_round(number: Format, dtype: torch.dtype, rounding: str, overflow: str) -> str | None:
    """Return why this backend does not round to `number`, or None if it does: every format, mode and rule."""
    if dtype not in DTYPES:
        return f"tensors are fp32, bf16 or fp16, not {dtype}"
    if rounding not in ROUNDINGS:
        return f"there is no rounding {rounding!r}"
    return None if overflow in OVERFLOWS else f"there is no overflow rule {overflow!r}"


def round_values(
    x: Tensor,
    number: Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
    out: Tensor | None = None,
) -> Tensor:
    """Round to a format; see `backends` for the contract.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.
        number: any scalar format.
        rounding: a name in `formats.ROUNDINGS`.
        overflow: a name in `formats.OVERFLOWS`.
        seed: in [0, 2^64); read by stochastic rounding only, like random_bits (1 to 32).
        out: written and returned if given: shape and dtype of `x`; may be `x`.
    """
    rounded = round_fp32(x.float(), number, rounding=rounding, overflow=overflow, seed=seed, random_bits=random_bits)
    return _finished(rounded, x, out)


def why_not_scaled(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why this backend does not quantise under `scheme`, or None if it does: every scheme."""
    return None if dtype in DTYPES else f"tensors are fp32, bf16 or fp16, not {dtype}"


def why_not_packed(scheme: TensorScheme, dtype: torch.dtype) -> str | None:
    """Return why this backend does not pack under `scheme`, or None if it does."""
    stored = [scheme.format] if scheme.scaling is None else [scheme.format, scheme.scaling.scale_format]
    reasons = (why_not_pack(formats.get(name)) for name in stored)
    return why_not_scaled(scheme, dtype) or next((reason for reason in reasons if reason), None)


def fake_quantize(
    x_NK: Tensor,
    scheme: TensorScheme,
    *,
    rounding: str = "nearest_even",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
    out: Tensor | None = None,
) -> Tensor:
    """Values of a matrix after quantising and dequantising, in its dtype; `scheme` has a scaling.

    With stochastic rounding element i of the flattened matrix draws word i.
    """
    assert scheme.scaling is not None
    if x_NK.numel() == 0:
        return x_NK.clone() if out is None else out
    granularity, (rows, columns) = scheme.scaling.granularity, x_NK.shape
    grouped = to_groups(x_NK.float(), granularity)
    scales = scales_of(grouped, x_NK, scheme)
    index = _index(x_NK, granularity, rounding)
    drawn = Drawn(rounding=rounding, seed=seed, random_bits=random_bits, index=index)
    codes = to_codes(grouped, scales, scheme, drawn)
    values = from_groups(to_values(codes, scales, scheme), rows, columns, granularity)
    return _finished(values, x_NK, out)


def quantize(
    x_NK: Tensor,
    scheme: TensorScheme,
    *,
    scales: Scales | None = None,
    rounding: str = "nearest_even",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
) -> QTensor:
    """Codes and scales of a matrix; `scheme` has a scaling. Scales are found unless they are given ([R, G, 1])."""
    assert scheme.scaling is not None
    granularity, (rows, columns) = scheme.scaling.granularity, x_NK.shape
    grouped = to_groups(x_NK.float(), granularity)
    found = scales_of(grouped, x_NK, scheme) if scales is None else scales
    index = _index(x_NK, granularity, rounding)
    drawn = Drawn(rounding=rounding, seed=seed, random_bits=random_bits, index=index)
    codes = to_codes(grouped, found, scheme, drawn)
    return QTensor(
        scheme=scheme,
        codes_NK=from_groups(codes, rows, columns, granularity),
        scales_NG=found.scale[..., 0],
        offsets_NG=None if found.offset is None else found.offset[..., 0],
        tensor_scale=found.tensor_scale,
    )


def why_not_delayed(number: Format, dtype: torch.dtype) -> str | None:
    """Return why this backend does not scale by what is known, or None if it does: every format."""
    return None if dtype in DTYPES else f"tensors are fp32, bf16 or fp16, not {dtype}"


def scale_with_amax(
    x: Tensor, number: Format, inv_scale: Tensor, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values ``format(x · inv_scale) · (1 / inv_scale)`` in the dtype of `x`, and max |x|, fp32 0-d; see `backends`."""
    wide = x.float()
    values = round_fp32(wide * inv_scale, number) * (1 / inv_scale)
    return _finished(values, x, out), wide.abs().amax() if x.numel() else wide.new_zeros(())


def pack(
    x_NK: Tensor,
    scheme: TensorScheme,
    *,
    rounding: str = "nearest_even",
    seed: int = 0,
    random_bits: int = MAX_RANDOM_BITS,
) -> PackedTensor:
    """Codes as bits and scales as stored of a matrix; `scheme` has a scaling."""
    return pack_codes(quantize(x_NK, scheme, rounding=rounding, seed=seed, random_bits=random_bits))


def unpack(packed: PackedTensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Values of a packed matrix."""
    values = packed.unpack(dtype)
    return values if out is None else out.copy_(values)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """A rounding mode, and the random bits of a stochastic one."""

    rounding: str = "nearest_even"
    seed: int = 0
    random_bits: int = MAX_RANDOM_BITS
    #: Which random word each element draws, int64, the shape of the elements.
    index: Tensor | None = None


_NEAREST_EVEN = Drawn()


def to_codes(grouped: Tensor, scales: Scales, scheme: TensorScheme, drawn: Drawn = _NEAREST_EVEN) -> Tensor:
    """Code values of groups [..., g] under stored scales [..., 1]."""
    assert scheme.scaling is not None
    number = formats.get(scheme.format)
    unit = scales.effective
    divisor = unit.masked_fill(unit == 0, torch.inf)
    match scheme.scaling.symmetry:
        case "symmetric":
            return _rounded(grouped / divisor, number, drawn)
        case "minimum":
            assert scales.offset is not None
            return _rounded((grouped - scales.offset) / divisor, number, drawn)
        case "zero_point":
            assert scales.offset is not None
            if drawn.rounding == "nearest_even":
                whole = (grouped / divisor).round_()
            else:
                whole = _rounded(grouped / divisor, _WHOLE, drawn)
            return round_to_format(whole.add_(scales.offset), number)


def to_values(codes: Tensor, scales: Scales, scheme: TensorScheme) -> Tensor:
    """Values of codes, group by group; the same formula as `QTensor.dequantize`."""
    assert scheme.scaling is not None
    if scheme.scaling.symmetry == "symmetric":
        return codes * scales.effective
    assert scales.offset is not None
    if scheme.scaling.symmetry == "zero_point":
        return (codes - scales.offset) * scales.effective
    return codes * scales.effective + scales.offset


def _rounded(x: Tensor, number: Format, drawn: Drawn) -> Tensor:
    if drawn.rounding == "nearest_even" and has_fp32_grid(number):
        return round_to_format(x, number)
    return round_fp32(
        x, number, rounding=drawn.rounding, seed=drawn.seed, random_bits=drawn.random_bits, index=drawn.index
    )


def scales_of(grouped: Tensor, x_NK: Tensor, scheme: TensorScheme) -> Scales:
    """Scales found from the groups; scale and offset are NaN where a group is not finite."""
    assert scheme.scaling is not None
    filling = is_filling(x_NK, scheme.scaling.granularity) if scheme.scaling.rule in ("percentile", "mse") else None
    if grouped.shape[-1] == 0:
        grouped = grouped.new_zeros(*grouped.shape[:-1], 1)  # one scale per tensor, of a tensor without elements
    found = find_scales(grouped, scheme.format, scheme.scaling, filling=filling)
    spoiled = ~torch.isfinite(found.scale)
    # + 0.0: which of two zeros is the least is a matter of order
    offset = None if found.offset is None else (found.offset + 0.0).masked_fill(spoiled, torch.nan)
    return Scales(
        scale=found.scale.masked_fill(spoiled, torch.nan),
        offset=offset,
        tensor_scale=found.tensor_scale,
    )


def _index(x_NK: Tensor, granularity: Granularity, rounding: str) -> Tensor | None:
    """The position in the flattened matrix of each element of the groups; None where no random bits are drawn."""
    if not find_mode(rounding).needs_seed:
        return None
    return to_groups(torch.arange(x_NK.numel(), device=x_NK.device).reshape(x_NK.shape), granularity)


def _finished(values: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """Values in the dtype of `x`, in `out` if it is given."""
    return values.to(x.dtype) if out is None else out.copy_(values)
