"""Packed products against float64: the exact values of codes and scales, and the rounding that fp32 sums may have.

With u = 2⁻²⁴ and every product of code and x exact, y is a sum of K products, of partial sums under scales, and of G
offsets times sums of x. Each term meets at most K + 2 G + 16 roundings on its way, so that (Higham, Accuracy and
Stability of Numerical Algorithms, 3.1)

    |y − exact| ≤ γ · Σ |x| (|code| + |zero point|) |scale| + |minimum|,     γ = n u / (1 − n u),  n = K + 2 G + 16

before y is rounded to the dtype of x, by half a unit in its last place.
"""

from __future__ import annotations

import pytest
import torch
from galleries import FURTHER_SCHEMES, gaussian
from torch import Tensor

from bitwright import formats
from bitwright.quantize import MATMULS, SCHEMES, PackedTensor, TensorScheme, pack, packed_matmul, select_matmul
from bitwright.quantize.backends.cpu.features import processor_features
from bitwright.quantize.backends.cpu.matmul import DIRECT, EXPANDED, SCALED
from bitwright.quantize.backends.cpu.matmul_parts import parts_of
from bitwright.quantize.backends.cpu.matmul_product import MAX_TOKENS, multiply, way_of_parts
from bitwright.quantize.backends.cpu.matmul_ways import Step
from bitwright.quantize.granularity import spread
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import unpack_codes
from bitwright.quantize.packed_matmul import prepare_matmul

#: Schemes beyond the catalog that meet what it leaves out: scales of 8 bits and offsets that rows share, ragged tables.
FURTHER = ("fp8 without -0", "fp4 with fp6 scales", "zero point per tensor", "signed zero points", "minima of blocks")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Rows and columns: primes; fewer columns than a group, and than a tile has rows.
SHAPES = ((67, 331), (3, 13))
NUM_TOKENS = {torch.bfloat16: (0, 1, 3, 33), torch.float16: (1,), torch.float32: (0, 1, 3)}
#: What kernels make use of: of no processor in particular, and of those without dot products of bf16.
PROCESSORS = {
    "any": frozenset[str](),
    "permutations of words": frozenset({"avx512f", "avx512bw"}),
    "permutations of bytes": frozenset({"avx512f", "avx512bw", "avx512vbmi"}),
}
#: One of each kind of codes, of scales and of offsets.
KINDS = ("int4_g64", "int4_g32_zp", "int4_g32_min", "int3_g64", "int8_w", "fp8_block", "fp6_w", "nvfp4", "nf4_g64")


def weight_schemes() -> dict[str, TensorScheme]:
    """What the weights of the catalog are stored in, each once, and further ones."""
    found: dict[TensorScheme, str] = {}
    for scheme in SCHEMES.values():
        if scheme.weights is not None:
            found.setdefault(scheme.weights, scheme.name)
    return {name: tensor for tensor, name in found.items()} | {name: FURTHER_SCHEMES[name] for name in FURTHER}


def scheme_of(name: str) -> TensorScheme:
    found = SCHEMES[name].weights
    assert found is not None
    return found


class Exact:
    """What a packed matrix stands for in float64, and what its products may be off by."""

    def __init__(self, packed: PackedTensor) -> None:
        q, scaling, (_, columns) = unpack_codes(packed), packed.scheme.scaling, packed.shape
        codes = q.codes_NK.double()
        groups, self.values, self.bounds = 1, codes, codes.abs()
        if scaling is not None:
            assert q.scales_NG is not None
            groups = scaling.granularity.num_groups(columns)
            scales = q.scales_NG.double() * (1 if q.tensor_scale is None else q.tensor_scale.double())
            scale_NK = spread(scales, *packed.shape, scaling.granularity)
            offsets = torch.zeros_like(q.scales_NG) if q.offsets_NG is None else q.offsets_NG
            offset_NK = spread(offsets.double(), *packed.shape, scaling.granularity)
            if scaling.symmetry == "zero_point":
                self.values = (codes - offset_NK) * scale_NK
                self.bounds = (codes.abs() + offset_NK.abs()) * scale_NK.abs()
            else:
                self.values = codes * scale_NK + offset_NK
                self.bounds = (codes * scale_NK).abs() + offset_NK.abs()
        n = (columns + 2 * groups + 16) * 2.0**-24
        self.gamma = n / (1 - n)

    def raise_if_off(self, y: Tensor, x: Tensor) -> None:
        """Compare a product with the exact one, as far as the docstring of this module allows."""
        expected = x.double() @ self.values.T
        off = self.gamma * (x.double().abs() @ self.bounds.T)
        info = torch.finfo(y.dtype)
        allowed = off + (expected.abs() + off).clamp(min=info.smallest_normal) * info.eps / 2
        assert y.shape == expected.shape and y.dtype == x.dtype
        assert torch.equal(y.isnan(), expected.isnan())
        wrong = (y.double() - expected).abs() > allowed
        assert not bool(wrong.any()), f"off by {(y.double() - expected).abs()[wrong]}, may be {allowed[wrong]}"


