"""Names, aliases and the rows of the format table."""

from __future__ import annotations

import math

import ml_dtypes
import pytest
import torch

from bitwright import formats
from bitwright.errors import UnknownName

#: Every format that the design's vocabulary asks for now.
NEEDED = (
    "fp64 fp32 tf32 fp16 bf16 fp8_e4m3 fp8_e5m2 fp8_e4m3fnuz fp8_e5m2fnuz fp6_e3m2 fp6_e2m3 fp4_e2m1 e8m0 "
    "fp8_e4m3_ieee fp8_e3m4 nf4 int16 int8 int7 int6 int5 int4 int3 int2 uint8 uint6 uint5 uint4 uint3 uint2"
).split()


def test_public_names_exist() -> None:
    assert all(hasattr(formats, name) for name in formats.__all__)
    assert callable(formats.round) and callable(formats.encode) and callable(formats.decode)


def test_every_needed_format_is_there() -> None:
    assert set(NEEDED) <= set(formats.names())
    assert list(formats.names()) == sorted(formats.names())


@pytest.mark.parametrize(
    "name", ["fp16", "bf16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "int8", "e8m0"]
)
def test_torch_dtypes_resolve(name: str) -> None:
    dtypes = {
        "fp16": torch.half,
        "bf16": torch.bfloat16,
        "fp32": torch.float,
        "fp64": torch.double,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
        "int8": torch.int8,
        "e8m0": torch.float8_e8m0fnu,
    }
    assert formats.resolve(str(dtypes[name])) == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (ml_dtypes.float6_e3m2fn, "fp6_e3m2"),
        (ml_dtypes.float4_e2m1fn, "fp4_e2m1"),
        (ml_dtypes.float8_e4m3, "fp8_e4m3_ieee"),
        (ml_dtypes.float8_e3m4, "fp8_e3m4"),
        (ml_dtypes.float8_e4m3fn, "fp8_e4m3"),
        (ml_dtypes.int2, "int2"),
    ],
)
def test_ml_dtypes_resolve(dtype: type, name: str) -> None:
    assert formats.resolve(dtype.__name__) == name


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("F32", "fp32"),
        ("BF16", "bf16"),
        ("F16", "fp16"),
        ("F8_E4M3", "fp8_e4m3"),
        ("F8_E5M2", "fp8_e5m2"),
        ("F8_E8M0", "e8m0"),
        ("F8_E4M3FNUZ", "fp8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "fp8_e5m2fnuz"),
        ("F6_E2M3", "fp6_e2m3"),
        ("F6_E3M2", "fp6_e3m2"),
        ("F4", "fp4_e2m1"),
        ("F64", "fp64"),
        ("I16", "int16"),
        ("I8", "int8"),
        ("U8", "uint8"),
    ],
)
def test_safetensors_dtypes_resolve(header: str, name: str) -> None:
    assert formats.resolve(header) == name


def test_the_ieee_style_e4m3_is_no_alias_of_the_ocp_one() -> None:
    """ml_dtypes means 240 and Inf by float8_e4m3, safetensors means OCP's 448 by F8_E4M3."""
    assert formats.get(formats.resolve("float8_e4m3")).max == 240
    assert formats.get(formats.resolve("F8_E4M3")).max == 448


def test_aliases_stop_at_the_borders() -> None:
    with pytest.raises(UnknownName, match="unknown format 'float16'"):
        formats.get("float16")
    with pytest.raises(
        UnknownName, match=r"unknown format 'flaot16'; did you mean 'float16'\? Known formats: bf16, e8m0"
    ):
        formats.resolve("flaot16")


def test_rows_state_the_facts() -> None:
    rows = {row.name: row for row in formats.rows()}
    assert set(rows) == set(formats.names())
    assert [row.bits for row in formats.rows() if row.has_nan] == sorted(
        (row.bits for row in formats.rows() if row.has_nan), reverse=True
    )
    e4m3 = rows["fp8_e4m3"]
    assert (e4m3.bits, e4m3.layout, e4m3.max, e4m3.min_normal, e4m3.min_subnormal) == (8, "1·4·3", 448, 2**-6, 2**-9)
    assert (e4m3.steps_per_octave, e4m3.has_inf, e4m3.has_nan) == (8, False, True)
    assert (rows["bf16"].steps_per_octave, rows["fp16"].steps_per_octave, rows["e8m0"].steps_per_octave) == (
        128,
        1024,
        1,
    )
    assert math.isclose(rows["fp32"].decimal_digits, 7.22, abs_tol=0.01)
    assert math.isclose(rows["fp64"].decimal_digits, 15.95, abs_tol=0.01)
    nf4 = rows["nf4"]
    assert (nf4.layout, nf4.min, nf4.max, nf4.steps_per_octave) == ("codebook", -1, 1, None)
    assert nf4.min_normal == 0.07958029955625534 and nf4.min_subnormal is None
    assert math.isclose(nf4.decimal_digits, -math.log10(1 - 0.6961928), rel_tol=1e-6)
    int4 = rows["int4"]
    assert (int4.layout, int4.min, int4.max, int4.steps_per_octave) == ("two's complement", -8, 7, None)
