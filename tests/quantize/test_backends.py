"""One suite for every backend: bit for bit what the reference gives; and the reference itself against outsiders.

A further backend is one line of `BACKENDS`. What it says that it cannot do is skipped with its reason, and what it must
be able to do is listed beside it.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from galleries import MATRICES, finite, gaussian, same_bits, scaled_schemes, spoiled
from stratified import quiet, stratified_inputs
from torch import Tensor

from bitwright import formats
from bitwright.formats import BlockFormat, CodebookFormat, FloatFormat, Format, IntFormat
from bitwright.formats.decode import value_table
from bitwright.formats.philox import philox4x32
from bitwright.formats.types import IEEE_SPECIALS, NO_SPECIALS, SIGN_NAN_SPECIALS, TOP_NAN_SPECIALS
from bitwright.quantize import PackedTensor, QTensor, Scaling, TensorScheme, group
from bitwright.quantize.backends import reference
from bitwright.quantize.backends.torch_philox import random_words
from bitwright.quantize.pack import stored_dtype

SCALED = scaled_schemes()
#: What kernels leave to torch: offsets, and scales in a format that torch has no dtype for.
SCHEMES_OF_KERNELS = [
    name
    for name, scheme in SCALED.items()
    if scheme.scaling is not None
    and scheme.scaling.symmetry == "symmetric"
    and stored_dtype(formats.FORMATS[scheme.scaling.scale_format]) is not None
    and formats.FORMATS[scheme.format].bits <= 8
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Triton's kernels look at amax alone.
SCHEMES_OF_TRITON = [
    name for name in SCHEMES_OF_KERNELS if (scaling := SCALED[name].scaling) is not None and scaling.needs_amax_alone
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A module of `quantize/backends`, and what it must not refuse, by name."""

    name: str
    format_names: frozenset[str] = frozenset(formats.names())
    roundings: frozenset[str] = frozenset(formats.ROUNDINGS)
    overflows: frozenset[str] = frozenset(formats.OVERFLOWS)
    schemes: frozenset[str] = frozenset(SCALED)

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"bitwright.quantize.backends.{self.name}")


#: Triton's interpreter takes part where it is switched on (`test_triton.py` starts such a process).
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = (
    Backend(name="reference"),
    Backend(name="torch"),
    Backend(
        name="cpu",
        format_names=frozenset(formats.names()) - {"fp32", "fp64", "e8m0", "nf4"},
        schemes=frozenset(SCHEMES_OF_KERNELS),
    ),
    *([Backend(name="triton", schemes=frozenset(SCHEMES_OF_TRITON))] if IN_INTERPRETER else []),
)

EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
JUDGED = pytest.mark.parametrize("backend", BACKENDS[1:], ids=lambda backend: backend.name)
EVERY_FORMAT = pytest.mark.parametrize("number", [formats.get(name) for name in formats.names()], ids=lambda f: f.name)
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCALED.values(), ids=SCALED.keys())


def skip_if(reason: str | None) -> None:
    if reason is not None:
        pytest.skip(reason)


@EVERY_BACKEND
def test_what_a_backend_must_cover(backend: Backend) -> None:
    refused = [
        (name, dtype, rounding, overflow)
        for name in backend.format_names
        for dtype in DTYPES
        for rounding in backend.roundings
        for overflow in backend.overflows
        if backend.module.why_not_round(formats.get(name), dtype, rounding, overflow) is not None
    ]
    assert not refused
    for name in backend.schemes:
        for dtype in DTYPES:
            assert backend.module.why_not_scaled(SCALED[name], dtype) is None, name
            assert backend.module.why_not_packed(SCALED[name], dtype) is None, name


@EVERY_BACKEND
def test_other_dtypes_are_refused_in_words(backend: Backend) -> None:
    number, scheme = formats.get("fp8_e4m3"), SCALED["mxfp4"]
    assert "float64" in backend.module.why_not_round(number, torch.float64, "nearest_even", "saturate")
    assert "int32" in backend.module.why_not_scaled(scheme, torch.int32)


# --- element by element -----------------------------------------------------------------------------------------------


