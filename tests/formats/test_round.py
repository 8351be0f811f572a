"""Rounding against outside casts: a million stratified fp32 inputs per format; every mode against gfloat."""

from __future__ import annotations

from collections.abc import Callable

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from outsiders import ML_DTYPES, TORCH
from stratified import quiet, stratified_inputs

from bitwright import formats
from bitwright.errors import UnknownName
from bitwright.formats import IntFormat


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal as numbers, NaN to NaN, and zeros with the same sign."""
    np.testing.assert_array_equal(actual, expected)
    zero = actual == 0
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected[zero]))


def numpy_cast(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    def cast(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(dtype).astype(np.float64)

    return cast


def torch_cast(dtype: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: torch.from_numpy(x).to(dtype).to(torch.float64).numpy()


#: E8M0 is judged apart: both libraries round it up near its smallest value.
JUDGED_BY_ML_DTYPES = [name for name in ML_DTYPES if name != "e8m0"]
JUDGED_BY_TORCH = [name for name in TORCH if name != "e8m0"]


def inputs_of(name: str) -> np.ndarray:
    """A million fp32 inputs."""
    return quiet(stratified_inputs(formats.get(name)))


@pytest.mark.parametrize("name", JUDGED_BY_ML_DTYPES)
def test_a_million_inputs_round_as_in_ml_dtypes(name: str) -> None:
    x = inputs_of(name)
    assert_same(formats.round(name, x, overflow="ml_dtypes"), numpy_cast(ML_DTYPES[name])(x))


@pytest.mark.parametrize("name", JUDGED_BY_TORCH)
def test_a_million_inputs_round_as_in_torch(name: str) -> None:
    x = inputs_of(name)
    assert_same(formats.round(name, x, overflow="torch"), torch_cast(TORCH[name])(x))


E8M0_CASTS = {"ml_dtypes": numpy_cast(ml_dtypes.float8_e8m0fnu), "torch": torch_cast(torch.float8_e8m0fnu)}


@pytest.mark.parametrize("who", E8M0_CASTS)
def test_a_million_inputs_round_to_e8m0_as_in(who: str) -> None:
    """torch drops the sign; zero and negative numbers are NaN to ml_dtypes. One stretch differs: see the next test."""
    x = inputs_of("e8m0")
    x = x[~((np.abs(x) > 2.0**-127) & (np.abs(x) < 1.5 * 2.0**-127))]
    assert_same(formats.round("e8m0", x, overflow=who), E8M0_CASTS[who](x))


@pytest.mark.parametrize("who", E8M0_CASTS)
def test_e8m0_above_its_smallest_value_is_nearest_here_and_up_elsewhere(who: str) -> None:
    """torch 2.13 and ml_dtypes 0.6 step up from any fp32 subnormal above 2**-127, however close it is."""
    x = np.float32(2.0**-127) * np.array([1.01, 1.25, 1.49], np.float32)
    assert formats.round("e8m0", x).tolist() == [2.0**-127] * 3
    assert E8M0_CASTS[who](x).tolist() == [2.0**-126] * 3


def test_e8m0_has_no_zero_and_no_sign() -> None:
    x = np.array([0.0, -0.0, -1.0, -np.inf, 2.0**-140])
    smallest = 2.0**-127
    assert formats.round("e8m0", x).tolist() == [smallest] * 5
    assert_same(formats.round("e8m0", x, overflow="ieee"), E8M0_CASTS["ml_dtypes"](x))


def test_fp32_equals_the_cast_of_numpy_in_every_mode() -> None:
    rng = np.random.default_rng(3)
    x = 2.0 ** rng.uniform(-152, 129, 50_000) * rng.choice([-1.0, 1.0], 50_000)
    values = x[np.abs(x) < 1e38].astype(np.float32).astype(np.float64)
    ties = values / 2 + np.nextafter(values.astype(np.float32), np.float32(np.inf)) / 2
    x = np.concatenate([x, values, ties, np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf), [np.inf, -np.inf]])
    nearest32 = numpy_cast(np.float32)(x)
    assert_same(formats.round("fp32", x, overflow="ieee"), nearest32)
    step_down = np.nextafter(nearest32.astype(np.float32), np.float32(-np.inf)).astype(np.float64)
    step_up = np.nextafter(nearest32.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    down = formats.round("fp32", x, "down", "ieee")
    np.testing.assert_array_equal(down, np.where(nearest32 > x, step_down, nearest32))
    up = formats.round("fp32", x, "up", "ieee")
    np.testing.assert_array_equal(up, np.where(nearest32 < x, step_up, nearest32))


@pytest.mark.parametrize("rounding", formats.ROUNDINGS)
@pytest.mark.parametrize("overflow", formats.OVERFLOWS)
def test_fp64_leaves_every_number_alone(rounding: str, overflow: str) -> None:
    words = np.random.default_rng(5).integers(0, 1 << 64, 20_000, dtype=np.uint64)
    x = words.view(np.float64)
    x = np.concatenate([x[~np.isinf(x)], [5e-324, -5e-324, 0.0, -0.0, 1.7976931348623157e308]])
    assert_same(formats.round("fp64", x, rounding, overflow, seed=0), x)


GFLOAT = {
    "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "fp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
    "tf32": gfloat.FormatInfo(
        "tf32",
        k=19,
        precision=11,
        bias=127,
        has_nz=True,
        domain=gfloat.Domain.Extended,
        num_high_nans=2**10 - 1,
        has_subnormals=True,
        is_signed=True,
        is_twos_complement=False,
    ),
    "fp8_e4m3fnuz": gfloat.FormatInfo(
        "fp8_e4m3fnuz",
        k=8,
        precision=4,
        bias=8,
        has_nz=False,
        domain=gfloat.Domain.Finite,
        num_high_nans=0,
        has_subnormals=True,
        is_signed=True,
        is_twos_complement=False,
    ),
}
MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def test_every_mode_has_its_judge() -> None:
    """Stochastic rounding has a file of its own."""
    assert {*MODES, "stochastic"} == set(formats.ROUNDINGS)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
@pytest.mark.parametrize("name", GFLOAT)
def test_every_mode_equals_gfloat(name: str, overflow: str, rounding: str) -> None:
    format = formats.get(name)
    x = quiet(stratified_inputs(format, 20_000)).astype(np.float64)
    if not format.has_nan:
        x = x[~np.isnan(x)]
    saturates = overflow == "saturate" or not format.has_nan  # gfloat raises where neither Inf nor NaN exists
    expected = gfloat.round_ndarray(GFLOAT[name], x, MODES[rounding], saturates)
    assert_same(formats.round(name, x, rounding, overflow), expected)


#: Closed forms of the five modes on integers.
INTEGER_MODES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nearest_even": np.rint,
    "nearest_away": lambda x: np.trunc(x + np.copysign(0.5, x)),
    "toward_zero": np.trunc,
    "up": np.ceil,
    "down": np.floor,
}


@pytest.mark.parametrize("rounding", INTEGER_MODES)
@pytest.mark.parametrize("name", [name for name in formats.names() if isinstance(formats.get(name), IntFormat)])
def test_integers_equal_their_closed_form(name: str, rounding: str) -> None:
    signed, bits = not name.startswith("u"), int(name.partition("int")[2])
    quarters = np.concatenate([np.arange(-1400, 1401), np.arange(130_900, 131_200), np.arange(-131_200, -130_900)]) / 4
    x = np.concatenate([quarters, [1e300, -1e300, np.inf, -np.inf]])
    lowest, highest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    expected = np.clip(INTEGER_MODES[rounding](x), lowest, highest)
    np.testing.assert_array_equal(formats.round(name, x, rounding), expected)
    np.testing.assert_array_equal(formats.encode(name, x, rounding), expected.astype(np.int64) & (2**bits - 1))


def test_unknown_rounding_names_those_that_exist() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown rounding 'nearest-even'; did you mean 'nearest_even'\? Known: near"
    ):
        formats.round("fp16", [1.0], "nearest-even")
