"""Packed products of the Triton kernels, run by Triton's interpreter on the CPU and judged in float64.

The bound is that of test_matmul.py. Collected by test_triton_matmul.py in a process of its own, since TRITON_INTERPRET
has to be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from galleries import FURTHER_SCHEMES, gaussian, same_bits
from test_matmul import Exact, weight_schemes
from torch import Tensor

from bitwright import formats
from bitwright.formats.decode import value_table
from bitwright.quantize import MATMULS, SCHEMES, PackedTensor, Scaling, TensorScheme, pack
from bitwright.quantize.backends.triton import matmul_call
from bitwright.quantize.backends.triton.matmul_numbers import why_no_number
from bitwright.quantize.granularity import ROW, Granularity, block, group
from bitwright.quantize.pack import pack_bits
from bitwright.quantize.packed_matmul import packed_matmul

LAYOUT = MATMULS["triton"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scheme_of(name: str, granularity: Granularity, scale_format: str, **facts: object) -> TensorScheme:
    scaling = Scaling(granularity=granularity, scale_format=scale_format, **facts)  # type: ignore[arg-type]
    return TensorScheme(format=name, scaling=scaling)


#: Groups that straddle words, scales and offsets in bits of any number, numbers of two and three parts.
ODD = {
    "uint4, zero points, groups of 20": scheme_of("uint4", group(20), "fp16", symmetry="zero_point"),
    "int3, groups of 7": scheme_of("int3", group(7), "bf16"),
    "uint3, minima, groups of 12": scheme_of("uint3", group(12), "fp32", symmetry="minimum"),
    "uint3, zero points, groups of 32": scheme_of("uint3", group(32), "fp16", symmetry="zero_point"),
    "fp4 under 6-bit scales": scheme_of("fp4_e2m1", group(8), "fp6_e3m2"),
    "int5 blocks": scheme_of("int5", block(3, 32), "fp8_e4m3"),
    "int7": scheme_of("int7", ROW, "bf16"),
    "int16": scheme_of("int16", ROW, "fp32"),
    "minimum per row": FURTHER_SCHEMES["minimum per row"],
    "two levels, exponent": FURTHER_SCHEMES["two levels, exponent"],
    "fp8 as it is": TensorScheme(format="fp8_e5m2"),
}
KNOWN = {
    name: scheme
    for name, scheme in (weight_schemes() | ODD).items()
    if LAYOUT.why_not(scheme, (9, 73), "cuda", torch.bfloat16) is None
}


def kind_of(scheme: TensorScheme) -> object:
    """What tells schemes apart, save for the size of groups."""
    scaling = scheme.scaling
    return scaling and (scheme.format, scaling.granularity.scope, scaling.scale_format, scaling.symmetry)


#: The last of each kind: of the smallest groups.
KINDS = list({kind_of(scheme) or name: name for name, scheme in KNOWN.items()}.values())


def check(packed: PackedTensor, x: Tensor) -> Tensor:
    """A product within its bound; and the weight bit for bit."""
    matrix = LAYOUT.prepare(packed)
    assert same_bits(LAYOUT.unpack(matrix), packed.unpack())
    y = packed_matmul(x, matrix)
    Exact(packed).raise_if_off(y, x)
    return y


def test_every_scheme_but_fp32_is_kept_so() -> None:
    assert set(weight_schemes()) - set(KNOWN) == {"fp32"}


@pytest.mark.parametrize("name", KINDS)
def test_products_of_every_kind_of_scheme(name: str) -> None:
    """One token, and several; a prime number of columns, fewer rows than a program takes. Dtypes take turns."""
    turn = KINDS.index(name)
    packed = pack(gaussian(9, 73), KNOWN[name])
    check(packed, gaussian(1, 73, seed=1).to(DTYPES[turn % 3]))
    check(packed, gaussian(3, 73, seed=2).to(DTYPES[(turn + 1) % 3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4_g32_zp", "fp8_w", "nf4_g64", "fp16"])
def test_products_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    packed = pack(gaussian(5, 70), KNOWN[name])
    for tokens in (0, 1, 2):
        assert check(packed, gaussian(tokens, 70, seed=tokens).to(dtype)).shape == (tokens, 5)


@pytest.mark.parametrize("tokens", [1, 17, 130])
@pytest.mark.parametrize("name", ["int4_g32_min", "fp6_w"])
def test_several_programs(name: str, tokens: int) -> None:
    """More rows, lanes, columns and tokens than a program takes."""
    scheme = KNOWN[name]
    rows, columns = (34, 1100) if tokens == 1 else (66, 140) if tokens == 17 else (3, 40)
    check(pack(gaussian(rows, columns), scheme), gaussian(tokens, columns, seed=1).bfloat16())


@pytest.mark.parametrize(
    ("name", "tokens", "columns"), [("int4_g32", 1, 1100), ("int4_g32", 2, 200), ("int8_w", 2, 600)]
)
def test_parts_of_a_sum_are_added_in_order(name: str, tokens: int, columns: int) -> None:
    """The same numbers on every run, however many parts; and the parts are those that `how` names."""
    packed = pack(gaussian(5, columns), KNOWN[name])
    x = gaussian(tokens, columns, seed=1).bfloat16()
    call = matmul_call.call_of(packed.scheme.text, packed.shape)
    parts = matmul_call.split_of(call, tokens).num_parts
    assert parts > 2
    matrix = LAYOUT.prepare(packed)
    assert f"in {parts} parts" in LAYOUT.how(tokens, matrix, x.dtype)
    assert same_bits(check(packed, x), LAYOUT.multiply(x, matrix))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 33)])
@pytest.mark.parametrize("name", ["int4_g32_zp", "int3_g64", "nvfp4"])
def test_tiny_shapes(name: str, shape: tuple[int, int]) -> None:
    for tokens in (1, 2):
        check(pack(gaussian(*shape), KNOWN[name]), gaussian(tokens, shape[1], seed=1))


NUMBERS = [name for name, number in formats.FORMATS.items() if why_no_number(number) is None]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_code_is_its_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column: y is the value of the code times x, exactly; Inf and NaN too. Of 65,536 codes, the ends and some."""
    monkeypatch.setattr(matmul_call, "ROWS", 256)  # one program
    monkeypatch.setattr(matmul_call, "PRODUCT_ROWS", 256)
    several = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "e8m0", "nf4", "int16", "fp16", "bf16")
    number = formats.FORMATS[name]
    codes = np.arange(1 << number.bits)
    if number.bits > 8:
        some = np.random.default_rng(0).integers(0, 1 << number.bits, 90)
        ends = (0, 1, 2, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7F80, 0x7F81, 0x7FFF)
        codes = np.array([*some, *ends, *(end + 0x8000 for end in ends)])
    stream = pack_bits(torch.from_numpy(codes.astype(np.int32)).unsqueeze(1), number.bits)
    packed = PackedTensor(scheme=TensorScheme(format=name), shape=(codes.size, 1), codes=stream)
    matrix = LAYOUT.prepare(packed)
    x = torch.tensor([[1.0], [-0.5]])
    with np.errstate(over="ignore"):
        expected = torch.from_numpy((value_table(number)[codes] * x.double().numpy()).astype(np.float32))
    for tokens in (1, 2) if name in several else (1,):
        y = LAYOUT.multiply(x[:tokens], matrix)
        # matrix units need not see what is below the normal numbers of bf16
        off = 0.0 if tokens == 1 else 2.0**-126
        torch.testing.assert_close(y, expected[:tokens], rtol=0, atol=off, equal_nan=True)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8_w"])
