"""Which policy a device runs best, and why another does not run there: from the facts of its file.

A policy asks for a matrix unit in its compute format and in those of its recipe, and, where scales lie along the
inputs, for a rule of such products. `why_not` says what is missing. "auto" is the policy of highest `preference` for
which nothing is: V100 → fp16-mixed, A100 → bf16-mixed, H100 → fp8-hybrid, B200 → mxfp8.

A processor runs every policy, with operands rounded as the format would and products in fp32: what a number format does
to a run can be seen anywhere. On a GPU that would be slower than the format that is there, and is done when asked for.

Rejected: trying. A policy is chosen for the hardware that a run is planned for, which is rarely the one at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitwright import hardware
from bitwright.errors import TrainingError
from bitwright.hardware import Device
from bitwright.training.policy import POLICIES, Policy

if TYPE_CHECKING:
    import torch

    from bitwright.training.product_recipe import OperandRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A policy, and why it is this one."""

    policy: Policy
    reason: str
    #: Those of higher preference: (name, why not).
    passed_over: tuple[tuple[str, str], ...] = ()


def choose_policy(device: Device) -> Chosen:
    """Return the policy of highest preference that a device runs natively.

    Args:
        device: its facts (`hardware.get("h100")`, `hardware.detect()`).
    """
    passed_over: list[tuple[str, str]] = []
    for policy in sorted(_preferred(), key=lambda policy: -(policy.preference or 0)):
        why = why_not(policy, device)
        if why is None:
            return Chosen(policy=policy, reason=_reason(policy, device), passed_over=tuple(passed_over))
        passed_over.append((policy.name, why))
    # every device computes in fp32, whether or not its matrix unit does
    fp32 = next(policy for policy in _preferred() if policy.compute == "fp32")
    return Chosen(
        policy=fp32,
        reason=f"no preferred policy is native to {device.name}, and {fp32.name} runs anywhere",
        passed_over=tuple(passed_over),
    )


def why_not(policy: Policy, device: Device) -> str | None:
    """Return what a device lacks to run a policy natively; None if it has all of it."""
    needed = dict.fromkeys((policy.compute, *policy.product_formats))
    missing = [name for name in needed if name not in device.matmul_tflops]
    if missing and missing != ["fp32"]:
        has = ", ".join(device.matmul_tflops)
        return f"{device.name} has no matrix unit for {' and '.join(missing)} (it has {has})"
    for rule in () if policy.products is None else policy.products.operands.values():
        lacking = _lacking_rule(rule, device)
        if lacking is not None:
            return lacking
    return None


def raise_if_not_native(policy: Policy, device: Device) -> None:
    """Raise TrainingError, naming what runs instead, for a policy that a device does not run natively."""
    why = why_not(policy, device)
    if why is not None:
        instead = choose_policy(device)
        raise TrainingError(
            f"policy '{policy.name}' does not run here: {why}; use '{instead.policy.name}' ({instead.reason}), or pass "
            "emulate=True to compute its rounding in fp32, which is slower"
        )


def device_at(place: torch.device) -> tuple[Device, str]:
    """Return the facts of the device that torch has there, and how it was recognised.

    Raises:
        TrainingError: a GPU that no device file speaks of, nor any of its compute capability.
    """
    import torch

    if place.type == "cpu":
        return hardware.detect(with_gpu=False)
    if place.type != "cuda":
        raise TrainingError(
            f"the model is on '{place}', of which nothing is known; pass device= with a name of `bitwright hardware`"
        )
    name = str(torch.cuda.get_device_name(place))
    for device in hardware.devices():
        if name in device.runtime_names:
            return device, f"the GPU reports itself as '{name}'"
    major, minor = torch.cuda.get_device_capability(place)
    capability = major + minor / 10
    for device in hardware.devices():
        if device.compute_capability == capability and torch.version.hip is None:
            return device, f"no device file is for '{name}'; {device.name} has its compute capability, {capability}"
    raise TrainingError(
        f"the GPU '{name}' is in no device file; pass device= with the name of one that is like it "
        "(`bitwright hardware`)"
    )


def _preferred() -> list[Policy]:
    return [policy for policy in POLICIES.values() if policy.preference is not None]


def _reason(policy: Policy, device: Device) -> str:
    rates = [f"{name} at {device.matmul_tflops[name]:g} TFLOP/s" for name in _fastest(policy, device)]
    if not rates:
        return f"{device.name} has no matrix unit for anything narrower"
    return f"{device.name} multiplies {' and '.join(rates)}, dense peak"


def _fastest(policy: Policy, device: Device) -> list[str]:
    """Formats of a policy's products, and its compute format, where the device has a rate."""
    return [name for name in dict.fromkeys((*policy.product_formats, policy.compute)) if name in device.matmul_tflops]


def _lacking_rule(operand: OperandRule, device: Device) -> str | None:
    scaling = operand.scheme.scaling
    size = 0 if scaling is None else scaling.granularity.group_size
    if scaling is None or not size:
        return None
    fits = any(
        operand.scheme.format in rule.formats and rule.group_size == size and scaling.scale_format in rule.scale_formats
        for rule in device.matmul_rules
    )
    if fits:
        return None
    return (
        f"{device.name} has no products of {operand.scheme.format} with {scaling.scale_format} scales in groups of "
        f"{size} along what is summed over"
    )
