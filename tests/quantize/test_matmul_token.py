"""One token by addresses: what the product of several tokens gives, and what numbers that are not finite become."""

from __future__ import annotations

import pytest
import torch

from bitwright.quantize import SCHEMES, pack, packed_matmul, select_matmul
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.packed_matmul import prepare_matmul

SHAPES = ((1, 2), (77, 576), (129, 1000), (512, 4096))
NAMES = ("int4_g128", "int4_g32_zp", "int4_g32_min", "int8_w", "fp8_block", "mxfp4")


def matrix_of(name: str, shape: tuple[int, int]) -> PackedMatrix:
    weights = SCHEMES[name].weights
    assert weights is not None
    packed = pack(torch.randn(shape, generator=torch.Generator().manual_seed(0)), weights)
    return select_matmul(packed.scheme, shape, "cpu", torch.bfloat16).layout.prepare(packed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_one_token_is_multiplied_as_several_are(name: str, shape: tuple[int, int]) -> None:
    """bf16 outputs of sums in fp32, in one order or another: apart by a rounding, and by what sums differ."""
    matrix = matrix_of(name, shape)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    values = select_matmul(matrix.scheme, shape, "cpu", torch.bfloat16).layout.unpack(matrix)
    exact, size = x.double() @ values.double().T, x.double().abs() @ values.double().abs().T
    product = prepare_matmul(matrix)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for token in range(3):
                y = product(x[token : token + 1].reshape(1, 1, -1))
                assert y.shape == (1, 1, shape[0]) and y.dtype == torch.bfloat16
                slack = 2.0**-8 * exact[token].abs() + shape[1] * 2.0**-23 * size[token]
                assert ((y[0, 0].double() - exact[token]).abs() <= slack).all()
        finally:
            torch.set_num_threads(before)


def test_what_is_not_finite_stays_so() -> None:
    matrix = matrix_of("int8_w", (64, 128))
    product = prepare_matmul(matrix)
    for value in (float("nan"), float("inf"), float("-inf")):
        x = torch.zeros(1, 128, dtype=torch.bfloat16)
        x[0, 5] = value
        values = packed_matmul(torch.eye(128), matrix)[5]
        found, expected = product(x)[0].float(), values * value
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_ties_go_to_even() -> None:
    """1 + 2⁻⁸ lies between two bf16; so do 1 + 3 · 2⁻⁸ and what rounds up to a power of two."""
    weights = SCHEMES["int8_w"].weights
    assert weights is not None
    matrix = matrix_of("int8_w", (64, 2))
    scale = packed_matmul(torch.tensor([[1.0, 0.0]]), matrix)
    assert torch.equal(prepare_matmul(matrix)(torch.tensor([[1.0, 0.0]]).bfloat16()), scale.bfloat16())


def test_gradients_and_tracing_see_the_operator() -> None:
    matrix = matrix_of("int4_g128", (64, 128))
    product = prepare_matmul(matrix)
    x = torch.randn(1, 128).bfloat16().requires_grad_()
    product(x).sum().backward()
    assert x.grad is not None
    values = select_matmul(matrix.scheme, (64, 128), "cpu", torch.bfloat16).layout.unpack(matrix)
    torch.testing.assert_close(x.grad[0].float(), values.sum(0), rtol=2e-2, atol=2e-2)
    traced = torch.compile(product, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(traced(x.detach()), product(x.detach()))


def test_parts_of_rows_and_other_dtypes_go_the_long_way() -> None:
    matrix = matrix_of("int8_w", (64, 128))
    product = prepare_matmul(matrix)
    wide = torch.randn(1, 256).bfloat16()
    torch.testing.assert_close(product(wide[:, ::2]), product(wide[:, ::2].contiguous()), rtol=1e-2, atol=1e-2)
    for dtype in (torch.float32, torch.float16):
        assert product(wide[:, :128].to(dtype)).dtype == dtype
    assert product(wide[:0, :128]).shape == (0, 64)
