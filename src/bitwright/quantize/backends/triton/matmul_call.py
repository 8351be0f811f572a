"""What of a product with packed weights is settled before there is an x: facts for kernels, and the programs of a call.

Programs share a sum where the rows alone would leave multiprocessors idle. How many do follows from the shape and from
nothing else, so that a product is the same on every GPU of a kind and on every run.

Legend: N rows and K columns of the weight, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from bitwright import formats
from bitwright.formats import Format
from bitwright.quantize.backends.triton import launch
from bitwright.quantize.backends.triton.matmul_layout import Chunks, chunks_of
from bitwright.quantize.backends.triton.matmul_numbers import Number, number_of, why_no_number
from bitwright.quantize.pack import stored_dtype
from bitwright.quantize.scheme import TensorScheme, read_scheme

#: Programs that keep a GPU of this decade busy.
_PROGRAMS = 1024
#: Of `multiply_kernel`: rows, and words of a row, of a program at a time.
ROWS, _TILE_WORDS = 32, 64
#: Of `product_kernel`: rows, columns at a time, columns between two looks at the sum where no scales divide them.
PRODUCT_ROWS, _PRODUCT_COLUMNS, _SEGMENT_COLUMNS = 64, 64, 256
#: Tokens of a program of `product_kernel`; matrix units take no fewer than the first, nor fewer columns.
TOKENS = (16, 32, 64, 128)


class _Chunk(NamedTuple):
    """A chunk as kernels see it."""

    lanes: int
    codes: int
    words: int
    #: Lanes of a row are a multiple of this.
    step: int


class _Scaling(NamedTuple):
    """Scales as kernels see them."""

    #: "none", "row", "lane" or "code".
    per: str
    symmetry: str
    #: What stored scales are multiplied by.
    unit: float
    group_rows: int
    group_lanes: int
    group_columns: int
    #: How they are decoded where they are stored as codes.
    scales: Number | None
    offsets: Number | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """What of a product follows from scheme and shape."""

    scheme: TensorScheme
    number: Format
    chunks: Chunks
    num_groups: int
    chunk: _Chunk
    scaling: _Scaling
    #: The formats of scales and of offsets; None without.
    scale_number: Format | None
    offset_number: Format | None

    @property
    def tile_lanes(self) -> int:
        """Lanes that a program of `multiply_kernel` takes at a time."""
        chunks = self.chunks
        return min(power_of_two_from(chunks.num_lanes), max(_TILE_WORDS // min(chunks.lane_words, 2), 4))

    @property
    def segment_columns(self) -> int:
        """Columns under one scale, or so many of a row."""
        return self.scaling.group_columns if self.scaling.per in ("lane", "code") else _SEGMENT_COLUMNS

    @property
    def product_columns(self) -> int:
        """Columns that a program of `product_kernel` takes at a time."""
        return min(_PRODUCT_COLUMNS, max(TOKENS[0], power_of_two_from(self.segment_columns)))


def why_no_call(scheme: TensorScheme, shape: tuple[int, int]) -> str | None:
    """Return why kernels do not multiply with a matrix under a scheme, or None if they do."""
    if shape[0] * shape[1] == 0:
        return f"a matrix of shape {shape} has no codes"
    scaling = scheme.scaling
    reason = why_no_number(formats.FORMATS[scheme.format])
    if reason is not None or scaling is None:
        return reason
    scale_number = formats.FORMATS[scaling.scale_format]
    return None if scale_number.name == "fp32" else why_no_number(scale_number)


@cache
def call_of(text: str, shape: tuple[int, int]) -> Call:
    """Products with a matrix of that shape under the scheme of that `TensorScheme.text`."""
    scheme = read_scheme(text)
    number, scaling, (rows, columns) = formats.FORMATS[scheme.format], scheme.scaling, shape
    group_columns = columns if scaling is None else scaling.granularity.group_columns(columns)
    chunks = chunks_of(rows, columns, number.bits, group_columns)
    scale_number = offset_number = None
    per, symmetry, unit, group_rows = "none", "symmetric", 1.0, 1
    if scaling is not None:
        scale_number = formats.FORMATS[scaling.scale_format]
        symmetry, unit = scaling.symmetry, 2.0**scaling.element_exponent
        offset_number = {"symmetric": None, "minimum": scale_number, "zero_point": number}[symmetry]
        group_rows = scaling.granularity.group_rows(rows)
        per = "row" if chunks.group_lanes == 0 and symmetry == "symmetric" else "lane"
        per = "code" if chunks.group_lanes < 0 else per
    return Call(
        scheme=scheme,
        number=number,
        chunks=chunks,
        num_groups=-(-columns // group_columns),
        chunk=_Chunk(
            lanes=chunks.chunk_lanes,
            codes=chunks.lane_codes,
            words=chunks.lane_words,
            step=min(chunks.chunk_lanes, 4),
        ),
        scaling=_Scaling(
            per=per,
            symmetry=symmetry,
            unit=unit,
            group_rows=group_rows,
            group_lanes=chunks.group_lanes or chunks.num_lanes,
            group_columns=group_columns,
            scales=_decoded(scale_number, as_bits=False),
            offsets=_decoded(offset_number, as_bits=symmetry == "zero_point"),
        ),
        scale_number=scale_number,
        offset_number=offset_number,
    )


def _decoded(number: Format | None, *, as_bits: bool) -> Number | None:
    """How a kernel decodes scales or offsets; None where it reads them as numbers."""
    if number is None or (not as_bits and stored_dtype(number) in launch.DTYPES):
        return None
    return number_of(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a product is cut into programs."""

    #: Tokens of a program.
    tokens: int
    #: Programs along rows and along tokens.
    row_programs: int
    token_programs: int
    #: What is cut up into parts of a sum: tiles of lanes, or segments of columns; and how many of them a part has.
    num_pieces: int
    pieces_per_part: int

    @property
    def num_parts(self) -> int:
        """Parts of a sum."""
        return -(-self.num_pieces // self.pieces_per_part)


@cache
def split_of(call: Call, num_tokens: int) -> Split:
    """The programs of a product with so many tokens."""
    rows, chunks = call.chunks.rows, call.chunks
    if num_tokens == 1:
        tokens, row_programs, token_programs = 1, -(-rows // ROWS), 1
        num_pieces = -(-chunks.num_lanes // call.tile_lanes)
    else:
        tokens = next((tokens for tokens in TOKENS if num_tokens <= tokens), TOKENS[-1])
        row_programs, token_programs = -(-rows // PRODUCT_ROWS), -(-num_tokens // tokens)
        num_pieces = -(-chunks.columns // call.segment_columns)
    wanted = max(1, _PROGRAMS // (row_programs * token_programs))
    return Split(
        tokens=tokens,
        row_programs=row_programs,
        token_programs=token_programs,
        num_pieces=num_pieces,
        pieces_per_part=-(-num_pieces // wanted),
    )


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()
