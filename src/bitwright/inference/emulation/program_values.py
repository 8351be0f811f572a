"""Where a plan's values are in a program, and what of them it has no place for.

Every part of `graph_values.py` has a place (`graph_places.py`), whether attention is one operator or written out, and
whether a norm is. K and V of a cache are rounded where attention reads them: they are what the cache holds, and
rounding them again at every read changes nothing, since a scale that a token or a head has stays what it was. What has
no place:

    a cache whose keys and values this program does not show, as that of a layer without softmax
    a static scale per head, where the program multiplies matrices of all heads and sequences in one dimension, as after
        `run_decompositions`
    keys under scales per channel, where the program is one that reads a cache: groups of tokens that are full are
        counted from the beginning of the text, which it does not know
    the sum of a softmax over blocks of keys, where their number is free in the program
    values of operators that `graph_values.py` does not know

All of these are refused by name, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import Node

from bitwright.errors import PlanError
from bitwright.inference.emulation.program_rewriter import Rewriter
from bitwright.inference.emulation.values import ValueRule, value_rules
from bitwright.models.attention_calls import PartOffer
from bitwright.models.graph import node_named
from bitwright.models.graph_places import NORMS, Place, keys_of, places_of
from bitwright.models.graph_sites import GraphSites
from bitwright.models.value_sites import PARTS, ValueSite
from bitwright.plan import Plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.value_rounding import round_values
from bitwright.quantize.value_scheme import ValueScheme

#: Part of a cache → part whose operand it is.
_READ_AT = {"k_cache": "qk", "v_cache": "pv"}
#: Node → part → rule.
ValuePlaces = Mapping[str, Mapping[str, ValueRule]]


def places_of_values(plan: Plan, graph: GraphSites, prefix: str) -> ValuePlaces:
    """Every node at which a plan rounds values, in the program's order, with the rule of each part.

    Raises:
        PlanError: values that have no place in this program; each with the reason.
    """
    chosen = {c.name: c for c in plan.sites if c.kind != "weight" and c.scheme != "as_loaded"}
    if not chosen:
        return {}
    nodes = {site.name.removeprefix(prefix): (site, nodes) for site, nodes in graph.values().items()}
    known: dict[str, ValueSite] = {}
    refused: dict[str, list[str]] = {}
    for name, choice in chosen.items():
        module, _, part = name.rpartition(":")
        at = f"{module}:{_READ_AT.get(part, part)}"
        if at not in nodes:
            refused.setdefault("no operator that computes them is in it", []).append(name)
            continue
        site, at_nodes = nodes[at]
        role, kind = PARTS[part]
        known[name] = replace(site, name=name, role=role, kind=kind)
        scheme = VALUE_SCHEMES[choice.scheme]
        if scheme.axis == "head" and choice.shape[0] > 1 and site.num_heads == 1:
            refused.setdefault("its operators have sequences and heads in one dimension", []).append(name)
            continue
        reasons = [_why_not(node_named(graph.program, node), part, scheme) for node in at_nodes]
        for reason in [reason for reason in reasons if reason is not None][:1]:
            refused.setdefault(reason, []).append(name)
    _raise_if_refused(refused)
    rules = {site.name: rule for site, rule in value_rules(plan, known.values()).items()}
    found: dict[str, dict[str, ValueRule]] = {}
    for name, rule in rules.items():
        module, _, part = name.rpartition(":")
        for node in nodes[f"{module}:{_READ_AT.get(part, part)}"][1]:
            found.setdefault(node, {})[part] = rule
    return {node.name: found[node.name] for node in graph.program.graph.nodes if node.name in found}


def _why_not(node: Node, part: str, scheme: ValueScheme) -> str | None:
    """Why values of an operator cannot be rounded so in a program; None where they can."""
    if part not in ("softmax_sum", "k_cache"):
        return None
    num_queries, num_keys = keys_of(node)
    if part == "softmax_sum" and not isinstance(num_keys, int):
        return "they are sums of a number of blocks of keys that it leaves free: export it with a fixed length"
    if part == "k_cache" and scheme.group_tokens > 1 and str(num_queries) != str(num_keys):
        return "groups of tokens are counted from the beginning of the text, and it reads a cache of any beginning"
    return None


def _raise_if_refused(refused: Mapping[str, Sequence[str]]) -> None:
    if not refused:
        return
    listing = "; ".join(f"{listed(names)} ({reason})" for reason, names in refused.items())
    raise PlanError(
        f"the plan rounds values at {listing}, for which this program has no place of its own; run the plan on the "
        "model itself (bitwright.inference.apply(plan, model)), or choose schemes that round weights alone"
    )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def round_values_in(rewriter: Rewriter, places: ValuePlaces) -> None:
    """Insert what rounds the values of `places_of_values`."""
    found: list[tuple[Node, tuple[Place, ...], PartOffer]] = []
    for name, rules in places.items():
        node, offer = rewriter.nodes[name], partial(_rounded, rules)
        if "norm" in rules and node.target not in NORMS:
            named = rewriter.name_norm_input(name)
            found.append((named, places_of(named, ("norm",)), offer))
        found.append((node, places_of(node, rules), offer))
    for changed in found:  # only now: places are read off a graph that nothing was inserted into
        rewriter.change_values(*changed)


def _rounded(rules: Mapping[str, ValueRule], part: str, operand: str, value: Tensor) -> Tensor:
    rule = rules.get(part)
    if rule is None:
        return value
    return round_values(value, rule.scheme, _scale_per_head(rule.scale(operand), value))


def _scale_per_head(scale: Tensor | None, value: Tensor) -> Tensor | None:
    """One scale for each head of a value: keys may lie in the program once for every query head that reads them."""
    heads: Any = value.shape[1] if scale is not None and scale.numel() > 1 else 1
    if scale is None or scale.numel() in (1, heads):
        return scale
    return scale.repeat_interleave(heads // scale.numel())
