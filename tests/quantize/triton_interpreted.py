"""The Triton kernels, run by Triton's interpreter on the CPU and judged by the NumPy reference, bit for bit.

Collected by test_triton.py in a process of its own, since TRITON_INTERPRET has to be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from galleries import MATRICES
from stratified import stratified_inputs
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError, UnknownName
from bitwright.formats import BlockFormat, CodebookFormat, FloatFormat, Specials, encode_values
from bitwright.formats.blocks import encode_blocks, round_blocks
from bitwright.formats.decode import decode_codes
from bitwright.formats.types import NO_SPECIALS
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.backends import triton as backend
from bitwright.quantize.backends.triton import launch
from bitwright.quantize.granularity import ROW, TENSOR, Granularity, block, group
from bitwright.quantize.pack import pack_codes
from bitwright.quantize.scheme import Scaling, TensorScheme

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OVERFLOWS = ["saturate", "ieee", "torch", "ml_dtypes", "te"]
MODES = list(formats.ROUNDINGS)

#: What no format of the catalog has: an unsigned float with a zero, a codebook across zero without one, steps below
#: the normal numbers of fp32, no −0 and no NaN.
OWN = [
    FloatFormat(name="ue4m4", exponent_bits=4, fraction_bits=4, bias=7, signed=False, source="-", specials=NO_SPECIALS),
    FloatFormat(
        name="ue4m4n",
        exponent_bits=4,
        fraction_bits=4,
        bias=7,
        signed=False,
        source="-",
        specials=Specials(has_inf=False, has_nan=True),
    ),
    FloatFormat(name="tiny", exponent_bits=5, fraction_bits=3, bias=140, source="-", specials=NO_SPECIALS),
    CodebookFormat(
        name="uneven", bits=3, values=(1.0, -3.0, 0.75, -0.125, 100.0, -(2.0**-99), 2.0**-140, 3.0), source="-"
    ),
]
NUMBERS = [*formats.FORMATS.values(), *OWN]


def bits(x: Tensor | np.ndarray) -> np.ndarray:
    """fp32 words, every NaN being one."""
    values = x.float().numpy() if isinstance(x, Tensor) else x.astype(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def assert_same(found: Tensor, expected: Tensor | np.ndarray, x: Tensor) -> None:
    differs = bits(found) != bits(expected)
    where = np.flatnonzero(differs.ravel())[:3]
    seen = [(x.flatten()[i].item(), found.flatten()[i].item(), expected.flatten()[i].item()) for i in where]
    assert not differs.any(), f"{differs.sum()} differ; (x, found, expected): {seen}"


def reference_round(x: Tensor, number: formats.Format, mode: str, overflow: str, seed: int, random_bits: int) -> Tensor:
    """The value in fp32, then in x's dtype; NaN that the rule refuses stays."""
    values = x.float().numpy()
    is_nan = np.isnan(values)
    refused = formats.overflow_values(number, overflow).nan is None
    given = np.where(is_nan, 0, values) if refused else values
    with np.errstate(all="ignore"):
        codes = encode_values(number, given, mode, overflow, seed=seed, random_bits=random_bits)
        rounded = decode_codes(number, codes).astype(np.float32)
    if refused:
        rounded = np.where(is_nan, np.float32(np.nan), rounded)
    return torch.from_numpy(rounded).to(x.dtype)


def inputs(number: formats.Format, num: int) -> Tensor:
    """A sample of the stratified inputs; of formats outside the catalog, the neighbourhood of every value instead."""
    if number in OWN:
        values = decode_codes(number, np.arange(1 << number.bits))
        values = np.unique(values[np.isfinite(values)]).astype(np.float32)
        points = np.concatenate(
            [values, values[:-1] / 2 + values[1:] / 2, stratified_inputs(formats.get("bf16"), 6000)]
        )
        points = points[np.isfinite(points)]
        x = np.concatenate([points, np.nextafter(points, np.float32(9e9)), -points])
    else:
        x = stratified_inputs(formats.get("fp32") if number.name == "fp64" else number, 6000)
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38], dtype=np.float32)
    sample = np.random.default_rng(3).choice(x, num - ends.size).astype(np.float32)
    return torch.from_numpy(np.concatenate([sample, ends]))


