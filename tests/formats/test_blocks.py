"""MX, NVFP4 and block floating point against gfloat, ml_dtypes' casts, exact rational arithmetic, and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import gfloat.formats
import ml_dtypes
import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError, UnknownName
from bitwright.formats import BLOCK_FORMATS, BlockCodes, BlockFormat
from bitwright.formats.blocks import encode_blocks, round_blocks

RECORDS = [format for format in BLOCK_FORMATS.values() if isinstance(format, BlockFormat)]
EVERY_RECORD = pytest.mark.parametrize("format", RECORDS, ids=lambda format: format.name)
#: OCP MX 1.0: name → (gfloat's name, exponent of the largest element, largest element).
MX = {
    "mxfp8": ("mxfp8_e4m3", 8, 448.0),
    "mxfp8_e5m2": ("mxfp8_e5m2", 15, 57344.0),
    "mxfp6": ("mxfp6_e3m2", 4, 28.0),
    "mxfp6_e2m3": ("mxfp6_e2m3", 2, 7.5),
    "mxfp4": ("mxfp4_e2m1", 2, 6.0),
    "mxint8": ("mxint8", 0, 127 / 64),
}
EVERY_MX = pytest.mark.parametrize("name", MX)


def record(name: str) -> BlockFormat:
    format = formats.get(name)
    assert isinstance(format, BlockFormat)
    return format


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wide(rows: int, columns: int, seed: int = 5) -> np.ndarray:
    """Blocks of very different size, with some zeros of both signs."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-90, 90, (rows, -(-columns // 8))).repeat(8, axis=1)[:, :columns]
    x = gaussian(rows, columns, seed=seed + 1) * 2.0**exponents
    x[rng.random(x.shape) < 0.05] = 0.0
    x[rng.random(x.shape) < 0.05] = -0.0
    return x.astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, NaN of any kind being NaN."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Scales as decoded from E8M0 by hand."""
    return np.ldexp(1.0, exponents.astype(int) - 127)


# --- the records ------------------------------------------------------------------------------------------------------


@EVERY_RECORD
def test_golden_blocks_of_the_standard(format: BlockFormat) -> None:
    assert format.golden
    for golden in format.golden:
        stored = BlockCodes(
            codes=np.array(golden.codes),
            scale_codes=np.full(-(-len(golden.codes) // format.block_size), golden.scale_code),
            tensor_scale=np.float32(1) if format.tensor_scale else None,
        )
        assert same_bits(format.decode(stored), np.array(golden.values, dtype=np.float32))


@EVERY_MX
def test_facts_are_those_of_table_1(name: str) -> None:
    theirs, _, largest = MX[name]
    info = getattr(gfloat.formats, f"format_info_{theirs}")
    format = record(name)
    assert (format.block_size, format.code_bits, format.scale.bits) == (32, info.element_bits, 8)
    assert format.bits_per_value * 32 == info.block_size_bytes * 8
    assert format.largest_element == largest == info.etype.max
    assert (format.scale_format, format.scale_rule, format.tensor_scale) == ("e8m0", "ocp_floor", False)


def test_facts_of_the_other_two() -> None:
    nvfp4, bfp8 = record("nvfp4"), record("bfp8")
    assert (nvfp4.block_size, nvfp4.scale_format, nvfp4.bits_per_value, nvfp4.max) == (16, "fp8_e4m3", 4.5, 2688.0)
    assert (bfp8.block_size, bfp8.scale_format, bfp8.bits_per_value, bfp8.code_bits) == (8, "e8m0", 9.0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "blocks of 0 values; give at least 1"),
        ({"element": formats.get("fp32")}, "elements of 32 bits"),
        ({"scale": formats.get("fp6_e3m2")}, "fp6_e3m2, which has no NaN"),
        ({"scale": formats.get("uint8")}, "uint8, which has no NaN"),
        ({"tensor_scale": True}, "a tensor scale under the rule 'ocp_floor'"),
        ({"source": " "}, "has no source"),
    ],
)
def test_contradictory_records_are_refused(change: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        replace(record("mxfp8"), **change)


def test_an_unknown_scale_rule_is_refused() -> None:
    with pytest.raises(UnknownName, match="'ocp_flor'; did you mean 'ocp_floor'"):
        replace(record("mxfp8"), scale_rule="ocp_flor")


# --- OCP MX -----------------------------------------------------------------------------------------------------------


@EVERY_MX
def test_mx_blocks_are_those_of_gfloat(name: str) -> None:
    info = getattr(gfloat.formats, f"format_info_{MX[name][0]}")
    x = np.concatenate([gaussian(10, 32), wide(30, 32)])
    expected = [gfloat.quantize_block(info, block.astype(np.float64), gfloat.compute_scale_amax) for block in x]
    assert np.array_equal(formats.round(name, x), np.array(expected).astype(np.float32))


#: Elements as others cast them, in units of the scale.
CASTS = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}