@cache
def inputs(number: Format, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(quiet(stratified_inputs(number, 5000))).to(dtype)


@cache
def expected_values(number: Format, dtype: torch.dtype, rounding: str, overflow: str) -> Tensor:
    return reference.round_values(inputs(number, dtype), number, rounding=rounding, overflow=overflow, seed=7)


@JUDGED
@EVERY_FORMAT
@pytest.mark.parametrize("rounding", formats.ROUNDINGS)
def test_rounding_agrees_with_the_reference(backend: Backend, number: Format, rounding: str) -> None:
    reason = None
    for overflow in formats.OVERFLOWS:
        for dtype in DTYPES if overflow in ("saturate", "ieee") else DTYPES[:1]:
            refused = backend.module.why_not_round(number, dtype, rounding, overflow)
            if refused is not None:
                reason = refused
                continue
            x = inputs(number, dtype)
            found = backend.module.round_values(x, number, rounding=rounding, overflow=overflow, seed=7)
            assert same_bits(found, expected_values(number, dtype, rounding, overflow)), (overflow, dtype)
    skip_if(reason)


CASTS: dict[str, tuple[torch.dtype | None, Any]] = {
    "fp16": (torch.float16, np.float16),
    "bf16": (torch.bfloat16, ml_dtypes.bfloat16),
    "fp8_e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "fp8_e4m3fnuz": (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
    "fp8_e5m2fnuz": (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz),
    "fp6_e3m2": (None, ml_dtypes.float6_e3m2fn),
    "fp6_e2m3": (None, ml_dtypes.float6_e2m3fn),
    "fp4_e2m1": (None, ml_dtypes.float4_e2m1fn),
}


@EVERY_BACKEND
@pytest.mark.parametrize("name", CASTS)
def test_rules_named_after_libraries_are_their_casts(backend: Backend, name: str) -> None:
    number, (dtype, scalar_type) = formats.get(name), CASTS[name]
    x = inputs(number, torch.float32)
    if dtype is not None:
        skip_if(backend.module.why_not_round(number, x.dtype, "nearest_even", "torch"))
        assert same_bits(backend.module.round_values(x, number, overflow="torch"), x.to(dtype).float())
    skip_if(backend.module.why_not_round(number, x.dtype, "nearest_even", "ml_dtypes"))
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(x.numpy().astype(scalar_type).astype(np.float32))
    assert same_bits(backend.module.round_values(x, number, overflow="ml_dtypes"), expected)


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["fp8_e4m3", "bf16", "int8", "nf4", "e8m0"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 5), (1000,)])
def test_any_shape_any_strides_and_out(backend: Backend, name: str, rounding: str, shape: tuple[int, ...]) -> None:
    number = formats.get(name)
    skip_if(backend.module.why_not_round(number, torch.float32, rounding, "saturate"))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    before = x.clone()
    found = backend.module.round_values(x, number, rounding=rounding, seed=3)
    assert (found.shape == x.shape and found.data_ptr() != x.data_ptr()) or x.numel() == 0
    flat = backend.module.round_values(x.reshape(-1), number, rounding=rounding, seed=3)
    assert same_bits(found, flat.reshape(shape)) and same_bits(x, before)
    if x.dim() > 1:
        # the position in the flattened tensor counts, not the place in memory
        turned = x.transpose(0, -1).contiguous().transpose(0, -1)
        assert same_bits(backend.module.round_values(turned, number, rounding=rounding, seed=3), found)
    out = torch.empty_like(x)
    assert backend.module.round_values(x, number, rounding=rounding, seed=3, out=out) is out and same_bits(out, found)
    assert backend.module.round_values(x, number, rounding=rounding, seed=3, out=x) is x and same_bits(x, found)


def own_float(exponent_bits: int, fraction_bits: int, bias: int, **facts: Any) -> FloatFormat:
    return FloatFormat(
        name=f"e{exponent_bits}m{fraction_bits} bias {bias}",
        exponent_bits=exponent_bits,
        fraction_bits=fraction_bits,
        bias=bias,
        source="a format of one's own",
        **{"specials": NO_SPECIALS, **facts},
    )


