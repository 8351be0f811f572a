"""One-pass statistics against NumPy, torch and the bits themselves."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitwright.errors import BitwrightError, FormatError
from bitwright.quantize.magnitude_histogram import NUM_BINS, NUM_FINITE_BINS, bin_edges
from bitwright.quantize.statistics import TensorStatistics, empty_statistics, measure_statistics

NARROW = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz]
ALL = [np.float32, np.float64, *NARROW]


def every_code(dtype: type) -> np.ndarray:
    """All values of a dtype of at most 16 bits, NaN and Inf among them."""
    bits = 8 * np.dtype(dtype).itemsize
    return np.arange(1 << bits, dtype=f"u{bits // 8}").view(dtype)


def assert_like_numpy(found: TensorStatistics, x: np.ndarray) -> None:
    """Hold statistics against NumPy on float64 copies of the values."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = x.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite)
    assert found.num == values.size
    assert found.num_nan == np.isnan(values).sum()
    assert found.num_inf == np.isinf(values).sum()
    assert found.num_finite == finite.size
    assert found.num_zero == (finite == 0).sum()
    assert found.amax == magnitudes.max(initial=0)
    assert found.smallest == magnitudes[magnitudes > 0].min(initial=math.inf)
    assert found.histogram.counts.sum() == values.size
    assert found.histogram.num_finite == finite.size
    if finite.size:
        size = magnitudes.sum()
        assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-13 * size)
        assert found.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-12)
        assert found.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-7 * found.rms)