def prepared(packed: PackedTensor, dtype: torch.dtype = torch.bfloat16) -> PackedMatrix:
    return select_matmul(packed.scheme, packed.shape, "cpu", dtype).layout.prepare(packed)


@pytest.mark.parametrize("name", list(weight_schemes()))
def test_products_of_every_scheme(name: str) -> None:
    scheme = weight_schemes()[name]
    for shape in SHAPES:
        packed = pack(gaussian(*shape), scheme)
        exact = Exact(packed)
        for dtype, num_tokens in NUM_TOKENS.items():
            matrix = prepared(packed, dtype)
            for tokens in num_tokens:
                x = gaussian(tokens, shape[1], seed=tokens).to(dtype)
                exact.raise_if_off(packed_matmul(x, matrix), x)


@pytest.mark.parametrize("name", [*KINDS, *FURTHER, "fp16"])
def test_products_of_the_layout_without_exceptions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwright.quantize.matmuls.dequantise._BLOCK", 8 * 331)
    packed, x = pack(gaussian(67, 331), weight_schemes()[name]), gaussian(5, 331, seed=1)
    matrix = MATMULS["dequantise"].prepare(packed)
    for dtype in DTYPES:
        Exact(packed).raise_if_off(packed_matmul(x.to(dtype), matrix), x.to(dtype))


@pytest.mark.parametrize("processor", list(PROCESSORS))
@pytest.mark.parametrize("name", ["int4_g64", "int4_g32_zp", "fp8_w", "fp6_w", "nvfp4", "nf4_g64"])
def test_processors_that_have_less(name: str, processor: str) -> None:
    features = PROCESSORS[processor]
    if missing := features - processor_features():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    packed = pack(gaussian(67, 331), scheme_of(name))
    parts = parts_of(packed.scheme.text, packed.shape)
    for tokens in (1, 9):
        x = gaussian(tokens, 331, seed=tokens).bfloat16()
        Exact(packed).raise_if_off(multiply(x, parts, parts.lay(packed), features=features), x)


@pytest.mark.parametrize("name", ["int4_g64", "bfp8"])
def test_whatever_is_done_with_a_run_of_codes(name: str) -> None:
    packed = pack(gaussian(67, 331), scheme_of(name))
    parts = parts_of(packed.scheme.text, packed.shape)
    tensors, x = parts.lay(packed), gaussian(9, 331, seed=1).bfloat16()
    for mode, columns, vectors in ((DIRECT, 4, 4), (DIRECT, 8, 2), (EXPANDED, 4, 4), (EXPANDED, 4, 1)):
        step = Step(mode=mode, columns=columns, vectors=vectors)
        Exact(packed).raise_if_off(multiply(x, parts, tensors, step=step), x)


@pytest.mark.parametrize("name", ["bfp8", "nvfp4", "mxfp8"])
def test_codes_multiplied_by_their_scales(name: str) -> None:
    """Scales of usual size, and of any: those are left for the sums."""
    scheme = scheme_of(name)
    for size in (1.0, 2.0**-90, 2.0**70):
        if size != 1.0 and scheme.scaling is not None and scheme.scaling.tensor_scale:
            continue
        weight = gaussian(67, 331)
        weight[:, 100:150] *= size
        packed = pack(weight, scheme)
        parts = parts_of(packed.scheme.text, packed.shape)
        for dtype in (torch.bfloat16, torch.float32):
            assert SCALED in {step.mode for step in way_of_parts(parts, dtype, processor_features()).steps}
            x = gaussian(9, 331, seed=1).to(dtype)
            step = Step(mode=SCALED, columns=4, vectors=4)
            Exact(packed).raise_if_off(multiply(x, parts, parts.lay(packed), step=step), x)


