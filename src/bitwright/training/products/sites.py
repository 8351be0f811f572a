"""Which linear modules of a model multiply codes under a policy, and why the others do not.

A module is known by its role (`models/sites.py`): the head and embeddings stay in the policy's `compute`, what belongs
to a router in fp32, and so do the last layers where the policy says so. Layers whose weights are packed codes already
(a frozen base under adapters) have a product of their own. What has no known role multiplies codes like any other.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from bitwright.errors import ModelError
from bitwright.models.sites import Site, find_sites, has_codes, role_of
from bitwright.training.forward.named_islands import find_islands
from bitwright.training.policy import Policy

_IN_CODES = "packed codes, which are frozen and have a product of their own"
_LAYER = re.compile(r"^(.*?\.)?(\d+)(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductSites:
    """Linear modules of a model, each on one side."""

    #: Name of a module that multiplies codes → its role.
    low: Mapping[str, str]
    #: Name of a module that does not → why.
    high: Mapping[str, str]
    #: Name of a module that multiplies by matrices without being a linear layer → why it stays as it is.
    beside: Mapping[str, str]


def product_sites(model: nn.Module, policy: Policy) -> ProductSites:
    """Sort a model's linear modules by whether they multiply codes.

    Args:
        model: names are those of its modules.
        policy: one with a recipe of products.
    """
    roles = _roles(model)
    why = {kept.role: kept.reason for kept in policy.kept}
    last = _last_layers(tuple(roles), policy.last_layers_high)
    low: dict[str, str] = {}
    high: dict[str, str] = {}
    islands = {f"{island.module}.": island.why for island in find_islands(model)}
    for name, role in roles.items():
        inside = next((reason for prefix, reason in islands.items() if f"{name}.".startswith(prefix)), None)
        if inside is not None:
            high[name] = inside
        elif has_codes(model.get_submodule(name)):
            high[name] = _IN_CODES
        elif role in why:
            high[name] = f"{role}: {why[role]}"
        elif name in last:
            high[name] = f"in the last {policy.last_layers_high:.0%} of the layers, whose gradients are largest"
        else:
            low[name] = role
    return ProductSites(low=low, high=high, beside=_beside(model, islands))


def _beside(model: nn.Module, islands: Mapping[str, str]) -> dict[str, str]:
    """Modules with matrices of their own that are no linear layers, such as experts in one parameter."""
    return {
        site.module: f"{site.role.partition('.')[0]}: matrices of a {type(model.get_submodule(site.module)).__name__}, "
        "which is no linear layer"
        for site in _sites(model)
        if site.role not in ("embedding", "lm_head")
        and not is_linear(model.get_submodule(site.module))
        and not any(f"{site.module}.".startswith(prefix) for prefix in islands)
    }


def _sites(model: nn.Module) -> tuple[Site, ...]:
    """The model's sites; none where there is nothing that a plan could be made for, which may be linear all the "
    "same."""
    try:
        return find_sites(model)
    except ModelError:
        return ()


def _roles(model: nn.Module) -> dict[str, str]:
    """Name of a linear module → its role."""
    found: dict[str, str] = {}
    for prefix, inner in _declared_models(model):
        try:
            found |= {f"{prefix}{use}": site.role for site in find_sites(inner) for use in site.uses}
        except ModelError:  # nothing that a plan could be made for; its modules may be linear all the same
            continue
    return {
        name: found.get(name, role_of(name)).partition("[")[0]
        for name, module in model.named_modules()
        if is_linear(module)
    }


def _declared_models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(prefix of its names, model) of models that say which layer is their head: this one, or those that it wraps."""
    if hasattr(module, "get_output_embeddings"):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _declared_models(child, f"{prefix}{name}.")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of torch, or transformers' Conv1D."""
    defining = sys.modules.get("transformers.pytorch_utils")
    return isinstance(module, nn.Linear) or (defining is not None and isinstance(module, defining.Conv1D))


def _last_layers(names: tuple[str, ...], share: float) -> frozenset[str]:
    """Names in the last layers of a list of layers: `share` of them, rounded up."""
    layers: dict[str, int] = {}
    for name in names:
        found = _LAYER.match(name)
        if found is not None:
            layers[name] = int(found.group(2))
    first = max(layers.values(), default=-1) + 1
    first -= math.ceil(share * first)
    return frozenset(name for name, layer in layers.items() if layer >= first)
