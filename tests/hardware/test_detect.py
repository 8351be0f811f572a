"""Detection: the rule is tried for machines that are not here."""

from __future__ import annotations

import pytest

from bitwright import hardware
from bitwright.hardware.detect import match

ZEN4 = {"sse2", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"}


@pytest.mark.parametrize(
    ("runtime_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_a_gpu_is_known_by_its_reported_name(runtime_name: str, name: str) -> None:
    device, reason = match(runtime_name=runtime_name, cpu_flags=ZEN4)
    assert device.name == name
    assert runtime_name in reason


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (ZEN4, "x86-avx512-bf16"),
        (ZEN4 | {"amx_tile", "amx_bf16", "amx_int8"}, "x86-amx"),
        (ZEN4 - {"avx512_bf16"}, "x86-avx2"),
        ({"asimd"}, "cpu-generic"),
        (set(), "cpu-generic"),
    ],
)
def test_without_a_gpu_the_processor_decides(flags: set[str], name: str) -> None:
    device, reason = match(runtime_name=None, cpu_flags=flags)
    assert device.name == name
    assert "reference" in reason


def test_an_unknown_gpu_is_said_not_guessed() -> None:
    device, reason = match(runtime_name="NVIDIA T4", cpu_flags=ZEN4)
    assert device.kind == "cpu"
    assert "'NVIDIA T4' is in no device file" in reason


def test_this_machine_is_something() -> None:
    device, reason = hardware.detect()
    assert device.name in hardware.names() and reason
