"""What Triton's compiler makes of the kernels for an NVIDIA GPU (compute capability 9.0): PTX, read without a GPU.

The backend is called as usual; where it would launch a kernel, the kernel is compiled, up to machine code. Collected by
test_triton.py in a process of its own, where kernels are not interpreted. Instructions: PTX ISA.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from bitwright import formats
from bitwright.quantize import SCHEMES, Scaling, TensorScheme
from bitwright.quantize.backends import triton as backend
from bitwright.quantize.backends.triton import launch, rounding
from bitwright.quantize.granularity import TENSOR, group


class NoDriver:
    """The driver of a GPU that is compiled for and not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel that a call would have launched."""

    name: str
    ptx: str
    num_warps: int

    def vector_bytes(self, direction: str) -> int:
        """Bytes that a program moves ("ld", "st") by instructions of 16 bytes a thread."""
        return len(re.findall(rf"\b{direction}\.global\.v4\.b32", self.ptx)) * 16 * 32 * self.num_warps

    def raise_if_inexact(self) -> None:
        """Refuse flushed subnormals, contracted products, and approximations."""
        inexact = r"\S*\.ftz\S*|\bfma\.\S*|\b(?:div|rcp|sqrt)\.(?:full|approx)\S*|\bmad\.\S*f32"
        found = sorted(set(re.findall(inexact, self.ptx)))
        assert not found, (self.name, found)


Compile = Callable[[Callable[[], object]], list[Compiled]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """``compiled(call)`` → the kernels that the call would have launched, all of them exact."""
    found: list[Compiled] = []

    def compile_instead(
        kernel: Any, num_programs: int, arguments: tuple, constants: tuple, x: object, num_warps: int = 4
    ) -> None:
        settings = {"grid": (num_programs,), "num_warps": num_warps, "enable_fp_fusion": False}
        ptx = kernel.warmup(*arguments, *constants, **settings).asm["ptx"]
        found.append(Compiled(kernel.fn.__name__, ptx, num_warps))

    def run(call: Callable[[], object]) -> list[Compiled]:
        found.clear()
        call()
        for kernel in found:
            kernel.raise_if_inexact()
        return list(found)

    monkeypatch.setattr(launch, "run", compile_instead)
    monkeypatch.setattr(rounding, "RUNS_ON_CPU", True)
    triton.runtime.driver.set_active(NoDriver())  # for as long as the process lasts
    return run


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [
        *((name, "nearest_even", torch.float32) for name in ("bf16", "fp8_e4m3", "e8m0", "int4", "nf4")),
        ("fp4_e2m1", "nearest_even", torch.float16),
        ("fp16", "nearest_away", torch.bfloat16),
        ("fp8_e5m2", "stochastic", torch.bfloat16),
        ("nf4", "stochastic", torch.float32),
    ],
)
def test_rounding_reads_once_and_writes_once(compiled: Compile, name: str, mode: str, dtype: torch.dtype) -> None:
    x = torch.zeros(4096, dtype=dtype)
    (kernel,) = compiled(lambda: backend.round_values(x, formats.get(name), rounding=mode, overflow="ieee"))
    assert kernel.vector_bytes("ld") == kernel.vector_bytes("st") == 1024 * x.element_size()
    assert ("f64" in kernel.ptx) == (name == "nf4" and mode == "stochastic")


def test_another_seed_is_no_other_kernel(compiled: Compile) -> None:
    x, number = torch.zeros(64), formats.get("fp8_e4m3")
    seeds = (0, 1, 16, 77)
    kernels = [
        compiled(lambda s=seed: backend.round_values(x, number, rounding="stochastic", seed=s)) for seed in seeds
    ]
    assert len({kernel.ptx for (kernel,) in kernels}) == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("fp8_e4m3", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        ("int8", torch.float32),
        ("nf4", torch.bfloat16),
    ],
)
def test_delayed_scaling_reads_once_and_writes_once(compiled: Compile, name: str, dtype: torch.dtype) -> None:
    x = torch.zeros(3 * launch.BLOCK, dtype=dtype)
    (kernel,) = compiled(lambda: backend.scale_with_amax(x, formats.get(name), torch.tensor(2.0)))
    assert kernel.vector_bytes("ld") == kernel.vector_bytes("st") == launch.BLOCK * x.element_size()
    # the reciprocal is a division; the program's maximum goes out once
    assert kernel.ptx.count("div.rn.f32") == 1
    assert len(re.findall(r"\b(?:atom|red)\.\S*relaxed\S*max\.s32", kernel.ptx)) == 1


def test_one_scale_of_many_is_no_other_kernel(compiled: Compile) -> None:
    x, number, inv_scales = torch.zeros(4096), formats.get("fp8_e4m3"), torch.ones(8)
    kernels = [compiled(lambda i=i: backend.scale_with_amax(x, number, inv_scales[i])) for i in range(3)]
    assert len({kernel.ptx for (kernel,) in kernels}) == 1


#: Scheme, elements that a program of its kernel works on.
FUSED = {
    "mxfp8": 4096,
    "mxint8": 4096,
    "int4_g128": 4096,
    "nf4_g64": 4096,
    "fp8_w": 4096,
    "fp8_block": 16384,
}


@pytest.mark.parametrize("name", FUSED)
def test_groups_are_read_once_and_written_once(compiled: Compile, name: str) -> None:
    scheme = SCHEMES[name].weights
    assert scheme is not None
    x = torch.zeros(256, 2048, dtype=torch.bfloat16)
    (kernel,) = compiled(lambda: backend.fake_quantize(x, scheme))
    assert kernel.name == "groups_kernel"
    assert kernel.vector_bytes("ld") == kernel.vector_bytes("st") == 2 * FUSED[name]


@pytest.mark.parametrize(
    ("scheme", "shape", "names"),
    [
        (SCHEMES["nvfp4"].weights, (64, 256), ["groups_kernel", "tensor_scale_kernel", "groups_kernel"]),
        (SCHEMES["fp8_w"].weights, (2, 40000), ["peaks_kernel", "pieces_kernel"]),
        (
            TensorScheme(
                format="int8", scaling=Scaling(granularity=TENSOR, scale_format="fp8_e4m3", tensor_scale=True)
            ),
            (50, 300),
            ["peaks_kernel", "tensor_scale_kernel", "pieces_kernel"],
        ),
        (
            TensorScheme(
                format="fp6_e3m2",
                scaling=Scaling(granularity=group(24), scale_format="e8m0", rule="power_of_two", margin=1),
            ),
            (5, 70),
            ["groups_kernel"],
        ),
    ],
)
def test_what_is_launched(compiled: Compile, scheme: TensorScheme, shape: tuple[int, int], names: list[str]) -> None:
    x = torch.zeros(shape)
    assert [kernel.name for kernel in compiled(lambda: backend.fake_quantize(x, scheme))] == names
    assert [kernel.name for kernel in compiled(lambda: backend.quantize(x, scheme))] == names


@pytest.mark.parametrize("name", ["int4_g32", "fp6_w", "fp8_w"])
def test_packing_compiles(compiled: Compile, name: str) -> None:
    scheme = SCHEMES[name].weights
    assert scheme is not None
    number = formats.get(scheme.format)
    kernels = compiled(lambda: backend.unpack(backend.pack(torch.zeros(3, 70), scheme), torch.bfloat16))
    packing = [] if number.bits == 8 else ["pack_kernel"]
    assert [kernel.name for kernel in kernels] == ["groups_kernel", *packing, "unpack_kernel"]
