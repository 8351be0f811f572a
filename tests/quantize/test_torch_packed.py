"""torch's packed operators for CPUs: exact codes and scales, one rounding; what they cannot express is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize import MATMULS, SCHEMES, PackedTensor, pack, packed_matmul, select_matmul
from bitwright.quantize.scheme import TensorScheme

BF16 = torch.bfloat16
#: (layout, scheme, shape): one block of rows and more, a last one that is shorter, more columns than are read at once.
HELD = (
    ("torch_int4", "int4:g32:bf16", (80, 96)),
    ("torch_int4", "int4:g64:bf16", (16, 64)),
    ("torch_int4", "int4:g128:bf16", (144, 1152)),
    ("torch_int8", "int8:row:bf16", (67, 144)),
)


def scheme_of(name: str) -> TensorScheme:
    found = SCHEMES[name].weights
    assert found is not None
    return found


def packed_of(name: str, shape: tuple[int, int]) -> PackedTensor:
    """Any bits as codes, under the scales of Gaussian weights."""
    generator = torch.Generator().manual_seed(0)
    packed = pack(torch.randn(shape, generator=generator), scheme_of(name))
    noise = torch.randint(0, 256, packed.codes.shape, dtype=torch.uint8, generator=generator)
    return dataclasses.replace(packed, codes=noise)


@pytest.mark.parametrize(("layout", "name", "shape"), HELD)
def test_products_are_those_of_the_values_rounded_once(layout: str, name: str, shape: tuple[int, int]) -> None:
    packed = packed_of(name, shape)
    assert MATMULS[layout].why_not(packed.scheme, shape, "cpu", BF16) is None
    matrix = MATMULS[layout].prepare(packed)
    for tokens in (0, 1, 3, 33):
        x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(1)).to(BF16)
        exact = x.double() @ packed.unpack().double().T
        found = packed_matmul(x, matrix)
        assert found.dtype == BF16 and found.shape == (tokens, shape[0])
        bound = exact.abs() * 2.0**-8 + x.double().abs() @ packed.unpack().double().abs().T * 2.0**-20
        assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("layout", "name", "shape"), HELD)
def test_values_and_rows_come_back_bit_for_bit(layout: str, name: str, shape: tuple[int, int]) -> None:
    packed = packed_of(name, shape)
    matrix, values = MATMULS[layout].prepare(packed), packed.unpack()
    assert torch.equal(MATMULS[layout].unpack(matrix), values)
    ids = torch.tensor([shape[0] - 1, 0, 3, 3, shape[0] // 2])
    assert torch.equal(MATMULS[layout].rows(matrix, ids), values[ids])
    assert MATMULS[layout].rows(matrix, ids[:0]).shape == (0, shape[1])


@pytest.mark.parametrize(
    ("layout", "name", "shape", "dtype", "said"),
    [
        ("torch_int4", "int4_g128", (16, 128), BF16, "those in fp16 would be rounded once more"),
        ("torch_int4", "int4:g32:bf16", (16, 64), torch.float16, "in float16 it is a loop"),
        ("torch_int4", "int4:g32:bf16", (17, 64), BF16, "multiples of 16"),
        ("torch_int4", "int4:g32:bf16", (16, 72), BF16, "whole groups"),
        ("torch_int4", "int4:g16:bf16", (16, 64), BF16, "groups of 32, 64, 128, 256"),
        ("torch_int4", "uint4:g32:bf16:zp", (16, 64), BF16, "multiplies int4 under scales"),
        ("torch_int8", "int8_w", (16, 64), BF16, "those in fp32 would be rounded once more"),
        ("torch_int8", "int8:g32:bf16", (16, 64), BF16, "one scale a row"),
        ("torch_int8", "int8:row:bf16", (16, 72), BF16, "columns in multiples of 16"),
        ("torch_int8", "int8:row:bf16:zp", (16, 64), BF16, "symmetric codes"),
    ],
)
def test_what_they_cannot_express_is_said(
    layout: str, name: str, shape: tuple[int, int], dtype: torch.dtype, said: str
) -> None:
    assert said in str(MATMULS[layout].why_not(scheme_of(name), shape, "cpu", dtype))
    assert "not for cuda" in str(MATMULS[layout].why_not(scheme_of(name), shape, "cuda", dtype))


def test_our_own_kernels_come_first() -> None:
    for _, name, shape in HELD:
        assert select_matmul(scheme_of(name), shape, "cpu", BF16).layout.name == "planar"


def test_codes_in_the_order_of_another_processor_are_refused() -> None:
    matrix = MATMULS["torch_int4"].prepare(packed_of("int4:g32:bf16", (80, 96)))
    witness: Tensor = matrix.parts["witness"].flip(0)
    elsewhere = dataclasses.replace(matrix, parts={**matrix.parts, "witness": witness})
    with pytest.raises(SchemeError, match="a processor with other vectors"):
        packed_matmul(torch.zeros(1, 96, dtype=BF16), elsewhere)
    with pytest.raises(SchemeError, match="apply the plan on this machine"):
        MATMULS["torch_int4"].unpack(elsewhere)
