"""Every code of every format comes out of registers as the table of its format has it, in each way that there is."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from bitwright import formats
from bitwright.formats.decode import value_table
from bitwright.quantize.backends.cpu.features import processor_features
from bitwright.quantize.backends.cpu.matmul_layout import TILE_ROWS, Tiles
from bitwright.quantize.backends.cpu.matmul_numbers import (
    Expansion,
    floats_expansion,
    pairs_expansion,
    why_no_numbers,
    why_no_pairs,
)
from bitwright.quantize.backends.cpu.matmul_steps import expand_groups
from bitwright.quantize.backends.cpu.matmul_tiling import to_tiles
from bitwright.quantize.backends.cpu.matmul_ways import constants_of
from bitwright.quantize.pack import pack_bits

EXPANDED = [name for name, number in formats.FORMATS.items() if why_no_numbers(number) is None]
FEATURES = {
    "any processor": frozenset[str](),
    "AVX2": processor_features() & {"avx2"},
    "this processor": processor_features(),
}


@cache
def kernel(takes_pairs: bool) -> Any:
    """Compiled for each kind of codes."""

    @njit
    def expand(codes: Any, num_pairs: Any, table: Any, out: Any, bits: Any, code: Any) -> None:
        expand_groups(codes, 0, 1, num_pairs, table, out, None, 0, (bits, code))

    return expand


def all_codes(bits: int) -> tuple[Tiles, np.ndarray[Any, Any]]:
    """Every code, 64 to a column, and again as often as columns are filled up."""
    columns = max(8, (1 << bits) // TILE_ROWS)
    codes = np.arange(columns * TILE_ROWS).reshape(columns, TILE_ROWS).T % (1 << bits)
    return Tiles(rows=TILE_ROWS, columns=columns, bits=bits, group_columns=columns), np.ascontiguousarray(codes)


def expanded(expansion: Expansion, *, takes_pairs: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Codes [64, columns], and what they became."""
    tiles, codes = all_codes(expansion.bits)
    laid = to_tiles(pack_bits(torch.from_numpy(codes).int(), expansion.bits).numpy(), tiles)
    size = tiles.num_pairs * TILE_ROWS * (1 if takes_pairs else 2)
    out = np.zeros(size, np.uint32 if takes_pairs else np.float32)
    kernel(takes_pairs)(laid.reshape(-1), tiles.num_pairs, expansion.entries, out, *constants_of(expansion))
    if not takes_pairs:
        return codes, out.reshape(-1, TILE_ROWS).T
    pairs = out.view(np.uint16).astype(np.uint32) << 16
    return codes, pairs.view(np.float32).reshape(-1, TILE_ROWS, 2).transpose(1, 0, 2).reshape(TILE_ROWS, -1)


def raise_if_not(codes: np.ndarray[Any, Any], found: np.ndarray[Any, Any], name: str) -> None:
    values = value_table(formats.FORMATS[name]).astype(np.float32)[codes]
    assert np.array_equal(found, values, equal_nan=True)
    is_number = ~np.isnan(values)
    assert np.array_equal(np.signbit(found[is_number]), np.signbit(values[is_number]))


@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("name", EXPANDED)
def test_codes_become_fp32_numbers(name: str, features: frozenset[str]) -> None:
    codes, found = expanded(floats_expansion(formats.FORMATS[name], features), takes_pairs=False)
    raise_if_not(codes, found, name)


@pytest.mark.parametrize("name", EXPANDED)
def test_codes_become_pairs_of_bf16(name: str) -> None:
    if reason := why_no_pairs(formats.FORMATS[name], processor_features()):
        pytest.skip(reason)
    codes, found = expanded(pairs_expansion(formats.FORMATS[name]), takes_pairs=True)
    raise_if_not(codes, found, name)
