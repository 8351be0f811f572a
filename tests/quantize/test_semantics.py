"""What libraries do to a number, statement by statement: formats, overflow on cast, scales.

Each test is named after the statement and asks bitwright and, where it is installed, the library itself (torch,
ml_dtypes: live). Transformer Engine, MS-AMP and torchao are transcribed from their sources.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright import formats
from bitwright.quantize import SCHEMES, QTensor, Scaling, TensorScheme, fake_quantize, quantize
from bitwright.quantize.delayed_scaling import DelayedScaling, current_inv_scale, power_of_two_inv_scale
from bitwright.quantize.granularity import ROW, block, group, to_groups
from bitwright.quantize.scaling import Scales, find_scales

F32 = np.float32
F32_MAX = float(np.finfo(np.float32).max)
NAN, INF = math.nan, math.inf


def same(a: object, b: object) -> bool:
    """Equal values and signs of zero; NaN equals NaN."""
    with np.errstate(invalid="ignore"):  # some NaNs are signalling
        x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    numbers = ~np.isnan(x)
    return np.array_equal(x, y, equal_nan=True) and np.array_equal(np.signbit(x)[numbers], np.signbit(y)[numbers])


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


# --- formats ----------------------------------------------------------------------------------------------------------

#: name, type of ml_dtypes or NumPy, max, smallest normal and subnormal, has Inf, NaN codes (None: most of a binade)
TABLE = [
    ("fp16", np.float16, 65504, 2.0**-14, 2.0**-24, True, None),
    ("bf16", ml_dtypes.bfloat16, 3.3895313892515355e38, 2.0**-126, 2.0**-133, True, None),
    ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 448, 2.0**-6, 2.0**-9, False, {0x7F, 0xFF}),
    ("fp8_e5m2", ml_dtypes.float8_e5m2, 57344, 2.0**-14, 2.0**-16, True, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}),
    ("fp8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 240, 2.0**-7, 2.0**-10, False, {0x80}),
    ("fp8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz, 57344, 2.0**-15, 2.0**-17, False, {0x80}),
    ("fp6_e3m2", ml_dtypes.float6_e3m2fn, 28, 0.25, 0.0625, False, set()),
    ("fp6_e2m3", ml_dtypes.float6_e2m3fn, 7.5, 1, 0.125, False, set()),
    ("fp4_e2m1", ml_dtypes.float4_e2m1fn, 6, 1, 0.5, False, set()),
]


@pytest.mark.parametrize(("name", "dtype", "largest", "normal", "subnormal", "has_inf", "nans"), TABLE)
def test_table_of_formats(name, dtype, largest, normal, subnormal, has_inf, nans) -> None:  # type: ignore[no-untyped-def]
    number = formats.FORMATS[name]
    assert isinstance(number, formats.FloatFormat)
    assert (number.max, number.min_normal, number.min_subnormal) == (largest, normal, subnormal)
    codes = np.arange(2**number.bits, dtype=np.uint16 if number.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(float)
    assert same(values, formats.table(name))
    finite = values[np.isfinite(values)]
    assert (finite.max(), finite[finite > 0].min()) == (largest, subnormal)
    assert np.isinf(values).any() == has_inf == number.has_inf
    if nans is not None:
        assert set(np.flatnonzero(np.isnan(values))) == nans


def test_e2m1_has_eight_magnitudes() -> None:
    assert sorted(set(np.abs(formats.table("fp4_e2m1")))) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e8m0_holds_powers_of_two_from_minus_127_to_127_without_zero_and_ff_is_nan() -> None:
    values = formats.table("e8m0")
    assert np.array_equal(values[:255], np.ldexp(1.0, np.arange(-127, 128))) and math.isnan(values[255])
    assert same(values, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(float))


def test_e4m3_is_three_formats() -> None:
    """OCP's e4m3fn to 448 without Inf, the IEEE-style e4m3 to 240 with Inf, AMD's e4m3fnuz to 240."""
    facts = [
        (formats.FORMATS[name].max, formats.FORMATS[name].has_inf)
        for name in ("fp8_e4m3", "fp8_e4m3_ieee", "fp8_e4m3fnuz")
    ]
    assert facts == [(448, False), (240, True), (240, False)]
    for dtype, (largest, _) in zip(
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fnuz), facts, strict=True
    ):
        assert float(ml_dtypes.finfo(dtype).max) == largest


# --- overflow on cast -------------------------------------------------------------------------------------------------

BEYOND = [448.0, 464.0, 464.1, 480.0, 1e6, 3e38, -464.1, -1e6, INF, -INF, NAN]


@pytest.mark.parametrize(
    ("name", "dtype", "of_1e6", "of_inf"),
    [
        ("fp8_e4m3", torch.float8_e4m3fn, 448, 448),
        ("fp8_e5m2", torch.float8_e5m2, INF, INF),
        ("fp8_e4m3fnuz", torch.float8_e4m3fnuz, NAN, NAN),
        ("fp8_e5m2fnuz", torch.float8_e5m2fnuz, NAN, NAN),
    ],
)
def test_torch_2_13_saturates_e4m3fn_inf_too_and_no_other(
    name: str, dtype: torch.dtype, of_1e6: float, of_inf: float
) -> None:
    found = formats.round(name, BEYOND, overflow="torch")
    assert same(found, torch.tensor(BEYOND).to(dtype).float().numpy())
    assert same(found[[4, 8, 10]], [of_1e6, of_inf, NAN])


@pytest.mark.parametrize(
    ("name", "dtype", "of_464", "of_more", "of_inf"),
    [
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 448, NAN, NAN),
        ("fp8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, NAN, NAN, NAN),
        ("fp8_e5m2", ml_dtypes.float8_e5m2, 448, 448, INF),
    ],
)
def test_ml_dtypes_gives_nan_for_e4m3fn_above_464_and_fnuz_and_inf_for_e5m2(
    name: str, dtype: type, of_464: float, of_more: float, of_inf: float
) -> None:
    found = formats.round(name, BEYOND, overflow="ml_dtypes")
    with np.errstate(all="ignore"):
        assert same(found, np.array(BEYOND, dtype=np.float32).astype(dtype).astype(float))
    assert same(found[[1, 2, 8, 10]], [of_464, of_more, of_inf, NAN])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp4_e2m1", ml_dtypes.float4_e2m1fn),
        ("fp6_e3m2", ml_dtypes.float6_e3m2fn),
        ("fp6_e2m3", ml_dtypes.float6_e2m3fn),
    ],
)
def test_ml_dtypes_saturates_fp4_and_fp6_and_nan_becomes_minus_zero(name: str, dtype: type) -> None:
    found = formats.round(name, BEYOND, overflow="ml_dtypes")
    assert same(found, np.array(BEYOND, dtype=np.float32).astype(dtype).astype(float))
    largest = formats.FORMATS[name].max
    assert same(found[[4, 8, 9, 10]], [largest, largest, -largest, -0.0])


def test_ml_dtypes_rounds_e8m0_to_nearest_and_inf_and_nan_to_ff() -> None:
    x = np.array([1.0, 1.49, 1.5, 1.51, 3.0, INF, NAN], dtype=np.float32)
    codes = formats.encode("e8m0", x, overflow="ml_dtypes")
    assert np.array_equal(codes, x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    assert codes.tolist() == [127, 127, 128, 128, 129, 255, 255]


def test_ocp_allows_both_conversions() -> None:
    """OFP8 1.0: the largest number (saturating) or NaN, and Inf where there is one (non-saturating)."""
    for name, special in (("fp8_e4m3", NAN), ("fp8_e5m2", INF)):
        largest = formats.FORMATS[name].max
        assert same(formats.round(name, [1e6, INF], overflow="saturate"), [largest, largest])
        assert same(formats.round(name, [1e6, INF], overflow="ieee"), [special, special])


def test_an_overflow_leaves_no_trace_in_what_a_cast_gives() -> None:
    """So it has to be counted before the cast: torch's E4M3 of Inf is finite, and equal to that of 448."""
    assert torch.tensor([INF, 1e9, 448.0]).to(torch.float8_e4m3fn).float().tolist() == [448.0] * 3


