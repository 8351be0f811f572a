"""What a policy comes to in memory: bits of every parameter and of every kept activation, for `hardware/memory`.

    parameters      those of the policy; fp32 ones are the masters
    copies          what products read of a weight: 16 bits under autocast; codes of W are written anew for each product
    gradients       in the format that the policy adds them up in (`gradient_storage.py`)
    moments         as many as the optimizer keeps, in the policy's format
    compensation    16 bits for the update rule that keeps what rounding lost

DeepSpeed and Megatron hold bf16 parameters and keep the masters in the optimizer (`masters="in optimizer"`): 2 + 2 + 12
bytes with AdamW in place of 4 + 4 + 8 and a copy of 2 while a step runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from bitwright import formats
from bitwright.catalog import nearest_name_hint
from bitwright.errors import TrainingError
from bitwright.hardware.memory import MOMENTS, ActivationSetup, StateBits
from bitwright.hardware.memory.training import AdapterSetup
from bitwright.quantize.catalogs import SCHEMES
from bitwright.training.optimizer.pieces import BATCH_ELEMENTS
from bitwright.training.optimizer.update import UPDATES
from bitwright.training.policy import Policy
from bitwright.training.product_recipe import OperandRule, ProductRecipe

Masters = Literal["in model", "in optimizer"]
#: tf32 is how products read fp32 numbers, which stay in their 32 bits.
_STORED_BITS = {"tf32": 32.0}


def stored_bits(format: str) -> float:
    """Return the bits in which a number of a format lies in memory."""
    return _STORED_BITS.get(format, float(formats.FORMATS[format].bits))


def state_bits(policy: Policy, *, optimizer: str = "adamw", masters: Masters = "in model") -> StateBits:
    """Return the bits that a policy keeps of every parameter.

    Args:
        policy: any.
        optimizer: a name of `hardware.memory.MOMENTS`.
        masters: where fp32 masters lie, for policies that have any beside products in 16 bits.

    Raises:
        TrainingError: an unknown optimizer, or masters asked for where a policy has none.
    """
    if optimizer not in MOMENTS:
        hint = nearest_name_hint(optimizer, list(MOMENTS))
        raise TrainingError(f"unknown optimizer {optimizer!r}{hint} Known optimizers: {', '.join(MOMENTS)}")
    compute, own = stored_bits(policy.compute), stored_bits(policy.parameters)
    moments = MOMENTS[optimizer] * stored_bits(policy.moments)
    in_optimizer = masters == "in optimizer"
    if in_optimizer and (own != 32 or compute == 32):
        raise TrainingError(
            f"policy '{policy.name}' has {policy.parameters} parameters and computes in {policy.compute}: there are no "
            "masters to keep in the optimizer; leave them in the model"
        )
    held = compute if in_optimizer else own
    copies = compute if compute < held else 0.0
    return StateBits(
        parameters=held,
        masters=own if in_optimizer else 0.0,
        copies=copies if policy.products is None else 0.0,
        head_copies=copies,
        gradients=held if in_optimizer else max(held, stored_bits(policy.gradients)),
        moments=moments,
        compensation=16.0 if UPDATES[policy.update].is_compensated else 0.0,
    )


def activation_setup(
    policy: Policy, *, batch: int, sequence: int, masters: Masters = "in model", **changes: object
) -> ActivationSetup:
    """Return in which formats a step under a policy leaves its activations.

    Args:
        policy: any.
        batch, sequence: sequences of one GPU, and tokens of each.
        masters: as in `state_bits`; the residual stream has the format of the model's parameters.
        changes: other fields of `ActivationSetup`.
    """
    compute = stored_bits(policy.compute)
    own = compute if masters == "in optimizer" else stored_bits(policy.parameters)
    fields: dict[str, object] = {
        "batch": batch,
        "sequence": sequence,
        "stream_bits": max(own, compute),
        "compute_bits": compute,
    }
    if own < 32 and masters == "in model":
        fields["casts_each_input"] = True  # norms stay fp32, and so does what they give
    if policy.products is not None and _keeps_codes(policy.products):
        fields |= {"input_bits": _operand_bits(policy.products.forward_x), "casts_each_input": False}
    return ActivationSetup(**{**fields, **changes})  # type: ignore[arg-type]


def _keeps_codes(recipe: ProductRecipe) -> bool:
    """Whether layers keep the codes of their inputs for the backward pass; else they keep the inputs."""
    return recipe.operands["forward_x"].shares_codes(recipe.operands["wgrad_x"])


def _operand_bits(rule: OperandRule) -> float:
    """Stored bits of one number of an operand, its share of the scales of its groups included."""
    return rule.scheme.stored_bytes(4096, 4096) * 8 / 4096**2


def update_scratch(policy: Policy, *, optimizer: str = "adamw") -> tuple[float, int | None]:
    """Return what an update holds beside its states: bits per element, and how many elements at a time (None: all).

    Parameters narrower than fp32 are stepped on as fp32 stand-ins, a bounded number at a time
    (`optimizer/pieces.py`): the stand-in and its rounded copy, and moments widened where they are narrower.
    """
    if stored_bits(policy.parameters) >= 32:
        return 0.0, None
    narrow = MOMENTS[optimizer] if stored_bits(policy.moments) < 32 else 0
    return 64.0 + 32.0 * narrow, BATCH_ELEMENTS


def adapters_on(base: str, rank: int, policy: Policy) -> AdapterSetup:
    """Return adapters of a rank on a base under a scheme, trained under a policy.

    Raises:
        UnknownName: no scheme has that name.
        TrainingError: the scheme has no weights.
    """
    bits, is_expanded = base_bits(base)
    compute = stored_bits(policy.compute)
    return AdapterSetup(
        rank=rank,
        base_bits=bits,
        other_bits=16.0 if is_expanded else bits,
        is_expanded=is_expanded,
        copy_bits=compute if compute < bits else 0.0,
    )


def adapter_bits(policy: Policy, *, optimizer: str = "adamw") -> StateBits:
    """Return the bits of adapters' parameters: in the policy's formats; the base has codes or copies of its own."""
    return replace(state_bits(policy, optimizer=optimizer), copies=0.0, head_copies=0.0)


def base_bits(scheme: str) -> tuple[float, bool]:
    """Return the bits of one weight of a frozen base under a scheme, and whether a matrix is expanded to be multiplied.

    Raises:
        UnknownName: no scheme has that name.
        TrainingError: the scheme has no weights.
    """
    weights = SCHEMES[scheme].weights
    if weights is None:
        raise TrainingError(f"scheme '{scheme}' says nothing of weights; a frozen base takes bf16, fp8_w, int4_g128, …")
    return weights.stored_bytes(4096, 4096) * 8 / 4096**2, weights.scaling is not None
