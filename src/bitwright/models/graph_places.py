"""What of a program's operator is a value: its operands before it, its result behind it, or all that is inside it.

    for place in places_of(node, ("pv", "output")):
        place.change(offer, value)

`offer(part, operand, value)` is given what `attention_calls.py` gives at the same part, in the same layout
[batch, heads, tokens, head_dim], and what it returns is used in its place. So there are two users and one definition:
running a program (`graph_run.py`), and inserting operators into one (`inference/emulation/program.py`).

    part                     place                                      as what
    qk                       the product's operands                     q times the number that the scores are scaled by
    k_cache, v_cache         k before q·k, v before p·v                 as they are
    softmax, softmax_sum     behind a softmax P                         e = P / max P, since the largest e is 1
    pv                       the product's operands                     p as e again
    output, y, h             behind the operator
    norm                     its first operand, and behind it

A fused attention has all of these inside, and is computed step by step instead (`attention_calls.attention`). How the
operands of products lie is said by `graph_products.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from bitwright.models.attention_calls import PartOffer, attention, causal_mask, sum_by_blocks
from bitwright.models.graph import RESHAPES, SAME_VALUES
from bitwright.models.graph_products import Order, product_of, tensors_of, with_operand

_ATEN: Any = torch.ops.aten


def overloads(*names: str) -> frozenset[Any]:
    """All overloads of operators."""
    packets = [getattr(_ATEN, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


SOFTMAXES = overloads("softmax", "_softmax")
FUSED_ATTENTIONS = frozenset({_ATEN.scaled_dot_product_attention.default})
NORMS = overloads("layer_norm", "rms_norm", "native_layer_norm", "group_norm")
_SCALINGS = {_ATEN.mul.Tensor: False, _ATEN.mul.Scalar: False, _ATEN.div.Tensor: True, _ATEN.div.Scalar: True}
#: The operator that `name_norm_inputs` puts before a written norm.
NORM_INPUT = _ATEN.alias.default
#: Operators after which the same values lie in the same or in another shape.
LOOKS_LIKE_ITSELF = SAME_VALUES | RESHAPES
#: Parts that are inside an attention.
INSIDE = ("k_cache", "v_cache", "qk", "softmax", "softmax_sum", "pv", "output")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """One value of an operator, and how another is put in its place."""

    #: "before": an operand; "behind": the result; "instead": the operator's arguments, and what it gives.
    kind: Literal["before", "behind", "instead"]
    #: The operand: its position among the operator's tensors, as `tensors_of` lists them.
    position: int = 0
    #: (offer, the value) → what is used in its place; with "instead" (offer, *args, **kwargs) → the result.
    change: Callable[..., Any]


def places_of(node: Node, parts: Collection[str]) -> tuple[Place, ...]:
    """Every value of a node that belongs to some of its parts, in the order in which they arise."""
    if node.target in FUSED_ATTENTIONS:
        return (Place(kind="instead", change=_attend(by_blocks="softmax_sum" in parts)),)
    found: list[Place] = []
    if {"qk", "k_cache"} & set(parts):
        found += _scores(node)
    if {"pv", "v_cache"} & set(parts):
        found += _weighted(node)
    if "output" in parts:
        found.append(Place(kind="behind", change=_of_heads(("output", "o"), result_order(node))))
    if "norm" in parts:
        found += _norm(node)
    if "softmax" in parts or "softmax_sum" in parts:
        change = _normalised(node, with_sum="softmax_sum" in parts)
        found.append(Place(kind="behind", change=change))
    for part in (part for part in parts if part not in INSIDE and part not in ("norm",)):
        operand = "h" if part == "residual" else "y"
        found.append(Place(kind="behind", change=_plain(part, operand)))
    return tuple(found)


def compute(node: Node, places: Sequence[Place], offer: PartOffer, args: Any, kwargs: Any) -> Any:
    """Run an operator with its values offered on their way."""
    if places[0].kind == "instead":
        return places[0].change(offer, *args, **kwargs)
    for place in places:
        if place.kind == "before":
            args = with_operand(node, args, place.position, partial(place.change, offer))
    target: Any = node.target
    result = target(*args, **kwargs)
    for place in places:
        if place.kind == "behind":
            result = place.change(offer, result)
    return result


def _norm(node: Node) -> list[Place]:
    """Both ends of a norm that is one operator; of one that is written out the end at which the node is."""
    before = Place(kind="before", change=lambda offer, x: offer("norm", "input", x))
    behind = Place(kind="behind", change=lambda offer, y: _first(offer, "norm", "output", y))
    if node.target in NORMS:
        return [before, behind]
    return [before] if node.target is NORM_INPUT else [behind]


def _plain(part: str, operand: str) -> Callable[[PartOffer, Tensor], Tensor]:
    return lambda offer, y: offer(part, operand, y)


def _first(offer: PartOffer, part: str, operand: str, result: Any) -> Any:
    """Offer a result, or the first of several."""
    if isinstance(result, Tensor):
        return offer(part, operand, result)
    return (offer(part, operand, result[0]), *result[1:])


# --- products of activations ------------------------------------------------------------------------------------------


def _of_heads(what: tuple[str, str], order: Order) -> Callable[[PartOffer, Tensor], Tensor]:
    return lambda offer, x: order.back(offer(*what, order.seen(x)), x)


def _scores(node: Node) -> list[Place]:
    """q and k of q·k: k as it is kept, and q with every number that scales the scores, since kernels fold it into q."""
    product, of_k = product_of(node), _factor_before(tensors_of(node)[1])
    scaling = of_k * _factor_behind(node)

    def change_q(offer: PartOffer, q: Tensor) -> Tensor:
        return product.first.back(offer("qk", "q", product.first.seen(q) * scaling) / scaling, q)

    def change_k(offer: PartOffer, k: Tensor) -> Tensor:
        seen = offer("k_cache", "k", product.second.seen(k) / of_k)
        return product.second.back(offer("qk", "k", seen) * of_k, k)

    return [
        Place(kind="before", position=0, change=change_q),
        Place(kind="before", position=1, change=change_k),
    ]


def _factor_before(operand: Node) -> float:
    """The number that an operand was multiplied by last, 1 where there is none."""
    return _factor(origin_of(operand))


def _factor_behind(node: Node) -> float:
    """The number that a product's result is multiplied by next, 1 where there is none."""
    users = list(node.users)
    while len(users) == 1 and users[0].target in LOOKS_LIKE_ITSELF:
        users = list(users[0].users)
    return _factor(users[0]) if len(users) == 1 else 1.0


