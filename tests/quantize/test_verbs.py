"""The public verbs: roundings of scaled codes, seeds, results in place, dtypes and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from galleries import gaussian, same_bits, scaled_schemes
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError, UnknownName
from bitwright.formats.philox import random_words
from bitwright.quantize import SCHEMES, Scaling, TensorScheme, dequantize, fake_quantize, group, pack, quantize, unpack
from bitwright.quantize.granularity import TENSOR, block

SCALED = scaled_schemes()
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCALED.values(), ids=SCALED.keys())


def int8(granularity: object = TENSOR, **facts: object) -> TensorScheme:
    scaling = Scaling(granularity=granularity, scale_format="fp32", **facts)  # type: ignore[arg-type]
    return TensorScheme(format="int8", scaling=scaling)


def unit_steps(rows: int, columns: int, width: int) -> Tensor:
    """Numbers within ±100 in steps of 1/8, 127 in each group of `width`: the scale of int8 is 1."""
    x = torch.randint(-800, 800, (rows, columns), generator=torch.Generator().manual_seed(0)) / 8.0
    x[:, ::width] = 127.0
    return x


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ("nearest_even", torch.round),
        ("nearest_away", lambda x: torch.sign(x) * torch.floor(x.abs() + 0.5)),
        ("toward_zero", torch.trunc),
        ("up", torch.ceil),
        ("down", torch.floor),
    ],
)
@pytest.mark.parametrize("granularity", [TENSOR, group(10), block(2, 10)], ids=str)
def test_directed_roundings_of_codes(rounding: str, expected, granularity: object) -> None:  # type: ignore[no-untyped-def]
    x = unit_steps(4, 27, 10)
    values = fake_quantize(x, int8(granularity), rounding=rounding)
    assert torch.equal(values, expected(x) + 0.0)


@pytest.mark.parametrize("granularity", [TENSOR, group(10), block(2, 10), block(3, 8)], ids=str)
def test_an_element_draws_the_word_of_its_position(granularity: object) -> None:
    """Steps up where the fraction, as a share of 2^32, and the word together reach 2^32; groups do not matter."""
    x = unit_steps(5, 27, 2).abs()
    found = fake_quantize(x, int8(granularity), rounding="stochastic", seed=11)
    words = random_words(11, x.numel()).reshape(x.shape).astype(np.uint64)
    fraction = ((x - x.floor()).double() * 2.0**32).numpy().astype(np.uint64)
    expected = x.floor().numpy() + (fraction + words >= np.uint64(1 << 32))
    assert np.array_equal(found.numpy(), expected)


def test_stochastic_rounding_is_right_on_average() -> None:
    """A tenth: 20,000 draws are off by at most four standard errors of sqrt(p (1 − p) / n)."""
    x = torch.full((1, 20_001), 0.1)
    x[0, 0] = 127.0
    mean = fake_quantize(x, int8(), rounding="stochastic", seed=0)[0, 1:].double().mean().item()
    assert abs(mean - 0.1) <= 4 * (0.1 * 0.9 / 20_000) ** 0.5


@EVERY_SCHEME
@pytest.mark.parametrize("rounding", [name for name in formats.ROUNDINGS if name != "nearest_even"])
def test_verbs_agree_under_every_rounding(scheme: TensorScheme, rounding: str) -> None:
    x = gaussian(5, 45)
    seed = 3 if rounding == "stochastic" else None
    values = fake_quantize(x, scheme, rounding=rounding, seed=seed)
    assert same_bits(dequantize(quantize(x, scheme, rounding=rounding, seed=seed)), values)
    assert same_bits(unpack(pack(x, scheme, rounding=rounding, seed=seed)), values)
    if rounding != "nearest_away":  # which differs on ties alone
        assert (values - fake_quantize(x, scheme)).abs().max() > 0
    codes = quantize(x, scheme, rounding=rounding, seed=seed).codes_NK.numpy()
    assert np.array_equal(formats.round(scheme.format, codes), codes)


@pytest.mark.parametrize(("rounding", "rounded"), [("up", np.ceil), ("down", np.floor), ("toward_zero", np.trunc)])
def test_directed_roundings_come_before_the_zero_point(rounding: str, rounded: np.ufunc) -> None:
    x = gaussian(4, 40)
    q = quantize(x, int8(group(16), symmetry="zero_point"), rounding=rounding)
    assert q.scales_NG is not None and q.offsets_NG is not None
    scale, zero = (part.numpy().repeat(16, axis=1)[:, :40] for part in (q.scales_NG, q.offsets_NG))
    assert np.array_equal(q.codes_NK.numpy(), np.clip(rounded(x.numpy() / scale) + zero, -128, 127))


@pytest.mark.parametrize("scheme", [TensorScheme(format="fp8_e4m3"), SCALED["mxfp4"]], ids=str)
def test_random_bits_need_a_seed(scheme: TensorScheme) -> None:
    x = torch.ones(2, 32)
    for verb in (quantize, fake_quantize, pack):
        with pytest.raises(SchemeError, match=r"'stochastic' draws random bits and was given no seed.*pass seed=0"):
            verb(x, scheme, rounding="stochastic")
        with pytest.raises(UnknownName, match=r"nearest_evn.*nearest_even"):
            verb(x, scheme, rounding="nearest_evn")


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_tensors_are_computed_in_fp32_and_narrowed(scheme: TensorScheme, dtype: torch.dtype) -> None:
    x = gaussian(3, 70).to(dtype)
    values = fake_quantize(x, scheme)
    assert values.dtype == dtype
    assert same_bits(values, fake_quantize(x.float(), scheme).to(dtype))
    assert same_bits(dequantize(quantize(x, scheme), dtype), values)


@pytest.mark.parametrize("scheme", [TensorScheme(format="bf16"), SCALED["mxfp4"], SCALED["int4_g32_zp"]], ids=str)
@pytest.mark.parametrize("shape", [(), (64,), (2, 3, 64), (0, 64), (2, 0)])
def test_any_shape_in_place_or_not(scheme: TensorScheme, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = fake_quantize(x, scheme)
    assert values.shape == x.shape
    out = torch.full_like(x, 7.0)
    assert fake_quantize(x, scheme, out=out) is out and same_bits(out, values)
    assert fake_quantize(x, scheme, out=x) is x and same_bits(x, values)


@pytest.mark.parametrize("scheme", [TensorScheme(format="bf16"), SCALED["mxfp4"]], ids=str)
@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.empty(2, 32), r"\(2, 32\), torch.float32"),
        (torch.empty(4, 32, dtype=torch.bfloat16), "bfloat16"),
        (torch.empty(32, 4).T, "not contiguous"),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_an_out_that_does_not_fit_is_refused_untouched(scheme: TensorScheme, out: Tensor, said: str) -> None:
    before = out.clone()
    with pytest.raises(SchemeError, match=rf"out is .*{said}.*contiguous with the shape, dtype and device of x"):
        fake_quantize(gaussian(4, 32), scheme, out=out)
    assert same_bits(out, before)


@pytest.mark.parametrize("name", ["mxfp4", "int4_g128_zp", "nvfp4"])
def test_unpacked_into_memory_that_is_there(name: str) -> None:
    scheme = SCHEMES[name].weights
    assert scheme is not None
    packed = pack(torch.randn(4, 256, generator=torch.Generator().manual_seed(0)), scheme)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(4, 256, dtype=dtype)
        assert unpack(packed, dtype, out=out) is out and same_bits(out, unpack(packed, dtype))
    with pytest.raises(SchemeError, match="what is unpacked"):
        unpack(packed, out=torch.empty(4, 128))
    with pytest.raises(SchemeError, match=r"not torch\.float64"):
        unpack(packed, torch.float64)
