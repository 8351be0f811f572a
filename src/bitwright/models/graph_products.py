"""Products of two activations in a program: which nodes are some, which operands they have, and how these lie.

    product = product_of(node)
    q = product.first.seen(value)           # [batch, heads, tokens, numbers], the summed dimension last
    product.first.back(q, value)            # and back

Products are matmul, bmm, baddbmm and einsum, whatever the order of their dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

_ATEN: Any = torch.ops.aten
#: Products of two activations.
ACTIVATION_PRODUCTS = frozenset({_ATEN.matmul.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN.einsum.default})


def tensors_of(node: Node) -> list[Node]:
    """The operands of a product, or the first argument of anything else: nodes."""
    arguments: Any = node.args
    match node.target:
        case _ATEN.einsum.default:
            return list(arguments[1])
        case _ATEN.baddbmm.default:
            return [arguments[1], arguments[2]]
    return [arg for arg in arguments[:2] if isinstance(arg, Node)]


def with_operand(node: Node, args: Any, position: int, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Arguments of a node, or what stands for them, with one of the operands of `tensors_of` changed."""
    if node.target is _ATEN.einsum.default:
        operands = list(args[1])
        operands[position] = change(operands[position])
        return (args[0], operands, *args[2:])
    at = position + 1 if node.target is _ATEN.baddbmm.default else position
    return (*args[:at], change(args[at]), *args[at + 1 :])


class Order(NamedTuple):
    """How a tensor is seen as [batch, heads, tokens, numbers]: its dimensions in that order, heads in any number."""

    dims: tuple[int, ...]

    def shape(self, value: Tensor) -> tuple[Any, ...]:
        """[batch, heads, tokens, numbers] of a tensor."""
        sizes = [value.shape[dim] for dim in self.dims]
        return (sizes[0] if len(sizes) > 2 else 1, prod(sizes[1:-2]), *sizes[-2:])

    def seen(self, x: Tensor) -> Tensor:
        """The tensor in that shape."""
        ordered = x.permute(self.dims)
        match len(self.dims):
            case 4:
                return ordered
            case 3:
                return ordered.unsqueeze(1)
            case 2:
                return ordered[None, None]
        return ordered.flatten(1, -3)

    def back(self, seen: Tensor, like: Tensor) -> Tensor:
        """The reverse: in the shape of `like`."""
        ordered = seen.reshape([like.shape[dim] for dim in self.dims])
        return ordered.permute([self.dims.index(dim) for dim in range(len(self.dims))])


class ActivationProduct(NamedTuple):
    """A product of two activations: how its operands and its result lie, both with the summed dimension last."""

    first: Order
    second: Order
    result: Order


def product_of(node: Node) -> ActivationProduct:
    """How the operands of a product lie. Raises ValueError where it is none of one summed dimension."""
    dims = [operand.meta["val"].dim() for operand in tensors_of(node)]
    if len(dims) != 2 or min(dims) < 2:
        raise ValueError("no product of two matrices")
    if node.target is _ATEN.einsum.default:
        return _einsum(str(node.args[0]))
    first, second = (tuple(range(dim)) for dim in dims)
    result = tuple(range(max(dims)))
    return ActivationProduct(Order(first), Order((*second[:-2], second[-1], second[-2])), Order(result))


def _einsum(equation: str) -> ActivationProduct:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    first, comma, second = inputs.partition(",")
    plain = all(len(set(letters)) == len(letters) and letters.isalpha() for letters in (first, second, output))
    summed = [letter for letter in first if letter in second and letter not in output]
    shared = [letter for letter in output if letter in first and letter in second]
    # in the order of the output: what comes last before the summed one are tokens
    own = [[letter for letter in output if letter in letters and letter not in shared] for letters in (first, second)]
    whole = all(set(letters) == {*shared, *o, *summed} for letters, o in zip((first, second), own, strict=True))
    if not arrow or not comma or not plain or not whole or len(summed) != 1 or not own[0] or not own[1]:
        raise ValueError(f"einsum '{equation}' is no product of two matrices with one summed dimension")
    return ActivationProduct(
        Order(tuple(first.index(letter) for letter in (*shared, *own[0], *summed))),
        Order(tuple(second.index(letter) for letter in (*shared, *own[1], *summed))),
        Order(tuple(output.index(letter) for letter in (*shared, *own[0], *own[1]))),
    )
