"""Static scales against closed forms; overflows against torch's and ml_dtypes' own casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright.errors import SchemeError
from bitwright.quantize import SCHEMES, Scaling, Scheme, TensorScheme
from bitwright.quantize.granularity import ROW, TENSOR
from bitwright.quantize.static_scales import RULE_NUMBERS, find_static_scale, overflows, reach, round_input

STATIC = [scheme for scheme in SCHEMES.values() if scheme.static_activations]


def tensor_scheme(format: str, **rule: object) -> TensorScheme:
    return TensorScheme(format=format, scaling=Scaling(granularity=TENSOR, scale_format="fp32", **rule))  # type: ignore[arg-type]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_there_are_static_schemes_of_integers_and_floats() -> None:
    assert {scheme.name for scheme in STATIC} >= {"int8_static", "fp8_static"}
    assert all(scheme.activations is not None for scheme in STATIC)


def test_the_scale_of_amax_maps_the_largest_number_to_the_largest_code() -> None:
    x = drawn(50, 30)
    assert find_static_scale(x, tensor_scheme("int8")) == pytest.approx(float(x.abs().max()) / 127)
    assert find_static_scale(x.bfloat16(), tensor_scheme("fp8_e4m3")) == pytest.approx(
        float(x.bfloat16().float().abs().max()) / 448
    )


def test_the_scale_of_a_percentile_is_numpys() -> None:
    x = drawn(100, 40)
    expected = np.percentile(x.abs().numpy(), 99.0) / 127
    assert find_static_scale(x, tensor_scheme("int8", rule="percentile", percentile=99.0)) == pytest.approx(expected)


def test_the_scale_of_mse_has_less_error_than_amax() -> None:
    x = drawn(100, 40)
    x[3, 4] = 40.0
    errors = {}
    for rule in ("amax", "mse"):
        scheme = tensor_scheme("int8", rule=rule)
        errors[rule] = float((round_input(x, scheme, find_static_scale(x, scheme)) - x).square().sum())
    assert errors["mse"] < errors["amax"]


def test_slow_rules_look_at_some_of_many_tokens() -> None:
    x = drawn(8 * RULE_NUMBERS // 64, 64)
    scale = find_static_scale(x, tensor_scheme("int8", rule="percentile", percentile=99.9))
    assert scale == pytest.approx(np.percentile(x.abs().numpy(), 99.9) / 127, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_under_a_static_scale_is_by_the_formula(dtype: torch.dtype) -> None:
    x = (3 * drawn(2, 7, 30)).to(dtype)
    scale = torch.tensor(0.037)
    found = round_input(x, tensor_scheme("int8"), scale)
    expected = (x.float() / scale).round().clamp(-128, 127) * scale
    assert torch.equal(found, expected.to(dtype)) and found.dtype == dtype
    fp8 = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(round_input(x, tensor_scheme("fp8_e4m3"), scale), fp8.to(dtype))


def test_without_a_static_scale_the_scale_is_found_now_and_nothing_overflows() -> None:
    x = drawn(5, 30) * 1e6
    scheme = SCHEMES["int8"].activations
    assert scheme is not None
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert torch.allclose(round_input(x, scheme), (x / scale).round() * scale)
    assert overflows(x, scheme) is None
    assert round_input(torch.zeros(0, 30), scheme, torch.tensor(1.0)).shape == (0, 30)


@pytest.mark.parametrize(("format", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_numbers_without_a_scale_overflow_where_torchs_cast_gives_inf(format: str, dtype: torch.dtype) -> None:
    largest = torch.tensor(torch.finfo(dtype).max)
    step = largest - torch.nextafter(largest.to(dtype), torch.zeros((), dtype=dtype)).float()
    tie = largest + step / 2
    x = torch.stack([largest, torch.nextafter(tie, torch.zeros(())), tie, largest * 1.003, tie * 1.001])
    x = torch.cat([x, -x, torch.tensor([0.0, 1.0, -torch.inf])])
    found = overflows(x, TensorScheme(format=format))
    assert found is not None
    assert torch.equal(found, torch.isinf(x.to(dtype)))
    assert found.any() and not found.all()


def test_fp8_overflows_where_ml_dtypes_gives_nan() -> None:
    units = torch.linspace(440, 480, 401)
    found = overflows(torch.cat([units, -units]) * 0.5, tensor_scheme("fp8_e4m3"), torch.tensor(0.5))
    lost = np.isnan(units.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert found is not None and np.array_equal(found.numpy(), np.concatenate([lost, lost]))


def test_int8_overflows_beyond_its_ends() -> None:
    x = torch.tensor([127.0, 127.49, 127.5, 128.0, -128.0, -128.5, -128.6, 0.0, float("nan")])
    found = overflows(x, tensor_scheme("int8"), torch.tensor(1.0))
    assert found is not None
    assert found.tolist() == [False, False, True, True, False, False, True, False, False]


@pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)
def test_what_a_scale_was_found_from_does_not_overflow_it(scheme: Scheme) -> None:
    """Also where amax / scale lies a last bit beyond the largest code."""
    assert scheme.activations is not None and scheme.activations.scaling is not None
    if scheme.activations.scaling.rule != "amax":
        pytest.skip("other rules give up the outermost numbers")
    for seed in range(200):
        x = drawn(4, 8, seed=seed)
        found = overflows(x, scheme.activations, find_static_scale(x, scheme.activations))
        assert found is not None and not found.any()


def test_a_scale_of_zeros_overflows_by_anything_else() -> None:
    scheme = tensor_scheme("int8")
    scale = find_static_scale(torch.zeros(3, 4), scheme)
    assert scale == 0
    found = overflows(torch.tensor([[0.0, 1e-9]]), scheme, scale)
    assert found is not None and found.tolist() == [[False, True]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_have_no_scale(bad: float) -> None:
    x = drawn(4, 8)
    x[2, 2] = bad
    with pytest.raises(SchemeError, match="finite"):
        find_static_scale(x, tensor_scheme("int8"))


def test_no_inputs_have_no_scale() -> None:
    with pytest.raises(SchemeError, match="there are none"):
        find_static_scale(torch.zeros(0, 8), tensor_scheme("int8"))
    with pytest.raises(SchemeError, match="no scale to find"):
        find_static_scale(drawn(2, 8), TensorScheme(format="bf16"))


@pytest.mark.parametrize(
    "activations",
    [
        None,
        TensorScheme(format="bf16"),
        TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="fp32")),
        TensorScheme(format="uint8", scaling=Scaling(granularity=TENSOR, scale_format="fp32", symmetry="zero_point")),
    ],
    ids=str,
)
def test_static_activations_have_one_scale_for_the_whole_tensor(activations: TensorScheme | None) -> None:
    with pytest.raises(SchemeError, match="a static scale is one per tensor"):
        Scheme(
            name="odd",
            description="",
            source="",
            weights=tensor_scheme("int8"),
            activations=activations,
            static_activations=True,
        )


# --- two levels: the second is static ---------------------------------------------------------------------------------


def nvfp4() -> TensorScheme:
    scheme = SCHEMES["nvfp4_static"].activations
    assert scheme is not None
    return scheme


def test_the_static_scale_of_two_levels_is_the_second() -> None:
    x = drawn(50, 32)
    assert find_static_scale(x, nvfp4()) == pytest.approx(float(x.abs().max()) / (448 * 6))


def test_groups_are_scaled_in_units_of_the_static_scale() -> None:
    """The arithmetic of NVFP4 checkpoints: what is stored is 1 / scale, and groups are measured on every call."""
    x, scale = 3 * drawn(40, 64), torch.tensor(0.0025)
    global_scale = 1 / scale
    groups = x.unflatten(1, (-1, 16))
    local = (global_scale * groups.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    units = (groups / (local / global_scale)).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = torch.from_numpy(units) * (local / global_scale)
    found = round_input(x, nvfp4(), scale).unflatten(1, (-1, 16))
    same = torch.isclose(found, expected, rtol=1e-6, atol=0)
    assert same.float().mean() > 0.999  # 1 / scale is rounded: a number on an edge may go either way
    assert local.max() == 448 and (local < 448).any()  # this scale saturates the largest groups


def test_what_lies_beyond_the_largest_group_overflows() -> None:
    scale = torch.tensor(1.0)
    found = overflows(torch.tensor([[2688.0, -2688.0, 3000.0, 3200.0, -3200.0, 0.0]]), nvfp4(), scale)
    assert found is not None and found.tolist() == [[False, False, False, True, True, False]]
    assert reach(nvfp4()) == 2688 and reach(tensor_scheme("fp8_e4m3")) == 448