def sample(dtype: type, seed: int = 0, num: int = 40_000) -> np.ndarray:
    """Magnitudes over 30 octaves, with zeros of both signs, NaN and Inf where the dtype has it."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(num) * 2.0 ** random.integers(-20, 10, num)
    x[::101], x[1::101], x[::5003], x[1::5003] = 0.0, -0.0, np.nan, np.inf
    with np.errstate(all="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.__name__)
def test_statistics_are_those_of_numpy(dtype: type) -> None:
    x = sample(dtype)
    assert_like_numpy(measure_statistics(x), x)


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.__name__)
def test_every_code_once(dtype: type) -> None:
    x = every_code(dtype)
    found = measure_statistics(x)
    assert_like_numpy(found, x)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = np.abs(x.astype(np.float32))
    expected = np.bincount(wide[np.isfinite(wide)].view(np.uint32) >> 16, minlength=NUM_BINS)[:NUM_FINITE_BINS]
    assert np.array_equal(found.histogram.counts[:NUM_FINITE_BINS], expected)


def test_bins_are_the_upper_half_of_fp32_words() -> None:
    # Every bf16 magnitude with the lowest and the highest lower half that a float32 can add to it.
    words = np.arange(NUM_FINITE_BINS, dtype=np.uint32) << 16
    both = np.concatenate([words, words + 0xFFFF, words | 1 << 31]).view(np.float32)
    found = measure_statistics(both).histogram
    assert np.array_equal(found.counts[:NUM_FINITE_BINS], np.full(NUM_FINITE_BINS, 3))
    assert found.num_zero == 2
    assert np.array_equal(bin_edges()[:-1], words.view(np.float32).astype(np.float64))
    assert bin_edges()[-1] == 2.0**128


def test_float64_counts_in_the_bin_of_its_value_cut_to_float32() -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal(20_000) * 2.0 ** random.uniform(-150, 120, 20_000)
    cut = x.astype(np.float32)
    cut = np.where(np.abs(cut.astype(np.float64)) > np.abs(x), np.nextafter(cut, np.float32(0)), cut)
    found = measure_statistics(x).histogram
    assert np.array_equal(found.counts, measure_statistics(cut).histogram.counts)


def test_float64_beyond_float32_stays_finite() -> None:
    found = measure_statistics(np.array([1e300, -1e-300, 5e-324, 0.0, np.inf, np.nan]))
    assert (found.num_nan, found.num_inf, found.num_zero) == (1, 1, 1)
    assert (found.amax, found.smallest) == (1e300, 5e-324)
    assert found.histogram.counts[NUM_FINITE_BINS - 1] == 1
    assert found.histogram.nonzero_counts()[0] == 2


@pytest.mark.parametrize(
    ("dtype", "extra_bits"), [(ml_dtypes.bfloat16, 0), (ml_dtypes.float8_e5m2, 0), (np.float16, 3)], ids=str
)
def test_extra_bits_tell_how_fine_the_values_are(dtype: type, extra_bits: int) -> None:
    x = np.random.default_rng(0).standard_normal(5000).astype(dtype)
    for same in (x, x.astype(np.float32), x.astype(np.float64)):
        assert measure_statistics(same).histogram.extra_bits == extra_bits
    assert measure_statistics(np.float32([1 + 2.0**-23])).histogram.extra_bits == 16
    assert measure_statistics(np.array([1 + 2.0**-52])).histogram.extra_bits == 45


def test_octaves_are_those_of_log2() -> None:
    x = np.random.default_rng(2).standard_normal(50_000).astype(np.float32)
    x[:7] = [0.0, -0.0, np.nan, np.inf, 1.0, 0.5, 2.0**-149]
    magnitudes = np.abs(x[np.isfinite(x) & (x != 0)]).astype(np.float64)
    keys, counts = np.unique(np.floor(np.log2(magnitudes[magnitudes >= 2.0**-133])).astype(int), return_counts=True)
    assert measure_statistics(x).histogram.octaves() == {-134: 1, **dict(zip(keys, counts, strict=True))}


def test_octaves_agree_with_torch_histc() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.histc(x.float().abs().log2().floor(), bins=40, min=-36, max=4).long()
    octaves = measure_statistics(x).histogram.octaves()
    assert [octaves.get(exponent, 0) for exponent in range(-36, 4)] == expected.tolist()


def test_octaves_below_the_largest() -> None:
    x = np.array([3.0, -1.625, 1.5, 1.375, 0.75, 0.0, 2.0**-16], dtype=np.float32)
    # Shares of 3: 1, 0.54 | 0.5, 0.46 | 0.25 | 2**-17.6
    assert measure_statistics(x).histogram.octaves_below_amax() == {-18: 1, -3: 1, -2: 2, -1: 2}
    assert measure_statistics(np.zeros(3)).histogram.octaves_below_amax() == {}


def test_quantiles_are_those_of_sorted_magnitudes() -> None:
    x = np.random.default_rng(3).standard_normal(9_999).astype(ml_dtypes.bfloat16)
    ordered = np.sort(np.abs(x.astype(np.float64)))
    histogram = measure_statistics(x).histogram
    for share in (0.0, 0.01, 0.5, 0.999, 1.0):
        assert histogram.quantile(share) == ordered[max(math.ceil(share * ordered.size), 1) - 1]
    fine = np.random.default_rng(3).standard_normal(9_999)
    found, exact = measure_statistics(fine).histogram.quantile(0.5), np.sort(np.abs(fine))[4999]
    assert exact * (1 - 1 / 128) <= found <= exact


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_quantile_needs_a_share_and_values(share: float) -> None:
    with pytest.raises(FormatError, match="0 to 1"):
        measure_statistics(np.ones(3)).histogram.quantile(share)
    with pytest.raises(FormatError, match="no finite value"):
        measure_statistics(np.array([np.nan])).histogram.quantile(0.5)


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.__name__)
def test_empty_and_zero_dimensional(dtype: type) -> None:
    assert_like_numpy(measure_statistics(np.empty((0, 3), dtype=dtype)), np.empty(0, dtype=dtype))
    assert_like_numpy(measure_statistics(np.array(1.5, dtype=dtype)), np.array(1.5, dtype=dtype))


def test_only_nan_has_no_mean() -> None:
    found = measure_statistics(np.full(5, np.nan, dtype=np.float32))
    assert (found.num, found.num_nan, found.num_finite, found.amax, found.smallest) == (5, 5, 0, 0.0, math.inf)
    assert math.isnan(found.mean) and math.isnan(found.rms) and math.isnan(found.std)
    assert found.histogram.octaves() == {}


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.__name__)
def test_strides_do_not_matter(dtype: type) -> None:
    x = sample(dtype, num=4000).reshape(40, 10, 10)
    assert_like_numpy(measure_statistics(x.T), x)
    assert_like_numpy(measure_statistics(x[::3, 1:, ::-2]), x[::3, 1:, ::-2])


def test_unaligned_read_only_and_foreign_byte_order() -> None:
    x = sample(np.float32, num=1000)
    raw = b"\0" + x.tobytes()
    shifted = np.frombuffer(raw, dtype=np.uint8)[1:].view(np.float32)
    assert not shifted.flags.aligned and not shifted.flags.writeable
    assert_like_numpy(measure_statistics(shifted), x)
    assert_like_numpy(measure_statistics(x.astype(">f4")), x)


@pytest.mark.parametrize("num_codes", [256, 40_000])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_bytes_at_odd_addresses_and_of_odd_number(num_codes: int, start: int, stop: int) -> None:
    codes = np.resize(np.arange(256, dtype=np.uint8), num_codes + 2)[start : num_codes + stop]
    assert_like_numpy(measure_statistics(codes, format="fp8_e4m3"), codes.view(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_torch_tensors_are_read_as_they_lie(dtype: torch.dtype) -> None:
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double().numpy()
    assert_like_numpy(measure_statistics(x), expected)
    assert_like_numpy(measure_statistics(x.T), expected)
    assert_like_numpy(measure_statistics(torch.nn.Parameter(x.float())), x.float().numpy())


@pytest.mark.parametrize("dtype", ALL, ids=lambda dtype: dtype.__name__)
def test_threads_change_nothing(dtype: type) -> None:
    pieces = -(-5 * 8 * 2**20 // 2 // np.dtype(dtype).itemsize)
    x = np.resize(sample(dtype), pieces)
    one, three = (measure_statistics(x, threads=threads) for threads in (1, 3))
    assert (one.num, one.total, one.total_squares, one.smallest) == (
        three.num,
        three.total,
        three.total_squares,
        three.smallest,
    )
    assert np.array_equal(one.histogram.counts, three.histogram.counts)


@given(
    pieces=st.lists(
        hnp.arrays(np.float32, hnp.array_shapes(max_dims=1, min_side=0, max_side=9), elements=st.floats(width=32)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_statistics_of_pieces_add_up_to_the_whole(pieces: list[np.ndarray]) -> None:
    whole = measure_statistics(np.concatenate(pieces))
    parts = [measure_statistics(piece) for piece in pieces]
    left = reduce(add, parts, empty_statistics())
    right = reduce(lambda total, part: part + total, reversed(parts))
    for found in (left, right):
        assert (found.num, found.num_nan, found.num_inf, found.num_zero) == (
            whole.num,
            whole.num_nan,
            whole.num_inf,
            whole.num_zero,
        )
        assert (found.amax, found.smallest, found.histogram.extra_bits) == (
            whole.amax,
            whole.smallest,
            whole.histogram.extra_bits,
        )
        assert np.array_equal(found.histogram.counts, whole.histogram.counts)
        assert found.total_squares == pytest.approx(whole.total_squares, rel=1e-14)
        assert found.total == pytest.approx(whole.total, abs=1e-14 * whole.num * whole.amax)


def test_codes_are_read_by_the_format_that_is_named() -> None:
    found = measure_statistics(np.array([0x38, 0x7E, 0x7F, 0x80], dtype=np.uint8), format="fp8_e4m3")
    assert (found.amax, found.smallest, found.num_nan, found.num_zero) == (448.0, 1.0, 1, 1)
    assert measure_statistics(np.array([-128, 5], dtype=np.int8), format="int8").amax == 128
    assert measure_statistics(np.array([0x3F800000], dtype=np.uint32), format="fp32").amax == 1
    assert measure_statistics(np.array([0x1FC00], dtype=np.uint32), format="tf32").amax == 1


def test_counts_may_not_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        measure_statistics(np.ones(3)).histogram.counts[0] = 1


@pytest.mark.parametrize(
    ("x", "format", "message"),
    [
        (np.arange(3), None, "numbers or codes"),
        (np.array([True]), None, "numbers or codes"),
        (np.array([1j]), None, "complex128 has no format"),
        (np.array(["a"]), None, "has no format"),
        (np.zeros(3, np.uint8), "bf16", "passed as uint16"),
        (np.full(3, 200, np.uint8), "fp4_e2m1", "code 200 is not in"),
        (np.zeros(3, np.uint8), "fp8", "unknown format 'fp8'"),
        (torch.arange(3), None, "has no format"),
    ],
    ids=str,
)
def test_what_has_no_statistics_says_so(x: object, format: str | None, message: str) -> None:
    with pytest.raises(BitwrightError, match=message):
        measure_statistics(x, format=format)
