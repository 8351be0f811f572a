"""Codebooks: nf4 against its publication, rounding against brute force in exact fractions, codes in any order."""

from __future__ import annotations

from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from stratified import stratified_inputs

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats import CodebookFormat
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values

#: The order of a sign-and-magnitude codebook, a list without zero, gaps of very different width, and middles that
#: float64 cannot hold.
CODEBOOKS = [
    formats.get("nf4"),
    CodebookFormat(name="signed", bits=3, values=(0.0, 1.0, 0.25, 4.0, -8.0, -1.0, -0.25, -4.0), source="a test"),
    CodebookFormat(name="without_zero", bits=2, values=(-1.0, 3.0, 0.5, -0.125), source="a test"),
    CodebookFormat(name="positive", bits=1, values=(2.0, 1.0), source="a test"),
    CodebookFormat(name="wide", bits=2, values=(2.0**-120, -(2.0**100), 2.0**90, 1.0), source="a test"),
]
ALL = pytest.mark.parametrize("format", CODEBOOKS, ids=lambda f: f.name)


def inputs_for(format: CodebookFormat) -> np.ndarray:
    listed = np.sort(np.array(format.values))
    middles = listed[:-1] / 2 + listed[1:] / 2
    points = np.concatenate([listed, middles])
    rng = np.random.default_rng(0)
    spread = rng.uniform(listed[0], listed[-1], 200)
    tiny = [0.0, -0.0, 5e-324, -5e-324, 1e-30, -1e-30]
    return np.concatenate([points, np.nextafter(points, -np.inf), np.nextafter(points, np.inf), spread, tiny])


def brute_force(format: CodebookFormat, x: float, rounding: str) -> set[float]:
    """What a mode may give: exact comparison with every value of the list."""
    exact = min(max(Fraction(x), Fraction(min(format.values))), Fraction(max(format.values)))
    below = max(v for v in format.values if Fraction(v) <= exact)
    above = min(v for v in format.values if Fraction(v) >= exact)
    match rounding:
        case "down":
            return {below}
        case "up":
            return {above}
        case "toward_zero":
            return {above if x < 0 else below}
    to_below, to_above = exact - Fraction(below), Fraction(above) - exact
    if to_below != to_above:
        return {below if to_below < to_above else above}
    if rounding == "nearest_away":
        return {below if x < 0 else above}
    even = {v for v in (below, above) if format.values.index(v) % 2 == 0}
    return even or {below, above}


@ALL
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "up", "down"])
def test_rounding_is_brute_force_over_the_list(format: CodebookFormat, rounding: str) -> None:
    x = inputs_for(format)
    rounded = decode_codes(format, encode_values(format, x, rounding))
    for value, found in zip(x.tolist(), rounded.tolist(), strict=True):
        assert found in brute_force(format, value, rounding), (value, found)


@ALL
def test_codes_are_positions_in_the_list(format: CodebookFormat) -> None:
    assert decode_codes(format, np.arange(1 << format.bits)).tolist() == list(format.values)
    assert encode_values(format, format.values).tolist() == list(range(1 << format.bits))


def test_nf4_is_the_closest_of_its_16_values() -> None:
    """Brute force in fp32's own values; stratified inputs."""
    values = np.array(formats.get("nf4").values)
    x = stratified_inputs(formats.get("nf4"), 50_000)
    x = x[np.isfinite(x)].astype(np.float64)
    distance = np.abs(np.clip(x, -1, 1)[:, None] - values)
    np.testing.assert_array_equal(np.abs(formats.round("nf4", x) - np.clip(x, -1, 1)), distance.min(axis=1))


def test_nf4_is_made_of_quantiles_of_the_normal_distribution() -> None:
    """QLoRA §3 and bitsandbytes' create_normal_map: 9 quantiles above zero, 8 below, scaled to ±1; fp32 to 1e-6."""
    offset = 0.9677083
    quantile = NormalDist().inv_cdf
    positive = np.array([quantile(share) for share in np.linspace(offset, 0.5, 9)[:-1]])
    negative = -np.array([quantile(share) for share in np.linspace(offset, 0.5, 8)[:-1]])
    expected = np.sort(np.concatenate([positive, [0.0], negative])) / positive.max()
    np.testing.assert_allclose(formats.table("nf4"), expected, atol=1e-6)


@pytest.mark.parametrize("overflow", formats.OVERFLOWS)
def test_every_rule_clips_to_the_ends_and_refuses_nan(overflow: str) -> None:
    assert formats.round("nf4", [2.0, -2.0, np.inf, -np.inf], overflow=overflow).tolist() == [1, -1, 1, -1]
    with pytest.raises(FormatError, match="1 of 2 values are NaN, and nf4 has no NaN"):
        formats.encode("nf4", [0.0, np.nan], overflow=overflow)