def test_a_byte_read_as_fnuz_is_half_of_what_it_is_as_fn() -> None:
    for ocp, fnuz in (("fp8_e4m3", "fp8_e4m3fnuz"), ("fp8_e5m2", "fp8_e5m2fnuz")):
        as_ocp, as_fnuz = formats.table(ocp), formats.table(fnuz)
        finite = np.isfinite(as_ocp) & (np.arange(256) != 0x80)
        assert np.array_equal(as_fnuz[finite], as_ocp[finite] / 2)
        assert same([as_ocp[0x80], as_fnuz[0x80]], [-0.0, NAN])
    codes = formats.encode("fp8_e4m3", [1.0, 448.0, -0.0])
    assert same(formats.decode("fp8_e4m3fnuz", codes), [0.5, 224.0, NAN])
    by_torch = torch.tensor([1.0, 448.0, -0.0]).to(torch.float8_e4m3fn).view(torch.float8_e4m3fnuz)
    assert same(by_torch.float().numpy(), [0.5, 224.0, NAN])


# --- Transformer Engine, MS-AMP ---------------------------------------------------------------------------------------


def after(amaxes: list[float], **settings: object) -> float:
    """The factor on x that delayed scaling of E4M3 has found after these steps."""
    state = DelayedScaling("fp8_e4m3", **settings)  # type: ignore[arg-type]
    for amax in amaxes:
        state.record(torch.tensor(amax))
        state.update()
    return state.inv_scale.item()


