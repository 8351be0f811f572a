"""Records: derived figures against finfo, contradictions refused, and random formats against gfloat."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats import CodebookFormat, FloatFormat, IntFormat
from bitwright.formats.decode import decode_codes, value_table
from bitwright.formats.encode import encode_values
from bitwright.formats.types import IEEE_SPECIALS, NO_SPECIALS, SIGN_NAN_SPECIALS, TOP_NAN_SPECIALS

FINFO = {
    "fp64": np.finfo(np.float64),
    "fp32": np.finfo(np.float32),
    "fp16": np.finfo(np.float16),
    "bf16": ml_dtypes.finfo(ml_dtypes.bfloat16),
    "fp8_e4m3": ml_dtypes.finfo(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": ml_dtypes.finfo(ml_dtypes.float8_e5m2),
    "fp8_e4m3fnuz": ml_dtypes.finfo(ml_dtypes.float8_e4m3fnuz),
    "fp8_e5m2fnuz": ml_dtypes.finfo(ml_dtypes.float8_e5m2fnuz),
    "fp8_e4m3_ieee": ml_dtypes.finfo(ml_dtypes.float8_e4m3),
    "fp8_e3m4": ml_dtypes.finfo(ml_dtypes.float8_e3m4),
    "fp6_e3m2": ml_dtypes.finfo(ml_dtypes.float6_e3m2fn),
    "fp6_e2m3": ml_dtypes.finfo(ml_dtypes.float6_e2m3fn),
    "fp4_e2m1": ml_dtypes.finfo(ml_dtypes.float4_e2m1fn),
}


@pytest.mark.parametrize("name", FINFO)
def test_figures_equal_finfo(name: str) -> None:
    format, finfo = formats.get(name), FINFO[name]
    assert isinstance(format, FloatFormat)
    assert format.bits == finfo.bits
    assert format.max == float(finfo.max) and format.min == float(finfo.min)
    assert format.min_normal == float(finfo.smallest_normal)
    assert format.min_subnormal == float(finfo.smallest_subnormal)
    assert format.fraction_bits == finfo.nmant
    assert format.emin == finfo.minexp
    assert format.emax == math.floor(math.log2(float(finfo.max)) if name != "fp64" else 1023)


def test_e8m0_figures() -> None:
    """OCP MX 1.0, table 7: 2**-127 to 2**127, no zero; torch says the same."""
    e8m0 = formats.get("e8m0")
    assert isinstance(e8m0, FloatFormat)
    assert (e8m0.bits, e8m0.min, e8m0.min_normal, e8m0.max) == (8, 2.0**-127, 2.0**-127, 2.0**127)
    assert (e8m0.min_subnormal, e8m0.has_zero, e8m0.has_inf, e8m0.has_nan) == (None, False, False, True)
    assert torch.finfo(torch.float8_e8m0fnu).max == e8m0.max


@pytest.mark.parametrize(
    ("name", "emax"), [("fp8_e4m3", 8), ("fp8_e5m2", 15), ("fp6_e3m2", 4), ("fp6_e2m3", 2), ("fp4_e2m1", 2)]
)
def test_emax_of_the_mx_elements(name: str, emax: int) -> None:
    """OCP MX 1.0: the exponent of the largest normal, which the shared scale is computed with."""
    assert formats.get(name).emax == emax


def test_integer_figures() -> None:
    assert [(formats.get(n).min, formats.get(n).max) for n in ("int8", "int4", "int3", "int2", "uint8", "uint2")] == [
        (-128, 127),
        (-8, 7),
        (-4, 3),
        (-2, 1),
        (0, 255),
        (0, 3),
    ]


def make(**changes: Any) -> FloatFormat:
    facts: dict[str, Any] = {
        "name": "mine",
        "exponent_bits": 4,
        "fraction_bits": 3,
        "bias": 7,
        "specials": IEEE_SPECIALS,
        "source": "a test",
        "golden": ((0, 0.0),),
    }
    return FloatFormat(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exponent_bits": 0}, "has 0 exponent and 3 fraction bits; give at least 1"),
        ({"exponent_bits": 11, "fraction_bits": 53, "bias": 1023}, "at most 64 in all"),
        ({"fraction_bits": 0}, "has Inf but no fraction bits"),
        ({"specials": SIGN_NAN_SPECIALS, "signed": False}, "has no −0 code to be its NaN"),
        ({"bias": 1100}, r"reaches from 2\*\*-1102 to"),
        ({"bias": -3}, r"reaches from 2\*\*1 to"),
        ({"exponent_bits": 11, "bias": 1000}, "a format must fit float64"),
        ({"source": " "}, "has no source; name the document"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        make(**changes)


@pytest.mark.parametrize(("bits", "signed"), [(0, False), (1, True), (33, False)])
def test_integer_widths_are_checked(bits: int, signed: bool) -> None:
    with pytest.raises(FormatError, match=f"has {bits} bits; give 1 to 32, at least 2 where signed"):
        IntFormat(name="mine", bits=bits, signed=signed, source="a test", golden=((0, 0.0),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 0, "values": (1.0,)}, "has 0 bits; give a codebook 1 to 16"),
        ({"values": (0.0, 1.0, 2.0)}, "lists 3 values for 2 bits; list 4, one per code"),
        ({"values": (0.0, 1.0, 2.0, 0.1)}, "lists 0.1, which is no finite fp32 number"),
        ({"values": (0.0, 1.0, 2.0, math.inf)}, "lists inf, which is no finite fp32 number"),
        ({"values": (0.0, 1.0, 2.0, math.nan)}, "lists nan, which is no finite fp32 number"),
        ({"values": (0.0, 1.0, 2.0, 1e39)}, "lists 1e.39, which is no finite fp32 number"),
        ({"values": (-0.0, 1.0, 2.0, 3.0)}, "lists −0, which a codebook cannot tell from 0"),
        ({"values": (3.0, 1.0, 2.0, 3.0)}, "lists 3.0 twice"),
        ({"values": (-3.0, -1.0, -2.0, 0.0)}, "has no positive value"),
        ({"source": ""}, "has no source"),
    ],
)
def test_contradictory_codebooks_are_refused(changes: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {"name": "mine", "bits": 2, "values": (0.0, 1.0, 2.0, 3.0), "source": "a test"}
    with pytest.raises(FormatError, match=message):
        CodebookFormat(**(facts | changes))


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().bias = 8  # type: ignore[misc]


@st.composite
def float_formats(draw: st.DrawFn) -> FloatFormat:
    """Small signed formats of every kind of specials."""
    specials = draw(st.sampled_from([IEEE_SPECIALS, TOP_NAN_SPECIALS, SIGN_NAN_SPECIALS, NO_SPECIALS]))
    exponent_bits = draw(st.integers(2, 5))
    fraction_bits = draw(st.integers(1, 4))
    bias = draw(st.integers(2, 40))
    return make(exponent_bits=exponent_bits, fraction_bits=fraction_bits, bias=bias, specials=specials)


def as_gfloat(format: FloatFormat) -> gfloat.FormatInfo:
    top_nans = 2**format.fraction_bits - 1 if format.has_inf else int(format.specials == TOP_NAN_SPECIALS)
    return gfloat.FormatInfo(
        format.name,
        k=format.bits,
        precision=format.fraction_bits + 1,
        bias=format.bias,
        is_signed=True,
        domain=gfloat.Domain.Extended if format.has_inf else gfloat.Domain.Finite,
        has_nz=format.has_negative_zero,
        num_high_nans=top_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(format=float_formats(), seed=st.integers(0, 2**32 - 1))
def test_random_formats_equal_gfloat(format: FloatFormat, seed: int) -> None:
    info = as_gfloat(format)
    table = value_table(format)
    np.testing.assert_array_equal(table, gfloat.decode_ndarray(info, np.arange(1 << format.bits, dtype=np.int64)))
    rng = np.random.default_rng(seed)
    x = 2.0 ** rng.uniform(format.emin - format.fraction_bits - 2, format.emax + 2, 200) * rng.choice([-1.0, 1.0], 200)
    x = np.concatenate([x, table[np.isfinite(table)], [np.inf, -np.inf]])
    rounded = decode_codes(format, encode_values(format, x))
    np.testing.assert_array_equal(rounded, gfloat.round_ndarray(info, x, gfloat.RoundMode.TiesToEven, True))
    assert format.max == float(info.max) and format.emax == info.emax


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(formats.names()),
    a=st.floats(allow_nan=False),
    b=st.floats(allow_nan=False),
    rounding=st.sampled_from(list(formats.ROUNDINGS)),
)
def test_rounding_keeps_order(name: str, a: float, b: float, rounding: str) -> None:
    # one call each: the element at index 0 draws the same random bits
    low, high = (formats.round(name, x, rounding, seed=0) for x in sorted([a, b]))
    assert low <= high


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from([n for n in formats.names() if isinstance(formats.get(n), FloatFormat) and n != "e8m0"]),
    x=st.floats(allow_nan=False),
)
def test_signed_floats_round_symmetrically(name: str, x: float) -> None:
    assert formats.round(name, -x) == -formats.round(name, x)
    assert formats.round(name, -x, "up") == -formats.round(name, x, "down")
