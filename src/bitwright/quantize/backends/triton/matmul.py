"""One product with packed weights on a GPU: which kernel, how many programs share a sum, and the call.

One token is multiplied where its words are read (`multiply_kernel`); more of them by matrix units (`product_kernel`).
Programs share a sum where the rows alone would leave multiprocessors idle. How many do follows from the shape and from
nothing else, so that a product is the same on every GPU of a kind and on every run.

x of 16 bits goes into matrix units as it is, where its dtype holds the codes too; otherwise both are taken apart into
numbers of bf16 that add up to them: two of fp16, three of fp32.

Legend: M tokens, N rows and K columns of the weight, G groups of a row, S parts of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats import Format
from bitwright.quantize.backends.triton import launch
from bitwright.quantize.backends.triton.matmul_layout import Chunks, chunks_of
from bitwright.quantize.backends.triton.matmul_numbers import (
    Number,
    fits,
    num_parts,
    number_of,
    values_of,
    why_no_number,
)
from bitwright.quantize.pack import stored_dtype
from bitwright.quantize.scheme import TensorScheme, read_scheme

#: Programs that keep a GPU of this decade busy.
_PROGRAMS = 1024
#: Of `multiply_kernel`: rows, and words of a row, of a program at a time.
_ROWS, _TILE_WORDS = 32, 64
#: Of `product_kernel`: rows, columns at a time, columns between two looks at the sum where no scales divide them.
_PRODUCT_ROWS, _PRODUCT_COLUMNS, _SEGMENT_COLUMNS = 64, 64, 256
#: Tokens of a program of `product_kernel`; matrix units take no fewer than the first, nor fewer columns.
_TOKENS = (16, 32, 64)
#: bf16 numbers that add up to one of x.
_X_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


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
        tokens, row_programs, token_programs = 1, -(-rows // _ROWS), 1
        num_pieces = -(-chunks.num_lanes // _tile_lanes(chunks))
    else:
        tokens = next((tokens for tokens in _TOKENS if num_tokens <= tokens), _TOKENS[-1])
        row_programs, token_programs = -(-rows // _PRODUCT_ROWS), -(-num_tokens // tokens)
        num_pieces = -(-chunks.columns // _segment_columns(call))
    wanted = max(1, _PROGRAMS // (row_programs * token_programs))
    return Split(
        tokens=tokens,
        row_programs=row_programs,
        token_programs=token_programs,
        num_pieces=num_pieces,
        pieces_per_part=-(-num_pieces // wanted),
    )


def multiply(x_MK: Tensor, call: Call, parts: Mapping[str, Tensor]) -> Tensor:
    """x Wᵀ, [M, N] in the dtype of x (fp32, bf16 or fp16).

    Raises:
        SchemeError, MissingExtra: x is on a CPU and kernels are not interpreted; no Triton.
    """
    launch.raise_if(launch.why_not_run(x_MK.dtype), x_MK)
    num_tokens, rows = x_MK.shape[0], call.chunks.rows
    y_MN = torch.empty(num_tokens, rows, dtype=x_MK.dtype, device=x_MK.device)
    if num_tokens == 0:
        return y_MN
    split = split_of(call, num_tokens)
    is_whole = split.num_parts == 1
    out = y_MN
    if not is_whole:
        out = torch.empty(split.num_parts, num_tokens, rows, dtype=torch.float32, device=x_MK.device)
    x = x_MK.detach().contiguous()
    arrays = (launch.words(x), *_arrays(call, parts, x.device), parts.get("tensor_scale"), launch.words(out))
    if num_tokens == 1:
        _multiply_one(arrays, call, split, is_whole, x)
    else:
        _multiply_many(arrays, call, split, is_whole, x)
    if not is_whole:
        from bitwright.quantize.backends.triton.matmul_kernels import add_kernel

        size = num_tokens * rows
        arguments = (out, parts.get("tensor_scale"), launch.words(y_MN), size, split.num_parts)
        run(add_kernel, (-(-size // 256),), arguments, (256,), x)
    return y_MN


def _multiply_one(arrays: tuple[Any, ...], call: Call, split: Split, is_whole: bool, x: Tensor) -> None:
    from bitwright.quantize.backends.triton.matmul_kernels import multiply_kernel

    chunks = call.chunks
    sizes = (
        *(chunks.rows, chunks.columns, chunks.num_lanes // call.chunk.step, call.num_groups),
        *(split.num_pieces, split.pieces_per_part),
    )
    constants = (number_of(call.number), call.chunk, call.scaling, is_whole, _ROWS, _tile_lanes(chunks))
    run(multiply_kernel, (split.row_programs, split.num_parts), (*arrays, *sizes), constants, x)


def _multiply_many(arrays: tuple[Any, ...], call: Call, split: Split, is_whole: bool, x: Tensor) -> None:
    from bitwright.quantize.backends.triton.matmul_kernels import product_kernel

    chunks, segment_columns = call.chunks, _segment_columns(call)
    sizes = (
        x.shape[0],
        chunks.rows,
        chunks.columns,
        chunks.row_words,
        call.num_groups,
        split.num_pieces,
        split.pieces_per_part,
    )
    element, x_parts, w_parts = operands_of(call.number, x.dtype)
    constants = (
        *(number_of(call.number), call.chunk, call.scaling, is_whole, segment_columns),
        *(_triton_type(element), x_parts, w_parts),
        *(split.tokens, _PRODUCT_ROWS, min(_PRODUCT_COLUMNS, max(_TOKENS[0], _power_of_two_from(segment_columns)))),
    )
    run(product_kernel, (split.row_programs, split.token_programs, split.num_parts), (*arrays, *sizes), constants, x)


def operands_of(number: Format, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """What matrix units multiply: a dtype, and how many of its numbers add up to one of x and to a code."""
    if dtype != torch.float32 and fits(number, dtype):
        return dtype, 1, 1
    return torch.bfloat16, _X_PARTS[dtype], num_parts(number)


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _arrays(call: Call, parts: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor | None, ...]:
    """Codes, scales and offsets as kernels take them, each with the values of what is looked up."""
    found: list[Tensor | None] = [parts["codes"], values_of(call.number, device)]
    for name, number, decoded in (
        ("scales", call.scale_number, call.scaling.scales),
        ("offsets", call.offset_number, call.scaling.offsets),
    ):
        stored = parts.get(name)
        if stored is None or number is None:
            found += [None, None]
        elif decoded is None:
            found += [launch.words(stored), None]
        else:
            found += [stored.view(torch.uint8).reshape(-1), values_of(number, device)]
    return tuple(found)


def _tile_lanes(chunks: Chunks) -> int:
    """Lanes that a program takes at a time."""
    return min(_power_of_two_from(chunks.num_lanes), max(_TILE_WORDS // min(chunks.lane_words, 2), 4))


def _segment_columns(call: Call) -> int:
    """Columns under one scale, or so many of a row."""
    return call.scaling.group_columns if call.scaling.per in ("lane", "code") else _SEGMENT_COLUMNS


def _power_of_two_from(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def run(
    kernel: Any, programs: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...], x: Tensor
) -> None:
    """Run a kernel on the device of `x`; products and sums may be contracted."""
    # the interpreter computes with NumPy, which would warn of infinities
    with torch.cuda.device_of(x), np.errstate(all="ignore"):
        kernel[programs](*arguments, *constants, enable_fp_fusion=True)
