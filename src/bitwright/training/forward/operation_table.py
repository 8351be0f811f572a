"""What runs in which format under a policy, and why, as rows of a table.

    products      the operands of linear layers, where the policy has a recipe; and which layers it leaves alone
    operations    every entry of `operations.py`, and who sees to its format: autocast, the kernel, torch, or bitwright
    by name       routers and tables of positions
    states        parameters, gradients, moments, loss scale

The rows follow from the records that a run is made of; nothing is written down twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bitwright import formats
from bitwright.training.forward.operations import OPERATIONS, By, Operation, treat
from bitwright.training.policy import Policy

Section = Literal["products", "operations", "states"]
#: Product of a linear layer → what it gives, and what its operands are called.
_PRODUCTS = {
    "forward": ("output", "inputs", "weights"),
    "dgrad": ("gradient of inputs", "gradients", "weights"),
    "wgrad": ("gradient of weights", "gradients", "inputs"),
}

#: Roles that are in fp32 whatever the policy computes in: a router by name, an embedding as its table is.
_FORMATS_OF_ROLES = {"router": "fp32", "embedding": "fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationRow:
    """One operation or state under a policy."""

    section: Section
    what: str
    format: str
    #: Who sees to it: autocast, a kernel that adds in fp32 by itself, torch's rules of promotion, or bitwright.
    by: str
    why: str


def operation_table(policy: Policy, device_type: str = "cuda") -> tuple[OperationRow, ...]:
    """Return which operation runs in which format under a policy, who sees to it, and why.

    Args:
        policy: any.
        device_type: kind of device, as torch calls it; autocast's lists differ.
    """
    return (
        *_products(policy),
        *(row for operation in OPERATIONS for row in _operation(operation, policy, device_type)),
        *_by_name(policy),
        *_states(policy),
    )


def _products(policy: Policy) -> Iterator[OperationRow]:
    if policy.products is None:
        return
    for name, (first, second) in policy.products.products.items():
        what, first_name, second_name = _PRODUCTS[name]
        yield OperationRow(
            section="products",
            what=what,
            format=f"{first.scheme.format} × {second.scheme.format}",
            by="bitwright",
            why=f"{first_name} {first}; {second_name} {second}",
        )
    for kept in policy.kept:
        format = _FORMATS_OF_ROLES.get(kept.role, policy.compute)
        yield OperationRow(section="products", what=kept.role, format=format, by="bitwright", why=kept.reason)
    if policy.last_layers_high:
        yield OperationRow(
            section="products",
            what=f"last {policy.last_layers_high:.0%} of layers",
            format=policy.compute,
            by="bitwright",
            why="their gradients are largest",
        )


def _operation(operation: Operation, policy: Policy, device_type: str) -> Iterator[OperationRow]:
    """One row, or one for each format where operators of an operation are treated differently."""
    by_format: dict[str, dict[str, By]] = {}
    for operator in operation.operators:
        treatment = treat(operation, operator, compute=policy.compute, device_type=device_type)
        by_format.setdefault(treatment.format, {})[operator] = treatment.by
    # the larger part keeps the title, the others are named
    largest = max(by_format, key=lambda format: len(by_format[format]))
    for format, operators in by_format.items():
        yield OperationRow(
            section="operations",
            what=_title(operation, policy) if format == largest else ", ".join(operators),
            format=format,
            by=", ".join(dict.fromkeys(operators.values())),
            why=operation.why,
        )


def _title(operation: Operation, policy: Policy) -> str:
    is_linear = operation.operators == ("linear",)
    return f"{operation.title} left alone" if is_linear and policy.products is not None else operation.title


def _by_name(policy: Policy) -> Iterator[OperationRow]:
    if formats.FORMATS[policy.compute].bits > 16:
        return
    for what, why in (
        ("routers", "rounding changes which experts a token reaches"),
        ("positions", "bf16 counts to 256; an angle is position · frequency"),
    ):
        yield OperationRow(section="operations", what=what, format="fp32", by="bitwright", why=why)


def _states(policy: Policy) -> Iterator[OperationRow]:
    is_master = policy.parameters == "fp32"

    def row(what: str, format: str, why: str) -> OperationRow:
        return OperationRow(section="states", what=what, format=format, by="bitwright", why=why)

    copies = "they are the masters" if policy.product_formats or policy.compute != "fp32" else "nothing is copied"
    yield row("parameters", policy.parameters, copies if is_master else f"updates are stored '{policy.update}'")
    if not is_master:
        yield row("norms, routers", "fp32", "their parameters are few, and everything passes them")
    yield row("gradients", policy.gradients, "micro-batches and rows of embeddings are added up in it")
    if policy.format_of_uses == policy.gradients:
        why = "those of all uses in a forward pass are widened, then added up"
    else:
        why = "autocast casts a weight once, and adds up at that copy; the policy's `uses` can say fp32"
    if policy.products is not None:
        why += "; products of the recipe are added up in fp32"
    yield row("gradients of a weight used many times", policy.format_of_uses, why)
    yield row("moments", policy.moments, "the optimizer's, between two steps")
    rule = policy.loss_scale
    if rule is None:
        yield row("loss scale", "none", f"{policy.compute} holds gradients as they are")
    else:
        moves = f"halved by a bad step, doubled after {rule.interval} good ones, never below {rule.floor:g}"
        yield row("loss scale", f"{rule.initial:g} at first", moves)