def test_te_delayed_scaling_has_no_power_of_two_rounding() -> None:
    assert after([3.0]) == F32(448) / F32(3)
    assert after([3.0], margin=3) == F32(448) / F32(3) / 8


def test_te_delayed_scaling_takes_the_maximum_of_the_history_or_slot_zero() -> None:
    assert after([7.0, 3.5]) == 64
    assert after([7.0, 3.5], amax_choice="most_recent") == 128


def test_te_delayed_scaling_keeps_the_old_scale_for_zero_inf_and_nan() -> None:
    for amax in (0.0, INF, NAN):
        assert after([amax]) == 1
        assert after([7.0, amax], amax_choice="most_recent") == 64


def test_te_delayed_scaling_caps_the_scale_at_the_largest_fp32_number() -> None:
    assert after([1e-42]) == F32_MAX


def test_te_delayed_scaling_starts_with_1024_zeros_and_scale_one_and_zeroes_slot_zero() -> None:
    state = DelayedScaling("fp8_e4m3")
    assert state.history.shape == (1024, 1) and not state.history.any() and state.inv_scale.item() == 1
    state.record(torch.tensor(7.0))
    state.update()
    assert state.history[0].item() == 0 and state.history[-1].item() == 7


def test_te_delayed_scaling_clips_values_over_the_range() -> None:
    state = DelayedScaling("fp8_e4m3")
    assert state.fake_quantize(torch.tensor([1e6, -1e6, INF])).tolist() == [448.0, -448.0, 448.0]


def test_te_current_scaling() -> None:
    amax = torch.tensor([3.0, 7.0, 8.0, 1e-9, 0.0, INF, NAN])
    plain = current_inv_scale(amax, "fp8_e4m3", epsilon=1e-6).tolist()
    assert plain == [F32(448) / F32(3), 64, 56, F32(448) / F32(1e-6), F32(448) / F32(1e-6), 1, 1]
    assert current_inv_scale(amax, "fp8_e4m3").tolist()[4:] == [1, 1, 1]
    floored = current_inv_scale(amax, "fp8_e4m3", is_power_of_two=True).tolist()
    assert floored == [128, 64, 32, 2.0**38, 1, 1, 1]  # 149.3, 64, 56, 4.48e11


def test_te_float8_block_scales_are_floored_powers_of_two() -> None:
    """128 × 128 for weights, 1 × 128 for inputs."""
    scheme = SCHEMES["fp8_block"]
    assert scheme.weights is not None and scheme.activations is not None
    x = gaussian(200, 300) * 5
    q = quantize(x, scheme.weights)
    assert q.scales_NG is not None and q.scales_NG.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            amax = x[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].abs().max().item()
            assert q.scales_NG[i, j].item() == 1 / 2.0 ** math.floor(math.log2(448 / amax))
    by_row = quantize(x, scheme.activations).scales_NG
    assert by_row is not None and by_row.shape == (200, 3)
    assert by_row[5, 2].item() == 1 / 2.0 ** math.floor(math.log2(448 / x[5, 256:].abs().max().item()))


def test_ms_amp_scales_are_two_to_the_floor_less_the_margin() -> None:
    amax, old = torch.tensor([3.0, 7.0, 8.0, 0.0, INF, NAN]), torch.tensor(0.125)
    assert power_of_two_inv_scale(amax, old, "fp8_e4m3").tolist() == [128, 64, 32, 0.125, 0.125, 0.125]
    assert power_of_two_inv_scale(amax, old, "fp8_e4m3", margin=2).tolist()[:3] == [32, 16, 8]
    how = Scaling(granularity=ROW, scale_format="fp32", rule="power_of_two", margin=2)
    assert (1 / find_scales(amax[:3, None], "fp8_e4m3", how).scale[:, 0]).tolist() == [32, 16, 8]


# --- OCP MX, NVIDIA MXFP8 ---------------------------------------------------------------------------------------------


