"""Rounded values in a model that runs packed: the places of emulation, by hooks where weights are no parameters.

What attention multiplies, norms, activation functions and the residual stream are reached as everywhere
(`models/value_calls.py`), for the time of each forward. Products with packed weights are not functions of a parameter
that could be watched: their modules have hooks for good.

Keys and values that go to a cache made of codes (`cache/`) are rounded by the cache. A cache that is new and empty
is given such layers on the way in, whoever made it: `generate()` of transformers keeps codes too. Where a cache alone
is rounded and it holds codes, attention runs as the model has it; without a cache it runs step by step
(`models/attention_calls.py`), since keys have to be rounded before they are read.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.inference.emulation.values import Fallbacks, ValueRule, round_operand
from bitwright.inference.fallback import Fallback
from bitwright.inference.packed.modules import PackedLinear, PackedOperand
from bitwright.models.sites import Site
from bitwright.models.value_calls import ValueCalls, products_of
from bitwright.models.value_sites import ValueSite

_CACHE_PARTS = ("k_cache", "v_cache")


def round_values_of(
    planned: nn.Module, rules: Mapping[ValueSite, ValueRule], sites: Sequence[Site], fallbacks: Fallbacks
) -> frozenset[str]:
    """Have a packed model round its values from now on; return the sites that are rounded behind a packed product.

    Args:
        planned: from `packed_model`.
        rules: value site → what it runs with.
        sites: the weight sites of the model as loaded.
        fallbacks: what happens to tokens that overflow; those that are not there saturate.
    """
    device = next(planned.parameters()).device
    by_name = {site.name: rule.on(device, site.operands) for site, rule in rules.items()}
    hooked = set()
    for name, of_product in products_of(planned, sites).items():
        modules = _packed_modules(planned, of_product)
        if name in by_name and modules:
            hooked.add(name)
            for module in modules:
                module.register_forward_hook(partial(_round_output, name, by_name[name], fallbacks.get((name, "y"))))
    rest = {name: rule for name, rule in by_name.items() if name not in hooked}
    if rest:
        hooks = ValueHooks(rules=rest, sites=sites, fallbacks=fallbacks)
        planned.register_forward_pre_hook(hooks.begin, with_kwargs=True)
        planned.register_forward_hook(hooks.end, always_call=True)
    return frozenset(hooked)


def _packed_modules(planned: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """The modules that compute the products of sites whose weights are packed."""
    found: dict[int, nn.Module] = {}
    for site in sites:
        owner = planned.get_submodule(site.module)
        operand = getattr(owner, site.parameter.rpartition(".")[2], None)
        if isinstance(owner, PackedLinear):
            found[id(owner)] = owner
        elif isinstance(operand, PackedOperand):
            matrix = operand.matrices[site.expert or 0]
            found[id(matrix)] = matrix
    return list(found.values())


def _round_output(name: str, rule: ValueRule, fallback: Fallback | None, _: nn.Module, __: Any, y: Tensor) -> Tensor:
    return _rounded(name, "y", y, rule, fallback)


def _rounded(name: str, operand: str, value: Tensor, rule: ValueRule, fallback: Fallback | None) -> Tensor:
    """In fp32, as in emulation: scales are no numbers of bf16."""
    return round_operand(name, operand, value.float(), rule, fallback).to(value.dtype)


@dataclass(kw_only=True, eq=False)
class ValueHooks:
    """Opens the rounding of values when a forward begins, and closes it when it ends."""

    #: Site name → rule.
    rules: Mapping[str, ValueRule]
    #: Weight sites of the model as loaded.
    sites: Sequence[Site]
    fallbacks: Fallbacks
    #: Thread → what its forwards have opened, innermost last.
    opened: dict[int, list[ExitStack]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> ValueHooks:
        # rules never change, and every forward names its own module; a copy of a model counts for itself
        return ValueHooks(rules=self.rules, sites=self.sites, fallbacks=copy.deepcopy(self.fallbacks, memo))

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start to round."""
        rules = self.rules
        if any(_is_of_cache(name) for name in rules):
            from bitwright.inference.cache.coded_cache import cache_argument, coded_cache

            cache = coded_cache(module, kwargs, rules, self.fallbacks)
            if cache is not None:
                kwargs = {**kwargs, cache_argument(kwargs): cache}
                rules = {name: rule for name, rule in rules.items() if not _is_of_cache(name)}
        with ExitStack() as stack:
            if rules:
                groups = {name: rule.scheme.group_tokens for name, rule in rules.items()}
                offer = partial(_offered, rules, self.fallbacks)
                stack.enter_context(ValueCalls(module, offer, names=rules, groups=groups, sites=self.sites))
            self.opened.setdefault(threading.get_ident(), []).append(stack.pop_all())
        return args, kwargs

    @torch.compiler.disable
    def end(self, *_: Any) -> None:
        """Stop rounding, also where the forward raised."""
        stacks = self.opened.get(threading.get_ident())
        if stacks:
            stacks.pop().close()


def _is_of_cache(name: str) -> bool:
    return name.rpartition(":")[2] in _CACHE_PARTS


def _offered(rules: Mapping[str, ValueRule], fallbacks: Fallbacks, name: str, operand: str, value: Tensor) -> Tensor:
    rule = rules.get(name)
    return value if rule is None else _rounded(name, operand, value, rule, fallbacks.get((name, operand)))
