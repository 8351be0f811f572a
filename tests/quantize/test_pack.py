"""Codes as bits: the layout by hand, by NumPy's packbits and by torch's own bytes; and back to the same values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from galleries import MATRICES, finite, gaussian, same_bits, scaled_schemes, spoiled
from hypothesis import given
from hypothesis import strategies as st

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats import Format
from bitwright.quantize import SCHEMES, PackedTensor, Scaling, TensorScheme, fake_quantize, group, pack, unpack
from bitwright.quantize.granularity import TENSOR
from bitwright.quantize.pack import pack_bits, stored_dtype, unpack_bits

NARROW = [number for number in map(formats.FORMATS.__getitem__, formats.names()) if number.bits <= 16]
EVERY_NARROW_FORMAT = pytest.mark.parametrize("number", NARROW, ids=lambda number: number.name)
#: torch's own formats, by hand: name → dtype.
OF_TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
    "e8m0": torch.float8_e8m0fnu,
}
PLAIN = {f"plain {number.name}": TensorScheme(format=number.name) for number in NARROW}
PLAIN |= {"plain fp32": TensorScheme(format="fp32")}
EVERY_SCHEME = pytest.mark.parametrize(
    "scheme", [*scaled_schemes().values(), *PLAIN.values()], ids=[*scaled_schemes(), *PLAIN]
)


# --- the bitstream ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 1, 1], [0b10000001, 1]),
        (3, [0b101, 0b011, 0b110, 0b001], [0b10_011_101, 0b0000_001_1]),
        (4, [1, 2, 3], [0x21, 0x03]),  # low nibble first
        (6, [0b000001, 0b000010, 0b000011, 0b110000], [0b10_000001, 0b0011_0000, 0b110000_00]),  # four in three bytes
        (8, [7, 255], [7, 255]),
        (12, [0xABC, 0x123], [0xBC, 0x3A, 0x12]),
        (16, [0xABCD], [0xCD, 0xAB]),  # little-endian
    ],
)
def test_layout_by_hand(bits: int, codes: list[int], expected: list[int]) -> None:
    assert pack_bits(torch.tensor([codes], dtype=torch.int32), bits).tolist() == [expected]
    assert unpack_bits(torch.tensor([expected], dtype=torch.uint8), bits, len(codes)).tolist() == [codes]


@given(bits=st.integers(1, 16), rows=st.integers(0, 3), columns=st.integers(0, 40), seed=st.integers(0, 1000))
def test_bits_are_those_of_numpy_and_come_back(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns))
    single = (codes[..., None] >> np.arange(bits)) & 1
    expected = np.packbits(single.astype(np.uint8).reshape(rows, columns * bits), axis=1, bitorder="little")
    packed = pack_bits(torch.from_numpy(codes.astype(np.int32)), bits)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, -(-columns * bits // 8))
    assert np.array_equal(packed.numpy(), expected)
    assert np.array_equal(unpack_bits(packed, bits, columns).numpy(), codes)


# --- numbers as they are ----------------------------------------------------------------------------------------------


@EVERY_NARROW_FORMAT
def test_codes_are_those_of_the_formats(number: Format) -> None:
    """Every code of the format, and what is rounded to it."""
    values = formats.table(number.name)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        x = np.concatenate([values, values * 1.01]).astype(np.float32)
    packed = pack(torch.from_numpy(x[None]), TensorScheme(format=number.name))
    codes = unpack_bits(packed.codes, number.bits, x.size)
    assert codes[0].tolist() == formats.encode(number.name, x, overflow="ieee").tolist()


@pytest.mark.parametrize("name", OF_TORCH)
def test_formats_of_torch_are_stored_as_torch_stores_them(name: str) -> None:
    dtype = OF_TORCH[name]
    assert stored_dtype(formats.FORMATS[name]) == dtype
    x = torch.linspace(0.01, 200, 300)[None] * (1 if name == "e8m0" else -1)
    packed = pack(x, TensorScheme(format=name))
    assert torch.equal(packed.codes, x.to(dtype).view(torch.uint8))


def test_torch_has_no_dtype_of_four_or_six_bits() -> None:
    assert {number.name for number in NARROW if stored_dtype(number)} == set(OF_TORCH) - {"fp64", "fp32"}


@pytest.mark.parametrize("name", ["int8", "fp4_e2m1", "nf4"])
def test_nan_is_refused_where_it_cannot_be_stored(name: str) -> None:
    with pytest.raises(SchemeError, match=rf"1 of 3 values are NaN, which {name} cannot store"):
        pack(torch.tensor([[0.5, torch.nan, 1.0]]), TensorScheme(format=name))


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3", "fp8_e4m3fnuz", "bf16", "fp32"])
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_is_one_code(name: str, sign: int) -> None:
    nan = torch.tensor([[0x7FC12345 | (sign < 0) << 31]], dtype=torch.int64).to(torch.int32).view(torch.float32)
    packed = pack(nan, TensorScheme(format=name))
    expected = formats.encode(name, [np.nan])
    assert packed.codes.flatten().tolist() == list(expected.tobytes())
    assert unpack(packed).isnan().all()


def test_wide_codes_that_torch_has_no_float_for_are_refused() -> None:
    with pytest.raises(SchemeError, match="tf32 has 19 bits, and codes are packed up to 16"):
        pack(torch.ones(1, 4), TensorScheme(format="tf32"))


# --- under scales -----------------------------------------------------------------------------------------------------


@EVERY_SCHEME
@pytest.mark.parametrize("matrix", ["finite", "non-contiguous", "one number", "no rows", "no columns"])
def test_unpacking_gives_what_fake_quantize_gives(scheme: TensorScheme, matrix: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = MATRICES[matrix]().to(dtype)
        x = torch.where(x.isfinite(), x, 0) if dtype == torch.float16 else x  # 1e38 is none
        packed = pack(x, scheme)
        assert same_bits(unpack(packed, dtype), fake_quantize(x, scheme))


@pytest.mark.parametrize("scheme", scaled_schemes().values(), ids=scaled_schemes())
def test_groups_that_are_not_finite_have_the_scale_nan_and_codes_zero(scheme: TensorScheme) -> None:
    x = spoiled()
    packed = pack(x, scheme)
    assert same_bits(unpack(packed), fake_quantize(x, scheme))
    bits = formats.FORMATS[scheme.format].bits
    codes = unpack_bits(packed.codes, bits, x.shape[1])
    assert (codes[fake_quantize(x, scheme).isnan()] == 0).all()


def test_a_scale_format_without_nan_refuses_groups_that_are_not_finite() -> None:
    scheme = TensorScheme(format="int4", scaling=Scaling(granularity=group(4), scale_format="fp6_e3m2"))
    assert same_bits(unpack(pack(gaussian(2, 9), scheme)), fake_quantize(gaussian(2, 9), scheme))
    with pytest.raises(SchemeError, match="1 of 2 scales of groups are NaN, which fp6_e3m2 cannot store"):
        pack(torch.tensor([[1.0, 2.0, 3.0, 4.0, torch.inf, 5.0]]), scheme)


@EVERY_SCHEME
@pytest.mark.parametrize("shape", [(6, 96), (3, 576), (1, 33), (7, 128), (5, 1)])
def test_bytes_are_those_of_the_scheme(scheme: TensorScheme, shape: tuple[int, int]) -> None:
    packed = pack(gaussian(*shape), scheme)
    code_bits = formats.FORMATS[scheme.format].bits
    expected = scheme.stored_bytes(*shape)
    parts_end_on_bytes = shape[1] * code_bits % 8 == 0
    if packed.offsets is not None and packed.offsets.dtype == torch.uint8:
        assert scheme.scaling is not None
        parts_end_on_bytes &= scheme.scaling.granularity.num_scales(*shape) * code_bits % 8 == 0
    assert packed.nbytes == expected if parts_end_on_bytes else expected <= packed.nbytes <= expected + shape[0] + 1


def test_scales_are_kept_in_their_own_format() -> None:
    x = finite()

    def packed(name: str) -> PackedTensor:
        weights = SCHEMES[name].weights
        assert weights is not None
        return pack(x, weights)

    mxfp4, nvfp4, int4_zp, int4_min = map(packed, ("mxfp4", "nvfp4", "int4_g32_zp", "int4_g32_min"))
    assert mxfp4.scales is not None and mxfp4.scales.dtype == torch.float8_e8m0fnu and mxfp4.scales.shape == (13, 3)
    exponents = mxfp4.scales.view(torch.uint8).int() - 127
    assert exponents[0].tolist() == [
        int(np.floor(np.log2(float(part.abs().max())))) - 2 for part in (x[0, :32], x[0, 32:64], x[0, 64:])
    ]
    assert exponents[1].tolist() == [-127] * 3  # zeros
    assert nvfp4.scales is not None and nvfp4.scales.dtype == torch.float8_e4m3fn and nvfp4.scales.shape == (13, 5)
    assert nvfp4.tensor_scale is not None and nvfp4.tensor_scale.shape == ()
    assert int4_zp.scales is not None and int4_zp.scales.dtype == torch.float16
    assert int4_zp.offsets is not None and int4_zp.offsets.shape == (13 * 3 * 4 // 8 + 1,)
    assert int4_min.offsets is not None and int4_min.offsets.dtype == torch.float16
    assert int4_min.offsets.shape == (13, 3)


def test_a_zero_point_by_hand() -> None:
    """−1 … 2 in uint4: scale 3 / 15, zero point 5."""
    scheme = TensorScheme(
        format="uint4", scaling=Scaling(granularity=TENSOR, scale_format="fp32", symmetry="zero_point")
    )
    packed = pack(torch.tensor([[-1.0, 0.0, 1.0, 2.0]]), scheme)
    assert packed.codes.tolist() == [[0x50, 0xFA]]
    assert packed.offsets is not None and packed.offsets.tolist() == [5]
    assert packed.nbytes == scheme.stored_bytes(1, 4) == 2 + 4 + 1
