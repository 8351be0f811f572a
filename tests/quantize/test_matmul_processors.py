"""Kernels for processors that are not this one: vectors of LLVM and nothing else, run on the least that there is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numba import njit, types

from bitwright import formats
from bitwright.quantize.backends.cpu.matmul_layout import constant
from bitwright.quantize.backends.cpu.matmul_numbers import floats_expansion
from bitwright.quantize.backends.cpu.matmul_steps import expand_groups, multiply_groups
from bitwright.quantize.backends.cpu.matmul_ways import constants_of

#: A format of each way that takes no permutations: integers of either kind, fields with and without NaN, fp16, a table.
NAMES = ("int4", "uint4", "fp6_e3m2", "fp8_e4m3", "fp16", "nf4")
#: Run where kernels are compiled for another processor: products against those of float64, as far as bf16 goes.
PROGRAM = """
import torch
from bitwright.quantize import MATMULS, SCHEMES, pack, packed_matmul
from bitwright.quantize.backends.cpu.features import processor_features
assert not any(name.startswith("avx512") for name in processor_features())
for name in ("int4_g32_zp", "mxfp8"):
    packed = pack(torch.randn(67, 330, generator=torch.Generator().manual_seed(0)), SCHEMES[name].weights)
    for tokens in (1, 9):
        x = torch.randn(tokens, 330, generator=torch.Generator().manual_seed(1)).bfloat16()
        y = packed_matmul(x, MATMULS["planar"].prepare(packed))
        expected = (x.double() @ packed.unpack().double().T).bfloat16()
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-3)
print("equal")
"""


@pytest.mark.parametrize("name", NAMES)
def test_no_instruction_is_of_one_processor(name: str) -> None:
    expansion = floats_expansion(formats.FORMATS[name], frozenset())
    one, four = constant(1), constant(4)

    @njit
    def kernel(codes: Any, table: Any, x: Any, run: Any, totals: Any, scales: Any, bits: Any, code: Any) -> None:
        how = (bits, code)
        expand_groups(codes, 0, 1, 8, table, run, None, 0, how)
        expand_groups(codes, 0, 2, 4, table, run, scales, 0, how)
        multiply_groups(codes, 0, 1, 8, table, x, 0, totals, 0, scales, 0, how, one, four)
        multiply_groups(run, 0, 1, 8, table, x, 0, totals, 0, scales, 0, how, four, one)

    floats, bytes_ = types.float32[::1], types.uint8[::1]
    of_table = floats if expansion.entries.dtype == np.float32 else types.uint16[::1]
    numbers = [types.UniTuple(types.none, len(number)) for number in constants_of(expansion)]
    kernel.compile((bytes_, of_table, floats, floats, floats, floats, *numbers))
    (text,) = kernel.inspect_llvm().values()
    assert "llvm.fmuladd" in text or "fma" in text
    assert not any(f"llvm.x86.{of_one}" in text for of_one in ("avx", "sse", "fma"))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the names of processors are those of x86")
@pytest.mark.parametrize("processor", ["x86-64-v3", "x86-64"])
def test_products_on_lesser_processors(processor: str) -> None:
    """With AVX2; and without FMA, conversions of fp16 or any register of more than 128 bits."""
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr
