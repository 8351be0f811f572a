"""What becomes of one number. Judges: struct, NumPy's nextafter and spacing, ml_dtypes, Python's decimals."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.explain import beyond_range, chances, explain, explain_code
from bitwright.formats.written_number import parse_code, parse_number, through_float64

FP16, FP32, FP64 = (formats.FORMATS[name] for name in ("fp16", "fp32", "fp64"))
BF16, E4M3, NF4 = (formats.FORMATS[name] for name in ("bf16", "fp8_e4m3", "nf4"))


def random_decimals(seed: int, count: int) -> list[str]:
    """Decimals of up to 30 digits, over the exponents of fp32 and beyond, both signs."""
    draw = random.Random(seed)
    return [
        f"{draw.choice('-+')}{draw.randint(0, 9)}.{draw.randint(0, 10 ** draw.randint(1, 30))}e{draw.randint(-47, 40)}"
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.1", Fraction(1, 10)),
        (" -2.5e3 ", Fraction(-2500)),
        ("1e-45", Fraction(1, 10**45)),
        ("0x1.8p3", Fraction(12)),
        ("-0x.8p-1", Fraction(-1, 4)),
        ("-0x0.8p-1", Fraction(-1, 4)),
        ("0X1P-1074", Fraction(1, 2**1074)),
        ("−1", Fraction(-1)),
        ("inf", math.inf),
        ("-Infinity", -math.inf),
    ],
)
def test_numbers_are_read_exactly(text: str, number: Fraction | float) -> None:
    assert parse_number(text) == number and type(parse_number(text)) is type(number)


def test_zeros_keep_their_sign_and_nan_is_nan() -> None:
    assert math.copysign(1, parse_number("-0")) == math.copysign(1, parse_number("-0x0p0")) == -1
    assert parse_number("0") == Fraction(0) and isinstance(parse_number("0"), Fraction)
    assert math.isnan(parse_number("NaN"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("abc", "'abc' is no number."),
        ("ifn", "did you mean 'inf'"),
        ("0x3dcd", "--code 0x3dcd"),
        ("1e99999999999", "beyond ±5000"),
        ("", "is no number"),
    ],
)
def test_what_is_no_number_is_said(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said.replace("'", ".").replace("±", ".")):
        parse_number(text)


def test_codes_are_read_in_every_base_and_bounded() -> None:
    assert parse_code(BF16, "0x3dcd") == parse_code(BF16, "0b0_01111011_1001101") == parse_code(BF16, "15821") == 0x3DCD
    for text, said in (("0x10000", "0xffff"), ("-1", "not in"), ("12x", "no code")):
        with pytest.raises(FormatError, match=said):
            parse_code(BF16, text)


def test_a_tenth_in_bf16() -> None:
    found = explain(BF16, Fraction(1, 10))
    assert [(field.name, field.bits) for field in found.point.fields] == [
        ("sign", "0"),
        ("exponent", "01111011"),
        ("fraction", "1001101"),
    ]
    assert found.point.code == int(np.float32(0.1).astype(ml_dtypes.bfloat16).view(np.uint16)) == 0x3DCD
    assert found.error == Fraction("0.10009765625") - Fraction("0.1")
    assert found.ulp == Fraction(1, 2**11) and found.error_ulps == Fraction(1, 5)
    assert found.relative_error == Fraction("0.0009765625")
    assert (found.fate, found.point.kind, found.out_of_range) == ("rounded", "normal", False)


@pytest.mark.parametrize(("format", "code", "dtype"), [(FP32, "<f", np.float32), (FP16, "<e", np.float16)])
def test_bits_and_neighbours_are_those_of_struct_and_numpy(format: formats.Format, code: str, dtype: type) -> None:
    for text in random_decimals(0, 150):
        with np.errstate(over="ignore"):
            value = float(dtype(text))
        if not math.isfinite(value) or value == 0:
            continue
        point = explain_code(format, int.from_bytes(struct.pack(code, value), "little"))
        assert point.value == value
        assert "".join(field.bits for field in point.fields) == f"{point.code:0{format.bits}b}"
        for neighbour, direction in ((point.below, -np.inf), (point.above, np.inf)):
            with np.errstate(over="ignore"):
                beside = np.nextafter(dtype(value), dtype(direction))
            assert neighbour is not None and neighbour.value == beside
            assert struct.pack(code, beside) == neighbour.code.to_bytes(format.bits // 8, "little")
            expected = abs(Fraction(float(beside)) - Fraction(value)) if np.isfinite(beside) else None
            assert neighbour.distance == expected
        assert point.kind == ("subnormal" if abs(value) < np.finfo(dtype).smallest_normal else "normal")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ulps_are_numpys_spacing(dtype: type) -> None:
    format = FP32 if dtype is np.float32 else FP16
    for value in (
        1.0,
        1.5,
        -3.75,
        1024.5,
        0.125,
        float(np.finfo(dtype).smallest_subnormal),
        float(np.finfo(dtype).max) / 2,
    ):
        assert explain(format, Fraction(value)).ulp == Fraction(abs(float(np.spacing(dtype(value)))))


def test_errors_are_exact_decimals() -> None:
    with localcontext() as context:
        context.prec = 400
        for text in random_decimals(1, 100):
            found = explain(FP32, parse_number(text))
            if found.error is None:
                continue
            error = Decimal(found.point.value) - Decimal(text)
            assert Decimal(found.error.numerator) / Decimal(found.error.denominator) == error


def test_decimals_become_the_nearest_value_although_they_pass_through_float64() -> None:
    above_tie, below_tie = "1.00390625" + "0" * 30 + "1", "1.01171874" + "9" * 30
    assert float(above_tie) == 1 + 2**-8 and float(below_tie) == 1 + 3 * 2**-8  # float64 sees ties
    assert explain(BF16, parse_number(above_tie)).point.value == 1 + 2**-7
    assert explain(BF16, parse_number("1.00390625")).point.value == 1
    assert explain(BF16, parse_number(below_tie)).point.value == 1 + 2**-7
    assert explain(BF16, parse_number("-" + above_tie), "toward_zero").point.value == -1
    assert explain(FP16, parse_number("65519." + "9" * 40)).point.value == 65504
    assert explain(FP16, parse_number("65520")).point.value == math.inf


@pytest.mark.parametrize("name", ["fp32", "fp16", "fp8_e5m2", "nf4", "int8"])
def test_no_value_is_nearer(name: str) -> None:
    format = formats.FORMATS[name]
    for text in random_decimals(2, 150):
        number = parse_number(text)
        found = explain(format, number)
        if found.error is None or found.out_of_range:
            continue
        for neighbour in (found.point.below, found.point.above):
            if neighbour is not None and math.isfinite(neighbour.value):
                assert abs(found.error) <= abs(Fraction(neighbour.value) - Fraction(number))


def test_float64_is_what_python_reads() -> None:
    for text in [
        *random_decimals(3, 200),
        "1e-400",
        "4.9e-324",
        "2.4703282292062328e-324",
        "1e309",
        "17976931348623158e292",
    ]:
        number = parse_number(text)
        assert explain(FP64, number).point.value == float(text)
        exact = Fraction(float(text)) if math.isfinite(float(text)) else None
        down, up = (explain(FP64, number, mode).point.value for mode in ("down", "up"))
        if exact == number:
            assert down == up == float(text)
        elif exact is not None:
            assert down == (float(text) if exact < number else math.nextafter(float(text), -math.inf))
            assert up == (float(text) if exact > number else math.nextafter(float(text), math.inf))
    tie = Fraction(1) + Fraction(1, 2**53)
    assert explain(FP64, tie).point.value == 1
    assert explain(FP64, tie, "nearest_away").point.value == explain(FP64, tie, "up").point.value == 1 + 2**-52
    assert explain(FP64, -tie, "nearest_away").point.value == -1 - 2**-52


def test_the_way_through_float64_is_odd_where_anything_is_lost() -> None:
    for text in random_decimals(4, 50):
        number = parse_number(text)
        start = through_float64(BF16, number, "nearest_even")
        assert Fraction(start) == number or struct.unpack("<Q", struct.pack("<d", start))[0] % 2 == 1


@pytest.mark.parametrize(
    ("name", "text", "fate", "value"),
    [
        ("fp16", "70000", "infinite", math.inf),
        ("fp16", "-70000", "infinite", -math.inf),
        ("fp8_e4m3", "70000", "NaN", math.nan),
        ("fp8_e4m3", "460", "rounded", 448),
        ("fp8_e4m3fnuz", "300", "NaN", math.nan),
        ("fp4_e2m1", "-70000", "saturated", -6),
        ("fp4_e2m1", "inf", "saturated", 6),
        ("int8", "127.4", "rounded", 127),
        ("int8", "127.5", "saturated", 127),
        ("int8", "-128.4", "rounded", -128),
        ("uint8", "-3", "saturated", 0),
        ("uint8", "-0.3", "zero", 0),
        ("int8", "0", "exact", 0),
        ("nf4", "1.5", "saturated", 1),
        ("fp16", "3e-5", "subnormal", 503 * 2**-24),
        ("fp16", "1e-9", "zero", 0),
        ("bf16", "1.5", "exact", 1.5),
        ("bf16", "-0", "exact", -0.0),
        ("bf16", "-inf", "exact", -math.inf),
        ("fp8_e5m2", "nan", "exact", math.nan),
        ("e8m0", "0", "NaN", math.nan),
        ("int8", "-0", "sign lost", 0.0),
        ("nf4", "-0", "sign lost", 0.0),
        ("fp8_e4m3fnuz", "-0", "sign lost", 0.0),
        ("e8m0", "1e-40", "saturated", 2.0**-127),
        ("e8m0", "0x0.bfffp-127", "saturated", 2.0**-127),
        ("e8m0", "0x0.cp-127", "rounded", 2.0**-127),
        ("e8m0", "0x1.01p-127", "rounded", 2.0**-127),
        ("e8m0", "3", "rounded", 4),
        ("fp64", "1e400", "infinite", math.inf),
    ],
)
def test_fates(name: str, text: str, fate: str, value: float) -> None:
    found = explain(formats.FORMATS[name], parse_number(text))
    assert found.fate == fate
    assert found.point.value == value or (math.isnan(value) and math.isnan(found.point.value))
    assert math.copysign(1, found.point.value) == math.copysign(1, value) or math.isnan(value)


@pytest.mark.parametrize(("mode", "is_beyond"), [("up", False), ("toward_zero", True), ("nearest_away", False)])
def test_below_a_format_without_zero_is_beyond_its_range(mode: str, is_beyond: bool) -> None:
    """With one binade more, 0.8 · 2**-127 would be 2**-128 toward zero, and 2**-127 by the other modes."""
    found = explain(formats.FORMATS["e8m0"], Fraction(4, 5) / 2**127, mode)
    assert found.point.value == 2.0**-127 and found.out_of_range == is_beyond
    assert explain(formats.FORMATS["e8m0"], Fraction(1, 2**200), mode).out_of_range


def test_fates_agree_with_ml_dtypes() -> None:
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("fp8_e4m3", ml_dtypes.float8_e4m3fn)):
        format = formats.FORMATS[name]
        for text in random_decimals(5, 100):
            with np.errstate(over="ignore"):
                single = np.float32(text)
                cast = single.astype(dtype)
            code = explain(format, Fraction(float(single)) if np.isfinite(single) else float(single)).point.code
            assert code == int(cast.view(f"u{cast.itemsize}")) or np.isnan(cast.astype(np.float32))


def test_nan_is_refused_where_there_is_none_unless_a_rule_has_an_answer() -> None:
    fp4 = formats.FORMATS["fp4_e2m1"]
    with pytest.raises(FormatError, match="has no NaN"):
        explain(fp4, math.nan)
    lost = explain(fp4, math.nan, overflow="ml_dtypes")
    assert lost.fate == "NaN lost" and lost.point.code == int(
        np.array(np.nan).astype(ml_dtypes.float4_e2m1fn).view("u1")
    )


def test_every_overflow_rule_is_told() -> None:
    found = explain(FP16, Fraction(-70000), overflow="saturate")
    assert found.point.value == -65504 and found.out_of_range
    assert set(found.by_rule) == set(formats.OVERFLOWS)
    assert found.by_rule["ieee"] == float(np.float64(-70000).astype(ml_dtypes.bfloat16)) * math.inf
    beyond = beyond_range(E4M3)
    assert (
        beyond["saturate"] == beyond["torch"] == 448 and math.isnan(beyond["ieee"]) and math.isnan(beyond["ml_dtypes"])
    )


def test_ends_of_a_format_have_one_neighbour() -> None:
    largest = explain(E4M3, Fraction(448)).point
    assert largest.above is None and largest.below is not None and largest.below.value == 416
    top = explain(FP16, Fraction(65504)).point.above
    assert top is not None and top.value == math.inf and top.code == 0x7C00 and top.distance is None
    assert explain_code(formats.FORMATS["int8"], 0x80).below is None
    assert explain_code(FP16, 0x7C01).below is None and explain_code(FP16, 0x7C01).kind == "NaN"
    first = explain_code(formats.FORMATS["e8m0"], 0)
    assert first.below is None and first.above is not None and first.above.value == 2.0**-126
    zero = explain_code(formats.FORMATS["uint8"], 0)
    assert zero.below is None and zero.above is not None and zero.above.value == 1
    entry = explain_code(NF4, 7)
    assert entry.value == 0 and entry.above is not None and entry.above.code == 8


def test_fields_of_formats_without_a_sign_or_without_an_exponent() -> None:
    names = {
        name: [field.name for field in explain_code(formats.FORMATS[name], 1).fields]
        for name in ("e8m0", "int8", "uint8", "nf4")
    }
    assert names == {"e8m0": ["exponent"], "int8": ["sign", "integer"], "uint8": ["integer"], "nf4": ["index"]}


def test_chances_of_stochastic_rounding_are_the_rest() -> None:
    (near, inner), (far, outer) = chances(BF16, Fraction(1, 10))
    assert (near, inner.point.value, far, outer.point.value) == (
        Fraction(1, 5),
        0.099609375,
        Fraction(4, 5),
        0.10009765625,
    )
    assert [chance for chance, _ in chances(BF16, Fraction(1, 2))] == [1]
    assert [outcome.point.value for _, outcome in chances(FP16, Fraction(10**6))] == [math.inf]
    assert [outcome.point.value for _, outcome in chances(FP16, -math.inf)] == [-math.inf]
    assert [outcome.point.value for _, outcome in chances(BF16, -0.0)] == [0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("bf16", "-0.1"), ("fp8_e4m3", "460"), ("fp4_e2m1", "0.2"), ("nf4", "0.3"), ("int8", "-3.7"), ("fp16", "1e-7")],
)
def test_chances_are_the_frequencies_of_the_stochastic_mode(name: str, text: str) -> None:
    count = 20_000
    drawn = formats.encode(name, np.full(count, float(text)), "stochastic", "ieee", seed=3)
    seen = Counter(drawn.tolist())
    expected = {
        outcome.point.code: float(chance) for chance, outcome in chances(formats.FORMATS[name], parse_number(text))
    }
    assert set(seen) == set(expected) and math.isclose(sum(expected.values()), 1)
    for code, chance in expected.items():
        assert abs(seen[code] / count - chance) < 5 * math.sqrt(chance * (1 - chance) / count)


def test_unknown_modes_and_rules_are_named() -> None:
    with pytest.raises(UnknownName, match="nearest_even"):
        explain(BF16, Fraction(1), "nearest_evn")
    with pytest.raises(UnknownName, match="torch"):
        explain(BF16, Fraction(1), overflow="torc")