# --- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_every_mode_and_rule_rounds_like_the_reference(number: formats.Format) -> None:
    x = inputs(number, 1500)
    # every mode; the rules take turns, from format to format too, and rules beyond clipping are for floats
    first, num_rules = NUMBERS.index(number), len(OVERFLOWS)
    pairs = [(mode, OVERFLOWS[(first + turn) % num_rules]) for turn, mode in enumerate(MODES)]
    if isinstance(number, FloatFormat):
        pairs += [("nearest_even", overflow) for overflow in OVERFLOWS]
        pairs += [("up", OVERFLOWS[(first + 1) % num_rules]), ("stochastic", OVERFLOWS[(first + 2) % num_rules])]
    # dtypes, seeds and widths of random bits take turns
    for turn, (mode, overflow) in enumerate(pairs):
        seed, random_bits = (0, 7, 2**63 + 11, 2**64 - 1)[turn % 4], (32, 1, 8, 23)[turn % 4]
        given = x.to(DTYPES[turn % 3])
        assert backend.why_not_round(number, given.dtype, mode, overflow) is None
        found = backend.round_values(
            given, number, rounding=mode, overflow=overflow, seed=seed, random_bits=random_bits
        )
        assert found.dtype == given.dtype
        assert_same(found, reference_round(given, number, mode, overflow, seed, random_bits), given)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "e8m0", "int4", "nf4", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_even_on_more_inputs(name: str, dtype: torch.dtype) -> None:
    number = formats.get(name)
    x = inputs(number, 4000).to(dtype)
    assert_same(backend.round_values(x, number), reference_round(x, number, "nearest_even", "saturate", 0, 32), x)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 5)])
def test_any_shape_and_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    number = formats.get("fp8_e4m3")
    before = x.clone()
    found = backend.round_values(x, number, rounding="stochastic", seed=5)
    assert found.shape == x.shape
    assert_same(found, reference_round(x, number, "stochastic", "saturate", 5, 32), x)
    assert torch.equal(x, before)


def test_strides_of_input_and_output() -> None:
    number = formats.get("fp4_e2m1")
    x = (torch.randn(12, 18, generator=torch.Generator().manual_seed(1)) * 3).T[::2, 1:]
    out = torch.zeros(18, 11).T[:, ::2].T.expand(9, 11).clone().as_strided((9, 11), (1, 9))
    expected = reference_round(x, number, "stochastic", "saturate", 9, 32)
    returned = backend.round_values(x, number, rounding="stochastic", seed=9, out=out)
    assert returned is out
    assert_same(out, expected, x)
    contiguous = x.contiguous()
    assert backend.round_values(contiguous, number, rounding="stochastic", seed=9, out=contiguous) is contiguous
    assert_same(contiguous, expected, x)


# --- scales -----------------------------------------------------------------------------------------------------------


def scheme_of(name: str, granularity: Granularity, scale_format: str, **settings: object) -> TensorScheme:
    return TensorScheme(
        format=name,
        scaling=Scaling(granularity=granularity, scale_format=scale_format, **settings),  # type: ignore[arg-type]
    )


