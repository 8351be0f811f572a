"""Rounding on fp32 bit patterns, judged by the reference in `formats`, by ml_dtypes and by torch's own casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from outsiders import ML_DTYPES, TORCH

from bitwright import formats
from bitwright.formats import Format
from bitwright.quantize.backends.torch import round_values
from bitwright.quantize.backends.torch_rounding import round_to_format

#: fp64 is no format that fp32 values are rounded to: it holds them all.
NAMES = [name for name in formats.names() if name != "fp64"]
ALL = pytest.mark.parametrize("number", [formats.get(name) for name in NAMES], ids=lambda f: f.name)

TORCH_DTYPES = {name: dtype for name, dtype in TORCH.items() if name != "e8m0"}


def fp32_inputs(number: Format) -> np.ndarray:
    """Every fp32 exponent with random fractions, and at each value of the format: itself, ties, their neighbours."""
    rng = np.random.default_rng(0)
    spread = rng.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    own = formats.table(number.name) if number.bits <= 16 else np.array([0.0, number.max, number.min])
    own = np.unique(own[np.isfinite(own)])
    if own.size > 2000:
        own = own[np.unique(np.linspace(0, own.size - 1, 2000).astype(int))]
    ties = own[:-1] / 2 + own[1:] / 2
    beyond = number.max * np.array([1 + 2.0**-8, 1.0357142857142858, 1.0625, 1.25, 1.5, 2.0, 4.0])
    points = np.concatenate([own, ties, beyond, -beyond, np.zeros(1)])
    points = points[np.abs(points) <= np.finfo(np.float32).max].astype(np.float32)
    with np.errstate(over="ignore"):
        below, above = (np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf))
    around = np.concatenate([points, below, above])
    tiny = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, -1.1754942e-38], dtype=np.float32)
    x = np.concatenate([spread, around, tiny, np.array([np.inf, -np.inf], dtype=np.float32)])
    return x[~np.isnan(x)]


def assert_same_bits(found: torch.Tensor, expected: np.ndarray, x: np.ndarray) -> None:
    """Equal fp32 bit patterns, every NaN being one."""
    got = found.numpy()
    want = expected.astype(np.float32)
    differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    assert not differs.any(), list(zip(x[differs][:5], got[differs][:5], want[differs][:5], strict=True))


@ALL
@pytest.mark.parametrize("overflow", ["saturate", "ieee"])
def test_agrees_with_the_reference_bit_for_bit(number: Format, overflow: str) -> None:
    x = fp32_inputs(number)
    expected = formats.round(number.name, x, overflow=overflow)
    assert_same_bits(round_values(torch.from_numpy(x), number, overflow=overflow), expected, x)
    if overflow == "saturate":
        # fp32 is the identity: no infinity is hidden by saturating it
        x, expected = (x[np.isfinite(x)], expected[np.isfinite(x)]) if number.name == "fp32" else (x, expected)
        assert_same_bits(round_to_format(torch.from_numpy(x), number), expected, x)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_agrees_with_ml_dtypes_within_the_range(name: str) -> None:
    number = formats.get(name)
    x = fp32_inputs(number)
    x = x[np.abs(x) <= number.max]
    if name == "e8m0":
        # No zero and no sign: ml_dtypes answers NaN, saturating gives the smallest value. Between 2^-127 and 2^-126,
        # which are subnormal in fp32, ml_dtypes 0.6 rounds everything up.
        x = x[x >= 2.0**-126]
    with np.errstate(all="ignore"):
        expected = x.astype(ML_DTYPES[name]).astype(np.float32)
    assert_same_bits(round_to_format(torch.from_numpy(x), number), expected, x)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_agrees_with_torch_casts_within_the_range(name: str) -> None:
    number = formats.get(name)
    x = fp32_inputs(number)
    x = x[np.abs(x) <= number.max]
    expected = torch.from_numpy(x).to(TORCH_DTYPES[name]).float().numpy()
    assert_same_bits(round_to_format(torch.from_numpy(x), number), expected, x)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e5m2"])
def test_ieee_overflow_agrees_with_casts_of_formats_that_have_inf(name: str) -> None:
    number = formats.get(name)
    x = fp32_inputs(number)
    expected = torch.from_numpy(x).to(TORCH_DTYPES[name]).float().numpy()
    assert_same_bits(round_values(torch.from_numpy(x), number, overflow="ieee"), expected, x)


def test_e4m3_overflow_agrees_with_torch_and_ml_dtypes() -> None:
    number = formats.get("fp8_e4m3")
    x = fp32_inputs(number)
    saturated = torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()
    assert_same_bits(round_to_format(torch.from_numpy(x), number), saturated, x)
    with np.errstate(all="ignore"):
        special = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_same_bits(round_values(torch.from_numpy(x), number, overflow="ieee"), special, x)


@ALL
def test_nan_stays_nan_and_the_input_is_not_written_to(number: Format) -> None:
    x = torch.tensor([[1.3, float("nan"), -0.3], [float("inf"), 0.0, 7.7]])
    before = x.clone()
    rounded = round_to_format(x, number)
    assert rounded.isnan().tolist() == [[False, True, False], [False, False, False]]
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


@ALL
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 5)])
def test_any_shape_and_any_strides(number: Format, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    assert round_to_format(x, number).shape == x.shape
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)) * 3
    strided = wide.T[::2, 1:]
    assert torch.equal(round_to_format(strided, number), round_to_format(strided.contiguous(), number))
