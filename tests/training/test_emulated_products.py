"""Emulated products: fp32 sums, scales on the sum, one rounding; against exact sums and torch's scaled products."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from bitwright.quantize import Scaling, TensorScheme, group
from bitwright.quantize.granularity import ROW, TENSOR
from bitwright.quantize.operand import Operand, quantize_operand
from bitwright.training.products.emulated import EmulatedProducts

PRODUCTS = EmulatedProducts()


def gaussian(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def per_tensor(format: str) -> TensorScheme:
    return TensorScheme(format=format, scaling=Scaling(granularity=TENSOR, scale_format="fp32"))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp64 to bf16 by way of fp32, whose 24 bits make no difference to values that are products of short numbers."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def integers(rows: int, columns: int, seed: int) -> Tensor:
    """Codes whose sums are exact in fp32, in any order."""
    return torch.randint(-15, 16, (rows, columns), generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(64, 48, 96), (1, 130, 33), (200, 7, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_multiply_the_fp32_sum_which_is_rounded_once(shape: tuple[int, int, int], has_bias: bool) -> None:
    rows, others, columns = shape
    a, b = integers(rows, columns, 0), integers(others, columns, 1)
    scale_a, scale_b = torch.tensor(0.037), torch.tensor(1.91)
    scale = (scale_a * scale_b).double().item()
    bias = gaussian(1, others, 2)[0].bfloat16() if has_bias else None
    exact = (a.double() @ b.double().t()).numpy()
    expected = exact * scale + (0.0 if bias is None else bias.double().numpy())
    first, second = Operand(numbers=a, scale=scale_a), Operand(numbers=b, scale=scale_b)
    in_fp32 = PRODUCTS.multiply(first, second, torch.float32, bias)
    assert np.allclose(in_fp32.double().numpy(), expected, rtol=3e-7, atol=1e-6)
    found = PRODUCTS.multiply(first, second, torch.bfloat16, bias).double().numpy()
    assert (found != to_bf16(expected)).mean() < 1e-3  # where fp32's own rounding lies on a tie of bf16
    rounded_twice = to_bf16(to_bf16(exact) * scale + (0.0 if bias is None else bias.double().numpy()))
    if rows * others > 1000:
        assert (rounded_twice != to_bf16(expected)).mean() > 0.02


@pytest.mark.parametrize("formats", [("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3")])
def test_against_scaled_products_of_torch(formats: tuple[str, str]) -> None:
    dtypes = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    a = quantize_operand(gaussian(32, 64, 0), per_tensor(formats[0]))
    b = quantize_operand(gaussian(48, 64, 1), per_tensor(formats[1]))
    expected = torch._scaled_mm(
        a.numbers.to(dtypes[formats[0]]),
        b.numbers.to(dtypes[formats[1]]).t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=torch.float32,
    )
    assert torch.allclose(PRODUCTS.multiply(a, b, torch.float32), expected, rtol=1e-5, atol=1e-5)


def test_one_scale_a_row() -> None:
    rows = TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=ROW, scale_format="fp32"))
    x = gaussian(20, 64, 0) * torch.logspace(-3, 3, 20)[:, None]
    a, b = quantize_operand(x, rows), quantize_operand(gaussian(30, 64, 1), rows)
    exact = a.values().double() @ b.values().double().t()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        found = PRODUCTS.multiply(a, b, dtype).double()
        assert torch.allclose(found, exact, rtol=tolerance, atol=float(exact.abs().min(1).values.max()) * 1e-2)


def test_numbers_that_bf16_does_not_hold() -> None:
    scheme = TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=group(16), scale_format="fp32"))
    a, b = quantize_operand(gaussian(20, 64, 0), scheme), quantize_operand(gaussian(30, 64, 1), scheme)
    assert a.numbers.dtype == torch.float32
    exact = a.values().double() @ b.values().double().t()
    assert torch.allclose(PRODUCTS.multiply(a, b, torch.float32).double(), exact, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_and_nan(dtype: torch.dtype) -> None:
    one = torch.tensor(1.0)
    nothing = Operand(numbers=torch.empty(0, 16, dtype=torch.bfloat16), scale=one)
    some = Operand(numbers=integers(8, 16, 0), scale=one)
    assert PRODUCTS.multiply(nothing, some, dtype).shape == (0, 8)
    assert torch.equal(
        PRODUCTS.multiply(nothing.transposed, nothing.transposed, dtype), torch.zeros(16, 16, dtype=dtype)
    )
    spoiled = Operand(numbers=some.numbers, scale=torch.tensor(torch.nan))
    assert bool(PRODUCTS.multiply(spoiled, some, dtype).isnan().all())
    transposed = Operand(numbers=integers(16, 8, 0), scale=one).transposed
    assert torch.equal(
        PRODUCTS.multiply(transposed, transposed, dtype).float(),
        (transposed.numbers.float() @ transposed.numbers.float().t()).to(dtype).float(),
    )
