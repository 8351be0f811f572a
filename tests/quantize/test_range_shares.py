"""What a format does to a histogram, against casts of the values themselves by ml_dtypes and torch."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError, UnknownName
from bitwright.quantize.range_shares import fates_by_octave, judge_octave, range_shares, scale_to_largest
from bitwright.quantize.statistics import measure_statistics

#: Format → (dtype of ml_dtypes or NumPy, smallest normal value by its data sheet).
CASTS = {
    "bf16": (ml_dtypes.bfloat16, 2.0**-126),
    "fp16": (np.float16, 2.0**-14),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 2.0**-6),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 2.0**-14),
    "fp8_e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 2.0**-7),
    "fp6_e3m2": (ml_dtypes.float6_e3m2fn, 0.25),
    "fp6_e2m3": (ml_dtypes.float6_e2m3fn, 1.0),
    "fp4_e2m1": (ml_dtypes.float4_e2m1fn, 1.0),
}
#: Formats whose data sheets know no sign.
UNSIGNED = {"e8m0", "uint8", "uint6", "uint5", "uint4", "uint3", "uint2"}
SIGNED = sorted(set(formats.FORMATS) - UNSIGNED)
#: Magnitude from which on a format without Inf and NaN rounds beyond its largest value: half a step above it.
LIMITS = {"fp6_e3m2": 30.0, "fp6_e2m3": 7.75, "fp4_e2m1": 7.0}


def cast_shares(x: np.ndarray, name: str) -> dict[str, float]:
    """Shares by casting every value."""
    dtype, min_normal = CASTS[name]
    values = x.astype(np.float32)
    with np.errstate(over="ignore"):
        rounded = np.abs(values.astype(dtype).astype(np.float64))
    overflow = np.abs(values) >= LIMITS[name] if name in LIMITS else ~np.isfinite(rounded)
    nonzero = values != 0
    return {
        "zero": float((~nonzero).mean()),
        "flushed": float((nonzero & (rounded == 0)).mean()),
        "subnormal": float(((rounded > 0) & (rounded < min_normal) & ~overflow).mean()),
        "normal": float(((rounded >= min_normal) & ~overflow).mean()),
        "overflow": float(overflow.mean()),
    }


def spread(dtype: type, seed: int = 0, num: int = 40_000) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.standard_normal(num) * 2.0 ** random.integers(-30, 18, num)
    x[::50] = 0
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("kept_as", ["itself", "float32"])
def test_shares_of_bf16_values_are_exact(name: str, kept_as: str) -> None:
    # Every magnitude of bf16 once: all ties and all edges of every format are among them.
    every = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    for x in (every, spread(ml_dtypes.bfloat16).astype(np.float32)):
        found = range_shares(
            measure_statistics(x if kept_as == "float32" else x.astype(ml_dtypes.bfloat16)).histogram, name
        )
        for share, expected in cast_shares(x, name).items():
            assert getattr(found, share) == pytest.approx(expected, abs=1e-12), share


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda dtype: dtype.__name__)
def test_shares_of_finer_values_err_by_what_lies_in_the_bins_at_the_edges(name: str, dtype: type) -> None:
    x = spread(np.float32)
    x = np.clip(x, -60000, 60000).astype(dtype)
    found = range_shares(measure_statistics(x).histogram, name)
    for share, expected in cast_shares(x, name).items():
        # A bin has 1/128 of an octave, and an octave holds some 3 % of these values.
        assert getattr(found, share) == pytest.approx(expected, abs=4 * 0.03 / 128), share


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1", "int8"])
@pytest.mark.parametrize("scale", [0.37, 2.0**-9, 5e3])
def test_values_are_divided_by_the_scale(name: str, scale: float) -> None:
    x = spread(ml_dtypes.bfloat16).astype(np.float64)
    rounded = formats.round(name, np.abs(x) / scale)
    found = range_shares(measure_statistics(x).histogram, name, scale)
    assert found.flushed == pytest.approx(((rounded == 0) & (x != 0)).mean(), abs=1e-12)
    assert found.signal == pytest.approx((x**2).sum(), rel=1e-12)
    assert found.noise == pytest.approx(((np.abs(x) - scale * rounded) ** 2).sum(), rel=1e-12)


@pytest.mark.parametrize(
    ("source", "name", "tolerance_db"),
    [
        (ml_dtypes.bfloat16, "fp8_e4m3", 1e-9),
        (np.float32, "bf16", 0.5),
        (np.float32, "fp16", 0.5),
        (np.float32, "fp8_e4m3", 0.1),
        (np.float32, "fp4_e2m1", 0.1),
        (np.float16, "fp8_e5m2", 0.1),
        (np.float16, "bf16", 0.5),
    ],
)
def test_signal_to_noise_is_that_of_the_values(source: type, name: str, tolerance_db: float) -> None:
    x = np.random.default_rng(5).standard_normal(100_000).astype(source).astype(np.float64)
    rounded = x.astype(np.float32).astype(CASTS[name][0]).astype(np.float64)
    expected = 10 * math.log10((x**2).sum() / ((x - rounded) ** 2).sum())
    assert range_shares(measure_statistics(x).histogram, name).sqnr_db == pytest.approx(expected, abs=tolerance_db)


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float32, "fp32"), (np.float16, "fp16"), (ml_dtypes.bfloat16, "bf16"), (np.float16, "tf32")]
)
def test_a_format_keeps_its_own_values(dtype: type, name: str) -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    found = range_shares(measure_statistics(x).histogram, name)
    assert (found.noise, found.sqnr_db, found.flushed, found.overflow) == (0.0, math.inf, 0.0, 0.0)


@pytest.mark.parametrize("name", SIGNED)
def test_shares_add_up_to_one_in_every_format(name: str) -> None:
    found = range_shares(measure_statistics(spread(np.float32)).histogram, name)
    assert found.zero + found.flushed + found.subnormal + found.normal + found.overflow == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
def test_scaled_to_its_largest_nothing_overflows(name: str, dtype: type) -> None:
    statistics = measure_statistics(np.random.default_rng(1).standard_normal(5000).astype(dtype))
    scale = scale_to_largest(statistics.amax, name)
    assert range_shares(statistics.histogram, name, scale).overflow == 0


def test_shares_of_two_tensors_add_up() -> None:
    one, two = spread(ml_dtypes.bfloat16, seed=1, num=1000), 300 * spread(ml_dtypes.bfloat16, seed=2, num=3000)
    together = range_shares(measure_statistics(np.concatenate([one, two])).histogram, "fp8_e4m3")
    first, second = (range_shares(measure_statistics(x).histogram, "fp8_e4m3") for x in (one, two))
    added = first + second
    for field in ("num", "zero", "flushed", "subnormal", "normal", "overflow", "signal", "noise"):
        assert getattr(added, field) == pytest.approx(getattr(together, field), rel=1e-12), field


def test_nothing_finite_has_no_shares() -> None:
    found = range_shares(measure_statistics(np.array([np.nan, np.inf])).histogram, "fp8_e4m3")
    assert (found.num, found.zero, found.normal, found.overflow) == (0, 0, 0, 0)
    assert math.isnan(found.sqnr_db)
    zeros = range_shares(measure_statistics(np.zeros(4)).histogram, "fp8_e4m3")
    assert (zeros.zero, zeros.normal) == (1, 0) and math.isnan(zeros.sqnr_db)


def test_octaves_of_e4m3_are_those_of_its_table() -> None:
    # OFP8 1.0, table 2: subnormals from 2**-9, normal from 2**-6, largest 448.
    fates = {exponent: judge_octave("fp8_e4m3", exponent) for exponent in range(-12, 11)}
    assert [k for k, fate in fates.items() if fate == "zero"] == [-12, -11]
    assert [k for k, fate in fates.items() if fate == "subnormal"] == [-10, -9, -8, -7]
    assert [k for k, fate in fates.items() if fate == "overflow"] == [9, 10]
    assert judge_octave("fp8_e4m3", 9, scale=2.0) == "normal"


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-7])
def test_fates_of_an_octave_are_those_of_the_values_in_it(name: str, scale: float) -> None:
    dtype, min_normal = CASTS[name]
    values = np.abs(spread(ml_dtypes.bfloat16, num=4000)).astype(np.float32)
    values = values[values > 0]
    with np.errstate(over="ignore"):
        rounded = (values / np.float32(scale)).astype(dtype).astype(np.float32)
    overflow = values / scale >= LIMITS[name] if name in LIMITS else ~np.isfinite(rounded)
    met = np.select([overflow, rounded == 0, rounded < min_normal], ["overflow", "zero", "subnormal"], "normal")
    octaves = np.floor(np.log2(values.astype(np.float64))).astype(int)
    expected = {int(octave): frozenset(met[octaves == octave].tolist()) for octave in np.unique(octaves)}
    assert fates_by_octave(measure_statistics(values).histogram, name, scale) == expected
    assert any(len(fates) > 1 for fates in expected.values()) or name in ("bf16", "fp16")


def test_fates_below_the_largest_are_found_by_its_octaves() -> None:
    # Scaled, 1024 lies on 448: 1 → 0.4375, 2**-8 → 0.0017 (subnormal), 2**-12 → 0.0001 (0). Octaves end at their top.
    histogram = measure_statistics(np.array([1024.0, 1.0, 2.0**-8, 2.0**-12])).histogram
    found = fates_by_octave(histogram, "fp8_e4m3", 1024 / 448, below_amax=True)
    assert found == {-1: {"normal"}, -11: {"normal"}, -19: {"subnormal"}, -23: {"zero"}}
    assert set(found) == set(histogram.octaves_below_amax())


@pytest.mark.parametrize("name", sorted(UNSIGNED))
def test_formats_without_negative_numbers_are_refused(name: str) -> None:
    histogram = measure_statistics(np.array([-1.0, 1.0])).histogram
    for judge in (range_shares, fates_by_octave):
        with pytest.raises(FormatError, match=f"{name} holds no negative numbers, .*magnitudes.*name signed formats"):
            judge(histogram, name)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_is_positive(scale: float) -> None:
    with pytest.raises(FormatError, match="the scale is"):
        range_shares(measure_statistics(np.ones(2)).histogram, "bf16", scale)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'bf16'"):
        range_shares(measure_statistics(np.ones(2)).histogram, "bf61")
