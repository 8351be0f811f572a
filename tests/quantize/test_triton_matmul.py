"""Packed products for GPUs where no GPU is: kernels interpreted, kernels compiled, and how codes lie.

Whether kernels are interpreted is settled when Triton is imported, so that both have a process of their own.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from galleries import gaussian
from test_triton import NEEDS_TRITON, ROOT, collect, run

from bitwright.errors import MissingExtra, SchemeError
from bitwright.quantize import MATMULS, SCHEMES, TensorScheme, pack, select_matmul
from bitwright.quantize.backends.triton.matmul_call import call_of
from bitwright.quantize.backends.triton.matmul_layout import chunks_of
from bitwright.quantize.pack import pack_bits

LAYOUT = MATMULS["triton"]
WEIGHTS = {name: scheme.weights for name, scheme in SCHEMES.items() if scheme.weights is not None}


@NEEDS_TRITON
def test_products_in_the_interpreter(tmp_path: Path) -> None:
    assert " passed" in run(collect("triton_matmul_interpreted.py"), tmp_path, TRITON_INTERPRET="1")


@NEEDS_TRITON
def test_products_as_compiled_for_a_gpu(tmp_path: Path) -> None:
    assert " passed" in run(collect("triton_matmul_compiled.py"), tmp_path)


# --- the choice -------------------------------------------------------------------------------------------------------


@NEEDS_TRITON
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_gpus_take_it_for_every_scheme_that_stores_codes(name: str) -> None:
    selection = select_matmul(WEIGHTS[name], (4096, 11008), "cuda", torch.bfloat16)
    assert selection.layout.name == {"bf16": "as_stored", "fp32": "as_stored"}.get(name, "triton")
    assert select_matmul(WEIGHTS[name], (4096, 11008), "cpu", torch.bfloat16).layout.name != "triton"


def test_reasons() -> None:
    scheme = WEIGHTS["int4_g128"]
    assert "run on GPUs of NVIDIA and AMD, not on cpu" in str(LAYOUT.why_not(scheme, (4, 4), "cpu", torch.bfloat16))
    assert "no codes" in str(LAYOUT.why_not(scheme, (0, 4), "cuda", torch.bfloat16))
    assert "32 bits" in str(LAYOUT.why_not(TensorScheme(format="fp32"), (4, 4), "cuda", torch.bfloat16))


@NEEDS_TRITON
def test_how_says_what_runs() -> None:
    matrix = LAYOUT.prepare(pack(gaussian(8, 128), WEIGHTS["nf4_g64"]))
    assert LAYOUT.how(0, matrix, torch.bfloat16) == "nothing to multiply"
    assert "one token" in LAYOUT.how(1, matrix, torch.bfloat16)
    assert "16 tokens with codes in bfloat16 (1 of each number of x, 3 of each code)" in LAYOUT.how(
        16, matrix, torch.bfloat16
    )
    fp8 = LAYOUT.prepare(pack(gaussian(8, 128), WEIGHTS["fp8_w"]))
    assert LAYOUT.how(16, fp8, torch.float16).endswith("codes in float16")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = LAYOUT.prepare(pack(gaussian(8, 128), WEIGHTS["int4_g128"]))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "'triton' is not installed" in str(LAYOUT.why_not(matrix.scheme, (8, 128), "cuda", torch.bfloat16))
    with pytest.raises(MissingExtra, match=r"pip install 'bitwright\[triton\]'"):
        LAYOUT.multiply(gaussian(1, 128), matrix)


@NEEDS_TRITON
def test_a_cpu_is_refused() -> None:
    matrix = LAYOUT.prepare(pack(gaussian(8, 128), WEIGHTS["int4_g128"]))
    with pytest.raises(SchemeError, match="runs on GPUs, and the tensor is on the CPU"):
        LAYOUT.multiply(gaussian(1, 128), matrix)


# --- how codes lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_columns", [7, 32, 64, 1000])
@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_lie_where_the_layout_says(bits: int, group_columns: int) -> None:
    """Code c of lane i of a chunk is column c · L + i; word p of all lanes lies together; and all come back."""
    rows, columns = 3, 150
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    stream = pack_bits(codes, bits)
    chunks = chunks_of(rows, columns, bits, group_columns)
    laid = chunks.lay(stream)
    assert laid.shape == (rows, chunks.row_words) and torch.equal(chunks.collect(laid), stream)
    words, lanes, width = laid.tolist(), chunks.chunk_lanes, chunks.chunk_lanes * chunks.lane_codes
    for row in range(rows):
        for column in range(columns):
            code, lane = column % width // lanes, column % lanes
            first = column // width * lanes * chunks.lane_words + lane
            of_lane = [words[row][first + p * lanes] & 0xFFFFFFFF for p in range(chunks.lane_words)]
            number = sum(word << 32 * p for p, word in enumerate(of_lane))
            assert number >> code * bits & (1 << bits) - 1 == codes[row, column]
    if group_columns < columns and chunks.group_lanes > 0:
        assert group_columns % width == 0 or lanes == 1


def test_many_rows_are_laid_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.randint(0, 256, (13, 37), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = chunks_of(13, 74, 4, 74).lay(stream)
    monkeypatch.setattr("bitwright.quantize.backends.triton.matmul_layout._CODES_AT_ONCE", 300)
    assert torch.equal(chunks_of(13, 74, 4, 74).lay(stream), whole)
    assert torch.equal(chunks_of(13, 74, 4, 74).collect(whole), stream)


@pytest.mark.parametrize("shape", [(4096, 11008), (4096, 4096), (1536, 576), (576, 1536), (49152, 576), (11008, 4096)])
@pytest.mark.parametrize("name", list(WEIGHTS))
def test_it_takes_the_bytes_of_the_scheme(name: str, shape: tuple[int, int]) -> None:
    scheme = WEIGHTS[name]
    if LAYOUT.why_not(scheme, shape, "cuda", torch.bfloat16):
        return
    chunks = call_of(scheme.text, shape).chunks
    codes_alone = -(-shape[0] * shape[1] * chunks.bits // 8)
    assert codes_alone <= 4 * shape[0] * chunks.row_words <= 1.006 * codes_alone


def test_real_shapes_have_long_chunks() -> None:
    """Groups of 128 are one chunk each; rows under one scale have the longest there are."""
    assert chunks_of(4096, 11008, 4, 128).chunk_lanes == 16
    assert chunks_of(4096, 11008, 8, 11008).chunk_lanes == 32
    assert chunks_of(4096, 11008, 4, 16).chunk_lanes == 2


# --- the check on a GPU -----------------------------------------------------------------------------------------------


def test_the_check_on_a_gpu_notices_what_is_off() -> None:
    spec = importlib.util.spec_from_file_location("gpu_products", ROOT / "benchmarks" / "gpu_products.py")
    assert spec is not None and spec.loader is not None
    products = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(products)
    expected = torch.tensor([[1.0, 2.0, 0.0, -3.0]], dtype=torch.float64)
    off = torch.full((1, 4), 1e-6, dtype=torch.float64)
    assert products.judged(expected.bfloat16(), expected, off)["num_different"] == 0
    wrong = torch.tensor([[1.0, 2.02, 1e-5, torch.nan]]).bfloat16()
    assert products.judged(wrong, expected, off)["num_different"] == 3
    exact, magnitudes, gamma = products.exact_values(pack(gaussian(4, 70), WEIGHTS["int4_g32_min"]))
    torch.testing.assert_close(exact, pack(gaussian(4, 70), WEIGHTS["int4_g32_min"]).unpack().double())
    assert (magnitudes >= exact.abs() - 1e-12).all() and 0 < gamma < 1e-5
