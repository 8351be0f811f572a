"""Roofline times against arithmetic done by hand."""

from __future__ import annotations

import pytest

from bitwright import hardware
from bitwright.errors import HardwareError, UnknownName
from bitwright.hardware import roofline


def test_one_token_is_bound_by_the_weights() -> None:
    # 4096 x 4096 bf16 weights: 33,554,432 bytes, activations 2 x 8,192 bytes; 3,350 GB/s
    time = roofline.matmul_time(
        hardware.get("h100"), tokens=1, out_features=4096, in_features=4096, weight_bits=16, compute_format="bf16"
    )
    assert time.bound == "memory"
    assert time.moved_bytes == 33_554_432 + 16_384
    assert time.seconds == pytest.approx(33_570_816 / 3350e9)
    assert time.status == "predicted"


def test_many_tokens_are_bound_by_the_matrix_unit() -> None:
    time = roofline.matmul_time(
        hardware.get("h100"), tokens=8192, out_features=4096, in_features=4096, weight_bits=16, compute_format="bf16"
    )
    assert time.bound == "compute"
    assert time.flops == 2 * 8192 * 4096 * 4096
    assert time.seconds == pytest.approx(2 * 8192 * 4096 * 4096 / 989.4e12)


def test_fewer_bits_are_faster_only_where_memory_binds() -> None:
    device = hardware.get("a100")
    times = {
        (tokens, bits): roofline.matmul_time_s(device, tokens, 4096, 4096, bits, "bf16")
        for tokens in (1, 4096)
        for bits in (4.25, 16)
    }
    assert times[1, 16] / times[1, 4.25] == pytest.approx(16 / 4.25, rel=0.01)
    assert times[4096, 16] == times[4096, 4.25]


def test_achieved_rates_are_used_where_known() -> None:
    device = hardware.get("a100")
    assert roofline.matmul_tflops(device, "bf16", "achieved") == 271.2
    assert roofline.matmul_tflops(device, "int8", "achieved") == pytest.approx(624 * 271.2 / 312)  # nobody measured it
    assert roofline.memory_gb_per_s(device, "achieved") == 2039


def test_a_format_without_a_rate_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"'a100-sxm' has no matrix rate for fp8_e4m3; it has: fp32, tf32"):
        roofline.matmul_time_s(hardware.get("a100"), 1, 8, 8, 8, "fp8_e4m3")


@pytest.mark.parametrize("wrong", ["tokens", "out_features", "in_features", "weight_bits"])
def test_sizes_must_be_positive(wrong: str) -> None:
    sizes = {"tokens": 1, "out_features": 8, "in_features": 8, "weight_bits": 8, wrong: 0}
    with pytest.raises(HardwareError, match=f"{wrong} is 0"):
        roofline.matmul_time(hardware.get("a100"), compute_format="bf16", **sizes)


@pytest.mark.parametrize(
    ("device", "wanted", "computed"),
    [
        ("h100", "fp8_e4m3", "fp8_e4m3"),
        ("a100", "fp8_e4m3", "bf16"),
        ("a100", "int4", "bf16"),
        ("v100", "fp8_e5m2", "fp16"),
        ("v100", "bf16", "fp32"),  # fp16 has not the range of bf16
        ("mi300x", "fp8_e4m3", "bf16"),  # its FP8 is the FNUZ kind
        ("x86-avx512-bf16", "fp16", "fp32"),  # bf16 has not the fraction of fp16
    ],
)
def test_a_format_without_a_unit_is_widened_without_loss(device: str, wanted: str, computed: str) -> None:
    name, reason = roofline.compute_format(hardware.get(device), wanted)
    assert name == computed
    assert wanted in reason


def test_an_unknown_format_cannot_be_widened() -> None:
    with pytest.raises(UnknownName, match="bf61"):
        roofline.compute_format(hardware.get("a100"), "bf61")


def test_reading_a_cache_takes_bytes_over_bandwidth() -> None:
    assert roofline.read_time_s(hardware.get("l4"), 300e9) == pytest.approx(1.0)
