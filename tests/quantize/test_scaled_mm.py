"""Scaled products of torch: what they take, that nothing is lost, and the products that torch has on a CPU.

No GPU is asked for: capabilities are arguments, and where scales lie is compared with what torch and cuBLAS write down.
"""

from __future__ import annotations

import pytest
import torch
from galleries import gaussian, same_bits

from bitwright.errors import SchemeError
from bitwright.quantize import MATMULS, SCHEMES, PackedTensor, Scheme, TensorScheme, pack, quantize, select_matmul
from bitwright.quantize.matmuls.scaled_mm import from_tiles, multiply_scaled, to_tiles
from bitwright.quantize.scaled_recipes import nvidia_capability, recipe_of, why_not_codes

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
LAYOUT = MATMULS["scaled_mm"]


def weights_of(name: str) -> TensorScheme:
    found = SCHEMES[name].weights
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("fp8", ADA, None),
        ("fp8_static", HOPPER, None),
        ("fp8", (8, 0), "need compute capability 8.9, and here it is 8.0"),
        ("fp8_block", HOPPER, None),
        ("fp8_block", BLACKWELL, "need compute capability 9.0 and below 10.0, and here it is 10.0"),
        ("mxfp8", BLACKWELL, None),
        ("mxfp8", HOPPER, "need compute capability 10.0"),
        ("nvfp4", (12, 0), None),
        ("fp8_w", HOPPER, "take inputs as fp8_e4m3 under fp32 scales, not numbers"),
        ("mxfp4", BLACKWELL, "not fp4_e2m1 per group(32), e8m0 scales"),
        ("int8", HOPPER, "not int8 per row"),
        ("int4_g128", HOPPER, "not int4 per group"),
        ("bf16", HOPPER, "or fp4_e2m1 under fp8_e4m3 scales, not bf16"),
        ("as_loaded", HOPPER, "not numbers"),
    ],
)
def test_what_a_gpu_multiplies(name: str, capability: tuple[int, int], reason: str | None) -> None:
    said = why_not_codes(SCHEMES[name], "cuda", capability)
    assert said is None if reason is None else reason in str(said)


def test_never_on_a_cpu_nor_where_no_gpu_of_nvidia_is() -> None:
    assert "far slower than bf16" in str(why_not_codes(SCHEMES["fp8"], "cpu", None))
    assert "GPUs of NVIDIA" in str(why_not_codes(SCHEMES["fp8"], "cuda", None))
    assert nvidia_capability("cpu") is None


def test_numbers_are_no_codes() -> None:
    for device_type in ("cpu", "cuda"):
        for dtype in (torch.bfloat16, torch.float32):
            assert select_matmul(weights_of("fp8_w"), (64, 64), device_type, dtype).layout.name != LAYOUT.name
            assert "x are numbers" in str(LAYOUT.why_not(weights_of("fp8_w"), (64, 64), device_type, dtype))
    with pytest.raises(SchemeError, match="int4 per group"):
        recipe_of(weights_of("int4_g128"))


@pytest.mark.parametrize("shape", [(37, 200), (256, 256), (5, 24)])
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mxfp8", "nvfp4", "fp8_e4m3:tensor:fp32"])
def test_values_come_back_bit_for_bit(name: str, shape: tuple[int, int]) -> None:
    packed = pack(gaussian(*shape), weights_of(name))
    matrix = LAYOUT.prepare(packed)
    assert same_bits(LAYOUT.unpack(matrix), packed.unpack())
    x = gaussian(3, shape[1], seed=1)
    wide = x.double() @ packed.unpack().double().T
    torch.testing.assert_close(LAYOUT.multiply(x, matrix).double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(37, 200), (128, 512), (130, 20)])
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mxfp8", "nvfp4"])
def test_operands_have_the_sizes_and_strides_that_torch_checks(name: str, shape: tuple[int, int]) -> None:
    """ScaledBlas.cpp: multiples; [K / 128 up to 4, N / 128] column by column; tiles up to 128 rows and 4 groups."""
    packed = pack(gaussian(*shape), weights_of(name))
    parts = LAYOUT.prepare(packed).parts
    codes, scales = parts["codes"], parts["scales"]
    columns = codes.shape[1] * (2 if codes.dtype == torch.float4_e2m1fn_x2 else 1)
    assert columns % 16 == 0 and codes.shape[0] % 16 == 0 and codes.is_contiguous()
    assert codes.shape[0] >= shape[0] and columns >= shape[1]
    match name:
        case "fp8":
            assert scales.shape == (1, codes.shape[0]) and scales.dtype == torch.float32
        case "fp8_block":
            groups = -(-(columns // 128) // 4) * 4
            assert scales.shape == (groups, codes.shape[0] // 128) and scales.stride() == (1, groups)
        case _:
            width = 32 if name == "mxfp8" else 16
            assert scales.numel() == -(-codes.shape[0] // 128) * 128 * (-(-columns // (4 * width)) * 4)


def test_scales_lie_in_tiles_as_cublas_writes() -> None:
    """Offset in a tile of 128 × 4: (row mod 32) · 16 + ⌊row / 32⌋ · 4 + group; tiles go along a row of tiles."""
    rows, groups = 300, 6
    stored = torch.randint(0, 255, (rows, groups), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiled = to_tiles(stored.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert tiled.shape == (3 * 128 * 8,)
    for row, column in ((0, 0), (1, 0), (31, 3), (32, 2), (127, 5), (128, 4), (299, 1), (299, 5)):
        tile = (row // 128) * 2 + column // 4
        offset = tile * 512 + (row % 128 % 32) * 16 + (row % 128 // 32) * 4 + column % 4
        assert tiled[offset] == stored[row, column]
    assert int(tiled.long().sum()) == int(stored.long().sum())
    assert torch.equal(from_tiles(tiled, rows, groups), stored)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("name", ["fp8", "fp8_static", "fp8_e4m3:tensor:fp32|fp8_e4m3:row:fp32"])
def test_products_on_torchs_loop_for_cpus(name: str, tokens: int) -> None:
    """The sum is fp32's, y is rounded once: half a unit of bf16, and K roundings of fp32."""
    scheme: Scheme = SCHEMES[name]
    assert scheme.activations is not None
    weight, x = pack(gaussian(37, 200), weights_of(name)), quantize(gaussian(tokens, 200, seed=2), scheme.activations)
    assert x.scales_NG is not None
    matrix = LAYOUT.prepare(weight)
    y = multiply_scaled(x.codes_NK.to(torch.float8_e4m3fn), x.scales_NG, matrix)
    exact = x.dequantize().double() @ weight.unpack().double().T
    off = 204 * 2.0**-24 * (x.dequantize().double().abs() @ weight.unpack().double().abs().T)
    assert y.shape == exact.shape and y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= off + exact.abs() * 2.0**-8).all()


def test_packed_inputs_are_operands_as_they_are() -> None:
    """The bytes and stored scales of `pack` are what is multiplied: nothing is converted on the way."""
    weight, x = pack(gaussian(32, 64), weights_of("fp8")), pack(gaussian(4, 64, seed=1), weights_of("fp8"))
    assert isinstance(x, PackedTensor) and x.scales is not None
    y = multiply_scaled(x.codes.view(torch.float8_e4m3fn), x.scales, LAYOUT.prepare(weight))
    torch.testing.assert_close(y, (x.unpack() @ weight.unpack().T).bfloat16(), rtol=2.0**-7, atol=1e-5)
