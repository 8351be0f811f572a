"""The named overflow rules, each against the library that it is named after; TE's against the words of the PTX ISA."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from outsiders import ML_DTYPES, TORCH

from bitwright import formats
from bitwright.errors import UnknownName
from bitwright.formats import FloatFormat, OverflowValues

Cast = Callable[[np.ndarray], np.ndarray]

SIGNED_FLOATS = [
    name for name in formats.names() if isinstance(formats.get(name), FloatFormat) and formats.get(name).min < 0
]


def cast_by_ml_dtypes(name: str) -> Cast:
    def cast(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(ML_DTYPES[name]).astype(np.float64)

    return cast


def cast_by_torch(name: str) -> Cast:
    return lambda x: torch.from_numpy(x).to(TORCH[name]).to(torch.float64).numpy()


CASTS = [
    *(("ml_dtypes", name, cast_by_ml_dtypes(name)) for name in ML_DTYPES),
    *(("torch", name, cast_by_torch(name)) for name in TORCH),
]


def inputs_around_every_code(name: str) -> np.ndarray:
    """Each code's value, its fp32 neighbours, the ties, what lies beyond, zeros, ±Inf and NaN."""
    own = formats.table(name)
    own = np.unique(own[np.isfinite(own)])
    step = own[-1] - own[-2]
    beyond = np.concatenate([own[-1] + step * np.arange(1, 9) / 4, own[-1] * 2.0 ** np.arange(1, 12)])
    points = np.concatenate([own, own[:-1] / 2 + own[1:] / 2, beyond, -beyond])
    points = points[np.abs(points) < 3.4e38].astype(np.float32)
    near = [np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)]
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38], np.float32)
    return np.concatenate([points, *near, specials])


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal as numbers, NaN to NaN, and zeros with the same sign."""
    np.testing.assert_array_equal(actual, expected)
    zero = actual == 0
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected[zero]))


@pytest.mark.parametrize(("overflow", "name", "cast"), CASTS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_rule_is_that_of_its_library(overflow: str, name: str, cast: Cast) -> None:
    x = inputs_around_every_code(name)
    if name == "e8m0":  # both libraries round up here, however close 2**-127 is: a difference of rounding
        x = x[~((np.abs(x) > 2.0**-127) & (np.abs(x) < 1.5 * 2.0**-127))]
    assert_same(formats.round(name, x, overflow=overflow), cast(x))


def test_a_negative_nan_is_lost_like_a_positive_one() -> None:
    """ml_dtypes gives it the other zero; here the sign of a NaN is not read, as it means nothing (IEEE 754 §6.3)."""
    x = np.array([np.nan, -np.nan], np.float32)
    assert np.signbit(formats.round("fp4_e2m1", x, overflow="ml_dtypes")).tolist() == [True, True]
    assert np.signbit(cast_by_ml_dtypes("fp4_e2m1")(x)).tolist() == [True, False]


@pytest.mark.parametrize("name", [name for name in SIGNED_FLOATS if name in ML_DTYPES])
def test_te_is_the_outside_cast_of_clamped_numbers(name: str) -> None:
    """PTX ISA, cvt: with .satfinite a result beyond the range, Inf included, is the largest finite number."""
    largest = np.float32(formats.get(name).max)
    x = inputs_around_every_code(name)
    x = x[~np.isnan(x)]
    expected = cast_by_ml_dtypes(name)(np.clip(x, -largest, largest))
    assert_same(formats.round(name, x, overflow="te"), expected)


@pytest.mark.parametrize("name", SIGNED_FLOATS)
def test_te_keeps_nan_where_it_can_and_else_writes_the_largest_number(name: str) -> None:
    """PTX ISA, cvt: NaN is the canonical NaN of FP16, BF16 and FP8, the positive largest number of FP6 and FP4."""
    format = formats.get(name)
    expected = np.full(2, np.nan if format.has_nan else format.max)
    np.testing.assert_array_equal(formats.round(name, [np.nan, -np.nan], overflow="te"), expected)


def test_te_scales_saturate() -> None:
    """SEMANTICS, NVIDIA MXFP8: Inf → 0xFE in TE, NaN → 0xFF, 0 → 0x00."""
    assert formats.encode("e8m0", [np.inf, np.nan, 0.0], overflow="te").tolist() == [0xFE, 0xFF, 0x00]


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "rule", "beyond", "infinite", "nan"),
    [
        # SEMANTICS, "Overflow on cast"
        ("fp8_e4m3", "torch", 448, 448, NAN),
        ("fp8_e5m2", "torch", INF, INF, NAN),
        ("fp8_e4m3fnuz", "torch", NAN, NAN, NAN),
        ("fp8_e5m2fnuz", "torch", NAN, NAN, NAN),
        ("e8m0", "torch", NAN, NAN, NAN),
        ("fp8_e4m3", "ml_dtypes", NAN, NAN, NAN),
        ("fp8_e4m3fnuz", "ml_dtypes", NAN, NAN, NAN),
        ("fp8_e5m2", "ml_dtypes", INF, INF, NAN),
        ("fp4_e2m1", "ml_dtypes", 6, 6, -0.0),
        ("fp6_e3m2", "ml_dtypes", 28, 28, -0.0),
        ("e8m0", "ml_dtypes", NAN, NAN, NAN),
        ("fp8_e4m3", "te", 448, 448, NAN),
        ("fp8_e5m2", "te", 57344, 57344, NAN),
        ("fp4_e2m1", "te", 6, 6, 6),
        ("fp8_e4m3", "saturate", 448, 448, NAN),
        ("fp8_e5m2", "saturate", 57344, 57344, NAN),
        ("fp4_e2m1", "saturate", 6, 6, None),
        ("fp8_e4m3", "ieee", NAN, NAN, NAN),
        ("fp8_e5m2", "ieee", INF, INF, NAN),
        ("fp4_e2m1", "ieee", 6, 6, None),
        ("int4", "ml_dtypes", 7, 7, None),
        ("nf4", "te", 1, 1, None),
    ],
)
def test_three_numbers_tell_what_a_rule_does(
    name: str, rule: str, beyond: float, infinite: float, nan: float | None
) -> None:
    found = formats.overflow_values(formats.get(name), rule)
    assert found == formats.overflow_values(formats.get(name), formats.OVERFLOWS[rule])
    assert repr(found) == repr(OverflowValues(beyond=float(beyond), infinite=float(infinite), nan=nan and float(nan)))


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(UnknownName, match="unknown overflow rule 'tee'; did you mean 'te'"):
        formats.overflow_values(formats.get("fp16"), "tee")
