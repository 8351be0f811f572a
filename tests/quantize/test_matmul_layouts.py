"""Layouts of packed weights: nothing is lost, they take no more room, and the choice among them is explained."""

from __future__ import annotations

import dataclasses
import io
import logging

import pytest
import torch
from galleries import FURTHER_SCHEMES, gaussian, same_bits, scaled_schemes

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
from bitwright.quantize.backends.cpu import features
from bitwright.quantize.backends.cpu.features import PERMUTATIONS, lacks
from bitwright.quantize.backends.cpu.matmul_layout import Tiles, from_tiles, to_tiles, unit_columns, unit_of
from bitwright.quantize.granularity import TENSOR

needs_permutations = pytest.mark.skipif(bool(lacks(PERMUTATIONS)), reason="the processor has no such permutations")
BF16 = torch.bfloat16


def scheme_of(name: str) -> TensorScheme:
    found = SCHEMES[name].weights
    assert found is not None
    return found


def weight_schemes() -> dict[str, TensorScheme]:
    plain = {name: scheme_of(name) for name in ("fp32", "fp16", "bf16")}
    return plain | scaled_schemes() | {"without scales": TensorScheme(format="fp8_e4m3")}


# --- where codes lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_units_hold_every_bit_once(bits: int) -> None:
    """16 bits of each word are bits of codes, and every code has all of its bits."""
    unit = unit_of(bits)
    assert len(unit.codes) * bits == 16 * unit.num_vectors
    places = [(p.vector, p.shift + i) for pieces in unit.codes for p in pieces for i in range(p.num_bits)]
    assert sorted(places) == [(vector, bit) for vector in range(unit.num_vectors) for bit in range(16)]
    for pieces in unit.codes:
        assert sorted(p.target + i for p in pieces for i in range(p.num_bits)) == list(range(bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
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


@needs_permutations
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.weights is not None])
def test_every_scheme_of_the_catalog_has_a_layout_of_its_own(name: str) -> None:
    """Codes under scales are expanded in registers; weights of the dtype of x are multiplied as they are."""
    scheme = scheme_of(name)
    for dtype in (BF16, torch.float32):
        found = select_matmul(scheme, (4096, 4096), "cpu", dtype)
        if scheme.scaling is not None:
            assert found.layout.name == "planar"
        elif name == {BF16: "bf16", torch.float32: "fp32"}[dtype]:
            assert found.layout.name == "as_stored"
        else:
            assert found.layout.name == "dequantise" and "not as_stored" in found.reason


@pytest.mark.parametrize(("scheme", "shape", "device", "reason"), [
    (scheme_of("int4_g128"), (64, 64), "mps", "on a CPU, not on mps"),
    (TensorScheme(format="int3", scaling=Scaling(granularity=group(20), scale_format="fp16")), (9, 60), "cpu",
     "groups have 20 columns, and 3-bit codes are expanded 8 columns at a time"),
    (scheme_of("int4_g128"), (0, 64), "cpu", "no codes"),
    (FURTHER_SCHEMES["zero point per tensor"], (8, 0), "cpu", "no codes"),
    (TensorScheme(format="e8m0", scaling=Scaling(granularity=TENSOR, scale_format="fp32")), (8, 8), "cpu", "2^-126"),
    (scheme_of("fp16"), (8, 8), "cpu", "16 bits"),
])  # fmt: skip
@needs_permutations
def test_what_planes_do_not_hold(scheme: TensorScheme, shape: tuple[int, int], device: str, reason: str) -> None:
    found = select_matmul(scheme, shape, device, BF16)
    assert found.layout.name == "dequantise" and reason in found.reason


def test_a_processor_without_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "processor_features", lambda: frozenset({"avx512f", "neon"}))
    reason = MATMULS["planar"].why_not(scheme_of("int4_g128"), (64, 64), "cpu", BF16)
    assert reason is not None and "avx512bw, avx512vbmi" in reason


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
    planar, matrix = MATMULS["planar"], MATMULS["dequantise"].prepare(packed)
    assert "once for all of 4 columns" in planar.how(4, matrix, BF16)
    assert "5 columns are more than the 4" in planar.how(5, matrix, BF16)
    assert "3 columns (3 bf16 of each number of x)" in planar.how(1, matrix, torch.float32)


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