@pytest.mark.parametrize("name", ["int4_g32_zp", "fp8_block", "nvfp4"])
def test_several_threads(name: str) -> None:
    packed = pack(gaussian(1031, 640), scheme_of(name))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for tokens in (1, 7):
            x = gaussian(tokens, 640, seed=tokens).bfloat16()
            Exact(packed).raise_if_off(packed_matmul(x, prepared(packed)), x)
    finally:
        torch.set_num_threads(before)


def test_one_token_of_codes_that_bf16_does_not_hold() -> None:
    packed, x = pack(gaussian(67, 330), scheme_of("nf4_g64")), gaussian(1, 330).bfloat16()
    Exact(packed).raise_if_off(prepare_matmul(prepared(packed))(x), x)


def test_more_tokens_than_one_call_takes() -> None:
    packed = pack(gaussian(70, 64), scheme_of("int4_g32_zp"))
    matrix = prepared(packed)
    for dtype in DTYPES:
        x = gaussian(MAX_TOKENS + 3, 64).to(dtype)
        Exact(packed).raise_if_off(packed_matmul(x, matrix), x)


@pytest.mark.parametrize("name", KINDS)
def test_every_code_and_scale(name: str) -> None:
    """Bit patterns that no rounding gives: NaN and −0 codes, zero points of any value; scales as a matrix has them."""
    packed = pack(gaussian(70, 200), scheme_of(name))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, packed.codes.shape, dtype=torch.uint8, generator=generator)
    odd = PackedTensor(
        scheme=packed.scheme,
        shape=packed.shape,
        codes=noise,
        scales=packed.scales,
        offsets=packed.offsets,
        tensor_scale=packed.tensor_scale,
    )
    x = gaussian(2, 200)
    Exact(odd).raise_if_off(packed_matmul(x, prepared(odd)), x)


@pytest.mark.parametrize("name", KINDS)
def test_groups_that_are_not_finite_spoil_their_rows_only(name: str) -> None:
    scheme = scheme_of(name)
    assert scheme.scaling is not None
    if not formats.FORMATS[scheme.scaling.scale_format].has_nan:
        pytest.skip("such groups are refused when they are packed")
    weight = gaussian(67, 160)
    weight[3, 5], weight[9, 159], weight[40] = torch.nan, torch.inf, -torch.inf
    packed = pack(weight, scheme)
    for tokens in (1, 6):
        x = gaussian(tokens, 160).bfloat16()
        Exact(packed).raise_if_off(packed_matmul(x, prepared(packed)), x)


def test_zeros_and_extremes() -> None:
    weight = gaussian(70, 160)
    weight[1], weight[2], weight[3] = 0.0, -0.0, weight[3] * 1e-30
    packed = pack(weight, scheme_of("fp8_w"))
    x = gaussian(6, 160)
    x[1], x[2], x[3, 4], x[4] = 0.0, -0.0, 1e30, x[4] * 1e-20
    Exact(packed).raise_if_off(packed_matmul(x, prepared(packed)), x)
    assert not bool(packed_matmul(x, prepared(packed))[:, 1:3].any())


@pytest.mark.parametrize("name", ["int8_w", "nvfp4"])
def test_inputs_that_are_not_finite(name: str) -> None:
    packed = pack(gaussian(70, 64).abs() + 1, scheme_of(name))
    for dtype in DTYPES:
        x = gaussian(5, 64).to(dtype)
        x[1, 3], x[2, 3], x[3, 60] = torch.inf, -torch.inf, torch.nan
        y = packed_matmul(x, prepared(packed, dtype)).double()
        assert bool((y[1] == torch.inf).all()) and bool((y[2] == -torch.inf).all()) and bool(y[3].isnan().all())
        Exact(packed).raise_if_off(y[[0, 4]].to(dtype), x[[0, 4]])


def test_the_whole_range_of_fp32() -> None:
    """The largest number rounds to Inf in bf16, and must not."""
    packed = pack(torch.eye(64), scheme_of("fp8_w"))
    x = torch.full((1, 64), torch.finfo(torch.float32).max / 512)
    Exact(packed).raise_if_off(packed_matmul(x, prepared(packed, torch.float32)), x)
    x[0, 0] = 3.4e38
    assert packed_matmul(x, prepared(packed, torch.float32))[0, 0] == torch.inf  # 448 of it, under a scale of 1/448
