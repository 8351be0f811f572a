"""Which policy a device gets, and what is said where it cannot run one: facts of published hardware."""

from __future__ import annotations

import pytest
import torch

from bitwright import hardware
from bitwright.errors import TrainingError
from bitwright.training.choose import choose_policy, device_at, raise_if_not_native, why_not
from bitwright.training.policy import POLICIES


@pytest.mark.parametrize(
    ("device", "policy"),
    [
        ("v100-sxm2", "fp16-mixed"),
        ("a100-sxm", "bf16-mixed"),
        ("rtx-3090", "bf16-mixed"),
        ("h100", "fp8-hybrid"),
        ("h200-sxm", "fp8-hybrid"),
        ("l4", "fp8-hybrid"),
        ("b200", "mxfp8"),
        ("mi300x", "bf16-mixed"),  # its FP8 is FNUZ
        ("x86-amx", "bf16-mixed"),
        ("x86-avx2", "fp32"),
    ],
)
def test_auto_takes_what_is_native(device: str, policy: str) -> None:
    chosen = choose_policy(hardware.get(device))
    assert chosen.policy.name == policy
    assert hardware.get(device).name in chosen.reason
    assert all(why for _, why in chosen.passed_over)


def test_auto_always_finds_something() -> None:
    for device in hardware.devices():
        assert choose_policy(device).reason


@pytest.mark.parametrize(
    ("policy", "device", "says"),
    [
        ("bf16-mixed", "v100-sxm2", "no matrix unit for bf16"),
        ("tf32", "v100-sxm2", "no matrix unit for tf32"),
        ("fp8-hybrid", "a100-sxm", "fp8_e4m3 and fp8_e5m2"),
        ("mxfp8", "h100", "e8m0 scales in groups of 32"),
        ("nvfp4", "h100", "fp4_e2m1"),
        ("fp8-hybrid", "mi300x", "fp8_e4m3 and fp8_e5m2"),
    ],
)
def test_what_is_missing_is_named(policy: str, device: str, says: str) -> None:
    assert says in str(why_not(POLICIES[policy], hardware.get(device)))


@pytest.mark.parametrize(
    ("policy", "device"), [("nvfp4", "b200"), ("fp8-block", "h100"), ("tf32", "a100-sxm"), ("fp32", "a100-sxm")]
)
def test_what_is_there_is_native(policy: str, device: str) -> None:
    assert why_not(POLICIES[policy], hardware.get(device)) is None


def test_a_refusal_says_what_runs_instead() -> None:
    with pytest.raises(TrainingError, match=r"'bf16-mixed' does not run here.*use 'fp16-mixed'.*emulate=True"):
        raise_if_not_native(POLICIES["bf16-mixed"], hardware.get("v100-sxm2"))


def test_the_processor_is_found_even_beside_a_gpu() -> None:
    device, reason = device_at(torch.device("cpu"))
    assert device.kind == "cpu" and reason


def test_a_device_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(TrainingError, match="pass device="):
        device_at(torch.device("mps"))