def scale_by_hand(amax: float, emax: int) -> float:
    """OCP MX 1.0 §6.3 in exact arithmetic."""
    if amax == 0:
        return 2.0**-127
    exponent = 0
    while Fraction(2) ** (exponent + 1) <= Fraction(amax):
        exponent += 1
    while Fraction(2) ** exponent > Fraction(amax):
        exponent -= 1
    return 2.0 ** min(max(exponent - emax, -127), 127)


@pytest.mark.parametrize("columns", [64, 75])
@pytest.mark.parametrize("name", CASTS)
def test_mx_blocks_are_those_of_ml_dtypes_bit_for_bit(name: str, columns: int) -> None:
    _, emax, top = MX[name]
    x = wide(40, columns)
    expected = np.empty_like(x)
    for row, out in zip(x, expected, strict=True):
        for start in range(0, columns, 32):
            block = row[start : start + 32].astype(np.float64)
            scale = scale_by_hand(float(np.abs(block).max()), emax)
            codes = np.clip(block / scale, -top, top).astype(np.float32).astype(CASTS[name]).astype(np.float64)
            out[start : start + 32] = codes * scale
    assert same_bits(formats.round(name, x), expected)
    stored = formats.encode(name, x)
    assert np.array_equal(stored.codes.astype(np.uint8), cast_codes(name, x, stored))


def cast_codes(name: str, x: np.ndarray, stored: BlockCodes) -> np.ndarray:
    """Codes by ml_dtypes, under the stored scales."""
    top = MX[name][2]
    scale = powers_of_two(stored.scale_codes).repeat(32, axis=1)[:, : x.shape[1]]
    return np.clip(x / scale, -top, top).astype(np.float32).astype(CASTS[name]).view(np.uint8)


@EVERY_MX
def test_mx_scales_step_at_every_power_of_two_of_fp32(name: str) -> None:
    _, emax, _ = MX[name]
    exponents = np.arange(-149, 128)
    at = np.ldexp(np.float32(1), exponents).astype(np.float32)
    for amax, shift in ((np.nextafter(at, np.float32(0)), -1), (at, 0), (np.nextafter(at, np.float32(np.inf)), 0)):
        keep = (amax > 0) & ((amax >= 2.0**-126) | (shift == 0) & (amax == at))
        found = powers_of_two(formats.encode(name, amax[:, None]).scale_codes[:, 0])
        expected = np.ldexp(1.0, np.clip(exponents + shift - emax, -127, 127))
        assert np.array_equal(found[keep], expected[keep])


@EVERY_MX
def test_mx_at_the_ends_of_fp32(name: str) -> None:
    """x / scale is exact, subnormal blocks and scales included: nothing is lost but what the element loses."""
    _, emax, top = MX[name]
    tiny = np.float32(2.0**-149) * np.arange(1, 33, dtype=np.float32)
    huge = np.linspace(2.0**126, 1.75 * 2.0**127, 32).astype(np.float32)
    for x, scale in ((tiny, 2.0**-127), (huge, 2.0 ** (127 - emax))):
        element = np.clip(x.astype(np.float64) / scale, -top, top)
        if name in CASTS:
            expected = element.astype(np.float32).astype(CASTS[name]).astype(np.float64) * scale
        else:
            expected = np.rint(element * 64) / 64 * scale
        assert np.array_equal(formats.round(name, x), expected.astype(np.float32))
        assert powers_of_two(formats.encode(name, x).scale_codes).tolist() == [scale]


def test_mxint8_uses_the_whole_range_of_twos_complement() -> None:
    x = np.array([1.999, -1.999, -1.99, 1.0], dtype=np.float32)
    stored = formats.encode("mxint8", x)
    assert stored.codes.tolist() == [127, 0x80, 0x81, 64] and stored.scale_codes.tolist() == [127]
    assert formats.decode("mxint8", stored).tolist() == [127 / 64, -2.0, -127 / 64, 1.0]
    # the one way out of fp32's range: −2 · 2**127
    assert formats.round("mxint8", np.array([-3.4028235e38], dtype=np.float32)).tolist() == [-math.inf]