def _factor(node: Node) -> float:
    number: Any = node.args[1] if node.target in _SCALINGS and len(node.args) > 1 else None
    if not isinstance(number, int | float) or not number > 0:
        return 1.0
    return 1 / number if _SCALINGS[node.target] else float(number)


def _weighted(node: Node) -> list[Place]:
    """p and v of p·v; p as a kernel has it, before the division by its sum."""
    product, at_p = product_of(node), position_of_p(node)
    p_order, v_order = (product.first, product.second) if at_p == 0 else (product.second, product.first)

    def change_p(offer: PartOffer, p: Tensor) -> Tensor:
        seen = p_order.seen(p)
        largest = _largest(seen)
        return p_order.back(offer("pv", "p", seen / largest) * largest, p)

    def change_v(offer: PartOffer, v: Tensor) -> Tensor:
        # tokens are what is summed over: the other way round than k
        seen = offer("v_cache", "v", v_order.seen(v).transpose(-1, -2))
        return v_order.back(offer("pv", "v", seen).transpose(-1, -2), v)

    return [
        Place(kind="before", position=at_p, change=change_p),
        Place(kind="before", position=1 - at_p, change=change_v),
    ]


def position_of_p(node: Node) -> int:
    """Which operand of p·v the softmax's result is."""
    return next(at for at, operand in enumerate(tensors_of(node)) if is_probabilities(operand))


def is_probabilities(node: Node) -> bool:
    """Whether a node's values are a softmax's, some of them perhaps replaced (rows in which all keys are masked)."""
    origin = origin_of(node)
    if origin.target is _ATEN.where.self:
        return any(is_probabilities(operand) for operand in origin.all_input_nodes[1:])
    return origin.target in SOFTMAXES


def result_order(node: Node) -> Order:
    """How the result of p·v lies: [batch, heads, tokens, head_dim]."""
    dims = product_of(node).result.dims
    return Order(dims if position_of_p(node) == 0 else (*dims[:-2], dims[-1], dims[-2]))


