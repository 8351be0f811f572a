"""Layouts of packed weights: nothing is lost, they take no more room, and the choice among them is explained."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
from pathlib import Path

import pytest
import torch
from galleries import FURTHER_SCHEMES, gaussian, same_bits, scaled_schemes
from safetensors.torch import load_file, save_file

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize import (
    MATMULS,
    SCHEMES,
    PackedMatrix,
    Scaling,
    TensorScheme,
    group,
    pack,
    packed_matmul,
    select_matmul,
)
from bitwright.quantize.backends.cpu.matmul_layout import Tiles, unit_columns, unit_of
from bitwright.quantize.backends.cpu.matmul_tiling import from_tiles, to_tiles
from bitwright.quantize.backends.cpu.matmul_ways import way_of
from bitwright.quantize.granularity import TENSOR

BF16 = torch.bfloat16


def scheme_of(name: str) -> TensorScheme:
    found = SCHEMES[name].weights
    assert found is not None
    return found


def weight_schemes() -> dict[str, TensorScheme]:
    plain = {name: scheme_of(name) for name in ("fp32", "fp16", "bf16")}
    return plain | scaled_schemes() | {"without scales": TensorScheme(format="fp8_e4m3")}


# --- where codes lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [*range(1, 9), 16])
def test_units_hold_every_bit_once(bits: int) -> None:
    """16 bits of each word are bits of codes, and every code has all of its bits."""
    unit = unit_of(bits)
    assert len(unit.codes) * bits == 16 * unit.num_vectors
    places = [(p.vector, p.shift + i) for pieces in unit.codes for p in pieces for i in range(p.num_bits)]
    assert sorted(places) == [(vector, bit) for vector in range(unit.num_vectors) for bit in range(16)]
    for pieces in unit.codes:
        assert sorted(p.target + i for p in pieces for i in range(p.num_bits)) == list(range(bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("shape", [(1, 1), (65, 37), (128, 96)])
def test_codes_come_back_from_tiles(bits: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(bits)
    stream = torch.randint(0, 256, (rows, -(-columns * bits // 8)), dtype=torch.uint8, generator=generator).numpy()
    if columns * bits % 8:
        stream[:, -1] &= (1 << columns * bits % 8) - 1  # bits that no code has
    for size in (columns, 4 * unit_columns(bits)):
        tiles = Tiles(rows=rows, columns=columns, bits=bits, group_columns=size)
        laid = to_tiles(stream, tiles)
        assert laid.shape == (tiles.num_tiles, tiles.tile_bytes)
        assert (from_tiles(laid, tiles) == stream).all()


def test_four_bit_codes_lie_as_the_layout_says() -> None:
    """Row 17, column 5: the second code vector of the third pair, row 1 of it, odd column: bits 4–7 of word 3."""
    stream = torch.zeros(64, 4, dtype=torch.uint8).numpy()
    stream[17, 2] = 0xA0
    words = to_tiles(stream, Tiles(rows=64, columns=8, bits=4, group_columns=8)).view("uint16").reshape(4, 32)
    assert words[2, 3] == 0xA0
    words[2, 3] = 0
    assert not words.any()


# --- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(MATMULS))
def test_values_come_back_bit_for_bit(layout: str) -> None:
    """Every code that there is: any bits are codes, those of NaN and −0 too."""
    generator = torch.Generator().manual_seed(0)
    for name, scheme in weight_schemes().items():
        for dtype in (BF16, torch.float32):
            if MATMULS[layout].why_not(scheme, (67, 130), "cpu", dtype) is not None:
                continue
            packed = pack(gaussian(67, 130), scheme)
            if scheme.scaling is not None:
                noise = torch.randint(0, 256, packed.codes.shape, dtype=torch.uint8, generator=generator)
                packed = dataclasses.replace(packed, codes=noise)
            matrix = MATMULS[layout].prepare(packed)
            assert same_bits(MATMULS[layout].unpack(matrix), packed.unpack()), name


@pytest.mark.parametrize("layout", list(MATMULS))
def test_rows_are_those_of_the_whole_matrix(layout: str) -> None:
    ids = torch.tensor([66, 0, 3, 3, 64, 31])
    for name, scheme in weight_schemes().items():
        if MATMULS[layout].why_not(scheme, (67, 130), "cpu", torch.float32) is not None:
            continue
        packed = pack(gaussian(67, 130), scheme)
        matrix, values = MATMULS[layout].prepare(packed), packed.unpack()
        assert same_bits(MATMULS[layout].rows(matrix, ids), values[ids]), name
        assert MATMULS[layout].rows(matrix, ids[:0]).shape == (0, 130), name


@pytest.mark.parametrize("name", ["int4_g128_zp", "nvfp4", "fp8_block", "mxfp6", "nf4_g64", "fp16"])
def test_parts_are_buffers_like_any_others(name: str, tmp_path: Path) -> None:
    """Registered as they are, no copy; they survive devices, dtypes, deepcopy, state dicts and safetensors."""
    packed = pack(gaussian(70, 160), scheme_of(name))
    matrix, x = MATMULS["planar"].prepare(packed), gaussian(2, 160)
    module = torch.nn.Module()
    for part, stored in matrix.parts.items():
        module.register_buffer(part, stored)
        assert module.get_buffer(part).data_ptr() == stored.data_ptr() and stored.is_contiguous()
        assert stored.storage_offset() == 0 and stored.untyped_storage().nbytes() == stored.nbytes

    def product(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return packed_matmul(x, dataclasses.replace(matrix, parts={part: buffers[part] for part in matrix.parts}))

    expected, file = product(dict(module.named_buffers())), tmp_path / "parts.safetensors"
    save_file(module.state_dict(), file)
    assert torch.equal(product(load_file(file)), expected)
    assert torch.equal(product(dict(copy.deepcopy(module).to("cpu").named_buffers())), expected)
    module.load_state_dict(load_file(file))
    assert torch.equal(product(dict(module.named_buffers())), expected)
    assert module.get_buffer("codes").data_ptr() == matrix.parts["codes"].data_ptr()


def test_codes_lie_in_whole_cache_lines() -> None:
    """So that no vector of codes straddles two."""
    for rows in (64, 70, 4096):
        assert (
            MATMULS["planar"].prepare(pack(gaussian(rows, 256), scheme_of("int4_g64"))).parts["codes"].data_ptr() % 64
            == 0
        )


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.weights is not None])
def test_no_more_room_than_the_scheme_takes(name: str) -> None:
    """Within one percent on matrices of real models: of 4096 × 4096, and of the smallest there is."""
    scheme = scheme_of(name)
    for rows, columns in ((4096, 4096), (192, 576)) if name in ("int4_g64_zp", "nvfp4") else ((192, 576),):
        packed = pack(torch.zeros(rows, columns), scheme)
        matrix = select_matmul(scheme, packed.shape, "cpu", BF16).layout.prepare(packed)
        assert matrix.nbytes <= 1.01 * scheme.stored_bytes(rows, columns)
        assert matrix.nbytes >= 0.99 * scheme.stored_bytes(rows, columns)


def test_a_matrix_is_rebuilt_from_parts_and_facts() -> None:
    packed = pack(gaussian(70, 96), scheme_of("int4_g32_zp"))
    matrix = select_matmul(packed.scheme, packed.shape, "cpu", BF16).layout.prepare(packed)
    file = io.BytesIO()
    torch.save(dict(matrix.parts), file)
    file.seek(0)
    again = PackedMatrix(layout=matrix.layout, scheme=matrix.scheme, shape=matrix.shape, parts=torch.load(file))
    x = gaussian(2, 96)
    assert torch.equal(packed_matmul(x, again), packed_matmul(x, matrix))


# --- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.weights is not None])
def test_every_scheme_of_the_catalog_has_a_layout_of_its_own(name: str) -> None:
    """Weights that hold x as they are stored are torch's, whatever else there is in the catalog is expanded."""
    scheme = scheme_of(name)
    for dtype in (BF16, torch.float32):
        found = select_matmul(scheme, (4096, 4096), "cpu", dtype)
        is_torchs = name == "fp32" or (name, dtype) == ("bf16", BF16)
        assert found.layout.name == ("as_stored" if is_torchs else "planar")
        assert is_torchs or "not as_stored" in found.reason