#: What a file of formats may bring: beyond the range of fp32, finer than its subnormals, unsigned, without zero …
OWN_FORMATS: tuple[Format, ...] = (
    own_float(9, 3, 255, specials=IEEE_SPECIALS),
    own_float(8, 3, 140),
    own_float(8, 23, 140, specials=TOP_NAN_SPECIALS),
    own_float(5, 26, 15, specials=IEEE_SPECIALS),
    own_float(8, 24, 127, specials=SIGN_NAN_SPECIALS),
    own_float(8, 22, 127, specials=IEEE_SPECIALS),
    own_float(3, 0, 3),
    own_float(5, 3, 15, signed=False),
    own_float(5, 2, 15, signed=False, specials=IEEE_SPECIALS),
    own_float(4, 2, 3, signed=False, has_zero=False),
    *(
        IntFormat(name=f"{bits} bits, signed {signed}", bits=bits, signed=signed, source="a format of one's own")
        for bits, signed in ((1, False), (24, True), (32, True), (32, False))
    ),
    *(
        CodebookFormat(name=str(values), bits=2, values=values, source="a format of one's own")
        for values in (
            (1.0, -1.0, 3.0, -3.0),
            (0.0, 2.0**-149, 2.0**127, -(2.0**127)),
            (5.0, 1.0, 2.0, 2.0 + 2.0**-22),
        )
    ),
)


@cache
def expected_own(number: Format, rounding: str, overflow: str) -> Tensor:
    return reference.round_values(own_inputs(number), number, rounding=rounding, overflow=overflow, seed=9)


@cache
def own_inputs(number: Format) -> Tensor:
    """Every exponent of fp32, and around numbers of the format where those are few."""
    rng = np.random.default_rng(3)
    x = [rng.integers(0, 1 << 32, 6000, dtype=np.uint64).astype(np.uint32).view(np.float32)]
    x += [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38], dtype=np.float32)]
    x += [np.arange(-40, 40, dtype=np.float32) / 4]
    if number.bits <= 12:
        values = value_table(number)
        values = np.unique(values[np.isfinite(values)])
        with np.errstate(all="ignore"):
            points = np.concatenate([values, values[:-1] / 2 + values[1:] / 2, values * 1.5]).astype(np.float32)
            x += [points, *(np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf))]
    return torch.from_numpy(quiet(np.concatenate(x)))


@JUDGED
@pytest.mark.parametrize("number", OWN_FORMATS, ids=lambda number: number.name)
def test_formats_of_ones_own_agree_with_the_reference(backend: Backend, number: Format) -> None:
    reason = None
    for rounding in formats.ROUNDINGS:
        for overflow in ("saturate", "ieee", "torch"):
            refused = backend.module.why_not_round(number, torch.float32, rounding, overflow)
            if refused is not None:
                reason = refused
                continue
            x = own_inputs(number)
            found = backend.module.round_values(x, number, rounding=rounding, overflow=overflow, seed=9)
            assert same_bits(found, expected_own(number, rounding, overflow)), (rounding, overflow)
    skip_if(reason)


@JUDGED
@pytest.mark.parametrize(("seed", "random_bits"), [(0, 1), (1 << 32, 8), ((1 << 64) - 1, 31), (5, 32)])
@pytest.mark.parametrize("name", ["fp4_e2m1", "bf16", "int4", "nf4"])
def test_random_bits_are_those_of_the_reference(backend: Backend, name: str, seed: int, random_bits: int) -> None:
    number = formats.get(name)
    skip_if(backend.module.why_not_round(number, torch.float32, "stochastic", "saturate"))
    draw = {"rounding": "stochastic", "seed": seed, "random_bits": random_bits}
    x = gaussian(40, 50, seed=8)
    assert same_bits(backend.module.round_values(x, number, **draw), reference.round_values(x, number, **draw))


def test_the_first_word_of_philox_and_words_beyond_32_bits() -> None:
    """Random123's known answer for counter 0 and key 0, and counters that need their upper half."""
    assert random_words(0, torch.zeros(1, dtype=torch.int64)).item() == 0x6627E8D5
    index = torch.tensor([1, 2**32 - 1, 2**32, 2**40 + 12345, 2**62 + 7])
    words = index.numpy().astype(np.uint64)
    zero = np.zeros_like(words)
    for seed in (0, 1, 2**32 + 3, 2**64 - 1):
        key = (seed & 0xFFFFFFFF, seed >> 32)
        expected = philox4x32((words & np.uint64(0xFFFFFFFF), words >> np.uint64(32), zero, zero), key)[0]
        assert random_words(seed, index).tolist() == expected.tolist()


# --- under scales -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scaled:
    """What one backend makes of one matrix."""

    values: Tensor
    q: QTensor
    packed: PackedTensor

    @staticmethod
    def by(module: Any, x: Tensor, scheme: TensorScheme) -> Scaled:
        return Scaled(module.fake_quantize(x, scheme), module.quantize(x, scheme), module.pack(x, scheme))