@pytest.mark.parametrize("name", [format.name for format in RECORDS])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_kept_in_the_scale(name: str, bad: float) -> None:
    format = record(name)
    x = gaussian(3, 3 * format.block_size)
    clean = formats.round(name, x)
    if format.tensor_scale:  # the block that will be lost must not hold the tensor's largest magnitude
        x[1, format.block_size : 2 * format.block_size] /= 8
        clean = formats.round(name, x)
    x[1, format.block_size + 2] = bad
    stored = formats.encode(name, x)
    is_lost = np.zeros((3, 3), dtype=bool)
    is_lost[1, 1] = True
    nan_code = 0x7F if format.scale_format == "fp8_e4m3" else 0xFF
    assert np.array_equal(stored.scale_codes == nan_code, is_lost)
    assert (stored.codes[1, format.block_size : 2 * format.block_size] == 0).all()
    lost = is_lost.repeat(format.block_size, axis=1)
    assert same_bits(formats.decode(name, stored), np.where(lost, np.float32(np.nan), clean))


@EVERY_RECORD
def test_a_zero_block_has_the_smallest_scale_and_keeps_its_signs(format: BlockFormat) -> None:
    x = np.zeros((2, 40), dtype=np.float32)
    x[1] = -0.0
    stored = format.encode(x)
    assert (stored.scale_codes == 0).all()
    expected = x if format.element.has_negative_zero else np.abs(x)
    assert same_bits(format.decode(stored), expected)


# --- other scale rules ------------------------------------------------------------------------------------------------


@EVERY_MX
def test_round_up_is_the_smallest_power_of_two_without_saturation(name: str) -> None:
    """By exact arithmetic, at amax = top · 2**k and its fp32 neighbours, and everywhere else."""
    format = replace(record(name), name="trial", scale_rule="round_up")
    top = np.float32(format.largest_element)
    at = np.ldexp(top, np.arange(-100, 100)).astype(np.float32)
    amax = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))])
    amax = np.concatenate([amax, np.abs(wide(1, 4096)[0])])
    amax = amax[(amax > 2.0**-110) & (amax < 2.0**110)]
    found = powers_of_two(format.encode(amax[:, None]).scale_codes[:, 0])
    assert (found * format.largest_element >= amax).all()
    assert (found / 2 * format.largest_element < amax).all()


def test_round_up_of_the_smallest_blocks() -> None:
    format = replace(record("mxfp8"), name="trial", scale_rule="round_up")
    x = np.array([[2.0**-149], [2.0**-120], [447 * 2.0**-127], [449 * 2.0**-127]], dtype=np.float32)
    assert format.encode(x).scale_codes[:, 0].tolist() == [0, 0, 0, 1]


def clipping_blocks(format: BlockFormat, x: np.ndarray) -> float:
    """Share of blocks whose largest magnitude lies beyond the largest element."""
    scale = powers_of_two(format.encode(x).scale_codes)
    return float((np.abs(x).reshape(len(x), -1, 32).max(axis=-1) > scale * format.largest_element).mean())


def relative_rmse(x: np.ndarray, rounded: np.ndarray) -> float:
    return float(np.sqrt(((rounded - x) ** 2).mean() / (x**2).mean()))


def test_gaussian_blocks_under_floor_and_round_up_scales() -> None:
    """E4M3, blocks of 32: floor clips 16.8 % of the blocks and loses 2.92 %; round-up clips none and loses 2.65 %."""
    x = gaussian(2000, 320, seed=9)
    floor = record("mxfp8")
    up = replace(floor, name="trial", scale_rule="round_up")
    # P(amax < a) = erf(a / √2)^32, and a block clips where amax lies in (1.75, 2) · 2^k
    exact = sum(
        math.erf(2.0 ** (k + 1) / math.sqrt(2)) ** 32 - math.erf(1.75 * 2.0**k / math.sqrt(2)) ** 32
        for k in range(-6, 6)
    )
    assert exact == pytest.approx(0.169, abs=0.0005)
    assert clipping_blocks(floor, x) == pytest.approx(exact, abs=0.009)  # 20,000 blocks: three standard errors
    assert clipping_blocks(up, x) == 0
    assert relative_rmse(x, round_blocks(floor, x)) == pytest.approx(0.0292, rel=0.015)
    assert relative_rmse(x, round_blocks(up, x)) == pytest.approx(0.0265, rel=0.015)


