"""The operators: shape functions, `torch.compile` without graph breaks, `torch.export`, gradients; equal numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from galleries import same_bits, scaled_schemes
from torch import Tensor

from bitwright.quantize import SCHEMES, TensorScheme, fake_quantize, pack, quantize, unpack
from bitwright.quantize.scheme import read_scheme

SCALED = scaled_schemes()
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCALED.values(), ids=SCALED.keys())
PLAIN = [TensorScheme(format=name) for name in ("bf16", "fp16", "fp8_e5m2", "fp6_e3m2", "int8", "nf4")]


def matrix(rows: int = 6, columns: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@EVERY_SCHEME
def test_schemes_survive_being_spelled(scheme: TensorScheme) -> None:
    assert read_scheme(scheme.text) == scheme


@pytest.mark.parametrize("scheme", PLAIN, ids=lambda scheme: scheme.format)
def test_plain_schemes_survive_being_spelled(scheme: TensorScheme) -> None:
    assert read_scheme(scheme.text) == scheme


@EVERY_SCHEME
@pytest.mark.parametrize("name", ["fake_quantize", "quantize", "pack"])
def test_shape_functions_tell_what_comes_out(scheme: TensorScheme, name: str) -> None:
    operator, text = getattr(torch.ops.bitwright, name), scheme.text
    real = operator(matrix(), text, "nearest_even", 0, 32)
    meta = operator(matrix().to("meta"), text, "nearest_even", 0, 32)
    for found, promised in zip(tensors(real), tensors(meta), strict=True):
        assert (found.shape, found.dtype, found.stride()) == (promised.shape, promised.dtype, promised.stride())


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("scheme", [SCALED["mxfp4"], SCHEMES["int4_g64_zp"].weights], ids=str)
def test_torch_checks_the_operator(scheme: TensorScheme) -> None:
    arguments = (matrix(), scheme.text, "nearest_even", 0, 32)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name in ("fake_quantize", "quantize", "pack"):
        torch.library.opcheck(getattr(torch.ops.bitwright, name).default, arguments, test_utils=tests)
    rounding = (matrix(), "fp8_e4m3", "nearest_even", "ieee", 0, 32)
    torch.library.opcheck(torch.ops.bitwright.round_values.default, rounding, test_utils=tests)


def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every verb once, with something for a compiler in between."""
    y = fake_quantize(x * 2, SCALED["mxfp8"]) + fake_quantize(x, TensorScheme(format="fp16"))
    q = quantize(x.tanh(), SCHEMES["int4_g128_zp"].weights)  # type: ignore[arg-type]
    packed = pack(y, SCALED["nvfp4"])
    drawn = fake_quantize(x, SCALED["mxfp4"], rounding="stochastic", seed=3)
    return y + q.dequantize(), unpack(packed) + drawn, packed.codes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_graph_breaks_and_equal(backend: str) -> None:
    torch._dynamo.reset()
    x = matrix(5, 256)
    found = torch.compile(program, fullgraph=True, backend=backend)(x)
    for one, other in zip(found, program(x), strict=True):
        assert same_bits(one, other)


def test_exported_with_rows_left_open_and_equal() -> None:
    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return program(x)

    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Program(), (matrix(8, 256),), dynamic_shapes={"x": {0: rows}})
    x = matrix(5, 256, seed=1)
    for one, other in zip(exported.module()(x), program(x), strict=True):
        assert same_bits(one, other)
    called = {str(node.target) for node in exported.graph.nodes if "bitwright" in str(node.target)}
    assert {f"bitwright.{name}.default" for name in ("fake_quantize", "quantize", "pack", "unpack")} <= called


@pytest.mark.parametrize("scheme", [SCALED["mxfp8"], TensorScheme(format="fp8_e4m3")], ids=str)
def test_gradients_pass_straight_through(scheme: TensorScheme) -> None:
    x = matrix().requires_grad_()
    weights = matrix(seed=2)
    (fake_quantize(x, scheme) * weights).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weights)


def test_seeds_of_64_bits_pass_through() -> None:
    x = matrix()
    scheme = TensorScheme(format="bf16")
    high = fake_quantize(x, scheme, rounding="stochastic", seed=(1 << 64) - 1)
    assert same_bits(high, fake_quantize(x, scheme, rounding="stochastic", seed=(1 << 64) - 1))
    assert not torch.equal(high, fake_quantize(x, scheme, rounding="stochastic", seed=0))


def test_one_compiled_program_takes_one_scheme_after_another() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, scheme: fake_quantize(x, scheme), fullgraph=True, backend="aot_eager")
    x = matrix(4, 256)
    for name in ("mxfp8", "mxfp4", "nvfp4", "int8_w", "fp8_w"):
        assert same_bits(compiled(x, SCALED[name]), fake_quantize(x, SCALED[name]))


def test_compiled_for_sizes_that_vary() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 7):
        for one, other in zip(compiled(matrix(rows, 256)), program(matrix(rows, 256)), strict=True):
            assert same_bits(one, other)