@cache
def expected_scaled(scheme: TensorScheme, matrix: str, dtype: torch.dtype) -> Scaled:
    return Scaled.by(reference, MATRICES[matrix]().to(dtype), scheme)


@JUDGED
@EVERY_SCHEME
@pytest.mark.parametrize("matrix", MATRICES)
def test_scaled_values_codes_and_bits_agree_with_the_reference(
    backend: Backend, scheme: TensorScheme, matrix: str
) -> None:
    for dtype in {"finite": DTYPES[:2], "one row": DTYPES}.get(matrix, DTYPES[:1]):
        skip_if(backend.module.why_not_scaled(scheme, dtype) or backend.module.why_not_packed(scheme, dtype))
        x = MATRICES[matrix]().to(dtype)
        before = x.clone()
        found, expected = Scaled.by(backend.module, x, scheme), expected_scaled(scheme, matrix, dtype)
        assert same_bits(found.values, expected.values)
        for part in ("codes_NK", "scales_NG", "offsets_NG", "tensor_scale"):
            assert same_bits(getattr(found.q, part), getattr(expected.q, part)), part
        for part in ("codes", "scales", "offsets", "tensor_scale"):
            assert same_bits(getattr(found.packed, part), getattr(expected.packed, part)), part
        assert same_bits(backend.module.unpack(found.packed, dtype), found.values)
        assert same_bits(found.q.dequantize(dtype), found.values)
        assert same_bits(x, before), "the input was written to"


@EVERY_BACKEND
@EVERY_SCHEME
def test_a_result_may_take_the_place_of_the_input(backend: Backend, scheme: TensorScheme) -> None:
    skip_if(backend.module.why_not_scaled(scheme, torch.bfloat16))
    x = gaussian(3, 70).bfloat16()
    expected = backend.module.fake_quantize(x, scheme)
    out = torch.empty_like(x)
    assert backend.module.fake_quantize(x, scheme, out=out) is out and same_bits(out, expected)
    assert backend.module.fake_quantize(x, scheme, out=x) is x and same_bits(x, expected)


@EVERY_BACKEND
def test_a_scale_of_zero_keeps_signs_and_a_spoiled_group_is_nan(backend: Backend) -> None:
    scheme = TensorScheme(format="fp4_e2m1", scaling=Scaling(granularity=group(4), scale_format="fp16"))
    skip_if(backend.module.why_not_scaled(scheme, torch.float32))
    x = torch.tensor([[1e-30, -1e-30, 0.0, -0.0, 6.0, torch.inf, 1.0, 2.0, 6.0, 3.0, -6.0, 0.0]])
    values = backend.module.fake_quantize(x, scheme)
    assert same_bits(values[:, :4], torch.tensor([[0.0, -0.0, 0.0, -0.0]]))
    assert values[:, 4:8].isnan().all()
    assert values[:, 8:].tolist() == [[6.0, 3.0, -6.0, 0.0]]
    q = backend.module.quantize(x, scheme)
    assert q.scales_NG[:, 1].isnan().all() and q.codes_NK[:, 4:8].isnan().all()
    assert backend.module.pack(x, scheme).codes.tolist() == [[0x80, 0x80, 0x00, 0x00, 0x57, 0x0F]]


BLOCKS = {
    name: block
    for name, block in formats.BLOCK_FORMATS.items()
    if isinstance(block, BlockFormat) and block.element.name in formats.FORMATS
}


@EVERY_BACKEND
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "make", [finite, spoiled, lambda: gaussian(64, 256, seed=9)], ids=["finite", "spoiled", "many"]
)
def test_schemes_of_block_formats_are_those_formats(backend: Backend, name: str, make: Any) -> None:
    block = BLOCKS[name]
    scheme = TensorScheme(
        format=block.element.name,
        scaling=Scaling(
            granularity=group(block.block_size),
            scale_format=block.scale.name,
            rule=block.scale_rule,
            tensor_scale=block.tensor_scale,
            element_exponent=block.element_exponent,
        ),
    )
    skip_if(backend.module.why_not_scaled(scheme, torch.float32))
    x = make()
    expected = torch.from_numpy(formats.round(name, x.numpy()))
    assert same_bits(backend.module.fake_quantize(x, scheme), expected)