def test_groups_that_are_not_finite_spoil_their_rows_only(name: str) -> None:
    weight = gaussian(6, 64)
    weight[1, 3], weight[4] = torch.nan, torch.inf
    for tokens in (1, 2):
        y = check(pack(weight, KNOWN[name]), gaussian(tokens, 64, seed=1))
        assert torch.equal(y.isnan().any(0), torch.tensor([False, True, False, False, True, False]))


@pytest.mark.parametrize("name", ["int8_w", "nf4_g64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_are_not_finite(name: str, dtype: torch.dtype) -> None:
    matrix = LAYOUT.prepare(pack(gaussian(4, 64).abs() + 1, KNOWN[name]))
    x = gaussian(4, 64).to(dtype)
    x[1, 3], x[2, 3], x[3, 60] = torch.inf, -torch.inf, torch.nan
    y = LAYOUT.multiply(x, matrix)
    assert bool(y[0].isfinite().all()) and bool(y[3].isnan().all())
    assert bool((y[1] == torch.inf).all()) and bool((y[2] == -torch.inf).all())
    assert torch.equal(LAYOUT.multiply(x[2:3], matrix), y[2:3])


def test_strided_inputs_and_bits_that_no_code_has() -> None:
    packed = pack(gaussian(4, 45), SCHEMES["int4_g32"].weights)  # type: ignore[arg-type]
    noise = packed.codes.clone()
    noise[:, -1] |= 0xF0
    x = gaussian(45, 6, seed=1).T[::2]
    y = LAYOUT.multiply(x, LAYOUT.prepare(dataclasses.replace(packed, codes=noise)))
    assert same_bits(y, LAYOUT.multiply(x.contiguous(), LAYOUT.prepare(packed)))
