"""What Triton's compiler makes of the kernels for an NVIDIA GPU (compute capability 9.0): PTX, read without a GPU.

Collected by test_triton.py in a process of its own, where kernels are not interpreted. Instructions: PTX ISA.
"""

from __future__ import annotations

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from bitwright import formats
from bitwright.quantize.backends.triton import packing, rounding, scaling
from bitwright.quantize.backends.triton.grids import grid_of, overflow_of, rule_of
from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling

H100 = GPUTarget("cuda", 90, 32)
NUM_THREADS = 128
BYTES_OF = {"*fp32": 4, "*fp16": 2, "*i16": 2}


def ptx_of(kernel: object, pointers: dict[str, str | None], **constants: object) -> str:
    """The PTX of a kernel for aligned pointers (None: not given) and sizes that 16 divides."""
    names = kernel.arg_names  # type: ignore[attr-defined]
    constants |= {name: None for name, kind in pointers.items() if kind is None}
    signature = {name: "constexpr" if name in constants else pointers.get(name) or "i32" for name in names}
    source = ASTSource(
        kernel,
        signature | ({"seed": "u64"} if "seed" in names else {}),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind and (kind[0] == "*" or name in ("size", "columns"))
        },
    )
    return str(compile(source, target=H100, options={"enable_fp_fusion": False}).asm["ptx"])


def raise_if_inexact(ptx: str) -> None:
    """Refuse flushed subnormals, contracted products, and approximations."""
    found = re.findall(r"\S*\.ftz\S*|\bfma\.\S*|\b(?:div|rcp|sqrt)\.(?:full|approx)\S*|\bmad\.\S*f32", ptx)
    assert not found, sorted(set(found))


def vector_bytes(ptx: str, direction: str) -> int:
    """Bytes that a program moves by instructions of 16 bytes a thread."""
    return len(re.findall(rf"{direction}\.global\.v4\.b32", ptx)) * 16 * NUM_THREADS


@pytest.mark.parametrize(
    ("name", "mode", "pointer"),
    [
        *((name, "nearest_even", "*fp32") for name in ("bf16", "fp8_e4m3", "e8m0", "int4", "nf4")),
        ("fp4_e2m1", "nearest_even", "*fp16"),
        ("fp16", "nearest_away", "*i16"),
        ("fp8_e5m2", "stochastic", "*i16"),
        ("nf4", "stochastic", "*fp32"),
    ],
)
def test_rounding_is_exact_arithmetic(name: str, mode: str, pointer: str) -> None:
    number = formats.get(name)
    ptx = ptx_of(
        rounding.round_kernel,
        {"x_pointer": pointer, "out_pointer": pointer, "table": "*fp32" if name == "nf4" else None},
        grid=grid_of(number),
        overflow=overflow_of(number, "ieee"),
        mode=mode,
        random_bits=32,
        BLOCK=1024,
    )
    raise_if_inexact(ptx)
    assert ("f64" in ptx) == (name == "nf4" and mode == "stochastic")
    assert vector_bytes(ptx, "ld") == vector_bytes(ptx, "st") == 1024 * BYTES_OF[pointer]


SCHEMES = [
    ("fp8_e4m3", Scaling(granularity=group(32), scale_format="e8m0", rule="ocp_floor")),
    ("fp8_e5m2", Scaling(granularity=group(32), scale_format="e8m0", rule="round_up")),
    ("fp4_e2m1", Scaling(granularity=group(16), scale_format="fp8_e4m3", tensor_scale=True)),
    ("int4", Scaling(granularity=group(128), scale_format="fp16")),
    ("nf4", Scaling(granularity=group(64), scale_format="bf16")),
    ("fp6_e3m2", Scaling(granularity=group(32), scale_format="fp32", rule="power_of_two")),
]


@pytest.mark.parametrize(
    ("scheme", "gives"),
    [
        *((scheme, "values") for scheme in range(len(SCHEMES))),
        (0, "codes"),
        (4, "codes"),
        (3, "code values"),
        (2, "peak"),
    ],
)
def test_groups_are_read_once_and_written_once(scheme: int, gives: str) -> None:
    name, scaling_ = SCHEMES[scheme]
    number, scale_number = formats.get(name), formats.get(scaling_.scale_format)
    size = scaling_.granularity.group_size
    ptx = ptx_of(
        scaling.groups_kernel,
        {
            "x_pointer": "*i16",
            "out_pointer": {"values": "*i16", "codes": "*u8", "code values": "*fp32", "peak": None}[gives],
            "scales_pointer": "*fp32" if gives.startswith("code") else None,
            "tensor_peak_pointer": "*i32" if scaling_.tensor_scale else None,
            "table": "*fp32" if name == "nf4" else None,
        },
        block_rows=1,
        width=size,
        rule=rule_of(number, scaling_, scale_number.max),
        grid=grid_of(number),
        overflow=overflow_of(number, "saturate"),
        scale_grid=grid_of(scale_number),
        scale_overflow=overflow_of(scale_number, "saturate"),
        gives=gives,
        GROUPS=4096 // size,
        BLOCK=size,
    )
    raise_if_inexact(ptx)
    assert vector_bytes(ptx, "ld") == 4096 * 2
    if gives == "values":
        assert vector_bytes(ptx, "st") == 4096 * 2


def test_long_groups_and_packing_compile() -> None:
    number, scale_number = formats.get("fp4_e2m1"), formats.get("fp8_e4m3")
    rule = rule_of(number, SCHEMES[2][1], scale_number.max)
    place = {"block_rows": 1, "width": 0, "BLOCK": 4096}
    peaks = ptx_of(scaling.peaks_kernel, {"x_pointer": "*fp32", "peaks_pointer": "*i32"}, **place)
    assert "atom" in peaks or "red." in peaks
    pointers: dict[str, str | None] = {"x_pointer": "*fp32", "out_pointer": "*fp32", "scales_pointer": "*fp32"}
    pieces = ptx_of(
        scaling.pieces_kernel,
        pointers | {"tensor_peak_pointer": "*i32", "peaks_pointer": "*i32", "table": None},
        rule=rule,
        grid=grid_of(number),
        overflow=overflow_of(number, "saturate"),
        scale_grid=grid_of(scale_number),
        scale_overflow=overflow_of(scale_number, "saturate"),
        gives="values",
        **place,
    )
    raise_if_inexact(pieces)
    tensor = {"tensor_peak_pointer": "*i32", "tensor_scale_pointer": "*fp32"}
    raise_if_inexact(ptx_of(scaling.tensor_scale_kernel, tensor, rule=rule))
    for bits in (4, 6):
        ptx_of(packing.pack_kernel, {"codes_pointer": "*u8", "bytes_pointer": "*u8"}, bits=bits, ROWS=4, BLOCK=1024)
        unpacked = ptx_of(
            packing.unpack_kernel,
            {"bytes_pointer": "*u8", "values_pointer": "*fp32", "out_pointer": "*i16"}
            | {"scales_pointer": "*fp32", "tensor_scale_pointer": "*fp32"},
            bits=bits,
            block_rows=1,
            width=32,
            ROWS=4,
            BLOCK=1024,
        )
        raise_if_inexact(unpacked)
