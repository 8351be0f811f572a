"""Padding: shapes, the cache of plans, what is counted, and that products stay what they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.inference.counters import PaddingCounts
from bitwright.inference.packed.native_rows import NATIVE_PRODUCTS, int8_rows, scaled_rows, select_native
from bitwright.inference.packed.padding import Multiples, Padding, fill, up_to
from bitwright.quantize import SCHEMES, fake_quantize, pack, quantize
from bitwright.quantize.pack import pack_codes
from bitwright.quantize.scheme import Scheme

INT8 = NATIVE_PRODUCTS[0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 70), st.integers(1, 70), st.sampled_from([1, 16, 32, 128]), st.sampled_from([0, 17]))
def test_a_shape_is_filled_up_to_the_next_multiple(tokens: int, columns: int, multiple: int, least: int) -> None:
    padding = Padding(multiples=Multiples(tokens=multiple, min_tokens=least, columns=multiple), counts=PaddingCounts())
    x = torch.ones(tokens, columns)
    padded = padding.pad(x)
    assert padded.shape[0] % multiple == padded.shape[1] % multiple == 0
    assert padded.shape[0] >= max(tokens, least) and padded.shape[0] - max(tokens, least) < multiple
    assert 0 <= padded.shape[1] - columns < multiple
    assert float(padded.sum()) == tokens * columns and torch.equal(padded[:tokens, :columns], x)
    assert padding.counts.values == padded.numel()
    assert padding.counts.padded_values == padded.numel() - x.numel()
    assert padding.pad(x).shape == padded.shape
    assert len(padding.plans) == 1 and padding.counts.calls == 2


def test_what_fits_is_not_copied() -> None:
    x = torch.ones(32, 64)
    assert fill(x, 32, 64) is x and up_to(32, 16) == 32 and up_to(33, 16) == 48 and up_to(0, 16) == 0
    counts = PaddingCounts(calls=1, values=4, padded_values=1)
    assert counts.padded_share == 0.25


@pytest.mark.parametrize("scheme_name", ["int8", "int8_static"])
@pytest.mark.parametrize("multiples", [Multiples(), Multiples(tokens=16, min_tokens=17, rows=32, columns=16)])
@pytest.mark.parametrize("shape", [(1, 13, 17), (5, 49, 31), (0, 8, 8), (24, 97, 128)])
def test_codes_times_codes_whatever_the_shape(
    scheme_name: str, multiples: Multiples, shape: tuple[int, int, int]
) -> None:
    """Prime dimensions, and kernels that take multiples only: the sum of products of codes, in whole numbers."""
    tokens, num_rows, columns = shape
    torch.manual_seed(1)
    scheme = SCHEMES[scheme_name]
    assert scheme.weights is not None and scheme.activations is not None
    weight = quantize(torch.randn(num_rows, columns), scheme.weights)
    x = quantize(torch.randn(tokens, columns), scheme.activations)
    counts = PaddingCounts()
    rows = int8_rows(pack_codes(weight), Padding(multiples=multiples, counts=counts))
    found = rows.multiply_codes(pack_codes(x), torch.float32)
    assert weight.scales_NG is not None and x.scales_NG is not None
    whole = (x.codes_NK.double() @ weight.codes_NK.double().T).float()
    expected = whole * x.scales_NG * weight.scales_NG.reshape(1, -1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(rows.values(), weight.dequantize())
    ids = torch.tensor([[0, 7]])
    assert rows.num_rows == num_rows and torch.equal(rows.lookup(ids), rows.values()[ids])
    assert (counts.padded_values > 0) == (multiples != Multiples() and tokens > 0)


@pytest.mark.parametrize("shape", [(1, 13, 17), (5, 49, 31), (24, 96, 128)])
def test_fp8_codes_times_codes(shape: tuple[int, int, int]) -> None:
    """torch has these products on a CPU too, as a loop: the rows that a GPU runs give the product of the values."""
    tokens, num_rows, columns = shape
    torch.manual_seed(1)
    scheme = SCHEMES["fp8"]
    assert scheme.weights is not None and scheme.activations is not None
    weight, x = torch.randn(num_rows, columns), torch.randn(tokens, columns)
    rows = scaled_rows(pack(weight, scheme.weights))
    exact = fake_quantize(x, scheme.activations) @ fake_quantize(weight, scheme.weights).T
    found = rows.multiply_codes(pack(x, scheme.activations), torch.bfloat16)
    assert found.shape == exact.shape
    assert ((found.float() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()
    assert torch.equal(rows.values(), fake_quantize(weight, scheme.weights))
    torch.testing.assert_close(rows.multiply(x), x @ rows.values().T, rtol=1e-5, atol=1e-4)


def test_a_kernel_says_why_it_does_not_fit() -> None:
    cases = {
        "int8_w": "its inputs are not rounded",
        "mxint8": "under one symmetric fp32 scale per row or tensor",
        "fp8": "torch._int_mm takes weights in int8, not in fp8_e4m3; torch has scaled products on a CPU as a loop",
        "bf16": "in int8 under a scale, not bf16",
    }
    for name, reason in cases.items():
        selection = select_native(SCHEMES[name], "cpu")
        assert selection.product is None and reason in selection.reason
    assert select_native(SCHEMES["int8"], "cpu").product is INT8
    asymmetric = Scheme(
        name="x",
        description="",
        source="",
        weights=SCHEMES["int4_g32_zp"].weights,
        activations=SCHEMES["int8"].activations,
    )
    assert select_native(asymmetric, "cpu").product is None
