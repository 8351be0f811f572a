"""Value sites of a traced program: what it computes between its weights, op by op.

    qk                      product of two activations that reaches a softmax through elementwise operators
    softmax, softmax_sum    the softmax itself
    pv                      product of a softmax's result with an activation
    output                  its result
    act                     an activation function
    norm                    layer_norm, rms_norm, or x · rsqrt(mean x²) · gain written out
    residual                x + f(x), with a weight somewhere in f
    gate, up, gate_up, down, logits             products, by the role of their weight; where its name says nothing, up
                                                feeds an activation function and down reads one

scaled_dot_product_attention is the first five in one operator. Names are those of `value_sites.py`, "<module>:<part>",
with the module around the operator; several operators of one module and part are one site, if their values have one
shape. A module without a cache keeps no state, so that none of its sites is one. Where the values lie in an operator
says `graph_places.py`; what cannot be read there is no site, and `graph_values_left_out` names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from bitwright.models.graph import WeightUse, module_of, node_named, parameters_of
from bitwright.models.graph_norms import ends_written_norm, norm_input
from bitwright.models.graph_places import (
    FUSED_ATTENTIONS,
    LOOKS_LIKE_ITSELF,
    NORMS,
    SOFTMAXES,
    heads_and_width,
    is_probabilities,
    origin_of,
    overloads,
)
from bitwright.models.graph_products import ACTIVATION_PRODUCTS
from bitwright.models.sites import Site
from bitwright.models.value_calls import ACTIVATION_HOMES, NOT_ELEMENTWISE, PRODUCT_PARTS
from bitwright.models.value_sites import PARTS, ValueSite

ACTIVATION_FUNCTIONS = overloads(
    *("celu", "elu", "gelu", "hardswish", "leaky_relu", "mish", "relu", "relu6", "selu", "silu", "softplus"),
    *("celu_", "elu_", "gelu_", "hardswish_", "leaky_relu_", "mish_", "relu_", "relu6_", "selu_", "silu_"),
)
_ELEMENTWISE = overloads(
    *("add", "sub", "mul", "div", "masked_fill", "where", "tanh", "clamp"),
    *("add_", "sub_", "mul_", "div_", "masked_fill_", "tanh_", "clamp_"),
)
_CHOICES = overloads("where")
_SUMS = overloads("add", "add_")
_MULTIPLICATIONS = overloads("mul", "mul_")
#: Parts of a fused attention.
_FUSED_PARTS = ("qk", "softmax", "softmax_sum", "pv", "output")

#: Site name without its shape, (heads, width) → nodes.
_Found = dict[tuple[str, str], dict[tuple[int, int], list[Node]]]


def find_graph_values(
    program: ExportedProgram, sites: Sequence[Site], uses: Mapping[str, Sequence[WeightUse]]
) -> dict[ValueSite, tuple[str, ...]]:
    """Value site → names of the nodes that compute it, in the program's order.

    Args:
        program: from `graph.trace` or `torch.export`.
        sites: its weight sites.
        uses: site name → where the program computes with it.
    """
    sites_found = {}
    for (module, part), by_shape in _found(program, sites, uses)[0].items():
        shape, nodes = next(iter(by_shape.items()))
        sites_found[_site(module, part, shape)] = tuple(node.name for node in nodes)
    return sites_found


def graph_values_left_out(
    program: ExportedProgram, sites: Sequence[Site], uses: Mapping[str, Sequence[WeightUse]]
) -> Iterator[tuple[str, str]]:
    """Role, and what of it is no site although the program computes it, in one sentence."""
    found, unread = _found(program, sites, uses)
    for part, node, reason in unread:
        yield PARTS[part][0], f"{module_of(node) or 'the model'}:{part}: {node.name} cannot be read, for {reason}"
    for (module, part), by_shape in found.items():
        for heads, width in list(by_shape)[1:]:
            first_heads, first_width = next(iter(by_shape))
            yield (
                PARTS[part][0],
                f"{module}:{part}: computed as {heads} × {width} numbers a token too, beside {first_heads} × "
                f"{first_width}, where one site has one shape",
            )
    for site in sites:
        product = PRODUCT_PARTS.get(site.role)
        if product in ("gate", "up", "gate_up"):
            owners = {_module(node_named(program, use.node), product, {use.node: [site]}) for use in uses[site.name]}
            for owner in sorted(owner for owner in owners if (owner, "act") not in found):
                yield "mlp.act", f"{owner}:act: no operator or module that is known as an activation function"


def _found(
    program: ExportedProgram, sites: Sequence[Site], uses: Mapping[str, Sequence[WeightUse]]
) -> tuple[_Found, list[tuple[str, Node, str]]]:
    products: dict[str, list[Site]] = {}
    for site in sites:
        for use in uses[site.name]:
            if use.kind == "product":
                products.setdefault(use.node, []).append(site)
    constants = set(parameters_of(program))
    found: _Found = {}
    unread: list[tuple[str, Node, str]] = []
    for node in program.graph.nodes:
        for part in _parts_of(node, products, constants):
            try:
                shape = heads_and_width(node, part)
                if part == "norm" and node.target not in NORMS:
                    norm_input(node)
            except ValueError as reason:
                unread.append((part, node, str(reason)))
                continue
            found.setdefault((_module(node, part, products), part), {}).setdefault(shape, []).append(node)
    return found, unread


def _parts_of(node: Node, products: Mapping[str, Sequence[Site]], constants: set[str]) -> Iterator[str]:
    if node.name in products:
        roles = {site.role for site in products[node.name]}
        parts = {_beside_act(node) if role == "other" else PRODUCT_PARTS.get(role) for role in roles} - {None}
        yield from ({"gate_up"} if parts == {"gate", "up"} else parts)  # type: ignore[misc]
    elif node.target in FUSED_ATTENTIONS:
        yield from _FUSED_PARTS
    elif node.target in SOFTMAXES:
        if _reaches(node, _is_product, LOOKS_LIKE_ITSELF | _CHOICES):  # not the softmax of a router or of an output
            yield from ("softmax", "softmax_sum")
    elif node.target in ACTIVATION_PRODUCTS:
        if _reaches(node, lambda user: user.target in SOFTMAXES, LOOKS_LIKE_ITSELF | _ELEMENTWISE):
            yield "qk"
        elif any(is_probabilities(operand) for operand in node.all_input_nodes):
            yield from ("pv", "output")
    elif _is_act(node):
        yield "act"
    elif node.target in NORMS or ends_written_norm(node, constants):
        yield "norm"
    elif node.target in _SUMS and _is_residual(node, products):
        yield "residual"


def _beside_act(node: Node) -> str | None:
    """Which product of an MLP one is whose name says nothing: it feeds an activation function, or reads one."""
    if _reaches(node, _is_act, LOOKS_LIKE_ITSELF):
        return "up"
    operands = [origin_of(operand) for operand in node.all_input_nodes]
    gated = [origin_of(factor) for x in operands if x.target in _MULTIPLICATIONS for factor in x.all_input_nodes]
    return "down" if any(_is_act(found) for found in (*operands, *gated)) else None


def _is_act(node: Node) -> bool:
    return node.target in ACTIVATION_FUNCTIONS or _ends_activation_module(node)


def _ends_activation_module(node: Node) -> bool:
    """Whether a node is the result of an activation function that is a module, out of whatever operators."""
    kind = _class_of(node)
    if kind.rpartition(".")[0] not in ACTIVATION_HOMES or not isinstance(node.meta.get("val"), Tensor):
        return False
    elementwise = not any(fnmatchcase(kind.rpartition(".")[2], pattern) for pattern in NOT_ELEMENTWISE)
    return elementwise and all(module_of(user) != module_of(node) for user in node.users)


def _class_of(node: Node) -> str:
    """Dotted name of the class of the innermost module that ran an operator."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[1]) if stack else ""


