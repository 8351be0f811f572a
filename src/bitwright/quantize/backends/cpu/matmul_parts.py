"""A packed matrix in tiles, and back: codes, scales and offsets as kernels read them.

    codes              in tiles (`matmul_layout`)
    scales, offsets    of 16 and 32 bits: numbers as they are stored, those of a tile's rows together, [tiles, G, 64];
                       of 8 bits and fewer, and zero points: a matrix [N, G] of codes, in tiles of its own;
                       where several rows share them: fp32 numbers, [R, G]
    tensor_scale       as it is, fp32 0-d

Legend: N rows, K columns, R × G scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS, Tiles, unit_columns
from bitwright.quantize.backends.cpu.matmul_numbers import why_no_numbers
from bitwright.quantize.backends.cpu.matmul_tiling import from_tiles, to_tiles
from bitwright.quantize.pack import PackedTensor, load_numbers, pack_bits, store_numbers, stored_dtype, unpack_bits
from bitwright.quantize.packed_rows import scheme_of_rows
from bitwright.quantize.scheme import TensorScheme, read_scheme

#: Scales and offsets of more bits than this are kept as numbers.
_MAX_CODE_BITS = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Side:
    """How scales or offsets are kept."""

    number: Format
    #: [R, G].
    shape: tuple[int, int]
    #: Several rows share them.
    is_shared: bool
    #: The tiles of their codes; None where they are kept as numbers.
    tiles: Tiles | None
    #: They are stored as codes even where torch has a dtype of their format (zero points).
    as_bits: bool

    def lay(self, stored: Tensor) -> Tensor:
        """As kernels read them."""
        rows, groups = self.shape
        if self.is_shared:
            return load_numbers(stored, self.number, self.shape)
        if self.tiles is None:
            num_tiles = -(-rows // TILE_ROWS)
            filled = stored.new_zeros(num_tiles * TILE_ROWS, groups)
            filled[:rows] = stored
            return filled.reshape(num_tiles, TILE_ROWS, groups).transpose(1, 2).contiguous()
        if stored.dim() == 2:
            stream = stored.contiguous().view(torch.uint8)
        else:
            codes = unpack_bits(stored.reshape(1, -1), self.number.bits, rows * groups)
            stream = pack_bits(codes.reshape(rows, groups), self.number.bits)
        return lay_codes(stream, self.tiles)

    def collect(self, laid: Tensor) -> Tensor:
        """Undo `lay`."""
        return self.of_rows(laid, torch.arange(self.shape[0]))

    def of_rows(self, laid: Tensor, rows: Tensor) -> Tensor:
        """Those of some rows, int64 [n], as `PackedTensor` stores them."""
        groups = self.shape[1]
        if self.is_shared:
            return store_numbers(laid[rows], self.number, as_bits=self.as_bits)
        if self.tiles is None:
            return laid[rows // TILE_ROWS, :, rows % TILE_ROWS]
        stream = collect_codes(laid, self.tiles, rows)
        dtype = None if self.as_bits else stored_dtype(self.number)
        if dtype is not None:
            return stream.view(dtype)
        codes = unpack_bits(stream, self.number.bits, groups)
        return pack_bits(codes.reshape(1, -1), self.number.bits)[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """How the parts of a matrix are kept."""

    scheme: TensorScheme
    shape: tuple[int, int]
    number: Format
    tiles: Tiles
    #: None without scaling.
    scales: Side | None
    #: None where symmetric.
    offsets: Side | None

    def lay(self, packed: PackedTensor) -> dict[str, Tensor]:
        """The parts of a packed matrix, by name."""
        parts = {"codes": lay_codes(packed.codes, self.tiles)}
        for name, side, stored in (
            ("scales", self.scales, packed.scales),
            ("offsets", self.offsets, packed.offsets),
        ):
            if side is not None:
                assert stored is not None
                parts[name] = side.lay(stored)
        if packed.tensor_scale is not None:
            parts["tensor_scale"] = packed.tensor_scale
        return parts

    def collect(self, parts: dict[str, Tensor]) -> PackedTensor:
        """Undo `lay`."""
        return PackedTensor(
            scheme=self.scheme,
            shape=self.shape,
            codes=collect_codes(parts["codes"], self.tiles),
            scales=None if self.scales is None else self.scales.collect(parts["scales"]),
            offsets=None if self.offsets is None else self.offsets.collect(parts["offsets"]),
            tensor_scale=parts.get("tensor_scale"),
        )

    def rows(self, parts: dict[str, Tensor], ids: Tensor) -> PackedTensor:
        """Rows of the packed matrix, int64 [n], as a matrix in which every row has scales of its own."""
        scaling, stored = self.scheme.scaling, {}
        shared = 1 if scaling is None else scaling.granularity.group_rows(self.shape[0])
        for name, side in (("scales", self.scales), ("offsets", self.offsets)):
            if side is not None:
                stored[name] = side.of_rows(parts[name], ids // shared)
        return PackedTensor(
            scheme=scheme_of_rows(self.scheme),
            shape=(len(ids), self.shape[1]),
            codes=collect_codes(parts["codes"], self.tiles, ids),
            tensor_scale=parts.get("tensor_scale"),
            **stored,
        )


def why_no_parts(scheme: TensorScheme, shape: tuple[int, int]) -> str | None:
    """Return why a matrix is not kept in tiles, or None if it is."""
    rows, columns = shape
    number = formats.FORMATS[scheme.format]
    if reason := why_no_numbers(number):
        return reason
    if rows * columns == 0:
        return f"a matrix of shape {shape} has no codes"
    scaling = scheme.scaling
    if scaling is None:
        return None
    granularity = scaling.granularity
    size, step = granularity.group_columns(columns), unit_columns(number.bits)
    if granularity.num_groups(columns) > 1 and size % step:
        return f"groups have {size} columns, and {number.bits}-bit codes are expanded {step} columns at a time"
    scale_number = formats.FORMATS[scaling.scale_format]
    if scale_number.bits > _MAX_CODE_BITS and stored_dtype(scale_number) is None:
        return f"torch has no dtype for scales in {scale_number.name}"
    if scale_number.bits > 32:
        return f"sums are fp32, and scales in {scale_number.name} are wider"
    return None


@cache
def parts_of(text: str, shape: tuple[int, int]) -> Parts:
    """How the parts of a matrix of that shape are kept under the scheme of that `TensorScheme.text`."""
    scheme = read_scheme(text)
    rows, columns = shape
    number = formats.FORMATS[scheme.format]
    scaling = scheme.scaling
    scales = offsets = None
    if scaling is not None:
        scales = _side(scheme, shape, formats.FORMATS[scaling.scale_format], as_bits=False)
        if scaling.symmetry == "minimum":
            offsets = scales
        elif scaling.symmetry == "zero_point":
            offsets = _side(scheme, shape, number, as_bits=True)
    size = columns if scaling is None else scaling.granularity.group_columns(columns)
    return Parts(
        scheme=scheme,
        shape=shape,
        number=number,
        tiles=Tiles(rows=rows, columns=columns, bits=number.bits, group_columns=size),
        scales=scales,
        offsets=offsets,
    )


def _side(scheme: TensorScheme, shape: tuple[int, int], number: Format, *, as_bits: bool) -> Side:
    assert scheme.scaling is not None
    granularity = scheme.scaling.granularity
    rows, groups = granularity.scale_shape(*shape)
    is_shared = granularity.group_rows(shape[0]) > 1
    is_code = number.bits <= _MAX_CODE_BITS and not is_shared
    tiles = Tiles(rows=rows, columns=groups, bits=number.bits, group_columns=groups) if is_code else None
    return Side(number=number, shape=(rows, groups), is_shared=is_shared, tiles=tiles, as_bits=as_bits)


def lay_codes(stream_NB: Tensor, tiles: Tiles) -> Tensor:
    """The bitstream of each row (`quantize/pack.py`) as tiles: uint8 [tiles, bytes]."""
    return torch.from_numpy(to_tiles(stream_NB.contiguous().numpy(), tiles))


def collect_codes(laid: Tensor, tiles: Tiles, rows: Tensor | None = None) -> Tensor:
    """Undo `lay_codes`; of some rows, int64 [n], if any are given."""
    return torch.from_numpy(from_tiles(laid.contiguous().numpy(), tiles, None if rows is None else rows.numpy()))
