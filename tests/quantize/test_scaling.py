"""Scale rules against their formulas, written out in NumPy or in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize import quantize
from bitwright.quantize.granularity import TENSOR, group, is_filling, to_groups
from bitwright.quantize.scaling import MSE_RATIOS, RULES, find_scales
from bitwright.quantize.scheme import ScaleRule, Scaling, TensorScheme, block_scheme

F32 = np.float32
F32_MAX = np.finfo(np.float32).max
#: Largest value and its exponent: OCP MX v1.0, tables 1, 2, 4 and 5; two's complement.
ELEMENTS = {
    "fp8_e4m3": (448.0, 8),
    "fp8_e5m2": (57344.0, 15),
    "fp6_e3m2": (28.0, 4),
    "fp6_e2m3": (7.5, 2),
    "fp4_e2m1": (6.0, 2),
    "int8": (127.0, 6),
}
ALL_RULES = pytest.mark.parametrize("rule", get_args(ScaleRule))


def scaling(rule: ScaleRule = "amax", *, size: int = 32, scale_format: str = "fp32", **fields: object) -> Scaling:
    return Scaling(granularity=group(size), scale_format=scale_format, rule=rule, **fields)  # type: ignore[arg-type]


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scales_of(x: np.ndarray, format_name: str, how: Scaling) -> np.ndarray:
    return find_scales(torch.from_numpy(x), format_name, how).scale.numpy()[..., 0]


def edge_amaxes() -> np.ndarray:
    """Just below, at and just above m · 2^k, m the largest elements' mantissas, for every k; all subnormal 2^k."""
    at = np.ldexp(np.array([[1.0], [1.75], [1.5], [127 / 64]]), np.arange(-126, 128)).astype(np.float32).ravel()
    around = [np.nextafter(at, F32(0)), at, np.nextafter(at, F32(3e38))]
    return np.concatenate([*around, np.ldexp(F32(1), np.arange(-149, -126)).astype(np.float32)])


def test_every_rule_has_a_function() -> None:
    assert set(RULES) == set(get_args(ScaleRule))


# --- powers of two ----------------------------------------------------------------------------------------------------


def smallest_power_of_two_that_holds(amax: float, largest: float) -> int:
    """Least k with largest · 2^k >= amax, in exact arithmetic."""
    ratio = Fraction(amax) / Fraction(largest)
    k = math.floor(math.log2(ratio)) - 1
    while Fraction(2) ** k < ratio:
        k += 1
    return k


@pytest.mark.parametrize("format_name", ELEMENTS)
def test_ocp_floor_is_the_binade_of_amax_over_that_of_the_element(format_name: str) -> None:
    amaxes = edge_amaxes()
    found = scales_of(amaxes[:, None].repeat(2, axis=1), format_name, scaling("ocp_floor", scale_format="e8m0"))
    exponents = [math.frexp(a)[1] - 1 - ELEMENTS[format_name][1] for a in amaxes.astype(float)]
    assert np.array_equal(found.astype(float), np.ldexp(1.0, np.clip(exponents, -127, 127)))


@pytest.mark.parametrize("format_name", ELEMENTS)
def test_round_up_is_the_smallest_power_of_two_that_holds_amax(format_name: str) -> None:
    amaxes = edge_amaxes()
    largest = ELEMENTS[format_name][0]
    found = scales_of(amaxes[:, None], format_name, scaling("round_up", scale_format="e8m0")).astype(float)
    exponents = [smallest_power_of_two_that_holds(float(a), largest) for a in amaxes]
    is_normal = amaxes >= largest * 2.0**-126  # below, amax / max is rounded to a subnormal first
    expected = np.ldexp(1.0, np.clip(exponents, -127, 127))
    assert np.array_equal(found[is_normal], expected[is_normal])
    assert (found[~is_normal] <= 2.0**-126).all()
    assert (amaxes[is_normal] / found[is_normal] <= largest).all(), "nothing saturates"


@pytest.mark.parametrize("format_name", ELEMENTS)
def test_power_of_two_without_margin_is_round_up_wherever_fp32_holds_both(format_name: str) -> None:
    amaxes = edge_amaxes()
    exponents = np.array([smallest_power_of_two_that_holds(float(a), ELEMENTS[format_name][0]) for a in amaxes])
    found = scales_of(amaxes[:, None], format_name, scaling("power_of_two")).astype(float)
    assert np.array_equal(found, np.ldexp(1.0, np.maximum(exponents, -127)))  # max / amax is at most 2^127