def mx(rule: str, format_name: str = "fp8_e4m3") -> TensorScheme:
    return TensorScheme(
        format=format_name,
        scaling=Scaling(granularity=group(32), scale_format="e8m0", rule=rule),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "emax"), [("fp8_e4m3", 8), ("fp8_e5m2", 15), ("fp6_e3m2", 4), ("fp6_e2m3", 2), ("fp4_e2m1", 2)]
)
def test_ocp_scale_is_the_binade_of_amax_over_that_of_the_element(name: str, emax: int) -> None:
    assert formats.FORMATS[name].emax == emax
    for amax in (1.0, 1.99, 2.0, 3.0, 1e-38, 3e38):
        q = quantize(torch.tensor([[amax] + [0.0] * 31]), mx("ocp_floor", name))
        assert q.scales_NG is not None
        assert q.scales_NG.item() == 2.0 ** max(math.floor(math.log2(amax)) - emax, -127)


def test_ocp_elements_between_448_and_512_times_two_to_the_k_clip_by_up_to_an_eighth() -> None:
    for k in (-20, 0, 30):
        kept = torch.tensor([[448.0] * 32, [511.9] * 32, [512.0] * 32]) * 2.0**k
        found = fake_quantize(kept, mx("ocp_floor")) / 2.0**k
        assert found[:, 0].tolist() == [448, 448, 512]
    assert (512 - 448) / 512 == 0.125


def test_nvidia_rounds_e8m0_up_if_any_mantissa_bit_is_set() -> None:
    amax = torch.tensor([448.0, 448.0001, 447.9, 0.0])
    x = torch.cat([amax[:, None], torch.zeros(4, 31)], dim=1)
    q = quantize(x, mx("round_up"))
    assert q.scales_NG is not None
    assert q.scales_NG[:, 0].tolist() == [1, 2, 1, 2.0**-127]  # amax 0: code 0x00
    assert formats.encode("e8m0", q.scales_NG[:, 0].numpy()).tolist() == [127, 128, 127, 0]


def test_nvidia_nan_scale_is_ff_and_so_is_inf_as_in_torchao() -> None:
    """TE stores 0xFE for Inf, which reads as 2^127 and hides it; bitwright follows torchao."""
    x = gaussian(2, 32)
    x[0, 3], x[1, 4] = NAN, INF
    q = quantize(x, mx("round_up"))
    assert q.scales_NG is not None and q.scales_NG.isnan().all()
    assert formats.encode("e8m0", q.scales_NG.numpy()).tolist() == [[0xFF], [0xFF]]
    assert q.dequantize().isnan().all()


def clipped_and_error(x: torch.Tensor, q: QTensor) -> tuple[float, float]:
    """Share of blocks whose largest element saturates, and the relative RMS error."""
    assert q.scales_NG is not None
    beyond = x.abs().amax(dim=1) > 448 * q.scales_NG[:, 0]
    return beyond.double().mean().item(), ((q.dequantize() - x).norm() / x.norm()).item()


@pytest.mark.parametrize(("rule", "clipped", "error"), [("ocp_floor", 0.168, 0.0292), ("round_up", 0.0, 0.0265)])
def test_share_of_gaussian_blocks_that_clip_and_the_error(rule: str, clipped: float, error: float) -> None:
    """Blocks of 32: floor 16.8 % and 2.92 % relative RMS error, round-up none and 2.65 %."""
    x = gaussian(40_000, 32, seed=1)
    share, relative = clipped_and_error(x, quantize(x, mx(rule)))
    assert share == pytest.approx(clipped, abs=0.008)
    assert relative == pytest.approx(error, abs=0.0004)


def test_nearest_powers_of_two_clip_most_gaussian_blocks() -> None:
    """Nearest by its logarithm: 59 % and 7.38 %. Nearest by its value, which is how E8M0 casts round: 70 % and 9.3 %,
    since the middle between 1 and 2 is 1.5 and not 1.41."""
    x = gaussian(40_000, 32, seed=1)
    by_logarithm = torch.exp2((x.abs().amax(dim=1) / 448).log2().round()).reshape(-1, 1, 1)
    scales = Scales(scale=by_logarithm, offset=None, tensor_scale=None)
    assert clipped_and_error(x, quantize(x, mx("amax"), scales=scales)) == pytest.approx((0.59, 0.0738), rel=0.025)
    q = quantize(x, mx("amax"))
    assert q.scales_NG is not None
    by_value = (x.abs().amax(dim=1) / 448).numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(q.scales_NG[:, 0].numpy(), by_value)
    assert clipped_and_error(x, q) == pytest.approx((0.704, 0.0933), rel=0.01)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def nvfp4() -> TensorScheme:
    weights = SCHEMES["nvfp4"].weights
    assert weights is not None
    return weights


