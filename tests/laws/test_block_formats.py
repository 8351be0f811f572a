"""Laws that every block format of the catalog obeys. A new one is tested here with no edit.

What a format may claim follows from its facts: only a power-of-two scale found by the floor rule over floating elements
survives a second rounding (an integer's code −2**(b−1) moves its block's exponent, an amax scale moves with its block's
rounded maximum), and only formats with short blocks take rows of any length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError, UnknownName
from bitwright.formats import BLOCK_FORMATS, BlockCodec, BlockCodes, BlockFormat, FloatFormat

ALL = pytest.mark.parametrize("format", list(BLOCK_FORMATS.values()), ids=lambda format: format.name)


def gaussian(format: BlockCodec, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, blocks * format.block_size)).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(
        a.shape == b.shape and a.dtype == b.dtype == np.float32 and (a.view(np.uint32) == b.view(np.uint32)).all()
    )


def same_storage(a: Any, b: Any) -> bool:
    if not isinstance(a, BlockCodes):
        return bool(np.array_equal(a, b))
    return bool(
        np.array_equal(a.codes, b.codes)
        and np.array_equal(a.scale_codes, b.scale_codes)
        and a.tensor_scale == b.tensor_scale
    )


def has_tensor_scale(format: BlockCodec) -> bool:
    return isinstance(format, BlockFormat) and format.tensor_scale


@ALL
def test_record_is_complete(format: BlockCodec) -> None:
    row = format.row
    assert formats.get(format.name) is BLOCK_FORMATS[format.name] and format.name not in formats.names()
    assert format.source and row.source == format.source and row.element and row.scale_format and row.rule
    assert row.name == format.name and row.block_size == format.block_size > 0 and np.isfinite(row.max)
    assert format.code_bits < row.bits_per_value < format.code_bits + 2
    assert format.golden
    for alias in format.aliases:
        assert formats.resolve(alias) == formats.resolve(alias.upper()) == format.name


@ALL
def test_round_is_decode_of_encode(format: BlockCodec) -> None:
    x = gaussian(format, 5, 3)
    stored = formats.encode(format.name, x)
    assert same_storage(stored, format.encode(x))
    values = formats.decode(format.name, stored)
    assert values.shape == x.shape and same_bits(values, format.decode(stored))
    assert same_bits(formats.round(format.name, x), values)


@ALL
def test_storage_is_as_large_as_it_says(format: BlockCodec) -> None:
    stored = format.encode(gaussian(format, 2, 4))
    num_values = 8 * format.block_size
    if isinstance(stored, BlockCodes):
        assert isinstance(format, BlockFormat)
        bits = stored.codes.size * format.code_bits + stored.scale_codes.size * format.scale.bits
        assert int(stored.codes.max()) < 1 << format.code_bits
    else:
        assert stored.dtype == np.uint8
        bits = 8 * stored.size
    assert bits == format.row.bits_per_value * num_values


@ALL
def test_a_second_rounding_changes_nothing_where_the_rule_allows(format: BlockCodec) -> None:
    if not isinstance(format, BlockFormat) or format.scale_rule != "ocp_floor":
        return
    x = gaussian(format, 50, 4) * np.float32(2.0) ** np.arange(-25, 25, dtype=np.float32)[:, None]
    once = formats.round(format.name, x)
    if not isinstance(format.element, FloatFormat):
        stored = format.encode(x)
        lowest = stored.codes == 1 << (format.code_bits - 1)
        moved = lowest.reshape(50, 4, -1).any(-1).repeat(format.block_size, axis=-1)
        assert not moved.all()
        once = np.where(moved, np.float32(0), once)
    assert same_bits(formats.round(format.name, once), once)


@ALL
def test_powers_of_two_pass_through(format: BlockCodec) -> None:
    x = gaussian(format, 4, 3)
    rounded = formats.round(format.name, x)
    for exponent in (-4, -1, 1, 3, 8):
        factor = np.float32(2.0**exponent)
        is_fp16 = not isinstance(format, BlockFormat)
        if is_fp16 and exponent < 0:
            continue  # inner scales may be subnormal in fp16
        scaled = formats.round(format.name, x * factor)
        if is_fp16:
            assert np.abs(scaled - rounded * factor).max() <= 2.0**-8 * np.abs(x).max() * factor
        else:
            assert same_bits(scaled, rounded * factor)


@ALL
@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_do_not_know_each_other(format: BlockCodec, blocks: int) -> None:
    """Every block, a short last one too, is stored as it would be alone (with the same tensor amax)."""
    size = format.block_size
    x = gaussian(format, 3, blocks + 1)
    if has_tensor_scale(format):
        x[:, ::size] = 4.5  # every block holds the largest magnitude of the tensor
    lengths = [blocks * size + 1, blocks * size + max(size // 2, 1)] if format.allows_short_blocks else []
    for length in (*lengths, (blocks + 1) * size):
        row = formats.round(format.name, x[:, :length])
        alone = [formats.round(format.name, x[:, s : min(s + size, length)]) for s in range(0, length, size)]
        assert same_bits(row, np.concatenate(alone, axis=1))
    if not format.allows_short_blocks:
        with pytest.raises(FormatError, match="whole blocks"):
            formats.round(format.name, x[:, : size + 1])


@ALL
def test_a_short_block_is_a_block_filled_with_zeros(format: BlockCodec) -> None:
    if not format.allows_short_blocks:
        return
    x = gaussian(format, 3, 2)[:, : format.block_size + (format.block_size + 1) // 2]
    filled = np.zeros((3, 2 * format.block_size), dtype=np.float32)
    filled[:, : x.shape[1]] = x
    assert same_bits(formats.round(format.name, x), formats.round(format.name, filled)[:, : x.shape[1]])


@ALL
def test_empty_inputs_stay_empty(format: BlockCodec) -> None:
    for shape in ((0,), (3, 0), (0, format.block_size), (2, 0, 2 * format.block_size)):
        rounded = formats.round(format.name, np.zeros(shape, dtype=np.float32))
        assert rounded.shape == shape and rounded.dtype == np.float32


@ALL
def test_strides_and_leading_dimensions_do_not_matter(format: BlockCodec) -> None:
    size = format.block_size
    x = np.random.default_rng(3).standard_normal((2, 6, 4 * size)).astype(np.float32)
    for view in (x[:, ::2, ::-1], x[:, ::-1, : 2 * size], x[..., ::2], x.swapaxes(0, 1)):
        before = view.copy()
        rounded = formats.round(format.name, view)
        assert same_bits(rounded, formats.round(format.name, np.ascontiguousarray(view)))
        assert np.array_equal(view, before)
    assert same_bits(formats.round(format.name, x).reshape(12, -1), formats.round(format.name, x.reshape(12, -1)))
    one = formats.round(format.name, x[0, 0])
    assert one.shape == (4 * size,)
    if not has_tensor_scale(format):
        assert same_bits(one, formats.round(format.name, x)[0, 0])


@ALL
def test_zeros_stay_zero(format: BlockCodec) -> None:
    x = gaussian(format, 2, 3)
    x[0] = 0.0
    x[1, : format.block_size] = -0.0
    rounded = formats.round(format.name, x)
    assert (rounded[x == 0] == 0).all()
    if isinstance(format, BlockFormat) and format.element.has_negative_zero:
        assert np.array_equal(np.signbit(rounded), np.signbit(x))


@ALL
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_its_block_and_nowhere_else(format: BlockCodec, bad: float) -> None:
    size = format.block_size
    x = gaussian(format, 3, 3)
    x[0, 0] = 5.0  # the largest magnitude of the tensor is not the one that is lost
    clean = formats.round(format.name, x)
    x[1, size + size // 2] = bad
    rounded = formats.round(format.name, x)
    assert np.isnan(rounded[1, size : 2 * size]).all()
    keep = np.ones(x.shape, dtype=bool)
    keep[1, size : 2 * size] = False
    assert np.array_equal(rounded[keep], clean[keep])
    everything = formats.round(format.name, np.full((1, 2 * size), bad, dtype=np.float32))
    assert np.isnan(everything).all()


@ALL
def test_the_error_is_a_code_or_so(format: BlockCodec) -> None:
    """No value is off by more than its share of the block's largest magnitude.

    A float element: half a step of the top binade, or what the floor rule cuts off; an E4M3 scale adds 1/16. Integer
    codes of b bits: half of 2**-(b−1), all of it where the largest positive code is missing, and the rounding of
    inner scales.
    """
    x = gaussian(format, 40, 4)
    blocks = x.reshape(40, 4, -1)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    if isinstance(format, BlockFormat) and isinstance(format.element, FloatFormat):
        step = 2.0 ** -(format.element.fraction_bits + 1)
        cut = 1 - format.largest_element / 2.0 ** (format.element.emax + format.element_exponent + 1)
        scale_error = 0.0 if format.scale_rule == "ocp_floor" else 2.0**-3
        bound = max(step, cut) + scale_error
    else:
        bound = 1.15 * 2.0 ** -(format.code_bits - 1)
    error = np.abs(formats.round(format.name, x).reshape(blocks.shape) - blocks)
    assert (error <= bound * amax).all()
    assert float(error.max()) > 0


@ALL
def test_signs_and_order_survive(format: BlockCodec) -> None:
    x = np.sort(gaussian(format, 4, 1), axis=1)
    rounded = formats.round(format.name, x)
    if format.row.rule != "least squares":  # groups inside the block have scales of their own
        assert (np.diff(rounded, axis=1) >= 0).all()
    if isinstance(format, BlockFormat):
        assert (np.sign(rounded) * np.sign(x) >= 0).all()


@ALL
def test_a_block_format_has_no_table_and_saturates(format: BlockCodec) -> None:
    with pytest.raises(FormatError, match=rf"{format.name} depend on the scale.*{format.row.element}"):
        formats.table(format.name)
    with pytest.raises(FormatError, match="overflow='ieee' was asked for"):
        formats.round(format.name, np.zeros(format.block_size, dtype=np.float32), overflow="ieee")


def test_names_of_both_kinds_are_found_and_hinted() -> None:
    assert list(formats.block_names()) == sorted(formats.block_names()) == sorted(BLOCK_FORMATS)
    assert not set(formats.block_names()) & set(formats.names())
    assert {row.name for row in formats.block_rows()} == set(formats.block_names())
    bits = [row.bits_per_value for row in formats.block_rows()]
    assert bits == sorted(bits, reverse=True)
    for ask in (formats.get, formats.resolve, lambda name: formats.round(name, [0.0])):
        with pytest.raises(UnknownName, match=r"'mxfp5'; did you mean 'mxfp.*fp8_e4m3.*nvfp4"):
            ask("mxfp5")