@pytest.mark.parametrize("margin", [1, 4, -1])
def test_a_margin_doubles_the_scale(margin: int) -> None:
    x = gaussian(50, 32)
    plain = scales_of(x, "fp8_e4m3", scaling("power_of_two"))
    assert np.array_equal(scales_of(x, "fp8_e4m3", scaling("power_of_two", margin=margin)), plain * 2.0**margin)


def test_an_element_exponent_multiplies_codes_and_leaves_the_stored_scale_a_power_of_two() -> None:
    """MXINT8: codes are multiples of 1/64, emax is 0, and X lies in E8M0's range. OCP MX v1.0, 5.3.4 and table 1."""
    amaxes = edge_amaxes()
    how = scaling("ocp_floor", scale_format="e8m0", element_exponent=-6)
    stored = scales_of(amaxes[:, None], "int8", how).astype(float) * 64
    exponents = [math.frexp(a)[1] - 1 for a in amaxes.astype(float)]
    assert np.array_equal(stored, np.ldexp(1.0, np.clip(exponents, -127, 127)))


# --- percentile -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percentile", [0.5, 50.0, 99.0, 99.9, 100.0])
@pytest.mark.parametrize("size", [1, 2, 33, 1000])
def test_percentiles_are_those_of_numpy_and_torch(percentile: float, size: int) -> None:
    x = gaussian(20, size)
    found = scales_of(x, "int8", scaling("percentile", percentile=percentile)) * 127
    assert found == pytest.approx(np.quantile(np.abs(x).astype(float), percentile / 100, axis=1), rel=1e-6)
    by_torch = torch.quantile(torch.from_numpy(x).abs(), percentile / 100, dim=1)
    assert found == pytest.approx(by_torch.numpy(), rel=2e-5)  # torch places the quantile in fp32


def test_the_hundredth_percentile_is_amax() -> None:
    x = gaussian(40, 32)
    assert np.array_equal(scales_of(x, "int8", scaling("percentile")), scales_of(x, "int8", scaling("amax")))


def test_what_fills_a_short_group_up_does_not_count() -> None:
    x = torch.from_numpy(gaussian(6, 45))
    how = scaling("percentile", percentile=80)
    grouped, filling = to_groups(x, how.granularity), is_filling(x, how.granularity)
    found = find_scales(grouped, "int8", how, filling=filling).scale[..., 0].numpy() * 127
    for column, part in ((0, slice(0, 32)), (1, slice(32, 45))):
        expected = np.quantile(x.numpy()[:, part].__abs__().astype(float), 0.8, axis=1)
        assert found[:, column] == pytest.approx(expected, rel=1e-6)


