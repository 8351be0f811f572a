"""Value sites of a traced program: what it computes between its weights, op by op.

    qk          product of two activations that reaches a softmax through elementwise operators
    softmax     the softmax itself; softmax_sum has no place of its own in a program
    pv          product of a softmax's result with an activation
    output      its result
    act         an activation function
    norm        layer_norm, rms_norm, or x · rsqrt(mean x²) · gain written out
    residual    x + f(x), with a weight somewhere in f
    gate, up, gate_up, down, logits             products, by the role of their weight

scaled_dot_product_attention is the first four in one operator. Names are those of `value_sites.py`, "<module>:<part>",
with the module around the operator; several operators of one module and part are one site. A module without a cache
keeps no state, so that none of its sites is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from bitwright.models.graph import RESHAPES, SAME_VALUES, WeightUse, module_of, parameters_of
from bitwright.models.sites import Site
from bitwright.models.value_calls import ACTIVATION_HOMES, NOT_ELEMENTWISE, PRODUCT_PARTS
from bitwright.models.value_sites import PARTS, ValueSite

_ATEN: Any = torch.ops.aten


def _overloads(*names: str) -> frozenset[Any]:
    """All overloads of operators."""
    packets = [getattr(_ATEN, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


SOFTMAXES = _overloads("softmax", "_softmax")
FUSED_ATTENTIONS = _overloads("scaled_dot_product_attention")
ACTIVATION_FUNCTIONS = _overloads(
    "celu", "elu", "gelu", "hardswish", "leaky_relu", "mish", "relu", "relu6", "selu", "silu", "softplus"
)
NORMS = _overloads("layer_norm", "rms_norm", "native_layer_norm", "group_norm")
#: Products of two activations.
_ACTIVATION_PRODUCTS = _overloads("matmul", "bmm", "baddbmm", "einsum")
_ELEMENTWISE = _overloads("add", "sub", "mul", "div", "masked_fill", "where", "tanh", "clamp")
_SUMS = _overloads("add")
_MULTIPLICATIONS = _overloads("mul")
_ROOTS = _overloads("rsqrt")
_LOOKS_LIKE_ITSELF = SAME_VALUES | RESHAPES
#: Parts of a fused attention.
_FUSED_PARTS = ("qk", "softmax", "pv", "output")


def find_graph_values(
    program: ExportedProgram, sites: Sequence[Site], uses: Mapping[str, Sequence[WeightUse]]
) -> dict[ValueSite, tuple[str, ...]]:
    """Value site → names of the nodes that compute it, in the program's order.

    Args:
        program: from `graph.trace` or `torch.export`.
        sites: its weight sites.
        uses: site name → where the program computes with it.
    """
    products = {use.node: site for site in sites for use in uses[site.name] if use.kind == "product"}
    constants = set(parameters_of(program))
    found: dict[tuple[str, str], list[Node]] = {}
    for node in program.graph.nodes:
        for part in _parts_of(node, products, constants):
            found.setdefault((_module(node, part, products), part), []).append(node)
    return {
        _site(module, part, nodes[0]): tuple(node.name for node in nodes) for (module, part), nodes in found.items()
    }


def _parts_of(node: Node, products: Mapping[str, Site], constants: set[str]) -> Iterator[str]:
    if node.name in products:
        part = PRODUCT_PARTS.get(products[node.name].role)
        if part is not None:
            yield part
    elif node.target in FUSED_ATTENTIONS:
        yield from _FUSED_PARTS
    elif node.target in SOFTMAXES:
        if _reaches(node, _is_product, _LOOKS_LIKE_ITSELF):  # not the softmax of a router or of an output
            yield "softmax"
    elif node.target in _ACTIVATION_PRODUCTS:
        if _reaches(node, lambda user: user.target in SOFTMAXES, _LOOKS_LIKE_ITSELF | _ELEMENTWISE):
            yield "qk"
        elif any(_origin(operand).target in SOFTMAXES for operand in node.all_input_nodes):
            yield "pv"
            yield "output"
    elif node.target in ACTIVATION_FUNCTIONS or _ends_activation_module(node):
        yield "act"
    elif node.target in NORMS or _ends_written_norm(node, constants):
        yield "norm"
    elif node.target in _SUMS and _is_residual(node, products):
        yield "residual"


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
    return node.target in _ACTIVATION_PRODUCTS


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


def _origin(node: Node) -> Node:
    """The node whose values these are, in whatever shape."""
    while node.target in _LOOKS_LIKE_ITSELF and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _ends_written_norm(node: Node, constants: set[str]) -> bool:
    """Whether a node is the last multiplication of x · rsqrt(…) · gain, or of x · rsqrt(…) where there is no gain."""
    if node.target not in _MULTIPLICATIONS:
        return False
    operands = [_origin(operand) for operand in node.all_input_nodes]
    if any(_is_normalised(operand) for operand in operands) and any(operand.name in constants for operand in operands):
        return True
    if not _is_normalised(node):
        return False
    gains = [user for user in _users(node) if user.target in _MULTIPLICATIONS]
    return not any(_origin(other).name in constants for gain in gains for other in gain.all_input_nodes)


def _is_normalised(node: Node) -> bool:
    return node.target in _MULTIPLICATIONS and any(
        _origin(operand).target in _ROOTS for operand in node.all_input_nodes
    )


def _users(node: Node) -> Iterator[Node]:
    """Users of a node's values, in whatever shape."""
    for user in node.users:
        if user.target in _LOOKS_LIKE_ITSELF:
            yield from _users(user)
        else:
            yield user


def _is_residual(node: Node, products: Mapping[str, Site]) -> bool:
    """Whether a sum is x + f(x), or f(x) + x, with a weight in f."""
    operands: Any = node.args[:2]
    if not all(isinstance(operand, Node) and _is_activation(operand, node) for operand in operands):
        return False
    first, second = operands
    return _computed_from(first, _origin(second), products) or _computed_from(second, _origin(first), products)


def _is_activation(operand: Node, node: Node) -> bool:
    value, result = operand.meta.get("val"), node.meta.get("val")
    same_shape = getattr(value, "shape", None) == getattr(result, "shape", ())
    return same_shape and bool(value.is_floating_point()) and value.dim() >= 2  # type: ignore[union-attr]


def _computed_from(node: Node, origin: Node, products: Mapping[str, Site]) -> bool:
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


def _module(node: Node, part: str, products: Mapping[str, Site]) -> str:
    """The module that a value is named after: that of the operator, or around a product or an activation's own."""
    module = module_of(node)
    if part == "act":
        return module.rpartition(".")[0] if _class_of(node).rpartition(".")[0] in ACTIVATION_HOMES else module
    if node.name in products and part != "logits":
        site = products[node.name]
        return site.module.rpartition(".")[0] if site.module == module and site.expert is None else site.module
    return module


def _site(module: str, part: str, node: Node) -> ValueSite:
    role, kind = PARTS[part]
    operand = node.all_input_nodes[0] if part == "qk" else node
    value = operand.meta["val"]
    shape = (value[0] if isinstance(value, tuple | list) else value).shape
    in_heads = role.startswith("attn.") and len(shape) == 4
    numbered = re.search(r"(?:^|\.)(\d+)(?=\.|$)", module)
    return ValueSite(
        name=f"{module}:{part}",
        kind=kind,
        role=role,
        module=module,
        tied_group=None,
        # only sizes that are read here become numbers: batch and length may be free in the program
        num_heads=int(shape[1]) if in_heads else 1,
        head_dim=1 if part == "softmax" else int(shape[-1]),
        layer=int(numbered.group(1)) if numbered else None,
    )
