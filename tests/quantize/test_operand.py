"""Operands of products: codes are those of `quantize`, what is folded into them is exact, bf16 holds them."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from galleries import same_bits
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats.decode import value_table
from bitwright.quantize import SCHEMES, Scaling, TensorScheme, block, group, quantize
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.backends.cpu import operands as cpu_operands
from bitwright.quantize.granularity import ROW, TENSOR, spread
from bitwright.quantize.operand import folds_in_bf16, operand_of, quantize_operand, scale_operand


def under(
    format: str, granularity: object, scale_format: str = "fp32", rule: str = "amax", **more: object
) -> TensorScheme:
    return TensorScheme(
        format=format, scaling=Scaling(granularity=granularity, scale_format=scale_format, rule=rule, **more)
    )


KINDS = {
    "tensor e4m3": under("fp8_e4m3", TENSOR),
    "tensor e5m2": under("fp8_e5m2", TENSOR),
    "row": under("fp8_e4m3", ROW),
    "group 128": under("fp8_e4m3", group(128), rule="power_of_two"),
    "block 128": under("fp8_e4m3", block(128, 128), rule="power_of_two"),
    "mx": under("fp8_e4m3", group(32), "e8m0", "round_up"),
    "mx int8": under("int8", group(32), "e8m0", "ocp_floor", element_exponent=-6),
    "nvfp4": under("fp4_e2m1", group(16), "fp8_e4m3", tensor_scale=True),
    "nvfp4 squares": under("fp4_e2m1", block(16, 16), "fp8_e4m3", tensor_scale=True),
    "group 128 fp32": under("fp8_e4m3", group(128)),
}
EVERY_KIND = pytest.mark.parametrize("scheme", KINDS.values(), ids=KINDS.keys())


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    wide = normal(40, 576) * torch.exp(2 * normal(40, 576))
    spoiled = normal(33, 200)
    spoiled[3, 5], spoiled[20, 130] = torch.nan, torch.inf
    return {
        "wide": wide,
        "odd": normal(37, 83) * 1e-3,
        "one row": normal(1, 64),
        "one column": normal(50, 1),
        "zeros": torch.zeros(20, 48),
        "some zeros": torch.cat([torch.zeros(16, 48), normal(16, 48)]),
        "transposed": normal(96, 70).t(),
        "long": normal(300, 4096),
        "spoiled": spoiled,
        "tiny": normal(32, 64) * 1e-30,
        "tinier": normal(32, 64) * 1e-37,
    }


MATRICES = matrices()
EVERY_MATRIX = pytest.mark.parametrize("name", MATRICES)


@EVERY_KIND
@EVERY_MATRIX
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_times_scale_are_codes_times_scales(scheme: TensorScheme, name: str, dtype: torch.dtype) -> None:
    x = MATRICES[name].to(dtype)
    q = torch_backend.quantize(x, scheme)
    assert scheme.scaling is not None and q.scales_NG is not None
    found = quantize_operand(x, scheme)
    if scheme.scaling.granularity.scope in ("tensor", "row"):
        folded, scale = q.codes_NK.double(), q.scales_NG.double()
    else:
        folded = q.codes_NK.double() * spread(q.scales_NG, *x.shape, scheme.scaling.granularity).double()
        scale = torch.ones(1, 1).double() if q.tensor_scale is None else q.tensor_scale.double()
        largest = float(q.scales_NG.amax())
        if folds_in_bf16(scheme) and q.tensor_scale is None and 0 < largest < 2.0**-110:
            lifted = min(1 / largest, 2.0**127)
            folded, scale = folded * lifted, scale / lifted
    assert same_bits(found.scale.double().reshape(-1), scale.reshape(-1))
    if folds_in_bf16(scheme):
        assert found.numbers.dtype == torch.bfloat16
        assert torch.equal(found.numbers.double().nan_to_num(7.0), folded.nan_to_num(7.0))  # −0 is as good as 0 here
    else:
        assert same_bits(found.numbers.float(), folded.float())


@EVERY_KIND
def test_kernels_give_what_a_quantised_matrix_is(scheme: TensorScheme) -> None:
    for name, x in MATRICES.items():
        found, expected = cpu_operands.operand(x, scheme), operand_of(quantize(x, scheme))
        assert torch.equal(found.numbers.nan_to_num(7.0), expected.numbers.nan_to_num(7.0)), name
        assert same_bits(found.scale, expected.scale), name


def test_what_bf16_holds() -> None:
    """Every code times every scale, for the two pairs that the folding of block scales rests on."""
    codes = np.array(value_table(formats.FORMATS["fp4_e2m1"]))
    scales = np.array(value_table(formats.FORMATS["fp8_e4m3"]))
    exact = np.outer(codes, scales[np.isfinite(scales)])
    assert np.array_equal(exact, exact.astype(ml_dtypes.bfloat16).astype(np.float64))
    eights = np.array(value_table(formats.FORMATS["fp8_e4m3"]))
    exact = np.outer(eights[np.isfinite(eights)], 2.0 ** np.arange(-100, 101))
    assert np.array_equal(exact, exact.astype(ml_dtypes.bfloat16).astype(np.float64))
    assert folds_in_bf16(under("fp8_e4m3", group(16), "fp8_e4m3"))  # 4 bits by 4 are 8
    assert not folds_in_bf16(under("fp4_e2m1", group(16), "fp16"))
    assert [name for name, scheme in KINDS.items() if not folds_in_bf16(scheme)] == [
        "tensor e4m3",
        "tensor e5m2",
        "row",
        "group 128 fp32",
    ]


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)]
)
def test_known_scales_against_ml_dtypes(name: str, dtype: type) -> None:
    largest = float(formats.FORMATS[name].max)
    for x in (MATRICES["wide"], MATRICES["wide"].bfloat16(), MATRICES["odd"], MATRICES["transposed"].half()):
        inv_scale = torch.tensor(3.7)
        found, amax = scale_operand(x, name, inv_scale)
        product = (x.float() * inv_scale).numpy()
        assert np.array_equal(
            found.numbers.float().numpy(), np.clip(product, -largest, largest).astype(dtype).astype(np.float32)
        )
        assert amax == x.float().abs().max() and found.scale == 1 / inv_scale
    assert scale_operand(torch.empty(0, 8), name, inv_scale)[1] == 0


@EVERY_KIND
@pytest.mark.parametrize("rounding", ["stochastic", "toward_zero"])
def test_other_roundings_are_those_of_quantize(scheme: TensorScheme, rounding: str) -> None:
    for name in ("odd", "some zeros", "transposed", "spoiled"):
        for dtype in (torch.float32, torch.bfloat16):
            x = MATRICES[name].to(dtype)
            found = quantize_operand(x, scheme, rounding=rounding, seed=11)
            expected = operand_of(torch_backend.quantize(x, scheme, rounding=rounding, seed=11))
            assert torch.equal(found.numbers.nan_to_num(7.0), expected.numbers.nan_to_num(7.0)), name


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean of many draws is the number itself, within five standard errors of a grid of step at most 1/2."""
    x = torch.linspace(-5.9, 5.9, 64).repeat(2000, 1)
    x[:, 0] = 6.0
    found = quantize_operand(x, under("fp4_e2m1", TENSOR), rounding="stochastic", seed=3)
    error = found.values().mean(0) - x[0]
    assert float(error.abs().max()) < 5 * 1.0 / 2000**0.5


@EVERY_KIND
def test_nothing_is_an_operand_too(scheme: TensorScheme) -> None:
    for shape in ((0, 16), (16, 0)):
        found = quantize_operand(torch.empty(shape), scheme)
        assert found.numbers.shape == shape


def test_offsets_are_refused() -> None:
    weights = SCHEMES["int4_g32_min"].weights
    assert weights is not None
    with pytest.raises(SchemeError, match="no offsets"):
        quantize_operand(torch.ones(2, 32), weights)
    with pytest.raises(SchemeError, match="no offsets"):
        quantize_operand(torch.ones(2, 32), TensorScheme(format="bf16"))


def test_every_code_of_8_bits_is_a_number_of_bf16() -> None:
    for name, record in itertools.chain(formats.FORMATS.items()):
        if record.bits <= 8 and name not in ("nf4", "e8m0"):
            values = np.array(value_table(record))
            values = values[np.isfinite(values)]
            assert np.array_equal(values, values.astype(ml_dtypes.bfloat16).astype(np.float64)), name