def test_a_percentile_of_more_numbers_than_torch_takes() -> None:
    """2^24 + 3 numbers, 1 to n in some order: the quantile is known."""
    num_values = 2**24 + 3
    x = torch.arange(num_values).flip(0).float().reshape(1, 1, -1)  # above 2^24 fp32 holds even integers only
    x[..., 0] = 2.0**24
    how = Scaling(granularity=TENSOR, scale_format="fp32", rule="percentile", percentile=75.0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(x, 0.75)
    assert find_scales(x, "int8", how).scale.item() * 127 == pytest.approx(0.75 * (num_values - 1), rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_percentile_does_not_hide_what_is_not_finite(bad: float) -> None:
    x = gaussian(2, 32)
    x[0, 3] = bad
    assert np.isfinite(scales_of(x, "int8", scaling("percentile", percentile=50))).tolist() == [False, True]


# --- least squared error ----------------------------------------------------------------------------------------------


def squared_error(x: np.ndarray, scale: np.ndarray, rounded: object) -> np.ndarray:
    """Σ (x̂ − x)² of each row, fp64."""
    scale = scale[:, None].astype(np.float32)
    codes = rounded(x / np.where(scale == 0, F32(1), scale))  # type: ignore[operator]
    return ((codes * scale - x).astype(float) ** 2).sum(axis=1)


ROUNDED = {
    "int4": (7.0, lambda q: np.clip(np.rint(q), -8, 7).astype(np.float32)),
    "int2": (1.0, lambda q: np.clip(np.rint(q), -2, 1).astype(np.float32)),
    "fp4_e2m1": (6.0, lambda q: np.clip(q, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)),
}


@pytest.mark.parametrize("format_name", ROUNDED)
def test_no_ratio_of_the_grid_has_a_smaller_squared_error(format_name: str) -> None:
    largest, rounded = ROUNDED[format_name]
    x = gaussian(60, 128, seed=4)
    x[7] *= 1e30
    x[8] *= 1e-30
    amax = np.abs(x).max(axis=1)
    candidates = np.stack([(amax * F32(ratio)) / F32(largest) for ratio in MSE_RATIOS])
    errors = np.stack([squared_error(x, scale, rounded) for scale in candidates])
    found = scales_of(x, format_name, scaling("mse", size=128))
    assert all(scale in candidates[:, i] for i, scale in enumerate(found))
    assert (squared_error(x, found, rounded) <= errors.min(axis=0) * (1 + 1e-6)).all()
    assert squared_error(x, found, rounded).sum() < 0.99 * errors[0].sum(), "amax is not the best"


def test_the_plain_amax_wins_among_equals() -> None:
    x = np.zeros((3, 16), dtype=np.float32)
    x[0, 2] = 5.0  # every ratio restores it without error up to rounding; amax does so exactly
    x[1] = 3.0
    assert np.array_equal(scales_of(x, "int4", scaling("mse")), scales_of(x, "int4", scaling("amax")))
    assert MSE_RATIOS[0] == 1.0


def test_what_fills_a_group_up_does_not_weigh() -> None:
    x = torch.from_numpy(gaussian(200, 19, seed=2))
    how = scaling("mse", size=16)
    filling = is_filling(x, how.granularity)
    found = find_scales(to_groups(x, how.granularity), "int4", how, filling=filling).scale
    alone = find_scales(x[:, 16:].unsqueeze(1), "int4", how).scale
    assert torch.equal(found[:, 1:], alone)


# --- stored scales ----------------------------------------------------------------------------------------------------


@ALL_RULES
@pytest.mark.parametrize(
    ("scale_format", "zero"), [("fp32", 0.0), ("fp16", 0.0), ("fp8_e4m3", 0.0), ("e8m0", 2.0**-127)]
)
def test_a_group_of_zeros_has_the_scale_zero_or_the_smallest_there_is(
    rule: ScaleRule, scale_format: str, zero: float
) -> None:
    x = np.zeros((2, 32), dtype=np.float32)
    assert scales_of(x, "fp4_e2m1", scaling(rule, scale_format=scale_format)).tolist() == [zero, zero]


@ALL_RULES
@pytest.mark.parametrize("tensor_scale", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_is_seen_and_is_alone(rule: ScaleRule, tensor_scale: bool, bad: float) -> None:
    x = gaussian(4, 32)
    how = scaling(rule, scale_format="fp8_e4m3" if tensor_scale else "fp32", tensor_scale=tensor_scale)
    x[2] = 0
    others = scales_of(x, "fp8_e4m3", how)
    x[2, 5] = bad
    found = scales_of(x, "fp8_e4m3", how)
    assert np.isfinite(found).tolist() == [True, True, False, True]
    assert np.array_equal(found[[0, 1, 3]], others[[0, 1, 3]])


@ALL_RULES
def test_scales_are_numbers_of_their_stored_format(rule: ScaleRule) -> None:
    x = gaussian(100, 32, seed=8)
    found = scales_of(x, "int4", scaling(rule, scale_format="fp16"))
    assert np.array_equal(found.astype(np.float16).astype(np.float32), found)


@ALL_RULES
def test_shrinking_halves_the_range(rule: ScaleRule) -> None:
    x = torch.from_numpy(gaussian(30, 32))
    whole, half = (find_scales(x, "fp8_e4m3", scaling(rule), shrink).scale for shrink in (1.0, 0.5))
    if rule == "mse":
        assert (half <= whole).all()
    else:
        assert torch.equal(half, whole / 2)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1, 0)])
def test_nothing_to_scale_is_no_error(shape: tuple[int, ...]) -> None:
    for rule in RULES:
        assert find_scales(torch.zeros(*shape), "fp8_e4m3", scaling(rule)).scale.shape == (*shape[:-1], 1)


# --- two levels -------------------------------------------------------------------------------------------------------


