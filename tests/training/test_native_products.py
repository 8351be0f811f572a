"""Native products: what a GPU multiplies, what is handed to torch, and the product that torch has on a CPU too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitwright import formats
from bitwright.formats.decode import value_table
from bitwright.quantize import quantize
from bitwright.quantize.matmuls.scaled_mm import from_tiles
from bitwright.quantize.operand import scale_operand
from bitwright.training.product_recipe import OperandRule, ProductRecipe
from bitwright.training.products.emulated import EmulatedProducts
from bitwright.training.products.native import NativeOperand, NativeProducts, _scales
from bitwright.training.products.native_layouts import layout_of, why_not_native
from bitwright.training.recipes import FP8_BLOCK, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
NATIVE, EMULATED = NativeProducts(), EmulatedProducts()


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("recipe", "capability", "reason"),
    [
        (FP8_DELAYED, ADA, None),
        (FP8_CURRENT, HOPPER, None),
        (FP8_CURRENT, (8, 0), "need compute capability 8.9"),
        (FP8_BLOCK, HOPPER, None),
        (FP8_BLOCK, BLACKWELL, "need compute capability 9.0 and below 10.0"),
        (MXFP8, BLACKWELL, None),
        (MXFP8, HOPPER, "need compute capability 10.0"),
        (NVFP4, (12, 0), None),
        (NVFP4, HOPPER, "fp4_e2m1 per group(16)"),
        (
            ProductRecipe(forward_x=FP8_CURRENT.dgrad_g, forward_w=FP8_CURRENT.dgrad_g, dgrad_g=FP8_CURRENT.dgrad_g),
            HOPPER,
            "no forward product of fp8_e5m2",
        ),
        (
            ProductRecipe(forward_x=MXFP8.forward_x, forward_w=FP8_CURRENT.forward_w, dgrad_g=MXFP8.forward_x),
            BLACKWELL,
            "no forward product",
        ),
    ],
)
def test_what_a_gpu_multiplies(recipe: ProductRecipe, capability: tuple[int, int], reason: str | None) -> None:
    said = why_not_native(recipe, "cuda", capability)
    assert said is None if reason is None else reason in str(said)


def test_never_on_a_cpu_nor_where_no_gpu_of_nvidia_is() -> None:
    assert "far slower than bf16" in str(why_not_native(FP8_CURRENT, "cpu", None))
    assert "GPUs of NVIDIA" in str(why_not_native(FP8_CURRENT, "cuda", None))


def decoded(operand: NativeOperand) -> Tensor:
    """Values of the codes without scales, fp32 [R, S], read by the formats' own table."""
    number = formats.FORMATS[operand.scheme.format]
    raw = operand.codes.view(torch.uint8).int()
    if number.bits == 4:
        raw = torch.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
    return torch.tensor(value_table(number), dtype=torch.float32)[raw]