def test_amax_scales_are_rounded_to_the_scale_format() -> None:
    format = replace(record("mxfp4"), name="trial", scale=formats.get("fp16"), scale_rule="amax")
    x = gaussian(20, 70)
    blocks = [x[:, s : s + 32] for s in (0, 32, 64)]
    scales = [(np.abs(b).max(axis=1, keepdims=True) / np.float32(6)).astype(np.float16) for b in blocks]
    codes = [
        np.clip(b / s.astype(np.float32), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        for b, s in zip(blocks, scales, strict=True)
    ]
    values = np.concatenate([c.astype(np.float32) * s for c, s in zip(codes, scales, strict=True)], axis=1)
    assert same_bits(format.decode(format.encode(x)), values)
    assert np.array_equal(format.encode(x).scale_codes, np.concatenate(scales, axis=1).view(np.uint16))


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def nvfp4_by_hand(x: np.ndarray, amax: np.float32 | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 scales, values): amax / 6 times the global encode scale, then a division by scale · tensor scale."""
    f32 = np.float32
    amax = np.abs(x).max() if amax is None else amax
    with np.errstate(over="ignore"):
        encode_scale = min(f32(2688) / amax, np.finfo(f32).max) if amax > 0 else f32(1)
    tensor_scale = max(amax / f32(2688), f32(2.0**-128)) if amax > 0 else f32(1)
    scales, values = [], np.empty_like(x)
    for start in range(0, x.shape[1], 16):
        block = x[:, start : start + 16]
        ideal = np.abs(block).max(axis=1, keepdims=True) / f32(6) * encode_scale
        scale = np.minimum(ideal, f32(448)).astype(ml_dtypes.float8_e4m3fn)
        unit = scale.astype(f32) * tensor_scale
        codes = np.clip(block / np.where(unit == 0, f32(np.inf), unit), f32(-6), f32(6))
        values[:, start : start + 16] = codes.astype(ml_dtypes.float4_e2m1fn).astype(f32) * unit
        scales.append(scale.view(np.uint8))
    return np.concatenate(scales, axis=1), values


@pytest.mark.parametrize("columns", [128, 100])
@pytest.mark.parametrize("factor", [1.0, 3e-39, 1e-37, 1e30], ids=lambda f: f"times {f}")
@pytest.mark.parametrize("outlier", [0.0, 1e6], ids=["gaussian", "outlier"])
def test_nvfp4_is_what_its_formulas_say_bit_for_bit(columns: int, factor: float, outlier: float) -> None:
    """Also where the encode scale is capped at fp32's largest number, and numbers are subnormal."""
    x = gaussian(24, columns, seed=2)
    x[3, 7] += outlier
    x = (x * factor).astype(np.float32)
    stored = formats.encode("nvfp4", x)
    scales, values = nvfp4_by_hand(x)
    assert np.array_equal(stored.scale_codes, scales)
    assert same_bits(formats.decode("nvfp4", stored), values)


def test_the_order_of_operations_decides_at_ties_of_the_block_scale() -> None:
    """amax / 6, then times 2688 / amax_tensor: around every tie between E4M3 scales, where another order moves some."""
    e4m3 = np.arange(8, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    ties = (e4m3[:-1] + e4m3[1:]) / 2
    scales, others = [], []
    for largest in (1.0, 3.7, 1234.5, 0.0271):
        largest = np.float32(largest)
        amax = (6 * ties * float(largest) / 2688).astype(np.float32)
        amax = np.concatenate([(amax.view(np.int32) + ulps).view(np.float32) for ulps in range(-3, 4)])
        x = np.zeros((amax.size + 1, 16), dtype=np.float32)
        x[:, 5] = np.concatenate([amax, [largest]])
        expected, _ = nvfp4_by_hand(x)
        found = formats.encode("nvfp4", x).scale_codes
        assert np.array_equal(found, expected)
        reciprocal = np.abs(x[:, 5]) * (np.float32(2688) / largest * np.float32(1 / 6))
        scales.append(found[:, 0])
        others.append(np.minimum(reciprocal, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert 0 < (np.concatenate(scales) != np.concatenate(others)).mean() < 0.5


@pytest.mark.parametrize("factor", [1.0, 1e-37, 1e-35, 1e30])
def test_nvfp4_is_near_its_input_at_every_magnitude(factor: float) -> None:
    """The tensor scale is the reciprocal of the encode scale also where that is capped."""
    x = gaussian(64, 128, seed=3) * np.float32(factor)
    assert relative_rmse(x.astype(np.float64), formats.round("nvfp4", x).astype(np.float64)) < 0.11


def test_nvfp4_zeroes_few_elements_unless_an_outlier_takes_the_range() -> None:
    """6.8 % of Gaussian elements become zero; an outlier of 1e6 sends about 61 % of the block scales to zero."""
    x = gaussian(512, 512, seed=3)
    assert float((formats.round("nvfp4", x) == 0).mean()) == pytest.approx(0.068, abs=0.002)
    x[0, 0] = 1e6
    share = float((formats.encode("nvfp4", x).scale_codes == 0).mean())
    # a scale is zero up to half of E4M3's smallest number, 2**-10: amax ≤ 6 · (1e6 / 2688) / 1024
    exact = math.erf(6 * 1e6 / 2688 / 1024 / math.sqrt(2)) ** 16
    assert share == pytest.approx(exact, abs=0.012)  # 16,384 blocks: three standard errors
    assert share == pytest.approx(0.61, abs=0.03)
    stored = formats.encode("nvfp4", x)
    lost = (stored.scale_codes == 0).repeat(16, axis=1)
    assert np.array_equal(stored.codes[lost], np.where(x[lost] < 0, 8, 0))  # ±0


def test_part_of_a_tensor_is_encoded_with_the_amax_of_the_whole() -> None:
    x = gaussian(8, 96, seed=4)
    amax = float(np.abs(x).max())
    whole = formats.round("nvfp4", x)
    parts = [round_blocks(record("nvfp4"), part, tensor_amax=amax) for part in (x[:3], x[3:])]
    assert same_bits(np.concatenate(parts), whole)
    assert same_bits(round_blocks(record("nvfp4"), x, tensor_amax=3.0), nvfp4_by_hand(x, np.float32(3.0))[1])
    with pytest.raises(FormatError, match="mxfp8 has no tensor scale"):
        encode_blocks(record("mxfp8"), x, tensor_amax=3.0)
    with pytest.raises(FormatError, match="tensor_amax=nan is not a finite magnitude"):
        encode_blocks(record("nvfp4"), x, tensor_amax=math.nan)


# --- block floating point ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 5, 8, 64])
@pytest.mark.parametrize("mantissa_bits", [2, 3, 8, 11, 16, 24])
def test_block_floating_point_rounds_to_one_grid_a_block(block_size: int, mantissa_bits: int) -> None:
    """value = k · 2**(E − m + 2), k to nearest even in m bits of two's complement: by exact integers."""
    format = formats.block_floating_point(block_size=block_size, mantissa_bits=mantissa_bits)
    x = wide(12, 37)
    lowest, highest = -(1 << (mantissa_bits - 1)), (1 << (mantissa_bits - 1)) - 1
    expected = np.zeros_like(x)
    for row, out in zip(x, expected, strict=True):
        for start in range(0, 37, block_size):
            amax = np.abs(row[start : start + block_size]).max()
            step = Fraction(scale_by_hand(float(amax), 0)) / (1 << (mantissa_bits - 2))
            for j in range(start, min(start + block_size, 37)):
                k = min(max(round(Fraction(float(row[j])) / step), lowest), highest)
                out[j] = float(k * step)
    found = format.decode(format.encode(x))
    assert np.array_equal(found, expected)
    assert format.bits_per_value == mantissa_bits + 8 / block_size


def test_block_floating_point_of_24_bits_keeps_what_shares_an_exponent() -> None:
    format = formats.block_floating_point(block_size=4, mantissa_bits=24)
    x = np.array([1.0, 1.0 + 2.0**-22, -1.9999998, 2.0**-22], dtype=np.float32)
    assert np.array_equal(format.decode(format.encode(x)), x)
    smallest = np.float32(2.0**-149) * np.arange(1, 5, dtype=np.float32)
    assert np.array_equal(format.decode(format.encode(smallest)), smallest)


def test_mxint8_is_block_floating_point() -> None:
    x = wide(20, 100)
    format = formats.block_floating_point(block_size=32, mantissa_bits=8)
    assert same_bits(format.decode(format.encode(x)), formats.round("mxint8", x))
    assert (format.name, formats.block_floating_point().name) == ("bfp8_b32", "bfp8_b8")


@pytest.mark.parametrize(("kind", "value"), [("mantissa_bits", 1), ("mantissa_bits", 25), ("block_size", 0)])
def test_sizes_out_of_range_are_refused(kind: str, value: int) -> None:
    with pytest.raises(FormatError, match=f"{value}.*give"):
        formats.block_floating_point(**{kind: value})


# --- rounding and inputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", [name for name in formats.ROUNDINGS if name != "stochastic"])
@pytest.mark.parametrize("name", ["mxfp4", "mxint8", "nvfp4"])
def test_every_rounding_is_that_of_the_element(name: str, rounding: str) -> None:
    """x / unit is a number of the element format's own business, rounded as `formats` rounds single numbers."""
    format, x = record(name), gaussian(6, 48)
    stored = formats.encode(name, x, rounding)
    unit = formats.decode(format.scale_format, stored.scale_codes).astype(np.float32)
    unit = unit * (1 if stored.tensor_scale is None else stored.tensor_scale) * np.float32(2.0**format.element_exponent)
    ratio = x / unit.repeat(format.block_size, axis=1)[:, :48]
    assert np.array_equal(stored.codes, formats.encode(format.element.name, ratio, rounding))


def test_stochastic_rounding_draws_by_position_and_is_unbiased() -> None:
    x = np.full((4000, 8), 0.3, dtype=np.float32)
    x[:, 0] = 1.0
    first = formats.round("mxfp4", x, "stochastic", seed=1)
    assert np.array_equal(first, formats.round("mxfp4", x, "stochastic", seed=1))
    assert not np.array_equal(first, formats.round("mxfp4", x, "stochastic", seed=2))
    # scale 1/4: 0.3 / 0.25 = 1.2 lies between 1 and 1.5
    assert set(np.unique(first[:, 1:])) == {np.float32(0.25), np.float32(0.375)}
    deviation = 0.125 * math.sqrt(0.4 * 0.6 / 28000)
    assert float(first[:, 1:].astype(np.float64).mean()) == pytest.approx(0.3, abs=4 * deviation)
    stored = formats.encode("mxfp4", x, "stochastic", seed=1, random_bits=4)
    assert np.array_equal(stored.codes, formats.encode("fp4_e2m1", x * 4, "stochastic", seed=1, random_bits=4))


def test_inputs_are_exact_in_fp32_or_refused() -> None:
    assert formats.round("mxfp8", [0.5, 3, -2.25]).dtype == np.float32
    assert formats.round("mxfp8", np.float64(448.0)) == 448
    assert formats.round("mxfp8", np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    half = np.array([1.5, 2.5], dtype=np.float16)
    assert np.array_equal(formats.round("mxfp8", half), half)
    with pytest.raises(FormatError, match=r"1 of 2 values do not fit fp32 exactly, such as 0\.1.*astype"):
        formats.round("mxfp8", [0.5, 0.1])
    with pytest.raises(FormatError, match="1 of 1 values do not fit fp32"):
        formats.round("mxfp8", [1e300])
    with pytest.raises(FormatError, match="complex"):
        formats.round("mxfp8", np.array([1j]))


def test_codes_that_do_not_belong_together_are_refused() -> None:
    stored = formats.encode("mxfp8", gaussian(2, 64))
    with pytest.raises(FormatError, match=r"need scales of shape \(2, 2\), not \(2, 1\)"):
        formats.decode("mxfp8", BlockCodes(codes=stored.codes, scale_codes=stored.scale_codes[:, :1]))
    with pytest.raises(FormatError, match="mxfp8 has no tensor scale"):
        formats.decode("mxfp8", replace(stored, tensor_scale=np.float32(2)))
    with pytest.raises(FormatError, match="nvfp4 needs the tensor scale"):
        formats.decode("nvfp4", replace(formats.encode("nvfp4", gaussian(2, 64)), tensor_scale=None))
    with pytest.raises(FormatError, match="code 255 is not in"):
        formats.decode("mxfp4", BlockCodes(codes=np.array([255]), scale_codes=np.array([127])))