def nvfp4_scales(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Transformer Engine's reference quantiser: block decode scales and the tensor's, all fp32, each step rounded."""
    amax = np.abs(x).max()
    with np.errstate(over="ignore"):
        encode = F32(1) if amax == 0 else min(F32(448 * 6) / amax, F32_MAX)
    scale = np.minimum(np.abs(x).max(axis=1) / F32(6) * encode, F32(448))
    return scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), F32(1) / encode


@pytest.mark.parametrize("power", [0, -30, 60, -126, -140])
def test_nvfp4_scales_follow_the_fp32_order_of_transformer_engine(power: int) -> None:
    x = (gaussian(400, 16) * np.exp2(np.random.default_rng(1).uniform(-12, 3, (400, 1)))).astype(np.float32)
    x = np.ldexp(x, power).astype(np.float32)
    found = find_scales(torch.from_numpy(x), "fp4_e2m1", scaling(size=16, scale_format="fp8_e4m3", tensor_scale=True))
    scale, tensor_scale = nvfp4_scales(x)
    assert np.array_equal(found.scale.numpy()[:, 0], scale)
    assert found.tensor_scale is not None
    assert found.tensor_scale.item() == pytest.approx(tensor_scale, rel=1e-6)


def test_nvfp4_zero_tensors_have_the_tensor_scale_one() -> None:
    found = find_scales(torch.zeros(2, 16), "fp4_e2m1", scaling(size=16, scale_format="fp8_e4m3", tensor_scale=True))
    assert found.tensor_scale is not None and found.tensor_scale.item() == 1.0
    assert found.scale.tolist() == [[0.0], [0.0]]


# --- block formats ----------------------------------------------------------------------------------------------------

BLOCK_NAMES = [name for name, record in formats.BLOCK_FORMATS.items() if isinstance(record, formats.BlockFormat)]


def block_inputs() -> dict[str, np.ndarray]:
    wide = gaussian(64, 200, seed=3) * np.exp2(np.random.default_rng(4).integers(-120, 110, (64, 25))).repeat(8, axis=1)
    spoiled = gaussian(8, 96, seed=5)
    spoiled[1, 3], spoiled[2, 40], spoiled[3, 95], spoiled[4] = math.nan, math.inf, -math.inf, 0
    return {
        "gaussian": gaussian(64, 200),
        "one block": gaussian(3, 5),
        "every binade": wide.astype(np.float32),
        "edges": edge_amaxes()[:3040].reshape(-1, 8),
        "subnormal": (gaussian(8, 64) * 1e-40).astype(np.float32),
        "near the end of fp32": gaussian(8, 64).clip(-3, 3) * F32(1e38),
        "spoiled": spoiled,
    }


@pytest.mark.parametrize("x", block_inputs().values(), ids=block_inputs().keys())
@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_scales_and_values_of_block_formats_are_those_of_the_reference(name: str, x: np.ndarray) -> None:
    """Bit for bit, also NaN blocks; the reference is tested against gfloat and ml_dtypes (tests/formats)."""
    scheme = block_scheme(name)
    stored = formats.encode(name, x)
    q = quantize(torch.from_numpy(x), scheme)
    assert q.scales_NG is not None and scheme.scaling is not None
    scales = np.ldexp(q.scales_NG.numpy(), -scheme.scaling.element_exponent)
    assert np.array_equal(scales, formats.decode(scheme.scaling.scale_format, stored.scale_codes), equal_nan=True)
    if q.tensor_scale is not None:
        assert q.tensor_scale.item() == stored.tensor_scale
    assert np.array_equal(q.dequantize().numpy(), formats.round(name, x), equal_nan=True)


def test_the_scheme_of_a_block_format_has_its_facts() -> None:
    for name in BLOCK_NAMES:
        record = formats.BLOCK_FORMATS[name]
        assert isinstance(record, formats.BlockFormat)
        element = formats.FORMATS[block_scheme(name).format]
        assert (element.bits, element.max, element.min) == (record.element.bits, record.element.max, record.element.min)
    assert block_scheme("nvfp4") == TensorScheme(
        format="fp4_e2m1", scaling=scaling(size=16, scale_format="fp8_e4m3", tensor_scale=True)
    )


def test_packed_bytes_are_no_scheme() -> None:
    packed = next(name for name in formats.block_names() if name not in BLOCK_NAMES)
    with pytest.raises(SchemeError, match=f"'{packed}' has no elements"):
        block_scheme(packed)


def test_two_levels_of_scales_beyond_fp32_are_refused() -> None:
    with pytest.raises(SchemeError, match="fp32 scales times fp4_e2m1 codes reach"):
        TensorScheme(format="fp4_e2m1", scaling=scaling(tensor_scale=True))


# --- contradictions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rule": "median"}, "unknown scale rule 'median'"),
        ({"rule": "percentile", "percentile": 0.0}, "percentile is 0.0; give"),
        ({"rule": "percentile", "percentile": 100.5}, "percentile is 100.5; give"),
        ({"percentile": 99.0}, "rule 'amax' does not look at it"),
        ({"rule": "round_up", "margin": 1}, "margin is 1, but rule 'round_up'"),
        ({"rule": "mse", "symmetry": "minimum"}, "'minimum' goes with rule 'amax'"),
        ({"tensor_scale": True, "symmetry": "zero_point"}, "'zero_point' goes with rule 'amax'"),
        ({"element_exponent": -6, "symmetry": "zero_point"}, "element_exponent -6"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        Scaling(granularity=group(32), scale_format="fp32", **fields)  # type: ignore[arg-type]
