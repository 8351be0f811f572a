"""Where a plan has static scales, and what a model meets there on prompts: what finding scales and judging them share.

The reference sees the prompts, as in the search: fp32, nothing rounded. Inputs of matrices are looked at after the
change of their transform, values head by head.

Legend: H heads (1 outside attention), T tokens, D numbers of a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import DataError, PlanError
from bitwright.inference.emulation.emulate import SiteRule
from bitwright.inference.emulation.site_rules import site_rules
from bitwright.inference.emulation.values import ValueRule, scaled_operands, value_rule
from bitwright.inference.planned_model import sites_of
from bitwright.models.linear_calls import LinearCalls, Matrix, Operation
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.models.value_calls import ATTENTION_PARTS, ValueCalls
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import SCHEMES, VALUE_SCHEMES
from bitwright.quantize.scheme import TensorScheme

#: Told (site, operand, numbers [H, T, D]); the operand of a matrix is "input".
Look = Callable[[str, str, Tensor], None]


def hash_prompts(prompts: Sequence[Tensor]) -> bytes:
    """SHA-256 over the shapes and ids of prompts, in order."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(f"{list(ids.shape)}\n".encode())
        digest.update(ids.cpu().long().contiguous().numpy().tobytes())
    return digest.digest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StaticPlaces:
    """The static sites of a plan."""

    sites: tuple[Site, ...]
    #: Site → its choice, and the rule that it runs with.
    weights: Mapping[str, tuple[SiteChoice, SiteRule]]
    #: Site name → the site, and its rule.
    values: Mapping[str, tuple[ValueSite, ValueRule]]

    @staticmethod
    def of(plan: Plan, loaded: LoadedModel, sites: Sequence[Site] | None) -> StaticPlaces:
        """Find them; scales that the plan lacks count as 1.

        Raises:
            PlanError: there are none, or the plan does not fit the model.
        """
        known = sites_of(plan, loaded.model) if sites is None else tuple(sites)
        static = [c for c in plan.sites if c.kind == "weight" and SCHEMES[c.scheme].static_activations]
        unset = {f"{choice.name}/input_scale": np.ones((), np.float32) for choice in static}
        rules = site_rules(plan.attach(tensors={**unset, **plan.tensors}), known)
        values = _static_values(plan, loaded)
        if not static and not values:
            raise PlanError("the plan has no static scales: all that it rounds finds its scales on every call")
        return StaticPlaces(sites=known, weights={c.name: (c, rules[c.name]) for c in static}, values=values)

    @property
    def names(self) -> list[str]:
        """Names of all static sites."""
        return [*self.weights, *self.values]

    def operands(self, name: str) -> tuple[str, ...]:
        """Operands of a site that have a static scale."""
        if name in self.weights:
            return ("input",)
        site, rule = self.values[name]
        return scaled_operands(site, rule.scheme)

    def scheme(self, name: str) -> TensorScheme:
        """What the values of a site are rounded to."""
        if name in self.values:
            return self.values[name][1].scheme.values
        scheme = SCHEMES[self.weights[name][0].scheme].activations
        assert scheme is not None
        return scheme

    def scale(self, name: str, operand: str) -> Tensor:
        """The plan's scale of an operand, fp32 [H] or [1]."""
        if name in self.values:
            return self.values[name][1].scales[operand]
        scale = self.weights[name][1].input_scale
        assert scale is not None
        return scale.reshape(1)


def _static_values(plan: Plan, loaded: LoadedModel) -> dict[str, tuple[ValueSite, ValueRule]]:
    chosen = {c.name: VALUE_SCHEMES[c.scheme] for c in plan.sites if c.kind != "weight" and c.scheme != "as_loaded"}
    static = {name: scheme for name, scheme in chosen.items() if scheme.static}
    found = {}
    for site in find_value_sites(loaded.model) if static else ():
        scheme = static.get(site.name)
        if scheme is not None and scaled_operands(site, scheme):
            ends = ("", *(f"_{operand}" for operand in site.operands))
            unset = {f"{site.name}/scale{end}": np.ones(1, np.float32) for end in ends}
            found[site.name] = site, value_rule(site, scheme, {**unset, **plan.tensors})
    return found


@torch.no_grad()
def look_at_prompts(loaded: LoadedModel, prompts: Sequence[Tensor], places: StaticPlaces, look: Look) -> None:
    """Run the model on prompts, int64 [B, T] each, and show all values at static sites.

    Raises:
        DataError: no prompts, or values that are not finite.
    """
    if not any(ids.numel() for ids in prompts):
        raise DataError("there are no prompts to look at; give token ids of texts like those to come")

    def show(name: str, operand: str, x_HTD: Tensor) -> None:
        if not bool(torch.isfinite(x_HTD).all()):
            raise DataError(f"values at {name} are not finite on these prompts; give others")
        look(name, operand, x_HTD)

    def handle(matrix: Matrix, x: Tensor, operation: Operation) -> Tensor:
        for site in matrix.sites:
            if site.name in places.weights and x.is_floating_point():
                changed = places.weights[site.name][1].transform.input(x)
                show(site.name, "input", changed.reshape(1, -1, changed.shape[-1]))
        return operation(x)

    def offer(name: str, operand: str, value: Tensor) -> Tensor:
        if name in places.values and operand in places.operands(name):
            show(name, operand, _by_head(name, value))
        return value

    with ExitStack() as stack:
        watched = [site for site in places.sites if site.name in places.weights]
        if watched:
            stack.enter_context(LinearCalls(loaded.model, watched, handle))
        if places.values:
            stack.enter_context(ValueCalls(loaded.model, offer, names=places.values, sites=places.sites))
        for ids in prompts:
            loaded.model(input_ids=ids, use_cache=False)


def _by_head(name: str, value: Tensor) -> Tensor:
    """[B, H, T, D] or [..., D] → [H, tokens, D]."""
    if name.rpartition(":")[2] in ATTENTION_PARTS:
        return value.transpose(0, 1).flatten(1, 2)
    return value.reshape(1, -1, value.shape[-1])
