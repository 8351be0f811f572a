"""Laws that every format of the catalog obeys. A new format is tested here with no edit.

The judge is the standard (golden values), the list of all values (brute force), or the order of real numbers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats import CodebookFormat, FloatFormat, Format

ALL = pytest.mark.parametrize("format", [formats.get(name) for name in formats.names()], ids=lambda f: f.name)
LISTED = pytest.mark.parametrize(
    "format", [formats.get(name) for name in formats.names() if formats.get(name).bits <= 20], ids=lambda f: f.name
)


def sample_codes(format: Format) -> np.ndarray:
    """Every code of formats up to 20 bits; else 20,000 random ones and both ends."""
    if format.bits <= 20:
        return np.arange(1 << format.bits, dtype=np.uint64)
    rng = np.random.default_rng(0)
    ends = np.arange(64, dtype=np.uint64)
    every = np.uint64((1 << format.bits) - 1)
    return np.concatenate([rng.integers(0, 1 << format.bits, 20_000, dtype=np.uint64), ends, every - ends])


@cache
def finite_values(format: Format) -> tuple[np.ndarray, np.ndarray]:
    """All finite values in ascending order, and their codes; −0 is left out."""
    codes = sample_codes(format)
    values = formats.decode(format.name, codes)
    keep = np.isfinite(values) & ~((values == 0) & np.signbit(values))
    order = np.argsort(values[keep], kind="stable")
    return values[keep][order], codes[keep][order]


@cache
def inputs_within(format: Format) -> np.ndarray:
    """Values in the format's range: some of its own, ties, both float64 neighbours of each, and random ones."""
    own, _ = finite_values(format)
    if own.size > 4000:
        own = own[np.unique(np.linspace(0, own.size - 1, 4000).astype(int))]
    ties = own[:-1] / 2 + own[1:] / 2
    points = np.concatenate([own, ties])
    rng = np.random.default_rng(1)
    smallest = np.log2(float(np.min(np.abs(own[own != 0]))))
    spread = 2.0 ** rng.uniform(smallest - 2, np.log2(format.max), 4000) * rng.choice([-1.0, 1.0], 4000)
    x = np.concatenate([points, np.nextafter(points, -np.inf), np.nextafter(points, np.inf), spread])
    return x[(x >= format.min) & (x <= format.max)]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal as numbers, NaN to NaN, and zeros with the same sign."""
    return bool(np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0])))


@ALL
def test_golden_values_of_the_standard(format: Format) -> None:
    codes = np.array([code for code, _ in format.golden], dtype=np.uint64)
    values = np.array([value for _, value in format.golden])
    assert same(formats.decode(format.name, codes), values)


@ALL
def test_encode_undoes_decode_save_for_nan(format: Format) -> None:
    codes = sample_codes(format)
    values = formats.decode(format.name, codes)
    number = ~np.isnan(values)
    assert np.array_equal(formats.encode(format.name, values[number], overflow="ieee"), codes[number])


@ALL
@pytest.mark.parametrize("rounding", formats.ROUNDINGS)
@pytest.mark.parametrize("overflow", formats.OVERFLOWS)
def test_round_is_decode_of_encode_and_idempotent(format: Format, rounding: str, overflow: str) -> None:
    x = inputs_within(format)
    rounded = formats.round(format.name, x, rounding, overflow, seed=1)
    assert same(formats.decode(format.name, formats.encode(format.name, x, rounding, overflow, seed=1)), rounded)
    assert same(formats.round(format.name, rounded, rounding, overflow, seed=2), rounded)


@LISTED
def test_every_value_has_one_code(format: Format) -> None:
    values = formats.table(format.name)
    values = values[~np.isnan(values)]
    num_zeros = int(np.sum(values == 0))
    assert np.unique(values).size == values.size - max(num_zeros - 1, 0)
    assert num_zeros == format.has_zero + format.has_negative_zero
    assert (values[np.isfinite(values)].max(), values[np.isfinite(values)].min()) == (format.max, format.min)
    assert np.isinf(values).any() == format.has_inf


@ALL
def test_magnitudes_ascend_with_their_codes(format: Format) -> None:
    if isinstance(format, CodebookFormat):
        return  # any order
    sign_mask = 1 << (format.bits - 1) if format.min < 0 else 0
    codes = sample_codes(format)
    codes = np.unique(codes[(codes & np.uint64(sign_mask)) == 0])
    values = formats.decode(format.name, codes)
    values = values[~np.isnan(values)]
    assert (np.diff(values) > 0).all()
    assert values[np.isfinite(values)][-1] <= format.max
    assert formats.decode(format.name, formats.encode(format.name, format.max)) == format.max


@LISTED
def test_nearest_even_is_brute_force_over_all_values(format: Format) -> None:
    values, codes = finite_values(format)
    x = inputs_within(format)
    below = np.clip(np.searchsorted(values, x, side="right") - 1, 0, values.size - 2)
    low, high = values[below], values[below + 1]
    middle = low / 2 + high / 2
    if isinstance(format, FloatFormat) and format.fraction_bits == 0:
        high_wins_tie = np.abs(high) > np.abs(low)  # one significant bit, always odd: IEEE 754-2019 §4.3.1, last clause
    else:
        high_wins_tie = codes[below] % 2 == 1
    expected = np.where((x > middle) | ((x == middle) & high_wins_tie), high, low)
    assert np.array_equal(formats.round(format.name, x), expected)


@LISTED
def test_nearest_away_differs_from_nearest_even_only_at_ties(format: Format) -> None:
    values, _ = finite_values(format)
    x = inputs_within(format)
    even, away = formats.round(format.name, x), formats.round(format.name, x, "nearest_away")
    ties = np.isin(x, values[:-1] / 2 + values[1:] / 2)
    assert np.array_equal(even[~ties], away[~ties])
    assert (np.abs(away[ties]) >= np.abs(x[ties])).all()


@ALL
def test_stochastic_rounding_gives_a_neighbour(format: Format) -> None:
    x = inputs_within(format)
    down, up = formats.round(format.name, x, "down"), formats.round(format.name, x, "up")
    drawn = formats.round(format.name, x, "stochastic", seed=8)
    assert ((drawn == down) | (drawn == up)).all()
    inside = down < up
    assert inside.sum() < 100 or 0.1 < np.mean(drawn[inside] == up[inside]) < 0.9


@ALL
def test_directed_modes_bracket(format: Format) -> None:
    x = inputs_within(format)
    down, up = formats.round(format.name, x, "down"), formats.round(format.name, x, "up")
    assert (down <= x).all() and (x <= up).all()
    assert np.array_equal(formats.round(format.name, x, "toward_zero"), np.where(x < 0, up, down))
    nearest = formats.round(format.name, x)
    assert ((nearest == down) | (nearest == up)).all()
    assert ((x - down >= 0) & (up - x >= 0) & (np.abs(x - nearest) <= (up - down) / 2)).all()


@LISTED
def test_directed_modes_pick_neighbours(format: Format) -> None:
    values, _ = finite_values(format)
    x = inputs_within(format)
    rank_down = np.searchsorted(values, formats.round(format.name, x, "down"))
    rank_up = np.searchsorted(values, formats.round(format.name, x, "up"))
    assert np.array_equal(rank_up - rank_down, (~np.isin(x, values)).astype(int))


@ALL
def test_overflow_saturates_or_becomes_special(format: Format) -> None:
    beyond = np.array([np.inf, -np.inf])
    if format.max < 1e300:
        beyond = np.concatenate([beyond, [format.max * 4, -format.max * 4, 1e308, -1e308]])
    ends = np.where(beyond > 0, format.max, format.min)
    assert np.array_equal(formats.round(format.name, beyond), ends)
    if format.has_inf:
        special = np.sign(beyond) * np.inf
    elif format.has_nan:
        special = np.full(beyond.shape, np.nan)
    else:
        special = ends
    assert np.array_equal(formats.round(format.name, beyond, overflow="ieee"), special, equal_nan=True)


@ALL
def test_modes_toward_the_range_keep_the_largest_finite_value(format: Format) -> None:
    if format.max > 1e300 or format.min >= 0:
        return  # no finite float64 lies beyond; or nothing lies below
    beyond = np.array([format.max * 4, format.min * 4])
    rounded = {mode: formats.round(format.name, beyond, mode, "ieee") for mode in ("toward_zero", "up", "down")}
    assert np.array_equal(rounded["toward_zero"], [format.max, format.min])
    assert rounded["down"][0] == format.max and rounded["up"][1] == format.min


@ALL
@pytest.mark.parametrize("overflow", formats.OVERFLOWS)
def test_nan_is_what_the_rule_says(format: Format, overflow: str) -> None:
    x = np.array([1.0, np.nan, -np.nan])
    stand_in = formats.overflow_values(format, overflow).nan
    assert not format.has_nan or (stand_in is not None and np.isnan(stand_in))
    if stand_in is None:
        with pytest.raises(FormatError, match=f"2 of 3 values are NaN, and {format.name} has no NaN"):
            formats.encode(format.name, x, overflow=overflow)
    else:
        assert same(formats.round(format.name, x, overflow=overflow), np.array([1.0, stand_in, stand_in]))


@ALL
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "stochastic"])
@pytest.mark.parametrize("overflow", formats.OVERFLOWS)
def test_three_numbers_are_all_of_a_rule(format: Format, overflow: str, rounding: str) -> None:
    stand_in = formats.overflow_values(format, overflow)
    sign = -1.0 if isinstance(format, FloatFormat) else format.min / format.max
    x, expected = [np.inf], [stand_in.infinite]
    if format.max < 1e300:
        x, expected = [*x, 4 * format.max, 1e308], [*expected, stand_in.beyond, stand_in.beyond]
    assert same(formats.round(format.name, x, rounding, overflow, seed=0), np.array(expected))
    if format.min < 0:
        negative = formats.round(format.name, np.negative(x), rounding, overflow, seed=0)
        assert np.array_equal(negative, sign * np.array(expected), equal_nan=True)


@ALL
def test_zero_keeps_its_sign_where_there_is_a_code(format: Format) -> None:
    if not format.has_zero:
        assert formats.round(format.name, [0.0, -0.0]).tolist() == [format.min] * 2
        return
    zeros = formats.round(format.name, [0.0, -0.0])
    assert same(zeros, np.array([0.0, -0.0 if format.has_negative_zero else 0.0]))


@ALL
def test_subnormals_have_the_spacing_of_the_smallest_normals(format: Format) -> None:
    if not isinstance(format, FloatFormat) or format.min_subnormal is None:
        return
    step, count = format.min_subnormal, min(1 << format.fraction_bits, 1 << 12)
    assert np.array_equal(formats.decode(format.name, np.arange(2 * count)), step * np.arange(2 * count))
    assert formats.decode(format.name, 1 << format.fraction_bits) == format.min_normal
    if step / 2 > 0:
        assert formats.round(format.name, [step / 2, step * 0.75]).tolist() == [0.0, step]


@ALL
def test_shapes_and_dtypes_pass_through(format: Format) -> None:
    codes = formats.encode(format.name, np.ones((2, 0, 3)))
    assert codes.shape == (2, 0, 3) and formats.decode(format.name, codes).shape == (2, 0, 3)
    scalar = formats.encode(format.name, 1)
    assert scalar.shape == () and formats.decode(format.name, scalar) == 1.0
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-1]
    assert np.array_equal(formats.round(format.name, wide), formats.round(format.name, wide.copy()))
    assert codes.dtype.kind == "u" and format.bits <= 8 * codes.itemsize <= max(8, 2 * format.bits)


@ALL
def test_record_is_complete(format: Format) -> None:
    assert format.source and format.golden
    assert format.max == 2.0**format.emax * (format.max / 2.0**format.emax) and 1 <= format.max / 2.0**format.emax < 2
    for alias in format.aliases:
        assert formats.resolve(alias) == formats.resolve(alias.upper()) == format.name
