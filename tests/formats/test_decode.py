"""Every code of every format up to 19 bits against ml_dtypes, torch and gfloat; wider ones against NumPy."""

from __future__ import annotations

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import outsiders
import pytest
import torch

from bitwright import formats
from bitwright.errors import FormatError, UnknownName

ML_DTYPES = {
    **outsiders.ML_DTYPES,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int2": ml_dtypes.int2,
    "uint2": ml_dtypes.uint2,
}
TORCH = {**outsiders.TORCH, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}
GFLOAT = {
    "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "fp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
    "e8m0": gfloat.formats.format_info_ocp_e8m0,
}


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal as numbers, NaN to NaN, and zeros with the same sign."""
    np.testing.assert_array_equal(actual, expected)
    zero = actual == 0
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected[zero]))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_table_equals_ml_dtypes(name: str) -> None:
    bits = formats.get(name).bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = codes.view(ML_DTYPES[name]).astype(np.float64)
    assert_same(formats.table(name), expected)


@pytest.mark.parametrize("name", TORCH)
def test_table_equals_torch(name: str) -> None:
    bits = formats.get(name).bits
    codes = torch.arange(1 << bits, dtype=torch.int32).to(torch.int16 if bits > 8 else torch.uint8)
    assert_same(formats.table(name), codes.view(TORCH[name]).to(torch.float64).numpy())


def test_every_format_up_to_16_bits_has_a_judge() -> None:
    """Integers of other widths have a closed form below, nf4 its own file."""
    judged = {*ML_DTYPES, *TORCH, *GFLOAT, *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(2, 9)), "nf4"}
    assert {name for name in formats.names() if formats.get(name).bits <= 16} <= judged


@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_tables_are_twos_complement_and_binary(bits: int) -> None:
    half = 1 << (bits - 1)
    unsigned = np.arange(2 * half)
    signed = np.concatenate([np.arange(half), np.arange(-half, 0)])
    if f"uint{bits}" in formats.names():
        assert_same(formats.table(f"uint{bits}"), unsigned.astype(np.float64))
    assert_same(formats.table(f"int{bits}"), signed.astype(np.float64))


@pytest.mark.parametrize("name", GFLOAT)
def test_table_equals_gfloat(name: str) -> None:
    codes = np.arange(1 << formats.get(name).bits, dtype=np.int64)
    assert_same(formats.table(name), gfloat.decode_ndarray(GFLOAT[name], codes))


def test_tf32_is_the_upper_19_bits_of_binary32() -> None:
    words = np.arange(1 << 19, dtype=np.uint32) << np.uint32(13)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = words.view(np.float32).astype(np.float64)
    assert_same(formats.table("tf32"), expected)


@pytest.mark.parametrize(("name", "dtype", "words"), [("fp32", np.float32, np.uint32), ("fp64", np.float64, np.uint64)])
def test_wide_formats_are_numpy_views(name: str, dtype: type, words: type) -> None:
    codes = np.random.default_rng(0).integers(0, np.iinfo(words).max, 200_000, dtype=words, endpoint=True)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = codes.view(dtype).astype(np.float64)
    assert_same(formats.decode(name, codes), values)
    number = ~np.isnan(values)
    encoded = formats.encode(name, values[number], overflow="ieee")
    assert encoded.dtype == words
    np.testing.assert_array_equal(encoded, codes[number])


def test_one_byte_reads_as_half_in_fnuz() -> None:
    """SEMANTICS: the same byte read as FNUZ is half the OCP value; −0 becomes NaN."""
    ocp, fnuz = formats.table("fp8_e4m3"), formats.table("fp8_e4m3fnuz")
    shared = np.isfinite(ocp) & (np.arange(256) != 0x80)
    np.testing.assert_array_equal(fnuz[shared], ocp[shared] / 2)
    assert np.isnan(fnuz[0x80]) and ocp[0x80] == 0


def test_table_is_shared_and_read_only() -> None:
    table = formats.table("fp8_e4m3")
    assert table is formats.table("fp8_e4m3") and table.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1.0
    formats.decode("fp8_e4m3", np.arange(4))[0] = 1.0
    assert table[0] == 0.0


def test_bad_codes_are_named() -> None:
    with pytest.raises(FormatError, match=r"code 256 is not in \[0, 2\*\*8\), the codes of fp8_e4m3"):
        formats.decode("fp8_e4m3", [1, 256])
    with pytest.raises(FormatError, match=r"code -1 is not in \[0, 2\*\*4\), the codes of int4; .*stored bits"):
        formats.decode("int4", [-1])
    with pytest.raises(FormatError, match="codes of dtype float64 cannot be decoded"):
        formats.decode("int4", [1.0])
    with pytest.raises(FormatError, match=r"fp32 has 2\*\*32 values, too many for a table"):
        formats.table("fp32")
    with pytest.raises(UnknownName, match="did you mean 'fp8_e4m3'"):
        formats.decode("fp8e4m3", [0])
