"""What a training policy means for time: in which format each product runs, and what turning operands into codes costs.

A linear layer runs three products (forward, dgrad, wgrad). Under a recipe of fewer bits each operand becomes codes: x
in the forward pass, W once a step, g in the backward pass. They are written twice: matrix units read both operands
along the summed dimension, so the transposed matrix needs codes of its own even where they have the same values. A
scale found on a whole tensor itself takes a pass of its own over it; a delayed scale does not, and neither do groups,
whose numbers are at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright import formats
from bitwright.hardware.device import Device
from bitwright.training.choose import why_not
from bitwright.training.policy import POLICIES, Policy
from bitwright.training.product_recipe import OperandRule


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandCost:
    """One operand's codes."""

    #: Of a code, with its share of scales.
    bits: float
    needs_amax_pass: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """In which formats a training step computes and sends."""

    name: str
    #: Of products outside the recipe, attention, and activations.
    compute: str
    #: Of the products of linear layers.
    forward: str
    backward: str
    x: OperandCost | None = None
    w: OperandCost | None = None
    g: OperandCost | None = None
    #: Share of the decoder's layers that the recipe leaves alone.
    kept_share: float = 0.0
    #: Bits of a parameter as it is gathered, and of a gradient as it is reduced.
    parameter_bits: float = 16.0
    gradient_bits: float = 32.0

    @property
    def activation_bits(self) -> float:
        """Stored bits of an activation; tf32 is how products read fp32."""
        return 32.0 if self.compute == "tf32" else float(formats.FORMATS[self.compute].bits)


def numerics_of(policy: Policy, *, gradient_bits: float | None = None) -> Numerics:
    """Return what a policy means for time.

    Args:
        policy: any.
        gradient_bits: of a gradient on the wire; None: as the policy adds them up.
    """
    wire = 32.0 if policy.compute in ("fp32", "tf32") else 16.0
    kept = 32.0 if policy.gradients == "fp32" else 16.0
    bits = kept if gradient_bits is None else gradient_bits
    if policy.products is None:
        return Numerics(
            name=policy.name,
            compute=policy.compute,
            forward=policy.compute,
            backward=policy.compute,
            parameter_bits=wire,
            gradient_bits=bits,
        )
    operands = policy.products.operands
    return Numerics(
        name=policy.name,
        compute=policy.compute,
        forward=operands["forward_x"].scheme.format,
        backward=operands["dgrad_g"].scheme.format,
        x=_cost(operands["forward_x"]),
        w=_cost(operands["forward_w"]),
        g=_cost(operands["dgrad_g"]),
        kept_share=policy.last_layers_high,
        parameter_bits=wire,
        gradient_bits=bits,
    )


def faster_numerics(device: Device, known: Sequence[str]) -> tuple[Numerics, ...]:
    """Return what the policies with products of fewer bits that a device has units for mean, those known left out."""
    return tuple(
        numerics_of(policy)
        for policy in POLICIES.values()
        if policy.products is not None and policy.name not in known and why_not(policy, device) is None
    )


def _cost(rule: OperandRule) -> OperandCost:
    scaling = rule.scheme.scaling
    assert scaling is not None
    is_whole = scaling.granularity.scope == "tensor" or scaling.tensor_scale
    return OperandCost(
        bits=rule.scheme.stored_bytes(4096, 4096) * 8 / 4096**2,
        needs_amax_pass=bool(is_whole) and rule.delay is None,
    )
