"""What Triton's compiler makes of packed products for an NVIDIA GPU (compute capability 9.0): PTX, read without a GPU.

The interpreter takes programs that the compiler refuses, so that every kind of code, scale and offset is compiled once.
Collected by test_triton_matmul.py in a process of its own, where kernels are not interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from test_matmul import weight_schemes
from triton_compiled import NoDriver

from bitwright.quantize import MATMULS, TensorScheme, pack
from bitwright.quantize.backends.triton import matmul, rounding
from bitwright.quantize.granularity import group
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.scheme import Scaling

#: A group straddles words.
STRADDLING = TensorScheme(
    format="uint4", scaling=Scaling(granularity=group(20), scale_format="fp16", symmetry="zero_point")
)

Compile = Callable[[TensorScheme, tuple[int, int], int], list[tuple[str, str]]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """``compiled(scheme, shape, tokens)`` → names and PTX of the kernels that a product would have launched."""
    found: list[tuple[str, str]] = []

    def compile_instead(
        kernel: Any, programs: tuple, arguments: tuple, constants: tuple, x: object, num_warps: int = 4
    ) -> None:
        settings = {"grid": programs, "num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": True}
        built = kernel.warmup(*arguments, *constants, **settings)
        found.append((kernel.fn.__name__, built.asm["ptx"]))

    def run(scheme: TensorScheme, shape: tuple[int, int], tokens: int) -> list[tuple[str, str]]:
        found.clear()
        columns = shape[1]
        small = MATMULS["triton"].prepare(pack(torch.zeros(1, columns), scheme))
        parts = {name: part.expand(shape[0], *part.shape[1:]) for name, part in small.parts.items() if part.dim() == 2}
        matrix = PackedMatrix(layout="triton", scheme=scheme, shape=shape, parts={**small.parts, **parts})
        MATMULS["triton"].multiply(torch.zeros(tokens, columns, dtype=torch.bfloat16), matrix)
        return list(found)

    monkeypatch.setattr(matmul, "run", compile_instead)
    monkeypatch.setattr(rounding, "RUNS_ON_CPU", True)
    triton.runtime.driver.set_active(NoDriver())  # for as long as the process lasts
    return run


@pytest.mark.parametrize(("name", "vectors"), [("int4_g128", 4), ("fp6_w", 6), ("mxfp4", 4)])
def test_one_token_reads_words_by_sixteen_bytes_and_keeps_them_in_registers(
    compiled: Compile, name: str, vectors: int
) -> None:
    """Words of a tile come in loads of 16 bytes a thread; nothing goes by way of local memory, nothing is atomic."""
    (kernel, ptx), *rest = compiled(weight_schemes()[name], (4096, 11008), 1)
    assert kernel == "multiply_kernel" and [other for other, _ in rest] == ["add_kernel"]
    assert len(re.findall(r"\bld\.global\.v4\.b32", ptx)) == vectors
    assert not re.search(r"\b(?:atom|red|ld\.local|st\.local)\b", ptx)
    assert "fma.rn.f32" in ptx and ".ftz" not in ptx


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4"])
def test_several_tokens_go_to_matrix_units(compiled: Compile, name: str) -> None:
    (kernel, ptx), *rest = compiled(weight_schemes()[name], (4096, 11008), 16)
    assert kernel == "product_kernel" and [other for other, _ in rest] == ["add_kernel"]
    assert re.search(r"mma\.sync\S*\.f32\.bf16\.bf16\.f32|wgmma\.mma_async\S*\.f32\.bf16\.bf16", ptx)
    assert not re.search(r"\b(?:atom|red)\b", ptx) and ".ftz" not in ptx


@pytest.mark.parametrize("tokens", [1, 2])
def test_sizes_of_one_and_groups_that_straddle_words(compiled: Compile, tokens: int) -> None:
    """Sizes of 1 are constants to the compiler."""
    names = [name for name, _ in compiled(STRADDLING, (3, 50), tokens)]
    assert names[0] == ("multiply_kernel" if tokens == 1 else "product_kernel")
    assert compiled(weight_schemes()["nf4_g64"], (1, 1), tokens)
