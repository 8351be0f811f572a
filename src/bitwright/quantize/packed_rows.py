"""Some rows of a packed matrix, as a packed matrix: what an embedding reads.

Rows that are taken out have scales of their own, even where the matrix had them for several rows or for all: they are
repeated. Values are the same, bit for bit, since each is its code under the same scale.

Legend: n rows of N, K columns, R × G scales.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format
from bitwright.quantize.granularity import ROW, Granularity, group
from bitwright.quantize.pack import PackedTensor, pack_bits, unpack_bits
from bitwright.quantize.scheme import TensorScheme


def scheme_of_rows(scheme: TensorScheme) -> TensorScheme:
    """The scheme of rows that have scales of their own."""
    if scheme.scaling is None:
        return scheme
    return dataclasses.replace(
        scheme, scaling=dataclasses.replace(scheme.scaling, granularity=_of_rows(scheme.scaling.granularity))
    )


def _of_rows(granularity: Granularity) -> Granularity:
    match granularity.scope:
        case "tensor":
            return ROW
        case "block":
            return group(granularity.group_size)
        case _:
            return granularity


def packed_rows(packed: PackedTensor, ids: Tensor) -> PackedTensor:
    """Rows of a packed matrix, int64 [n], in that order."""
    scheme, scaling = packed.scheme, packed.scheme.scaling
    scales = offsets = None
    if scaling is not None:
        number, scale_number = (formats.FORMATS[name] for name in (scheme.format, scaling.scale_format))
        shape = scaling.granularity.scale_shape(*packed.shape)
        of_scales = ids // scaling.granularity.group_rows(packed.shape[0])
        scales = _numbers_of_rows(packed.scales, scale_number, shape, of_scales)
        offset_number = number if scaling.symmetry == "zero_point" else scale_number
        offsets = _numbers_of_rows(packed.offsets, offset_number, shape, of_scales)
    return PackedTensor(
        scheme=scheme_of_rows(scheme),
        shape=(len(ids), packed.shape[1]),
        codes=packed.codes[ids],
        scales=scales,
        offsets=offsets,
        tensor_scale=packed.tensor_scale,
    )


def _numbers_of_rows(stored: Tensor | None, number: Format, shape: tuple[int, int], rows: Tensor) -> Tensor | None:
    """Rows of scales [R, G], or of the bitstream of all of them."""
    if stored is None:
        return None
    if stored.dim() == 2:
        is_code = stored.element_size() == 1  # indexing knows not every dtype of eight bits
        return stored.view(torch.uint8)[rows].view(stored.dtype) if is_code else stored[rows]
    codes = unpack_bits(stored.reshape(1, -1), number.bits, shape[0] * shape[1]).reshape(shape)
    return pack_bits(codes[rows].reshape(1, -1), number.bits)[0]