@pytest.mark.parametrize(("scheme", "shape", "device", "reason"), [
    (scheme_of("int4_g128"), (64, 64), "mps", "on a CPU, not on mps"),
    (TensorScheme(format="int3", scaling=Scaling(granularity=group(20), scale_format="fp16")), (9, 60), "cpu",
     "groups have 20 columns, and 3-bit codes are expanded 8 columns at a time"),
    (scheme_of("int4_g128"), (0, 64), "cpu", "no codes"),
    (FURTHER_SCHEMES["zero point per tensor"], (8, 0), "cpu", "no codes"),
    (TensorScheme(format="int16", scaling=Scaling(granularity=TENSOR, scale_format="fp32")), (8, 8), "cpu", "16 bits"),
])  # fmt: skip
def test_what_planes_do_not_hold(scheme: TensorScheme, shape: tuple[int, int], device: str, reason: str) -> None:
    found = select_matmul(scheme, shape, device, BF16)
    assert found.layout.name == "dequantise" and reason in found.reason


@pytest.mark.parametrize(("name", "dtype", "features", "products", "codes"), [
    ("int4_g64", BF16, "avx512f avx512bw avx512vbmi avx512bf16", "dot products of bf16", "permutations of words"),
    ("fp8_w", BF16, "avx512f avx512bw avx512vbmi avx512bf16", "dot products of bf16", "permutations of bytes"),
    ("fp8_w", torch.float32, "avx512f avx512bw avx512vbmi avx512bf16", "fp32 products: x is float32", "of bytes"),
    ("nf4_g64", BF16, "avx512f avx512bw avx512vbmi avx512bf16", "bf16 does not hold the values of nf4", "of fp32"),
    ("fp8_w", BF16, "avx512f avx512bw avx512bf16", "no permutations of registers for them (avx512vbmi)", "fields"),
    ("int4_g64", BF16, "avx512f avx512bw", "no dot products of bf16 (avx512bf16)", "of fp32"),
    ("int4_g64", BF16, "avx2 fma", "no dot products of bf16 (avx512bf16, avx512f)", "converted from integers"),
    ("int4_g64_zp", BF16, "neon", "no dot products", "converted from integers"),
    ("mxfp4", BF16, "neon", "no dot products", "fields"),
    ("nf4_g64", BF16, "neon", "no dot products", "one by one"),
    ("nf4_g64", BF16, "avx2 fma", "no dot products", "permutations of eight fp32"),
    ("fp16", BF16, "avx2 fma f16c", "no dot products", "converted from fp16"),
    ("fp16", BF16, "sse2", "no dot products", "fields"),
])  # fmt: skip
def test_the_way_is_chosen_by_what_the_processor_has(
    name: str, dtype: torch.dtype, features: str, products: str, codes: str
) -> None:
    way = way_of(formats.FORMATS[scheme_of(name).format], None, 4096, dtype, frozenset(features.split()))
    assert products in way.reason and codes in way.expansion.spelled
    assert way.takes_pairs == (products == "dot products of bf16")


