"""MX and NVFP4 blocks, and FP8/FP6 rows, against NumPy written from the standards with ml_dtypes' casts."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright.quantize import SCHEMES, TensorScheme, fake_quantize, quantize

#: format → (ml_dtypes cast, exponent of the largest number, largest number): OCP MX v1.0, tables 1, 4 and 5.
ELEMENTS = {
    "mxfp8": (ml_dtypes.float8_e4m3fn, 8, 448.0),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 2, 6.0),
}


def activations_of(name: str) -> TensorScheme:
    activations = SCHEMES[name].activations
    assert activations is not None
    return activations


def gaussian(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def wide(rows: int, columns: int) -> np.ndarray:
    """Blocks of very different size, with some zeros."""
    rng = np.random.default_rng(5)
    x = gaussian(rows, columns, 6) * 2.0 ** rng.integers(-30, 30, (rows, columns // 16)).repeat(16, axis=1)
    x[rng.random(x.shape) < 0.05] = 0
    return x.astype(np.float32)


def mx_block(block: np.ndarray, cast: type, emax: int, top: float) -> np.ndarray:
    """X = 2^(floor(log2 amax) − emax), clamped to E8M0; elements saturate. OCP MX v1.0, section 6.3."""
    amax = float(np.abs(block).max())
    if amax == 0:
        return np.zeros_like(block)
    mantissa_exponent = math.floor(math.log2(amax))
    if 2.0**mantissa_exponent > amax:  # log2 may round up just below a power of two
        mantissa_exponent -= 1
    scale = 2.0 ** min(max(mantissa_exponent - emax, -127), 127)
    scaled = np.clip(block.astype(np.float64) / scale, -top, top).astype(np.float32)
    return (scaled.astype(cast).astype(np.float64) * scale).astype(np.float32)


@pytest.mark.parametrize("make", [gaussian, wide])
@pytest.mark.parametrize("columns", [256, 208])
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_blocks_agree_with_numpy_bit_for_bit(name, columns, make) -> None:  # type: ignore[no-untyped-def]
    x = make(12, columns)
    expected = np.stack(
        [np.concatenate([mx_block(row[s : s + 32], *ELEMENTS[name]) for s in range(0, columns, 32)]) for row in x]
    )
    found = fake_quantize(torch.from_numpy(x), activations_of(name)).numpy()
    assert np.array_equal(found.view(np.uint32)[found != 0], expected.view(np.uint32)[found != 0])
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_scales_are_exact_at_every_power_of_two(name: str) -> None:
    """amax just below, at, and just above 2^k, for all k of fp32: the scale steps at 2^k, and is a power of two."""
    _, emax, _ = ELEMENTS[name]
    exponents = np.arange(-126, 128)
    at = np.ldexp(np.float32(1), exponents).astype(np.float32)
    for amax, shift in ((np.nextafter(at, np.float32(0)), -1), (at, 0), (np.nextafter(at, np.float32(np.inf)), 0)):
        q = quantize(torch.from_numpy(np.repeat(amax[:, None], 32, axis=1)), activations_of(name))
        assert q.scales_NG is not None
        expected = np.ldexp(1.0, np.clip(exponents + shift - emax, -127, 127))
        assert np.array_equal(q.scales_NG.numpy()[:, 0].astype(np.float64), expected)


def test_a_zero_block_has_the_smallest_e8m0_scale() -> None:
    q = quantize(torch.zeros(1, 64), activations_of("mxfp4"))
    assert q.scales_NG is not None
    assert q.scales_NG.tolist() == [[2.0**-127] * 2]


def test_share_of_gaussian_blocks_that_clip_under_floor_scales() -> None:
    """About 17 % of blocks of 32 clip (amax in (448, 512) · 2^k). By the law of amax, and by what comes back."""
    x = gaussian(4000, 320, seed=9)
    amax = np.abs(x.reshape(-1, 32)).max(axis=1)
    restored = np.abs(fake_quantize(torch.from_numpy(x), activations_of("mxfp8")).numpy().reshape(-1, 32)).max(axis=1)
    scale = 2.0 ** (np.floor(np.log2(amax)) - 8)
    clipped = (restored == 448 * scale) & (amax > 448 * scale)
    # P(amax < a) = erf(a / √2)^32; amax clips in (1.75, 2) · 2^k
    exact = sum(
        math.erf(2.0 ** (k + 1) / math.sqrt(2)) ** 32 - math.erf(1.75 * 2.0**k / math.sqrt(2)) ** 32
        for k in range(-6, 6)
    )
    assert exact == pytest.approx(0.169, abs=0.0005)
    assert clipped.mean() == pytest.approx(exact, abs=0.006)  # 40,000 blocks: three standard errors


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def nvfp4(x: np.ndarray) -> np.ndarray:
    """tensor scale = amax / (448 · 6); block scale = E4M3(amax / 6 / tensor scale); codes = E2M1(x / their product)."""
    f32 = np.float32
    tensor_scale = np.abs(x).max() / f32(448 * 6)
    out = np.empty_like(x)
    for start in range(0, x.shape[1], 16):
        block = x[:, start : start + 16]
        ideal = np.abs(block).max(axis=1, keepdims=True) / f32(6) / tensor_scale
        scale = np.minimum(ideal, f32(448)).astype(ml_dtypes.float8_e4m3fn).astype(f32) * tensor_scale
        safe = np.where(scale == 0, f32(1), scale)
        codes = np.clip(block / safe, f32(-6), f32(6)).astype(ml_dtypes.float4_e2m1fn).astype(f32)
        out[:, start : start + 16] = np.where(scale == 0, f32(0), codes) * scale
    return out


@pytest.mark.parametrize("columns", [256, 200])
@pytest.mark.parametrize("outlier", [0.0, 1e6], ids=["gaussian", "outlier 1e6"])
def test_nvfp4_agrees_with_numpy_bit_for_bit(columns: int, outlier: float) -> None:
    x = gaussian(24, columns, seed=2)
    if outlier:
        x[3, 7] = outlier
    found = fake_quantize(torch.from_numpy(x), activations_of("nvfp4")).numpy()
    assert np.array_equal(found, nvfp4(x))


def test_nvfp4_zeroes_few_elements_unless_an_outlier_takes_the_range() -> None:
    """6.8 % of Gaussian elements become zero; an outlier of 1e6 sends most block scales to zero."""
    x = torch.from_numpy(gaussian(512, 512, seed=3))
    assert float((fake_quantize(x, activations_of("nvfp4")) == 0).float().mean()) == pytest.approx(0.068, abs=0.003)
    x[0, 0] = 1e6
    q = quantize(x, activations_of("nvfp4"))
    assert q.scales_NG is not None
    assert float((q.scales_NG == 0).float().mean()) == pytest.approx(0.61, abs=0.03)


# --- floating codes under one scale a row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cast", "top"), [("fp8_w", ml_dtypes.float8_e4m3fn, 448.0), ("fp6_w", ml_dtypes.float6_e3m2fn, 28.0)]
)
def test_floating_rows_agree_with_ml_dtypes_bit_for_bit(name: str, cast: type, top: float) -> None:
    x = gaussian(16, 300, seed=4) * 0.03
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(top)
    codes = np.clip(x / scale, np.float32(-top), np.float32(top)).astype(cast).astype(np.float32)
    weights = SCHEMES[name].weights
    assert weights is not None
    assert np.array_equal(fake_quantize(torch.from_numpy(x), weights).numpy(), codes * scale)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_plain_formats_are_torch_casts_also_beyond_their_range(name: str, dtype: torch.dtype) -> None:
    x = torch.from_numpy(gaussian(8, 64, seed=5)) * 3e4
    x[0, :4] = torch.tensor([65519.99, 65520.0, -7e4, 3.4e38])
    weights = SCHEMES[name].weights
    assert weights is not None
    assert torch.equal(fake_quantize(x, weights), x.to(dtype).float())