def origin_of(node: Node) -> Node:
    """The node whose values these are, in whatever shape."""
    while node.target in LOOKS_LIKE_ITSELF and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def heads_and_width(node: Node, part: str) -> tuple[int, int]:
    """Heads, and numbers of one token in one of them, as `ValueSite` has them.

    Raises:
        ValueError: the operator's values cannot be told, or their sizes are free in the program.
    """
    value: Any = node.meta["val"]
    value = value if isinstance(value, Tensor) else value[0]
    found: tuple[Any, Any] = (1, value.shape[-1] if value.dim() else 1)
    if part in INSIDE:
        q, _, v = _inside(node, part)
        found = (q[1], 1 if part in ("softmax", "softmax_sum") else v[3] if part == "pv" else q[3])
    if not all(isinstance(size, int) for size in found):
        raise ValueError(f"its sizes {found} are free in the program")
    return found


def _inside(node: Node, part: str) -> tuple[tuple[Any, ...], ...]:
    """Shapes [batch, heads, tokens, numbers] of what has a part's heads, and of what has its numbers."""
    if node.target in FUSED_ATTENTIONS:
        arguments: Any = node.args
        q, k, v = (Order(tuple(range(x.dim()))).shape(x) for x in (arg.meta["val"] for arg in arguments[:3]))
        return ((*q[:3], v[3]) if part == "output" else q), k, v
    if part in ("softmax", "softmax_sum"):
        scores = _scores_order(node).shape(node.meta["val"])
        return scores, scores, scores
    product = product_of(node)
    if part == "output":
        result = result_order(node).shape(node.meta["val"])
        return result, result, result
    operands = [operand.meta["val"] for operand in tensors_of(node)]
    first, second = product.first.shape(operands[0]), product.second.shape(operands[1])
    if part == "qk":
        return first, second, second
    p, v = (first, second) if position_of_p(node) == 0 else (second, first)
    return p, v, (*v[:2], v[3], v[2])


def keys_of(node: Node) -> tuple[Any, Any]:
    """Numbers of queries and of keys that an operator of attention computes with; a number, or free."""
    if node.target in FUSED_ATTENTIONS:
        arguments: Any = node.args
        return arguments[0].meta["val"].shape[-2], arguments[1].meta["val"].shape[-2]
    if node.target in SOFTMAXES:
        scores = _scores_order(node).shape(node.meta["val"])
        return scores[2], scores[3]
    product = product_of(node)
    first, second = (operand.meta["val"] for operand in tensors_of(node))
    return product.first.shape(first)[2], product.second.shape(second)[2]


# --- softmax ----------------------------------------------------------------------------------------------------------


def _largest(p: Tensor) -> Tensor:
    """The largest probability of each row: one over the sum of exponentials. 1 where a row is no number."""
    largest = p.detach().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def _scores_order(node: Node) -> Order:
    """How a softmax's result lies, with the dimension that it sums over last."""
    num_dims = node.meta["val"].dim()
    dim = int(node.args[1]) % num_dims  # type: ignore[arg-type]
    return Order((*(other for other in range(num_dims) if other != dim), dim))


def _normalised(node: Node, *, with_sum: bool) -> Callable[[PartOffer, Tensor], Tensor]:
    order = _scores_order(node)

    def change(offer: PartOffer, p: Tensor) -> Tensor:
        seen = order.seen(p)
        largest = _largest(seen)
        e, total = seen / largest, 1 / largest
        if with_sum:
            total = sum_by_blocks(e, torch.zeros_like(largest), lambda so_far: offer("softmax_sum", "sum", so_far))
        return order.back(offer("softmax", "p", e) / total, p)

    return change


def _attend(*, by_blocks: bool) -> Callable[..., Tensor]:
    """scaled_dot_product_attention, step by step."""

    def change(
        offer: PartOffer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        view = Order(tuple(range(query.dim())))
        mask = causal_mask(query.shape[-2], key.shape[-2], query.device, first=0) if is_causal else attn_mask
        if mask is not None and mask.dim() > 2 and query.dim() != 4:
            mask = view.seen(mask.expand(*query.shape[:-1], key.shape[-2]))
        q, k, v = (view.seen(x) for x in (query, key, value))
        o = attention(
            offer,
            q,
            offer("k_cache", "k", k),
            offer("v_cache", "v", v),
            mask,
            scaling=query.shape[-1] ** -0.5 if scale is None else scale,
            by_blocks=by_blocks,
        )
        return o.to(query.dtype).reshape(*query.shape[:-1], value.shape[-1])

    return change
