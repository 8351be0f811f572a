"""Stochastic rounding: the bits of the trick on bf16 words, the chance of a step, no bias, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from stratified import quiet, stratified_inputs

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats.philox import random_words

#: Rounding to fp64 moves nothing that float64 holds.
NAMES = [name for name in formats.names() if name != "fp64"]
ALL = pytest.mark.parametrize("name", NAMES)


def numbers_for(name: str, num: int = 30_000) -> np.ndarray:
    """Finite stratified inputs within the range of the format, and float64 numbers close to them."""
    format = formats.get(name)
    x = quiet(stratified_inputs(format, num)).astype(np.float64)
    x = np.concatenate([x, x * (1 + 2.0**-25 * np.random.default_rng(1).random(x.size))])
    return x[(x >= format.min) & (x <= format.max)]


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 - 1])
def test_bf16_with_16_bits_is_adding_them_to_the_fp32_word(seed: int) -> None:
    """SEMANTICS, stochastic rounding: bits(fp32) + 16 random bits, truncated. Subnormals and overflow included."""
    x = stratified_inputs(formats.get("bf16"))
    x = x[np.isfinite(x)]
    drawn = (random_words(seed, x.size) >> np.uint32(16)).astype(np.uint64)
    expected = ((x.view(np.uint32) + drawn) >> np.uint64(16)).astype(np.uint16)
    codes = formats.encode("bf16", x, "stochastic", "ieee", seed=seed, random_bits=16)
    np.testing.assert_array_equal(codes, expected)


@ALL
@pytest.mark.parametrize("random_bits", [1, 7, 32])
def test_every_result_is_one_of_the_two_neighbours(name: str, random_bits: int) -> None:
    x = numbers_for(name)
    rounded = formats.round(name, x, "stochastic", seed=3, random_bits=random_bits)
    down, up = formats.round(name, x, "down"), formats.round(name, x, "up")
    assert ((rounded == down) | (rounded == up)).all()


@ALL
def test_values_that_the_format_has_never_move(name: str) -> None:
    format = formats.get(name)
    own = formats.table(name) if format.bits <= 16 else formats.round(name, numbers_for(name))
    own = own[~np.isnan(own)]
    for seed in range(4):
        np.testing.assert_array_equal(formats.round(name, own, "stochastic", "ieee", seed=seed, random_bits=1), own)


@ALL
def test_a_step_is_as_likely_as_the_rest(name: str) -> None:
    """Between neighbours a and b, x = a + r (b − a) becomes b with chance r, to 5 standard deviations."""
    down, up = some_gaps(name)
    for gap, (a, b) in enumerate(zip(down, up, strict=True)):
        for rest in (0.125, 0.5, 0.75):
            x = np.full(4000, a + rest * (b - a))
            share = np.mean(formats.round(name, x, "stochastic", seed=gap) == b)
            assert abs(share - rest) < 5 * np.sqrt(rest * (1 - rest) / x.size), (a, b, rest, share)


def some_gaps(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Four pairs of neighbours: two at random, the one above zero or the smallest value, and one of the other sign."""
    rng = np.random.default_rng(2)
    x = numbers_for(name)
    down, up = formats.round(name, x, "down"), formats.round(name, x, "up")
    inside = down < up
    down, up = down[inside], up[inside]
    chosen = [*rng.choice(down.size, 2), int(np.argmin(np.where(down >= 0, up, np.inf))), int(np.argmin(up))]
    return down[chosen], up[chosen]


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp4_e2m1", "nf4", "int8", "int4"]
)
def test_the_mean_is_the_value(name: str) -> None:
    """z-score of mean(rounded − x) over 200,000 draws below 5; rounding to nearest fails the same test by far."""
    format = formats.get(name)
    x = np.full(200_000, 0.3 * format.max / 7)
    error = formats.round(name, x, "stochastic", seed=9) - x
    z = error.mean() / (error.std() / np.sqrt(x.size))
    assert abs(z) < 5
    assert abs(formats.round(name, x[:1]) - x[0]) > 5 * error.std() / np.sqrt(x.size)


def test_few_bits_round_toward_zero_below_their_resolution() -> None:
    """With b bits the chance is floor(r · 2**b) / 2**b: one bit knows 0 and ½ only."""
    x = np.repeat([0.25, 0.5, 0.75], 2000)
    ups = formats.round("int8", x, "stochastic", seed=1, random_bits=1).reshape(3, 2000).mean(axis=1)
    assert ups[0] == 0 and abs(ups[1] - 0.5) < 0.06 and abs(ups[2] - 0.5) < 0.06


def test_the_bits_follow_the_position_and_the_seed() -> None:
    x = np.full((40, 50), 0.5)
    drawn = formats.round("int8", x, "stochastic", seed=4, random_bits=8)
    np.testing.assert_array_equal(drawn, formats.round("int8", x, "stochastic", seed=4, random_bits=8))
    flat = formats.round("int8", x.ravel(), "stochastic", seed=4, random_bits=8)
    np.testing.assert_array_equal(drawn.ravel(), flat)
    transposed = formats.round("int8", x.T, "stochastic", seed=4, random_bits=8)
    np.testing.assert_array_equal(transposed.ravel(), flat)
    assert (drawn != formats.round("int8", x, "stochastic", seed=5, random_bits=8)).any()
    np.testing.assert_array_equal(flat == 1, (random_words(4, 2000) >> np.uint32(24)) >= 128)


def test_specials_overflow_and_empty_inputs() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 1e9, -1e9, -0.0, 0.0])
    for seed in range(3):
        found = formats.round("fp8_e5m2", x, "stochastic", "ieee", seed=seed)
        np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, np.inf, -np.inf, 0, 0])
        assert np.signbit(found[5:]).tolist() == [True, False]
        np.testing.assert_array_equal(formats.round("fp4_e2m1", x[1:5], "stochastic", seed=seed), [6, -6, 6, -6])
    assert formats.encode("bf16", np.zeros((3, 0)), "stochastic", seed=0).shape == (3, 0)
    assert formats.round("bf16", 1.0, "stochastic", seed=0).shape == ()


def test_a_missing_seed_is_refused_with_the_reason() -> None:
    with pytest.raises(
        FormatError, match=r"'stochastic' draws random bits and was given no seed, .* could be repeated"
    ):
        formats.round("bf16", [1.0], "stochastic")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(FormatError, match=rf"seed {seed} is not in \[0, 2\*\*64\)"):
        formats.round("bf16", [1.0], "stochastic", seed=seed)


@pytest.mark.parametrize("random_bits", [0, 33])
def test_a_number_of_bits_out_of_range_is_refused(random_bits: int) -> None:
    with pytest.raises(FormatError, match=f"{random_bits} random bits were asked for; give 1 to 32"):
        formats.round("bf16", [1.0], "stochastic", seed=0, random_bits=random_bits)
