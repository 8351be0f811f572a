"""Transforms: exact changes of variables, and that they do what their papers say they do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize import SCHEMES, TRANSFORMS, fake_quantize
from bitwright.quantize.fitted import UNCHANGED, Fitted, rotate, rotation_width
from bitwright.quantize.static_scales import find_static_scale, round_input
from bitwright.quantize.transforms import Transform

#: Schemes of every kind: weights alone, dynamic, static, blocks, unscaled.
KINDS = ("int4_g128", "int4_g32_min", "int8", "int8_static", "fp8", "fp8_static", "nvfp4", "bf16", "nf4_g64")
WIDTHS = (64, 96, 576, 33)


@dataclasses.dataclass(frozen=True)
class Seen:
    x_TK: Tensor
    token_weights_T: Tensor | None = None


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outlier_inputs(num_tokens: int, columns: int) -> Tensor:
    """A few columns are large on every token, as in trained models."""
    x_TK = drawn(num_tokens, columns, seed=1)
    x_TK[:, ::17] *= 60
    return x_TK


def fits(columns: int) -> list[tuple[Transform, str]]:
    return [
        (transform, scheme)
        for transform in TRANSFORMS.values()
        for scheme in KINDS
        if transform.why_not(SCHEMES[scheme], (24, columns)) is None
    ]


def output_error(weight_NK: Tensor, x_TK: Tensor, scheme_name: str, fitted: Fitted) -> float:
    """‖Q(W') Q(x') − W x‖² by the verbs alone; a static scale by hand."""
    scheme = SCHEMES[scheme_name]
    assert scheme.weights is not None
    changed = fitted.input(x_TK)
    if scheme.static_activations:
        assert scheme.activations is not None
        largest = {"int8": 127.0, "fp8_e4m3": 448.0}[scheme.activations.format]
        scale = changed.abs().max() / largest
        plain = dataclasses.replace(scheme.activations, scaling=None) if largest == 448 else None
        units = changed / scale
        changed = (units.round() if plain is None else fake_quantize(units, plain)) * scale
    elif scheme.activations is not None:
        changed = fake_quantize(changed, scheme.activations)
    y_TN = changed @ fake_quantize(fitted.weight(weight_NK), scheme.weights).T
    return float((y_TN - x_TK @ weight_NK.T).square().sum())


@pytest.mark.parametrize("columns", WIDTHS)
def test_changes_are_exact(columns: int) -> None:
    weight_NK, x_TK = drawn(24, columns), outlier_inputs(200, columns)
    expected = x_TK.double() @ weight_NK.double().T
    tried = set()
    for transform, scheme in fits(columns):
        fitted = transform.fit(weight_NK, SCHEMES[scheme], Seen(x_TK))
        found = fitted.input(x_TK.double()) @ fitted.weight(weight_NK.double()).T
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-11), (transform.name, scheme)
        restored = fitted.restore(fitted.weight(weight_NK.double()))
        assert torch.allclose(restored, weight_NK.double(), rtol=1e-13, atol=1e-13)
        assert torch.allclose(fitted.input(x_TK) @ fitted.weight(weight_NK).T, expected.float(), rtol=1e-3, atol=1e-3)
        tried.add(transform.name)
    assert tried == set(TRANSFORMS) - ({"hadamard"} if columns % 16 else set())


def test_restoring_any_weight_gives_what_it_does_in_the_original_space() -> None:
    """restore(W') x = W' x' also where W' is no changed weight, such as one that was rounded."""
    fitted = Fitted(column_scales_K=drawn(96).exp(), signs_K=drawn(96, seed=2).sign())
    changed_NK, x_TK = drawn(5, 96, seed=3).double(), drawn(7, 96, seed=4).double()
    assert torch.allclose(x_TK @ fitted.restore(changed_NK).T, fitted.input(x_TK) @ changed_NK.T, atol=1e-12)


@pytest.mark.parametrize("columns", [1, 2, 64, 96, 128, 576, 1024, 5120])
def test_rotations_are_hadamard_matrices_along_the_diagonal(columns: int) -> None:
    """Sylvester's matrix in closed form: element (i, j) is −1 to the number of ones that i and j have in common."""
    width = rotation_width(columns)
    assert columns % width == 0 and (columns // width) % 2 == 1
    common = np.bitwise_count(np.arange(width)[:, None] & np.arange(width))
    block = torch.from_numpy((-1.0) ** common / width**0.5)
    x = drawn(3, columns).double()
    assert torch.allclose(rotate(x).reshape(3, -1, width), x.reshape(3, -1, width) @ block, atol=1e-12)
    assert torch.allclose(rotate(rotate(x)), x, atol=1e-12)
    assert rotate(x.float()).dtype == torch.float32 and rotate(x).shape == x.shape


def test_a_plan_keeps_a_fit_bit_for_bit() -> None:
    weight_NK, x_TK = drawn(24, 64), outlier_inputs(50, 64)
    for transform, scheme in fits(64):
        fitted = transform.fit(weight_NK, SCHEMES[scheme], Seen(x_TK))
        stored = fitted.tensors()
        assert stored.keys() == transform.parts
        again = Fitted.from_tensors(stored)
        assert again.agrees_with(fitted)
        assert torch.equal(again.weight(weight_NK), fitted.weight(weight_NK))
        assert torch.equal(again.input(x_TK), fitted.input(x_TK))
    assert UNCHANGED.tensors() == {} and Fitted.from_tensors({}).is_identity


def test_fits_agree_only_where_they_are_the_same_change() -> None:
    one, other = Fitted(column_scales_K=torch.ones(8)), Fitted(column_scales_K=torch.full((8,), 2.0))
    assert one.agrees_with(Fitted(column_scales_K=torch.ones(8)))
    assert not one.agrees_with(other) and not one.agrees_with(UNCHANGED)
    assert one.is_identity and UNCHANGED.is_identity and not other.is_identity


@pytest.mark.parametrize("scales", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_factors_that_cannot_be_undone_are_refused(scales: list[float]) -> None:
    with pytest.raises(SchemeError, match="positive and finite"):
        Fitted(column_scales_K=torch.tensor(scales))


def test_signs_are_signs() -> None:
    with pytest.raises(SchemeError, match="1 or -1"):
        Fitted(signs_K=torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("scheme", ["int8", "int8_static"])
def test_smoothquant_saves_inputs_with_large_columns(scheme: str) -> None:
    weight_NK, x_TK = drawn(40, 576) * 0.05, outlier_inputs(300, 576)
    fitted = TRANSFORMS["smoothquant"].fit(weight_NK, SCHEMES[scheme], Seen(x_TK))
    plain = output_error(weight_NK, x_TK, scheme, UNCHANGED)
    assert output_error(weight_NK, x_TK, scheme, fitted) < 0.2 * plain
    ratio = fitted.column_scales_K
    assert ratio is not None
    large = torch.zeros(576, dtype=torch.bool)
    large[::17] = True
    assert ratio[large].min() > ratio[~large].max()


def test_smoothquant_takes_the_papers_formula_for_its_factors() -> None:
    """s_j ∝ amax|x_j|^α / amax|w_j|^(1−α), for one α of the grid."""
    weight_NK, x_TK = drawn(40, 64), outlier_inputs(100, 64)
    fitted = TRANSFORMS["smoothquant"].fit(weight_NK, SCHEMES["int8"], Seen(x_TK))
    assert fitted.column_scales_K is not None
    found = fitted.column_scales_K.log()
    amax_x, amax_w = x_TK.abs().amax(0).log(), weight_NK.abs().amax(0).log()
    gaps = []
    for tenth in range(1, 10):
        expected = tenth / 10 * amax_x - (1 - tenth / 10) * amax_w
        gaps.append(float(((found - found.mean()) - (expected - expected.mean())).abs().max()))
    assert min(gaps) < 1e-5


def test_awq_lowers_the_error_of_the_outputs_and_takes_a_power_of_the_mean_magnitude() -> None:
    weight_NK, x_TK = drawn(40, 256), outlier_inputs(300, 256)
    fitted = TRANSFORMS["awq"].fit(weight_NK, SCHEMES["int4_g128"], Seen(x_TK))
    plain = output_error(weight_NK, x_TK, "int4_g128", UNCHANGED)
    assert output_error(weight_NK, x_TK, "int4_g128", fitted) < 0.7 * plain
    assert fitted.column_scales_K is not None
    found, magnitude = fitted.column_scales_K.log(), x_TK.abs().mean(0).log()
    slope = np.polyfit(magnitude.numpy(), found.numpy(), 1)[0]
    assert slope == pytest.approx(round(slope, 1), abs=1e-4) and 0 < slope <= 1


@pytest.mark.parametrize("scheme", ["int8_static", "int8", "int4_g128"])
def test_hadamard_saves_inputs_with_large_columns(scheme: str) -> None:
    """Of a tensor with one large column per block all columns become alike; weights with such columns likewise."""
    weight_NK, x_TK = drawn(40, 576) * 0.05, drawn(300, 576, seed=1)
    x_TK[:, ::64] *= 60
    if SCHEMES[scheme].activations is None:
        weight_NK, x_TK = weight_NK.clone(), drawn(300, 576, seed=1)
        weight_NK[:, ::64] *= 30
    fitted = TRANSFORMS["hadamard"].fit(weight_NK, SCHEMES[scheme], None)
    plain = output_error(weight_NK, x_TK, scheme, UNCHANGED)
    assert output_error(weight_NK, x_TK, scheme, fitted) < 0.5 * plain
    changed = fitted.input(x_TK)
    if SCHEMES[scheme].activations is not None:
        assert changed.abs().max() / changed.std() < 0.5 * x_TK.abs().max() / x_TK.std()


def test_a_fit_does_no_harm_where_nothing_is_to_be_gained() -> None:
    """Plain Gaussian numbers, and tokens that were not seen."""
    weight_NK, x_TK, fresh_TK = drawn(40, 64), drawn(256, 64, seed=1), drawn(256, 64, seed=2)
    for name, schemes in {"smoothquant": ["int8", "mxfp8", "fp8"], "awq": ["int4_g32", "nf4_g64"]}.items():
        for scheme in schemes:
            fitted = TRANSFORMS[name].fit(weight_NK, SCHEMES[scheme], Seen(x_TK))
            plain = output_error(weight_NK, fresh_TK, scheme, UNCHANGED)
            assert output_error(weight_NK, fresh_TK, scheme, fitted) <= plain * 1.05, (name, scheme)


@pytest.mark.parametrize("scheme_name", ["int8_static", "fp8_static"])
def test_a_fit_does_not_fall_for_the_largest_numbers_that_it_learned_from(scheme_name: str) -> None:
    """Heavy tails: which column's largest number is large is chance, and another one's on the next tokens."""
    scheme, weight_NK = SCHEMES[scheme_name], drawn(40, 64)
    assert scheme.activations is not None and scheme.weights is not None
    normal, squares = drawn(3, 512, 64, seed=1), drawn(3, 512, 64, 3, seed=2).square().mean(-1)
    x_TK, fresh_TK, _ = normal / squares.sqrt()  # Student's t with 3 degrees of freedom

    def fresh_error(fitted: Fitted) -> float:
        assert scheme.activations is not None and scheme.weights is not None
        scale = find_static_scale(fitted.input(x_TK), scheme.activations)
        rounded = round_input(fitted.input(fresh_TK), scheme.activations, scale)
        y_TN = rounded @ fake_quantize(fitted.weight(weight_NK), scheme.weights).T
        return float((y_TN - fresh_TK @ weight_NK.T).square().sum())

    fitted = TRANSFORMS["smoothquant"].fit(weight_NK, scheme, Seen(x_TK))
    assert fresh_error(fitted) <= 1.02 * fresh_error(UNCHANGED)


def test_tokens_count_by_their_weights() -> None:
    """Half of the tokens have large columns; where they weigh nothing, the fit serves the others alone."""
    weight_NK = drawn(40, 64)
    parts = outlier_inputs(100, 64), outlier_inputs(100, 64).roll(5, dims=1)
    x_TK = torch.stack(parts, dim=1).reshape(200, 64)
    weights_T = torch.tensor([0.0, 1.0]).repeat(100)
    found = TRANSFORMS["awq"].fit(weight_NK, SCHEMES["int4_g32"], Seen(x_TK, weights_T))
    other = TRANSFORMS["awq"].fit(weight_NK, SCHEMES["int4_g32"], Seen(x_TK, 1 - weights_T))
    errors = [output_error(weight_NK, x_TK[1::2], "int4_g32", fitted) for fitted in (found, other)]
    assert errors[0] <= errors[1]


@pytest.mark.parametrize("name", ["smoothquant", "awq"])
def test_columns_that_nothing_reaches_keep_their_scale(name: str) -> None:
    scheme = SCHEMES["int8" if name == "smoothquant" else "int4_g32"]
    weight_NK, x_TK = drawn(8, 64), outlier_inputs(50, 64)
    x_TK[:, 3] = 0
    if name == "smoothquant":
        weight_NK[:, 5] = 0
    fitted = TRANSFORMS[name].fit(weight_NK, scheme, Seen(x_TK))
    assert fitted.column_scales_K is not None and not fitted.is_identity
    assert fitted.column_scales_K[3] == 1 and (name == "awq" or fitted.column_scales_K[5] == 1)
    for nothing in (torch.zeros(8, 64), weight_NK):
        only_zeros = TRANSFORMS[name].fit(nothing, scheme, Seen(torch.zeros(50, 64)))
        assert only_zeros.is_identity


def test_inputs_stored_in_bf16_are_taken_as_they_are() -> None:
    weight_NK, x_TK = drawn(8, 64), outlier_inputs(50, 64)
    for name, scheme in {"smoothquant": "int8", "awq": "int4_g32"}.items():
        fitted = TRANSFORMS[name].fit(weight_NK, SCHEMES[scheme], Seen(x_TK.bfloat16()))
        assert fitted.column_scales_K is not None and fitted.column_scales_K.dtype == torch.float32


def test_transforms_that_learn_need_something_to_learn_from() -> None:
    for transform, scheme in fits(64):
        if transform.needs_data:
            with pytest.raises(SchemeError, match="calibrate first"):
                transform.fit(drawn(4, 64), SCHEMES[scheme], None)
        else:
            transform.fit(drawn(4, 64), SCHEMES[scheme], None)


@pytest.mark.parametrize(
    ("transform", "scheme", "columns", "reason"),
    [
        ("smoothquant", "int4_g128", 64, "rounds no activations"),
        ("smoothquant", "bf16", 64, "rounds no activations under a scale"),
        ("smoothquant", "as_loaded", 64, "rounds no activations"),
        ("awq", "int8", 64, "rounds activations too"),
        ("awq", "int8_w", 64, "8 bits leave nothing to gain"),
        ("awq", "as_loaded", 64, "without scales"),
        ("hadamard", "int8", 33, "33 columns divide into blocks of 1 only"),
        ("hadamard", "int8", 40, "blocks of 8 only"),
        ("hadamard", "bf16", 64, "no scales"),
    ],
)
def test_what_cannot_gain_is_told_why(transform: str, scheme: str, columns: int, reason: str) -> None:
    why = TRANSFORMS[transform].why_not(SCHEMES[scheme], (24, columns))
    assert why is not None and reason in why