def _is_product(node: Node) -> bool:
    return node.target in ACTIVATION_PRODUCTS


def _reaches(node: Node, wanted: Callable[[Node], bool], through: frozenset[Any]) -> bool:
    """Whether a node's result gets to a wanted one through nothing but some operators."""
    front, seen = list(node.users), set(node.users)
    while front:
        user = front.pop()
        if wanted(user):
            return True
        if user.target in through:
            front += [further for further in user.users if further not in seen]
            seen.update(user.users)
    return False


def _is_residual(node: Node, products: Mapping[str, Sequence[Site]]) -> bool:
    """Whether a sum is x + f(x), or f(x) + x, with a weight in f."""
    operands: Any = node.args[:2]
    if not all(isinstance(operand, Node) and _is_activation(operand, node) for operand in operands):
        return False
    first, second = operands
    return _computed_from(first, origin_of(second), products) or _computed_from(second, origin_of(first), products)


def _is_activation(operand: Node, node: Node) -> bool:
    value, result = operand.meta.get("val"), node.meta.get("val")
    same_shape = getattr(value, "shape", None) == getattr(result, "shape", ())
    return same_shape and bool(value.is_floating_point()) and value.dim() >= 2  # type: ignore[union-attr]


def _computed_from(node: Node, origin: Node, products: Mapping[str, Sequence[Site]]) -> bool:
    """Whether a product with a weight lies on a way from `origin` to `node`."""
    if origin.op == "placeholder":
        return False
    front, seen = [(node, False)], {(node, False)}
    while front:
        at, weighed = front.pop()
        weighed = weighed or at.name in products
        for before in at.all_input_nodes:
            if before is origin and weighed:
                return True
            if (before, weighed) not in seen and before is not origin:
                seen.add((before, weighed))
                front.append((before, weighed))
    return False


def _module(node: Node, part: str, products: Mapping[str, Sequence[Site]]) -> str:
    """The module that a value is named after: that of the operator, or around a product or an activation's own."""
    module = module_of(node)
    if part == "act":
        return module.rpartition(".")[0] if _class_of(node).rpartition(".")[0] in ACTIVATION_HOMES else module
    if node.name in products and part != "logits":
        site = products[node.name][0]
        return site.module.rpartition(".")[0] if site.module == module and site.expert is None else site.module
    return module


def _site(module: str, part: str, shape: tuple[int, int]) -> ValueSite:
    role, kind = PARTS[part]
    numbered = re.search(r"(?:^|\.)(\d+)(?=\.|$)", module)
    return ValueSite(
        name=f"{module}:{part}",
        kind=kind,
        role=role,
        module=module,
        tied_group=None,
        num_heads=shape[0],
        head_dim=shape[1],
        layer=int(numbered.group(1)) if numbered else None,
    )