RULES = {
    "x": FP8_BLOCK.forward_x,
    "w": FP8_BLOCK.forward_w,
    "mx": MXFP8.forward_x,
    "nvfp4 x": NVFP4.forward_x,
    "nvfp4 w": NVFP4.forward_w,
    "tensor": FP8_CURRENT.forward_x,
    "gradient": FP8_CURRENT.dgrad_g,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("shape", [(300, 576), (17, 40), (256, 256)])
def test_codes_are_those_of_quantize_and_filled_up_with_zeros(rule: OperandRule, shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    q, operand, layout = quantize(x, rule.scheme), NATIVE.operand(x, rule, None), layout_of(rule.scheme)
    assert layout is not None
    values = decoded(operand)
    assert values.shape[0] % layout.rows == 0 and values.shape[1] % layout.columns == 0
    assert torch.equal(values[: shape[0], : shape[1]], q.codes_NK)
    assert not bool(values[shape[0] :].any()) and not bool(values[:, shape[1] :].any())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("shape", [(300, 576), (17, 40), (256, 256)])
def test_scales_lie_as_torch_asks(rule: OperandRule, shape: tuple[int, int]) -> None:
    """Shapes and strides that ScaledBlas.cpp checks; numbers by reading them back group by group."""
    q, operand = quantize(gaussian(*shape), rule.scheme), NATIVE.operand(gaussian(*shape), rule, None)
    layout = layout_of(rule.scheme)
    assert layout is not None and q.scales_NG is not None and rule.scheme.scaling is not None
    scales, kinds = _scales(operand, layout)
    assert len(scales) == len(kinds) and kinds[0] == layout.scaling
    granularity, expected = rule.scheme.scaling.granularity, q.scales_NG
    rows, columns = decoded(operand).shape
    found = scales[0]
    if granularity.scope == "tensor":
        assert found.shape == (1,) and float(found) == float(expected)
        return
    groups = -(-columns // granularity.group_size)
    if layout.is_tiled:
        tiled_groups = -(-groups // 4) * 4
        assert found.dim() == 1 and found.is_contiguous() and found.numel() == -(-rows // 128) * 128 * tiled_groups
        per_row = from_tiles(found, rows, groups).float()
        repeat = granularity.block_rows or 1
        expected = expected.repeat_interleave(repeat, 0)[: shape[0]]
        assert torch.equal(per_row[: shape[0], : expected.shape[1]], expected)
        if layout.has_tensor_scale:
            assert q.tensor_scale is not None and float(scales[1]) == float(q.tensor_scale)
    elif granularity.block_rows:
        aligned = -(-groups // 4) * 4
        assert found.shape == (aligned, -(-rows // 128)) and found.stride(0) == 1
        assert found.shape[1] == 1 or found.stride(1) == aligned
        assert torch.equal(found[: expected.shape[1], : expected.shape[0]].t(), expected)
    else:
        assert found.shape == (rows, groups) and found.stride(0) == 1
        assert groups == 1 or found.stride(1) == rows
        assert torch.equal(found[: shape[0], : expected.shape[1]], expected)


@pytest.mark.parametrize("rule", [RULES["w"], RULES["nvfp4 w"], RULES["tensor"]], ids=["blocks", "nvfp4", "tensor"])
def test_codes_from_the_other_side(rule: OperandRule) -> None:
    x = gaussian(300, 144)
    turned, direct = NATIVE.transposed(NATIVE.operand(x, rule, None)), NATIVE.operand(x.t().contiguous(), rule, None)
    assert (turned.rows, turned.columns) == (144, 300)
    assert torch.equal(decoded(turned), decoded(direct))
    assert torch.equal(turned.scales.float(), direct.scales.float())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_tensors_on_a_cpu(has_bias: bool, dtype: torch.dtype) -> None:
    """torch's loop against the emulated product, of current and of known scales, with sizes that are no multiples."""
    bias = gaussian(1, 21, 5)[0] if has_bias else None
    x, w = gaussian(19, 45), gaussian(21, 45, 1)
    first, second = FP8_CURRENT.dgrad_g, FP8_CURRENT.forward_w
    found = NATIVE.multiply(NATIVE.operand(x, first, None), NATIVE.operand(w, second, None), dtype, bias)
    expected = EMULATED.multiply(EMULATED.operand(x, first, None), EMULATED.operand(w, second, None), dtype, bias)
    assert found.shape == (19, 21) and found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    known, _ = scale_operand(x, "fp8_e5m2", torch.tensor(11.0))
    found = NATIVE.multiply(NATIVE.scaled(known, first), NATIVE.operand(w, second, None), torch.float32)
    expected = EMULATED.multiply(known, EMULATED.operand(w, second, None), torch.float32)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_products_of_nothing() -> None:
    rule = FP8_CURRENT.forward_x
    nothing, some = NATIVE.operand(torch.empty(0, 32), rule, None), NATIVE.operand(gaussian(8, 32), rule, None)
    assert NATIVE.multiply(nothing, some, torch.bfloat16).shape == (0, 8)
    assert torch.equal(
        NATIVE.multiply(NATIVE.transposed(nothing), NATIVE.transposed(nothing), torch.float32), torch.zeros(32, 32)
    )
