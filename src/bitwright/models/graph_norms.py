"""Norms that are written out: x · rsqrt(mean x² + ε), or (x − mean) / sqrt(var + ε), times a gain, plus a bias.

A norm's value sites are its input and its output. The output is its last operator's result. The input is read by
several of its operators, and by others that are not part of it (the residual stream passes it by), so that those
within it have to be told apart: they lie between the input and the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from bitwright.models.graph_places import LOOKS_LIKE_ITSELF, NORM_INPUT, origin_of, overloads

_SUMS = overloads("add", "add_")
_DIFFERENCES = overloads("sub")
_MULTIPLICATIONS = overloads("mul", "mul_")
_DIVISIONS = overloads("div", "div_")
_INVERSE_ROOTS = overloads("rsqrt")
_ROOTS = overloads("sqrt")
#: Operators of a written norm, and as many before it.
_MOST_NODES = 32


def ends_written_norm(node: Node, constants: set[str]) -> bool:
    """Whether a node is the last operator of a written norm.

    Args:
        node: of a traced program.
        constants: names of the nodes that are parameters.
    """
    if not _is_within(node, constants):
        return False
    return not any(_is_within(user, constants) and not _is_normalised(user) for user in _users(node))


def norm_input(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """What a written norm takes in, and the nodes inside it that read that.

    Args:
        node: its last operator.

    Raises:
        ValueError: it cannot be told.
    """
    normalised = next((found for found in (node, *_before(node)) if _is_normalised(found)), None)
    operands = [] if normalised is None else normalised.all_input_nodes
    roots = [operand for operand in operands if origin_of(operand).target in _INVERSE_ROOTS | _ROOTS]
    others = [operand for operand in operands if operand not in roots]
    if not roots or not others:
        raise ValueError("nothing in it is divided by a root")
    x = others[0]
    if origin_of(x).target in _DIFFERENCES:  # x less its mean
        x = origin_of(x).all_input_nodes[0]
    # a cast that changes nothing is a node too, and others than the norm may read it
    while x not in _before(roots[0]) and x.target in LOOKS_LIKE_ITSELF:
        x = x.all_input_nodes[0]
    if x not in _before(roots[0]):
        raise ValueError("what is divided is not what the root is of")
    inside = {node, *_before(node, until=x)}
    return x, tuple(user for user in x.users if user in inside)


def name_norm_input(graph: Graph, end: Node) -> Node:
    """Put an operator before a written norm that passes its input on to it alone; returns the operator.

    Args:
        graph: changed.
        end: the norm's last operator.
    """
    x, readers = norm_input(end)
    first = next(node for node in graph.nodes if node in readers)
    with graph.inserting_before(first):
        named = graph.call_function(NORM_INPUT, (x,))
    named.meta = dict(x.meta)
    for reader in readers:
        reader.replace_input_with(x, named)
    return named


def _is_within(node: Node, constants: set[str]) -> bool:
    """Whether a node is x · rsqrt(…), that times a gain, or one of these plus a bias."""
    if _is_normalised(node):
        return True
    if node.target not in _MULTIPLICATIONS | _SUMS:
        return False
    operands = [origin_of(operand) for operand in node.all_input_nodes]
    if not any(_is_vector(operand, constants) for operand in operands):
        return False
    return any(_is_within(operand, constants) for operand in operands)


def _is_vector(node: Node, constants: set[str]) -> bool:
    """Whether a node is a parameter of one dimension, also one to which a number was added, as in 1 + gain."""
    if node.target in _SUMS and len(node.all_input_nodes) == 1:
        node = origin_of(node.all_input_nodes[0])
    return node.name in constants and node.meta["val"].dim() == 1


def _is_normalised(node: Node) -> bool:
    if node.target not in _MULTIPLICATIONS | _DIVISIONS:
        return False
    roots = _INVERSE_ROOTS if node.target in _MULTIPLICATIONS else _ROOTS
    return any(origin_of(operand).target in roots for operand in node.all_input_nodes)


def _users(node: Node) -> Iterator[Node]:
    """Users of a node's values, in whatever shape."""
    for user in node.users:
        if user.target in LOOKS_LIKE_ITSELF:
            yield from _users(user)
        else:
            yield user


def _before(node: Node, until: Node | None = None) -> dict[Node, None]:
    """Nodes that a node is computed from, nearest first, none beyond `until`; at most so many."""
    found: dict[Node, None] = {}
    front = [node]
    while front and len(found) < _MOST_NODES:
        for operand in front.pop(0).all_input_nodes:
            if operand is not until and operand not in found:
                found[operand] = None
                front.append(operand)
    return found
