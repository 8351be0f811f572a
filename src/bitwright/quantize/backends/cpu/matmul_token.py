"""One token in bf16 times a packed matrix, from address to address: what a step of decoding calls hundreds of times.

A product of a small matrix takes microseconds, as many as its way from Python to the kernel: views of x and y as
arrays, and telling the types of two dozen arguments. So what follows from the matrix is settled once (`TokenProduct`),
x and y go by their addresses, and the kernel does what is left: sums of x where there are offsets, and the rounding to
bf16. The product itself is `matmul.multiply_tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from bitwright.quantize.backends.cpu.arrays import run_rows
from bitwright.quantize.backends.cpu.lanes import I16, I32, bits_of, float_of
from bitwright.quantize.backends.cpu.matmul import multiply_tiles
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS, constant
from bitwright.quantize.backends.cpu.matmul_parts import Parts
from bitwright.quantize.backends.cpu.matmul_product import call_of, operands_of, work_of
from bitwright.quantize.backends.cpu.team import in_team


@intrinsic
def _words_at(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to words of 32 bits."""
    return (
        types.CPointer(types.uint32)(types.int64),
        lambda context, builder, signature, args: builder.inttoptr(args[0], I32.as_pointer()),
    )


@intrinsic
def _halves_at(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to words of 16 bits."""
    return (
        types.CPointer(types.uint16)(types.int64),
        lambda context, builder, signature, args: builder.inttoptr(args[0], I16.as_pointer()),
    )


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"}, cache=True)
def _sum_of(pairs, first, count):  # type: ignore[no-untyped-def]
    """The sum of `count` pairs of bf16 from `first` on."""
    total = np.float32(0.0)
    for i in range(first, first + count):
        total += float_of(np.uint32(pairs[i] << np.uint32(16))) + float_of(np.uint32(pairs[i] & np.uint32(0xFFFF0000)))
    return total


def _as_taken(pairs, takes_pairs):  # type: ignore[no-untyped-def]
    """x as `multiply_tiles` takes it: pairs of bf16 as they are, [1, pairs, 1, 1], or fp32 numbers, [1, pairs, 2, 1].

    takes_pairs: a constant, 1 or 0.
    """


@overload(_as_taken)
def _compiled_as_taken(pairs, takes_pairs):  # type: ignore[no-untyped-def]
    def floats(pairs, takes_pairs):  # type: ignore[no-untyped-def]
        x = np.empty((1, pairs.size, 2, 1), np.float32)
        for i in range(pairs.size):
            x[0, i, 0, 0] = float_of(np.uint32(pairs[i] << np.uint32(16)))
            x[0, i, 1, 0] = float_of(np.uint32(pairs[i] & np.uint32(0xFFFF0000)))
        return x

    return (lambda pairs, takes_pairs: pairs.reshape((1, pairs.size, 1, 1))) if takes_pairs.count else floats


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_token(  # type: ignore[no-untyped-def]
    codes, scales, offsets, factor, x_address, y_address, first, last, tables, sizes, constants, takes_pairs
):
    """`y[n]` of the rows n of tiles first … last; x and y are rows of bf16, the rest is as `multiply_tiles` has it."""
    num_pairs = (sizes.num_groups - 1) * sizes.group_pairs + sizes.last_pairs
    pairs, y = carray(_words_at(x_address), num_pairs), carray(_halves_at(y_address), sizes.rows)
    out = np.empty((1, sizes.rows), np.float32)
    if offsets is None:
        sums = np.empty((0, 0), np.float32)
    else:
        sums = np.empty((1, sizes.num_groups), np.float32)
        for group in range(sizes.num_groups):
            of_group = sizes.last_pairs if group == sizes.num_groups - 1 else sizes.group_pairs
            sums[0, group] = _sum_of(pairs, group * sizes.group_pairs, of_group)
    x = _as_taken(pairs, takes_pairs)
    multiply_tiles(codes, x, out, scales, offsets, sums, first, last, factor, tables, sizes, constants)
    for row in range(first * TILE_ROWS, min(last * TILE_ROWS, sizes.rows)):
        value = out[0, row]
        word = bits_of(value)
        if value == value:
            word = np.uint32(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
        else:
            word = np.uint32(word | np.uint32(0x400000))
        y[row] = np.uint16(word >> np.uint32(16))


@njit(nogil=True, error_model="numpy", cache=True)
def multiply_token_parallel(  # type: ignore[no-untyped-def]
    codes, scales, offsets, factor, x_address, y_address, count, tables, sizes, constants, takes_pairs, team
):
    """`multiply_token` of all tiles on several threads."""
    in_team(
        multiply_token,
        (codes, scales, offsets, factor, x_address, y_address),
        count,
        (tables, sizes, constants, takes_pairs),
        team,
    )


def takes_pairs_as_they_are(parts: Parts) -> bool:
    """Whether columns of x are those of the tiles: neither filled up nor moved."""
    return parts.shape[1] == 2 * parts.tiles.num_pairs


class TokenProduct:
    """Multiplies one token with one matrix.

    Args:
        parts: how the weight is kept; `takes_pairs_as_they_are` is true of it.
        tensors: what is kept: whoever replaces one of them makes a new product.
    """

    def __init__(self, parts: Parts, tensors: Mapping[str, Tensor]) -> None:
        call = call_of(parts, torch.bfloat16)
        self._kept = dict(tensors)  # their memory is what the arrays below are
        self._before = operands_of(tensors)
        self._behind = (*call.arguments(call.way.step(1)), constant(int(call.way.takes_pairs)))
        self._num_rows, self._num_tiles = parts.shape[0], parts.tiles.num_tiles
        self._work = work_of(parts, 1)
        self._was_called = False

    def __call__(self, x: Tensor) -> Tensor:
        """x of shape [..., K] with one row, bf16 and contiguous → [..., N]."""
        y = torch.empty((*x.shape[:-1], self._num_rows), dtype=torch.bfloat16)
        arrays = (*self._before, x.data_ptr(), y.data_ptr())
        if self._was_called and torch.get_num_threads() == 1:  # nothing to announce, and nobody to share with
            multiply_token(*arrays, 0, self._num_tiles, *self._behind)
        else:
            run_rows(multiply_token, multiply_token_parallel, arrays, self._num_tiles, self._behind, self._work)
            self._was_called = True
        return y
