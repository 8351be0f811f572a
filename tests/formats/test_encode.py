"""Overflow rules and what `encode` refuses."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError, UnknownName
from bitwright.formats import FloatFormat
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values
from bitwright.formats.types import NO_SPECIALS


@pytest.mark.parametrize(
    ("name", "x", "saturate", "ieee"),
    [
        # OCP E4M3: 464 is the tie between 448 and the missing 480, and goes to the even 448
        ("fp8_e4m3", 464.0, 448.0, 448.0),
        ("fp8_e4m3", math.nextafter(464.0, math.inf), 448.0, math.nan),
        ("fp8_e4m3", math.inf, 448.0, math.nan),
        ("fp8_e4m3", -math.inf, -448.0, math.nan),
        ("fp8_e5m2", math.nextafter(61440.0, 0), 57344.0, 57344.0),
        ("fp8_e5m2", 61440.0, 57344.0, math.inf),
        ("fp8_e5m2", -61440.0, -57344.0, -math.inf),
        ("fp8_e5m2", math.inf, 57344.0, math.inf),
        # FNUZ: the tie above 240 goes to the missing 256, hence NaN
        ("fp8_e4m3fnuz", math.nextafter(248.0, 0), 240.0, 240.0),
        ("fp8_e4m3fnuz", 248.0, 240.0, math.nan),
        ("fp8_e5m2fnuz", 61440.0, 57344.0, math.nan),
        # IEEE 754 §7.4: 65520 is the threshold of binary16
        ("fp8_e4m3_ieee", math.nextafter(248.0, 0), 240.0, 240.0),
        ("fp8_e4m3_ieee", 248.0, 240.0, math.inf),
        ("fp8_e3m4", -15.75, -15.5, -math.inf),
        ("fp16", math.nextafter(65520.0, 0), 65504.0, 65504.0),
        ("fp16", 65520.0, 65504.0, math.inf),
        ("fp6_e3m2", 1e9, 28.0, 28.0),
        ("fp6_e2m3", -math.inf, -7.5, -7.5),
        ("fp4_e2m1", 5.0, 4.0, 4.0),
        ("fp4_e2m1", 7.0, 6.0, 6.0),
        ("int8", -1000.0, -128.0, -128.0),
        ("uint4", -1.0, 0.0, 0.0),
        ("int4", math.inf, 7.0, 7.0),
        ("nf4", 1e9, 1.0, 1.0),
        ("nf4", -math.inf, -1.0, -1.0),
    ],
)
def test_overflow_at_its_threshold(name: str, x: float, saturate: float, ieee: float) -> None:
    np.testing.assert_array_equal(formats.round(name, x, overflow="saturate"), saturate)
    np.testing.assert_array_equal(formats.round(name, x, overflow="ieee"), ieee)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("fp16", 0x7E00),
        ("bf16", 0x7FC0),
        ("fp32", 0x7FC00000),
        ("fp8_e4m3", 0x7F),
        ("fp8_e4m3fnuz", 0x80),
        ("e8m0", 0xFF),
    ],
)
def test_nan_is_written_as_the_quiet_nan(name: str, code: int) -> None:
    assert formats.encode(name, [np.nan, -np.nan]).tolist() == [code, code]


def test_code_dtypes_are_the_narrowest() -> None:
    widths = {name: formats.encode(name, 1.0).dtype for name in ("int2", "e8m0", "bf16", "tf32", "fp64")}
    assert widths == {"int2": np.uint8, "e8m0": np.uint8, "bf16": np.uint16, "tf32": np.uint32, "fp64": np.uint64}


@pytest.mark.parametrize(
    "x",
    [
        [1, 2, 3],
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], np.float16),
        np.array([1, 2, 3], ml_dtypes.bfloat16),
        np.array([1, 2, 3], ml_dtypes.float8_e4m3fn),
    ],
    ids=str,
)
def test_any_exact_input_is_taken(x: np.ndarray) -> None:
    assert formats.round("fp8_e4m3", x).tolist() == [1.0, 2.0, 3.0]
    assert formats.round("int4", True).tolist() == 1.0


def test_signalling_nans_are_read_in_silence() -> None:
    x = np.array([0x7F800001, 0xFFBFFFFF], np.uint32).view(np.float32)
    assert formats.encode("bf16", x).tolist() == [0x7FC0, 0x7FC0]


def test_inputs_that_float64_would_change_are_refused() -> None:
    with pytest.raises(FormatError, match=r"integers up to 9007199254740993 do not fit float64 exactly"):
        formats.encode("fp16", np.array([2**53 + 1]))
    with pytest.raises(FormatError, match="values of dtype complex128 cannot be rounded"):
        formats.encode("fp16", [1j])
    with pytest.raises(FormatError, match="values of dtype <U3 cannot be rounded"):
        formats.encode("fp16", ["1.0"])
    with pytest.raises(FormatError, match="values of dtype object cannot be rounded"):
        formats.encode("fp16", [None])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant == 52, reason="long double is float64 on this machine")
def test_extended_precision_is_refused() -> None:
    with pytest.raises(FormatError, match="cannot be rounded; pass real numbers of at most 64 bits"):
        formats.encode("fp16", np.ones(2, np.longdouble))


def test_inputs_are_left_alone() -> None:
    x = np.array([0.1, 1e9, -3.0])
    formats.round("fp8_e4m3", x)
    assert x.tolist() == [0.1, 1e9, -3.0]


def test_unknown_overflow_names_those_that_exist() -> None:
    with pytest.raises(UnknownName, match=r"unknown overflow rule 'saturated'; did you mean 'saturate'\? Known: satu"):
        formats.encode("fp16", [1.0], overflow="saturated")


def test_a_signed_format_without_zero_keeps_the_sign_of_its_smallest_value() -> None:
    number = FloatFormat(
        name="signed_powers",
        exponent_bits=3,
        fraction_bits=0,
        bias=3,
        specials=NO_SPECIALS,
        has_zero=False,
        source="sign and exponent: ±2^(e − 3)",
    )
    codes = encode_values(number, [0.125, -0.125, -0.01, -1.0, 16.0])
    assert codes.tolist() == [0b0000, 0b1000, 0b1000, 0b1011, 0b0111]
    assert decode_codes(number, codes).tolist() == [0.125, -0.125, -0.125, -1.0, 16.0]