def test_nvfp4_scales_are_448_times_6_over_amax_and_e4m3_of_the_block() -> None:
    x = gaussian(64, 64, seed=3)
    encode = F32(2688) / F32(x.abs().max().item())
    blocks = np.abs(x.numpy()).reshape(64, 4, 16).max(axis=2)
    q = quantize(x, nvfp4())
    assert q.scales_NG is not None and q.tensor_scale is not None
    expected = (blocks / F32(6) * encode).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(q.scales_NG.numpy(), expected)
    # the convention hazard: bitwright's tensor scale multiplies, amax / 2688, as torchao's; TE's is its reciprocal
    assert q.tensor_scale.item() == F32(x.abs().max().item()) / F32(2688)
    unit = (expected * q.tensor_scale.numpy()).repeat(16, axis=1)
    codes = np.clip(x.numpy() / unit, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(q.codes_NK.numpy(), codes)


def test_nvfp4_of_zeros_has_the_scale_one_and_of_tiny_tensors_a_capped_one() -> None:
    zeros = quantize(torch.zeros(1, 16), nvfp4())
    assert zeros.tensor_scale is not None and zeros.tensor_scale.item() == 1
    tiny = gaussian(4, 16) * 1e-37
    q = quantize(tiny, nvfp4())
    assert q.tensor_scale is not None and q.tensor_scale.item() == pytest.approx(1 / F32_MAX, rel=1e-6)
    assert (q.dequantize() - tiny).double().norm() < 0.2 * tiny.double().norm()


def test_nvfp4_training_weights_share_a_scale_in_squares_of_16() -> None:
    x = gaussian(40, 64)
    how = Scaling(granularity=block(16, 16), scale_format="fp8_e4m3", tensor_scale=True)
    scales = find_scales(to_groups(x, how.granularity), "fp4_e2m1", how)
    assert scales.scale.shape == (3, 4, 1)
    encode = F32(2688) / F32(x.abs().max().item())
    corner = F32(x[16:32, 48:].abs().max().item()) / F32(6) * encode
    assert scales.scale[1, 3].item() == corner.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def test_nvfp4_block_scales_may_be_zero_as_in_te_and_unlike_torchao() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 1.0, 1e-9
    scales = quantize(x, nvfp4()).scales_NG
    assert scales is not None and scales.tolist() == [[448.0, 0.0]]


def test_nvfp4_zeroes_7_percent_of_gaussian_elements_and_an_outlier_61_percent_of_block_scales() -> None:
    x = gaussian(512, 512, seed=3)
    assert (fake_quantize(x, nvfp4()) == 0).double().mean().item() == pytest.approx(0.068, abs=0.003)
    x[0, 0] = 1e6
    scales = quantize(x, nvfp4()).scales_NG
    assert scales is not None and (scales == 0).double().mean().item() == pytest.approx(0.61, abs=0.03)


# --- stochastic rounding, integers ------------------------------------------------------------------------------------


def test_stochastic_bf16_adds_16_random_bits_to_the_fp32_word_and_truncates() -> None:
    """A rest of k / 2^16 steps up with just that probability, and numbers of the format never move."""
    num_draws = 40_000
    for rest in (0, 1 << 4, 1 << 14, 3 << 14):
        word = np.uint32(0x3F9E0000 + rest)  # 1.234… to 1.242
        x = np.full(num_draws, word.view(np.float32))
        found = formats.round("bf16", x, "stochastic", seed=7, random_bits=16).astype(np.float32).view(np.uint32)
        assert set(found) <= {0x3F9E0000, 0x3F9F0000}
        share = rest / 2**16
        deviation = math.sqrt(share * (1 - share) / num_draws)
        assert (found == 0x3F9F0000).mean() == pytest.approx(share, abs=4 * deviation + 1e-12)


def test_awq_zero_points_cannot_reproduce_the_minimum_of_q4_1_exactly() -> None:
    """code · scale + minimum restores 16 levels that start anywhere; (code − zero_point) · scale those around 0."""
    x = (torch.arange(32) % 16).float().reshape(1, 32) * 0.25 + 0.1015625
    with_minimum, with_zero_point = SCHEMES["int4_g32_min"].weights, SCHEMES["int4_g32_zp"].weights
    assert with_minimum is not None and with_zero_point is not None
    assert torch.equal(fake_quantize(x, with_minimum), x)
    assert fake_quantize(x, with_zero_point)[0, 0] == 0 != x[0, 0]
    assert (fake_quantize(x, with_zero_point) - x).abs().max() > 0.1