def matrix(rows: int, columns: int, width: int) -> Tensor:
    """Every kind of group: Gaussian at many exponents, zeros, −0, one NaN, one Inf, one outlier, tiny, huge, ties."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    group_index = torch.arange(columns) // width + 17 * torch.arange(rows).unsqueeze(1)
    x *= torch.exp2(((group_index * 37) % 41 - 20).float())
    kind = group_index % 23
    x = torch.where(kind == 3, torch.zeros(()), x)
    x = torch.where(kind == 4, torch.full((), -0.0), x)
    x = torch.where(kind == 6, (x * 2.0**-132), x)
    x = torch.where(kind == 7, (x.sign() * 3.0e38), x)
    x = torch.where(kind == 8, (x * 8).round() / 2, x)
    flat = x.view(-1)
    flat[:: max(columns, 1) * 2 + 5] *= 1e6
    if rows * columns > 600:
        flat[5], flat[rows * columns // 2], flat[-3] = math.nan, math.inf, -math.inf
    return x


def reference_blocks(scheme: TensorScheme, columns: int) -> BlockFormat:
    assert scheme.scaling is not None
    scale = formats.get(scheme.scaling.scale_format)
    assert isinstance(scale, FloatFormat)
    return BlockFormat(
        name="reference",
        element=formats.get(scheme.format),
        element_exponent=scheme.scaling.element_exponent,
        block_size=scheme.scaling.granularity.group_size or columns,
        scale=scale,
        scale_rule=scheme.scaling.rule,  # type: ignore[arg-type]
        tensor_scale=scheme.scaling.tensor_scale,
        source="-",
    )


def reference_values(x_NK: Tensor, scheme: TensorScheme) -> Tensor:
    """By formats.blocks: groups along the rows; a block of several rows is one row of its own."""
    assert scheme.scaling is not None
    granularity, values = scheme.scaling.granularity, x_NK.float().numpy()
    rows, columns = values.shape
    if granularity.scope == "tensor":
        flat = values.reshape(1, -1)
        found = round_blocks(reference_blocks(scheme, flat.size), flat).reshape(values.shape)
    elif granularity.scope == "block":
        found = np.empty_like(values)
        for top in range(0, rows, granularity.block_rows):
            for left in range(0, columns, granularity.group_size):
                part = np.s_[top : top + granularity.block_rows, left : left + granularity.group_size]
                flat = values[part].reshape(1, -1)
                whole = dataclasses.replace(reference_blocks(scheme, columns), block_size=flat.size)
                found[part] = round_blocks(whole, flat).reshape(values[part].shape)
    else:
        found = round_blocks(reference_blocks(scheme, columns), values)
    with np.errstate(all="ignore"):
        return torch.from_numpy(found).to(x_NK.dtype)


MX = {"scale_format": "e8m0", "rule": "ocp_floor"}
SCHEMES = {
    "mxfp8": scheme_of("fp8_e4m3", group(32), **MX),
    "mxfp6": scheme_of("fp6_e2m3", group(32), **MX),
    "mxfp4": scheme_of("fp4_e2m1", group(32), **MX),
    "mxint8": scheme_of("int8", group(32), element_exponent=-6, **MX),
    "mxfp8 rounded up": scheme_of("fp8_e5m2", group(32), "e8m0", rule="round_up"),
    "power of two": scheme_of("fp8_e4m3", group(24), "fp32", rule="power_of_two"),
    "nvfp4": scheme_of("fp4_e2m1", group(16), "fp8_e4m3", tensor_scale=True),
    "int4 groups": scheme_of("int4", group(20), "fp16"),
    "int3 groups": scheme_of("int3", group(7), "bf16"),
    "nf4 groups": scheme_of("nf4", group(64), "bf16"),
    "int8 rows": scheme_of("int8", ROW, "fp32"),
    "fp8 rows": scheme_of("fp8_e4m3", ROW, "fp32"),
    "fp6 rows of power-of-two scales": scheme_of("fp6_e3m2", ROW, "e8m0", rule="round_up"),
    "fp8 tensor": scheme_of("fp8_e5m2", TENSOR, "fp32"),
    "fp8 blocks": scheme_of("fp8_e4m3", block(4, 12), "fp32"),
    "int5 blocks of e4m3 scales": scheme_of("int5", block(3, 5), "fp8_e4m3"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in SCHEMES] + [(name, DTYPES[1 + turn % 2]) for turn, name in enumerate(SCHEMES)],
)
def test_scaled_values_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    scheme = SCHEMES[name]
    assert scheme.scaling is not None
    # the columns are no multiple of most group sizes
    x = matrix(13, 104, scheme.scaling.granularity.group_size or 104).to(dtype)
    if scheme.scaling.granularity == TENSOR:
        x = x.nan_to_num(0.0, 1.0, -1.0)
    assert backend.why_not_scaled(scheme, dtype) is None
    oracle = scheme
    if scheme.scaling.rule == "power_of_two":  # without a margin, the same as round_up wherever amax / max is normal
        oracle = dataclasses.replace(scheme, scaling=dataclasses.replace(scheme.scaling, rule="round_up"))
        x = torch.where(x.abs() < 2.0**-100, 0.0, x)
    expected = reference_values(x, oracle)
    assert_same(backend.fake_quantize(x, scheme), expected, x)
    q = backend.quantize(x, scheme)
    assert_same(q.dequantize().to(dtype), expected, x)
    packed = backend.pack(x, scheme)
    assert_same(backend.unpack(packed, dtype), expected, x)
    assert_same(packed.unpack(dtype), expected, x)
    assert torch.equal(packed.codes, pack_codes(q).codes)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4 groups", "nf4 groups", "int8 rows"])
def test_codes_and_scales_are_those_of_the_reference(name: str) -> None:
    scheme = SCHEMES[name]
    assert scheme.scaling is not None
    x = matrix(9, 104, scheme.scaling.granularity.group_size or 104).nan_to_num(0.0, 1.0, -1.0)
    stored = encode_blocks(reference_blocks(scheme, 104), x.numpy())
    packed = backend.pack(x, scheme)
    width = formats.get(scheme.format).bits
    stream = np.unpackbits(packed.codes.numpy(), axis=1, bitorder="little")[:, : 104 * width]
    found = (stream.reshape(9, 104, width).astype(np.int64) << np.arange(width)).sum(-1)
    np.testing.assert_array_equal(found, stored.codes)
    q = backend.quantize(x, scheme)
    assert q.scales_NG is not None
    np.testing.assert_array_equal(
        bits(q.scales_NG), bits(formats.decode(scheme.scaling.scale_format, stored.scale_codes))
    )
    assert (q.tensor_scale is None) == (stored.tensor_scale is None)
    if q.tensor_scale is not None:
        assert q.tensor_scale.item() == stored.tensor_scale


@pytest.mark.parametrize("name", ["fp8 rows", "nvfp4", "fp8 tensor", "fp8 blocks", "mxfp4"])
def test_groups_that_are_read_twice_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SCHEMES[name]
    assert scheme.scaling is not None
    x = matrix(7, 90, scheme.scaling.granularity.group_size or 90)
    expected = reference_values(x, scheme)
    monkeypatch.setattr(launch, "LARGEST_GROUP", 8)
    monkeypatch.setattr(launch, "BLOCK", 32)
    assert_same(backend.quantize(x, scheme).dequantize(), expected, x)
    if scheme.scaling.tensor_scale:
        assert_same(backend.fake_quantize(x, scheme), expected, x)


def test_a_margin_is_that_many_powers_of_two() -> None:
    x = matrix(4, 64, 16).nan_to_num(0.0, 1.0, -1.0)
    plain, wide = (
        backend.quantize(x, scheme_of("fp8_e5m2", group(16), "fp32", rule="power_of_two", margin=margin)).scales_NG
        for margin in (0, 3)
    )
    assert plain is not None and wide is not None
    usual = (plain > 2.0**-120) & (plain < 2.0**120)
    assert usual.any()
    assert torch.equal(wide[usual], plain[usual] * 8)


@pytest.mark.parametrize("granularity", [ROW, TENSOR, group(8), block(2, 8)], ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (1, 1)])
def test_empty_and_single(granularity: Granularity, shape: tuple[int, int]) -> None:
    scheme = scheme_of("int4", granularity, "fp16")
    x = torch.ones(shape)
    assert backend.fake_quantize(x, scheme).shape == shape
    q = backend.quantize(x, scheme)
    assert q.scales_NG is not None and q.scales_NG.shape == granularity.scale_shape(*shape)
    if x.numel():
        assert q.scales_NG.item() == np.float16(1 / 7)
    elif granularity == TENSOR:
        assert q.scales_NG.item() == 0
    packed = backend.pack(x, scheme)
    assert packed.codes.shape == (shape[0], math.ceil(shape[1] / 2))
    assert backend.unpack(packed).shape == shape


def test_strided_matrices_and_out() -> None:
    scheme = SCHEMES["mxfp4"]
    x = matrix(104, 46, 46).T[::2]
    expected = reference_values(x, scheme)
    assert_same(backend.fake_quantize(x, scheme), expected, x)
    out = torch.zeros(104, 23).T
    assert backend.fake_quantize(x, scheme, out=out) is out
    assert_same(out, expected, x)
    given = x.contiguous()
    assert backend.fake_quantize(given, scheme, out=given) is given
    assert_same(given, expected, x)


# --- a scale that is known --------------------------------------------------------------------------------------------


def assert_delayed_is_torch(x: Tensor, number: formats.Format, inv_scale: float) -> None:
    """Values and amax of the torch backend, bit for bit."""
    assert backend.why_not_delayed(number, x.dtype) is None
    before = x.clone()
    values, amax = backend.scale_with_amax(x, number, torch.tensor(inv_scale))
    expected, expected_amax = torch_backend.scale_with_amax(x, number, torch.tensor(inv_scale))
    assert values.dtype == x.dtype and values.shape == x.shape
    assert_same(values, expected, x)
    assert amax.dtype == torch.float32 and amax.shape == ()
    assert_same(amax, expected_amax, amax)
    assert_same(x, before, x)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_delayed_scaling_knows_every_format(number: formats.Format) -> None:
    if backend.why_not_delayed(number, torch.float32) is not None:
        pytest.skip("no grid of fp32 words")
    x = inputs(number, 1200)
    # 1: on codes and ties; a quotient as of 448 / amax: everywhere else; dtypes take turns
    for turn, inv_scale in enumerate((1.0, 448 / 3, 2.0**-30)):
        assert_delayed_is_torch(x.to(DTYPES[(turn + NUMBERS.index(number)) % 3]), number, inv_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8", "nf4"])
def test_delayed_scaling_of_matrices(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BLOCK", 256)  # several programs, whose amaxes meet
    for matrix in MATRICES.values():
        x = matrix().to(dtype)
        # of the smallest inverses the reciprocal is no number, of the largest it is subnormal
        for inv_scale in (0.37, 3.4028235e38, 1e-40):
            assert_delayed_is_torch(x, formats.get(name), inv_scale)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.75, -(2.0**-149), math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(), (1,), (2, 0, 3), (3, 5, 7)])
def test_delayed_scaling_of_one_value(shape: tuple[int, ...], value: float) -> None:
    x = torch.full(shape, 0.25)
    x.view(-1)[-1:] = value
    assert_delayed_is_torch(x, formats.get("fp8_e4m3"), 448 / 1.7)
    _, amax = backend.scale_with_amax(x, formats.get("fp8_e4m3"), torch.tensor(1.0))
    known = max(abs(value), 0.25) if x.numel() > 1 else abs(value) if x.numel() else 0.0
    np.testing.assert_equal(amax.item(), math.nan if x.numel() and math.isnan(value) else known)


def test_delayed_scaling_into_memory_that_is_given_under_one_scale_of_many() -> None:
    number, inv_scales = formats.get("fp8_e5m2"), torch.tensor([9.0, 0.7, 5.0])
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(2), requires_grad=True)
    expected, _ = torch_backend.scale_with_amax(x.detach(), number, inv_scales[1])
    strided = torch.zeros(40, 9).T
    for out in (torch.zeros(9, 40), strided, x.detach()):
        returned, amax = backend.scale_with_amax(x, number, inv_scales[1], out=out)
        assert returned is out and not amax.requires_grad
        assert_same(out, expected, x)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_it_does_not_do_is_said_in_words() -> None:
    x = torch.ones(2, 8)
    refused = {
        "offsets": scheme_of("uint4", group(8), "fp16", symmetry="zero_point"),
        "percentile": scheme_of("int8", ROW, "fp32", rule="percentile", percentile=99.0),
        "mse": scheme_of("int8", ROW, "fp32", rule="mse"),
        "without scaling": TensorScheme(format="bf16"),
    }
    for word, scheme in refused.items():
        reason = backend.why_not_scaled(scheme, torch.float32)
        assert reason is not None and word in reason
        with pytest.raises(SchemeError, match=word):
            backend.fake_quantize(x, scheme)
    assert "float64" in str(backend.why_not_round(formats.get("bf16"), torch.float64, "up", "ieee"))
    assert "float64" in str(backend.why_not_delayed(formats.get("bf16"), torch.float64))
    with pytest.raises(SchemeError, match=r"not torch\.float64"):
        backend.scale_with_amax(x.double(), formats.get("bf16"), torch.tensor(1.0))
    with pytest.raises(UnknownName, match="nearest_even"):
        backend.why_not_round(formats.get("bf16"), torch.float32, "nearest", "ieee")
    with pytest.raises(SchemeError, match=r"it has to be torch\.float32 \(2, 8\)"):
        backend.fake_quantize(x, SCHEMES["mxfp8"], out=torch.ones(2, 9))
