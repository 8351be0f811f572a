"""Codes as bits: what a quantised matrix looks like in memory and in a file.

Code j of a row takes the bits [j · b, (j + 1) · b) of the row's bytes, bit 0 being the least significant bit of byte 0:

    4 bits    two codes a byte, the even column in the low nibble
    6 bits    four codes in three bytes
    8 bits    the code itself
    16 bits   the code itself, low byte first

Each row starts on a byte, so that rows can be cut off; the bits that are left over are 0. Codes are those of
`formats.encode`: sign, exponent and fraction of floats, two's complement of integers, places in the list of codebooks.

Scales and minima are tensors of the torch dtype of their format (float32, float16, bfloat16, float8_e4m3fn,
float8_e8m0fnu …); where torch has none, and for zero points, the bitstream of all of them, row after row, as one row of
bytes. A group with NaN or Inf has the scale NaN and codes 0.

Eight codes fill b whole bytes, whatever b is: byte i collects the codes that overlap it, each shifted into place.
Rejected: one path for nibbles and another for the rest (two formats to keep equal); rows that share a byte (a row could
no longer be cut off); engine layouts with interleaved nibbles (those belong to exporters).

Legend: N rows, K columns, B bytes of a row, R × G scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats import FloatFormat, Format
from bitwright.formats.decode import value_table
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme

#: Wider codes are not packed, save for floats that torch has.
MAX_CODE_BITS = 16
#: Codes that fill whole bytes together.
_GROUP = 8
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedTensor:
    """A matrix as it is stored: codes as bits, scales in their own format."""

    scheme: TensorScheme
    #: [N, K] of the matrix.
    shape: tuple[int, int]
    #: The bitstream of each row: uint8 [N, ceil(K · b / 8)].
    codes: Tensor
    #: Stored scales [R, G] in the torch dtype of their format, or their bitstream, uint8 [bytes]; None without scaling.
    scales: Tensor | None = None
    #: Zero points, a bitstream uint8 [bytes], or minima, stored like scales; None where symmetric.
    offsets: Tensor | None = None
    #: Second-level scale, fp32 0-d; None unless the scheme has one.
    tensor_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all parts: `TensorScheme.stored_bytes`, and what rows that end within a byte leave unused."""
        parts = (self.codes, self.scales, self.offsets, self.tensor_scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [N, K]: fp32 arithmetic, narrowed to `dtype` at the end."""
        return unpack_codes(self).dequantize(dtype)


def pack_codes(q: QTensor) -> PackedTensor:
    """Store codes, scales and offsets as bits, on the device that they are on.

    Raises:
        SchemeError: NaN in a format, or a group that is not finite under a scale format, without NaN; codes of more
            than 16 bits that are no floats of torch.
    """
    number = formats.get(q.scheme.format)
    rows, columns = q.codes_NK.shape
    scaling = q.scheme.scaling
    if scaling is None:
        _raise_if_nan_is_lost(q.codes_NK, number, "values")
        return PackedTensor(scheme=q.scheme, shape=(rows, columns), codes=_to_bytes(q.codes_NK, number))
    assert q.scales_NG is not None
    scale_number = formats.get(scaling.scale_format)
    _raise_if_nan_is_lost(q.scales_NG, scale_number, "scales of groups")
    offsets = None
    if q.offsets_NG is not None:
        is_integer = scaling.symmetry == "zero_point"
        offsets = (
            store_numbers(q.offsets_NG, number, as_bits=True)
            if is_integer
            else store_numbers(q.offsets_NG, scale_number)
        )
    return PackedTensor(
        scheme=q.scheme,
        shape=(rows, columns),
        codes=_to_bytes(
            torch.where(q.codes_NK.isnan(), _value_table(number, q.codes_NK.device)[0], q.codes_NK), number
        ),
        scales=store_numbers(q.scales_NG / 2.0**scaling.element_exponent, scale_number),
        offsets=offsets,
        tensor_scale=q.tensor_scale,
    )


def unpack_codes(packed: PackedTensor) -> QTensor:
    """Undo `pack_codes`: codes, scales and offsets as fp32 values."""
    number = formats.get(packed.scheme.format)
    rows, columns = packed.shape
    codes_NK = _from_bytes(packed.codes, number, columns)
    scaling = packed.scheme.scaling
    if scaling is None:
        return QTensor(scheme=packed.scheme, codes_NK=codes_NK)
    assert packed.scales is not None
    scale_shape = scaling.granularity.scale_shape(rows, columns)
    scale_number = formats.get(scaling.scale_format)
    offsets = None
    if packed.offsets is not None:
        offset_number = number if scaling.symmetry == "zero_point" else scale_number
        offsets = load_numbers(packed.offsets, offset_number, scale_shape)
    return QTensor(
        scheme=packed.scheme,
        codes_NK=codes_NK,
        scales_NG=load_numbers(packed.scales, scale_number, scale_shape) * 2.0**scaling.element_exponent,
        offsets_NG=offsets,
        tensor_scale=packed.tensor_scale,
    )


def stored_dtype(number: Format) -> torch.dtype | None:
    """Return torch's own dtype of a float format, found by the names that torch and others call it; None without."""
    for name in number.aliases:
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize * 8 == number.bits:
            return dtype
    return None


def why_not_pack(number: Format) -> str | None:
    """Return why codes of a format are not packed, or None if they are."""
    if number.bits <= MAX_CODE_BITS or stored_dtype(number) is not None:
        return None
    return f"{number.name} has {number.bits} bits, and codes are packed up to {MAX_CODE_BITS}"


def pack_bits(codes_NK: Tensor, bits: int) -> Tensor:
    """Return the bitstream of each row: int32 [N, K] in [0, 2^bits) → uint8 [N, ceil(K · bits / 8)]; 1 to 16 bits."""
    rows, columns = codes_NK.shape
    num_groups = -(-columns // _GROUP)
    filled = codes_NK.new_zeros(rows, num_groups * _GROUP)
    filled[:, :columns] = codes_NK
    groups = filled.reshape(rows, num_groups, _GROUP)
    packed = torch.empty(rows, num_groups, bits, dtype=torch.uint8, device=codes_NK.device)
    for byte in range(bits):
        collected = torch.zeros_like(groups[..., 0])
        for code in range(_GROUP):
            shift = code * bits - 8 * byte  # of the code's lowest bit against the byte's
            if -bits < shift < 8:
                collected |= _shifted(groups[..., code], shift)
        packed[..., byte] = (collected & 0xFF).to(torch.uint8)
    return packed.reshape(rows, num_groups * bits)[:, : -(-columns * bits // 8)].contiguous()


def unpack_bits(packed_NB: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack_bits`: uint8 [N, B] → int32 [N, K]."""
    rows, num_bytes = packed_NB.shape
    num_groups = -(-columns // _GROUP)
    filled = packed_NB.new_zeros(rows, num_groups * bits, dtype=torch.int32)
    filled[:, :num_bytes] = packed_NB
    groups = filled.reshape(rows, num_groups, bits)
    codes = torch.empty(rows, num_groups, _GROUP, dtype=torch.int32, device=packed_NB.device)
    for code in range(_GROUP):
        collected = torch.zeros_like(codes[..., 0])
        for byte in range(bits):
            shift = 8 * byte - code * bits
            if -8 < shift < bits:
                collected |= _shifted(groups[..., byte], shift)
        codes[..., code] = collected & ((1 << bits) - 1)
    return codes.reshape(rows, num_groups * _GROUP)[:, :columns]


def _shifted(words: Tensor, shift: int) -> Tensor:
    return words << shift if shift >= 0 else words >> -shift


# --- values and codes -------------------------------------------------------------------------------------------------


def encode_numbers(values: Tensor, number: Format) -> Tensor:
    """Return the codes of numbers *of the format*, int32, any shape; NaN is the format's NaN code, or 0 without one.

    The format has at most 16 bits. Codes are found by their place among all values of the format, −0 below +0.
    """
    keys, codes = _ordered_codes(number, values.device)
    place = torch.searchsorted(keys, _order_key(values).contiguous()).clamp(max=keys.numel() - 1)
    return codes[place].masked_fill(values.isnan(), _nan_code(number))


def decode_numbers(codes: Tensor, number: Format) -> Tensor:
    """Return the values of codes, fp32, any shape; the format has at most 16 bits."""
    return _value_table(number, codes.device)[codes]


def _order_key(values: Tensor) -> Tensor:
    """An int32 that orders fp32 numbers, −0 below +0."""
    words = values.view(torch.int32)
    return words ^ ((words >> 31) & 0x7FFFFFFF)


@cache
def _value_table(number: Format, device: torch.device) -> Tensor:
    return torch.tensor(value_table(number), dtype=torch.float32, device=device)


@cache
def _ordered_codes(number: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    """Order keys of every number, ascending, and their codes."""
    values = _value_table(number, device)
    codes = torch.arange(values.numel(), dtype=torch.int32, device=device)[~values.isnan()]
    keys, order = _order_key(values[codes]).sort()
    return keys, codes[order]


def _nan_code(number: Format) -> int:
    code = number.nan_code if isinstance(number, FloatFormat) else None
    return 0 if code is None else code


def _to_bytes(values_NK: Tensor, number: Format) -> Tensor:
    """The bitstream of numbers of the format: uint8 [N, B]."""
    dtype = stored_dtype(number)
    if dtype is not None and number.bits >= MAX_CODE_BITS:
        words = values_NK.to(dtype).contiguous().view(_INTEGERS[dtype.itemsize])
        return words.masked_fill(values_NK.isnan(), _nan_code(number)).view(torch.uint8)
    if number.bits > MAX_CODE_BITS:
        raise SchemeError(f"{why_not_pack(number)}; keep the QTensor, or choose a narrower format")
    return pack_bits(encode_numbers(values_NK, number), number.bits)


def _from_bytes(packed_NB: Tensor, number: Format, columns: int) -> Tensor:
    """Undo `_to_bytes`: fp32 [N, K]."""
    dtype = stored_dtype(number)
    if dtype is not None and number.bits >= MAX_CODE_BITS:
        return packed_NB.contiguous().view(dtype).float()
    return decode_numbers(unpack_bits(packed_NB, number.bits, columns), number)


def store_numbers(values_RG: Tensor, number: Format, *, as_bits: bool = False) -> Tensor:
    """Scales or offsets, fp32 [R, G], as they are stored."""
    dtype = None if as_bits else stored_dtype(number)
    if dtype is None:
        return _to_bytes(values_RG.reshape(1, -1), number)[0]
    return _to_bytes(values_RG, number).view(dtype)


def load_numbers(stored: Tensor, number: Format, shape: tuple[int, int]) -> Tensor:
    """Undo `store_numbers`."""
    if stored.dtype == torch.uint8:
        return _from_bytes(stored.reshape(1, -1), number, shape[0] * shape[1]).reshape(shape)
    return _from_bytes(stored.contiguous().view(torch.uint8), number, shape[1])


def _raise_if_nan_is_lost(values: Tensor, number: Format, what: str) -> None:
    if number.has_nan or not bool(values.isnan().any()):
        return
    count = int(values.isnan().sum())
    raise SchemeError(
        f"{count} of {values.numel()} {what} are NaN, which {number.name} cannot store; replace what is not finite "
        "first, or choose a format that has NaN"
    )