def test_a_selection_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    select_matmul.cache_clear()
    with caplog.at_level(logging.INFO, logger="bitwright.quantize.packed_matmul"):
        for _ in range(3):
            select_matmul(scheme_of("int4_g128"), (64, 64), "cpu", BF16)
    assert len(caplog.records) == 1 and "not as_stored" in caplog.text


def test_layouts_say_how_they_multiply() -> None:
    packed = pack(gaussian(64, 64), scheme_of("int4_g64"))
    for layout in MATMULS.values():
        if layout.why_not(packed.scheme, packed.shape, "cpu", BF16) is None:
            matrix = layout.prepare(packed)
            for tokens in (1, 4, 5, 1000):
                assert layout.how(tokens, matrix, BF16)
    planar, matrix = MATMULS["planar"], MATMULS["planar"].prepare(packed)
    assert "1 tokens, 1 at a time" in planar.how(1, matrix, BF16)
    assert "5 tokens, 4 at a time" in planar.how(5, matrix, BF16)
    assert "fp32 products: x is float32" in planar.how(1, matrix, torch.float32)


def test_codes_are_multiplied_by_scales_where_that_is_exact() -> None:
    """Significands of 2 and 4 bits, and powers of two, in the 8 bits of bf16; fp16 scales only in the 24 of fp32."""
    features = frozenset({"avx512f", "avx512bw", "avx512vbmi", "avx512bf16"})
    for name, dtype, expected in (
        ("nvfp4", BF16, True), ("mxfp8", BF16, True), ("bfp8", BF16, True), ("mxfp4", torch.float32, True),
        ("int4_g32", BF16, False), ("int4_g32", torch.float32, True), ("int4_g64", torch.float32, False),
        ("nf4_g64", BF16, False),
    ):  # fmt: skip
        scheme = scheme_of(name)
        assert scheme.scaling is not None
        scale, size = formats.FORMATS[scheme.scaling.scale_format], scheme.scaling.granularity.group_size
        way = way_of(formats.FORMATS[scheme.format], scale, size, dtype, features)
        assert ("times their scales" in way.spelled(64)) == expected, name


def test_preferences_are_distinct() -> None:
    assert len({layout.preference for layout in MATMULS.values()}) == len(MATMULS)
    assert max(MATMULS.values(), key=lambda layout: layout.preference).name == "dequantise"


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    packed = pack(gaussian(8, 64), scheme_of("int4_g64"))
    matrix = select_matmul(packed.scheme, packed.shape, "cpu", BF16).layout.prepare(packed)
    with pytest.raises(SchemeError, match=r"torch\.float64; convert"):
        packed_matmul(torch.zeros(1, 64, dtype=torch.float64), matrix)
    with pytest.raises(SchemeError, match=r"shape \(2, 63\), but the weight has 64 columns"):
        packed_matmul(torch.zeros(2, 63), matrix)
    with pytest.raises(SchemeError, match=r"torch\.int8; convert"):
        select_matmul(packed.scheme, packed.shape, "cpu", torch.int8)


def test_what_no_layout_holds() -> None:
    with pytest.raises(SchemeError, match=r"no layout holds tf32.*not dequantise: tf32 has 19 bits"):
        select_matmul(TensorScheme(format="tf32"), (8, 8), "cpu", BF16)
