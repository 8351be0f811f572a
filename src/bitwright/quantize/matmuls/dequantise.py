"""Bits as a file has them, expanded to fp32 a few rows at a time: the layout that has no exceptions.

    y[:, rows] = x · (values of these rows)ᵀ        in fp32, by torch

It runs on every device and under every scheme that is packed, and takes the bytes of the packed matrix exactly. It is
no fast way: all values are written and read once more, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright import formats
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import PackedTensor, why_not_pack
from bitwright.quantize.packed_rows import packed_rows
from bitwright.quantize.quantize import unpack
from bitwright.quantize.scheme import TensorScheme

#: Values that are expanded at once, 8 MB.
_BLOCK = 1 << 21
#: Codes that fill whole bytes together.
_WHOLE = 8
_NAMES = ("codes", "scales", "offsets", "tensor_scale")


@dataclass(frozen=True, slots=True)
class Dequantise:
    """Expands block by block."""

    name: str = "dequantise"
    description: str = "values expanded to fp32 a few rows at a time, and multiplied by torch"
    preference: int = 1000

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Only what is not packed at all: codes or scales of more than 16 bits that are no floats of torch."""
        stored = [scheme.format] if scheme.scaling is None else [scheme.format, scheme.scaling.scale_format]
        return next((reason for name in stored if (reason := why_not_pack(formats.FORMATS[name]))), None)

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """The parts as they are."""
        parts = {name: part for name in _NAMES if (part := getattr(packed, name)) is not None}
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts=parts)

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ; see `MatmulLayout`."""
        packed, x = _packed_of(matrix), x_MK.float()
        rows = matrix.shape[0]
        y_MN = x_MK.new_empty(x_MK.shape[0], rows)
        if x_MK.shape[0] == 0:
            return y_MN
        step = _rows_at_once(packed)
        for first in range(0, rows, step):
            values = unpack(rows_of(packed, first, min(rows, first + step)))
            y_MN[:, first : first + step] = x @ values.T
        return y_MN

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """The same for any number of tokens."""
        step = min(_rows_at_once(_packed_of(matrix)), matrix.shape[0])
        return f"{step} of {matrix.shape[0]} rows at a time expanded to fp32, and multiplied by torch in fp32"

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K]; see `MatmulLayout`."""
        return unpack(packed_rows(_packed_of(matrix), ids))

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K]."""
        return unpack(_packed_of(matrix))


MATMULS = (Dequantise(),)


def rows_of(packed: PackedTensor, first: int, last: int) -> PackedTensor:
    """Rows first … last of a packed matrix; `first` is a multiple of `_whole_rows`."""
    scaling, (rows, columns) = packed.scheme.scaling, packed.shape
    scales, offsets = packed.scales, packed.offsets
    if scaling is not None and scaling.granularity.scope != "tensor":
        group_rows = scaling.granularity.group_rows(rows)
        groups = scaling.granularity.num_groups(columns)
        of_rows = (first // group_rows, -(-last // group_rows))
        scale_bits, code_bits = (formats.FORMATS[name].bits for name in (scaling.scale_format, packed.scheme.format))
        scales = _cut(scales, *of_rows, groups * scale_bits)
        offset_bits = code_bits if scaling.symmetry == "zero_point" else scale_bits
        offsets = _cut(offsets, *of_rows, groups * offset_bits)
    return PackedTensor(
        scheme=packed.scheme,
        shape=(last - first, columns),
        codes=packed.codes[first:last],
        scales=scales,
        offsets=offsets,
        tensor_scale=packed.tensor_scale,
    )


def _cut(stored: Tensor | None, first: int, last: int, row_bits: int) -> Tensor | None:
    """Rows of scales [R, G], or of their bitstream, one row after the other."""
    if stored is None or stored.dim() == 2:
        return None if stored is None else stored[first:last]
    return stored[first * row_bits // 8 : -(-last * row_bits // 8)]


def _whole_rows(packed: PackedTensor) -> int:
    """Rows that may be cut off: those that share scales, eight times, so that bits of scales end with a byte."""
    scaling = packed.scheme.scaling
    if scaling is None or scaling.granularity.scope == "tensor":
        return 1
    return _WHOLE * scaling.granularity.group_rows(packed.shape[0])


def _rows_at_once(packed: PackedTensor) -> int:
    """Rows whose values are expanded together: about _BLOCK of them."""
    whole = _whole_rows(packed)
    return max(whole, _BLOCK // max(packed.shape[1], 1) // whole * whole)


def _packed_of(matrix: PackedMatrix) -> PackedTensor:
    return PackedTensor(scheme=matrix.scheme, shape=matrix.shape, **dict(matrix.parts))
