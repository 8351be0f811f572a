"""One door to running a plan: `apply` takes a model or an exported program, and gives one that runs under the plan.

    planned = bitwright.inference.apply(plan, model)
    planned.generate(**inputs)               # still a transformers model

A program becomes another program (`graph.py`). A model is copied: the copy's weights hold the values of their codes,
and where inputs or values are rounded, they are for the time of every forward of the copy, by hooks on the model as a
whole. So the copy runs as `emulate_plan` lets the model run, bit for bit, with nothing to close afterwards. Whatever
needs no rounding at run time needs no hooks either: it is a plain model with other weights.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, overload

from torch import Tensor, nn
from torch.export import ExportedProgram

from bitwright.errors import PlanError
from bitwright.inference.apply import site_rules
from bitwright.inference.emulate import SiteRule, emulate
from bitwright.inference.graph import apply_to_program
from bitwright.inference.values import ValueRule, emulate_values, value_rules
from bitwright.models.linear_calls import LinearCalls, Matrix, Operation, matrices_of
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site, find_sites
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Plan


@overload
def apply(plan: Plan, model: ExportedProgram, *, sites: Sequence[Site] | None = None) -> ExportedProgram:
    """A program gives a program."""


@overload
def apply(plan: Plan, model: nn.Module | LoadedModel, *, sites: Sequence[Site] | None = None) -> nn.Module:
    """A model gives a model."""


def apply(
    plan: Plan, model: nn.Module | LoadedModel | ExportedProgram, *, sites: Sequence[Site] | None = None
) -> nn.Module | ExportedProgram:
    """Return a model or program that runs as the plan says; what was given stays as it is.

    Args:
        plan: for this model.
        model: fp32: a model, what `models.load` or `models.plain_model` gave, or the exported program of either.
        sites: its weight sites; found by `find_sites`, or in the program, unless given.

    Raises:
        PlanError: sites of the plan that the model or program lacks, or has no place for; named.
        ModelError: nothing in the model is a site.
        SchemeError: rows of one fused matrix ask for different roundings of their one input.
    """
    match model:
        case ExportedProgram():
            return apply_to_program(plan, model, sites)
        case LoadedModel():
            return _applied(plan, model.model, sites)
        case nn.Module():
            return _applied(plan, model, sites)
    raise PlanError(
        f"a plan is applied to a model or an ExportedProgram, not to {type(model).__name__}; load the model first: "
        "bitwright.models.load(…)"
    )


def _applied(plan: Plan, model: nn.Module, sites: Sequence[Site] | None) -> nn.Module:
    known = find_sites(model) if sites is None else tuple(sites)
    rules = site_rules(plan, known)
    rounds_values = any(choice.kind != "weight" and choice.scheme != "as_loaded" for choice in plan.sites)
    values = value_rules(plan, find_value_sites(model)) if rounds_values else {}
    planned = copy.deepcopy(model)
    parameters = {site.parameter for site in known if site.name in rules}
    with emulate(planned, known, rules):
        changed = {name: planned.get_parameter(name).data for name in parameters}
    for name, weight in changed.items():
        planned.get_parameter(name).data = weight
    rounding = {site.name: rule for site in known if (rule := rules.get(site.name)) and rule.activations is not None}
    if rounding or values:
        roundings = _Roundings(sites=known, rules=rounding, values=values)
        planned.register_forward_pre_hook(roundings.begin)
        planned.register_forward_hook(roundings.end, always_call=True)
    return planned


@dataclass(kw_only=True, eq=False)
class _Roundings:
    """What is rounded during a forward of a planned model: hooks that open and close it."""

    sites: Sequence[Site]
    #: Site name → rule, of those that round inputs.
    rules: Mapping[str, SiteRule]
    values: Mapping[ValueSite, ValueRule]
    #: Thread → what its forwards have opened, innermost last.
    opened: dict[int, list[ExitStack]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> _Roundings:
        return self  # rules never change, and every forward names its own module

    def begin(self, module: nn.Module, _: Any) -> None:
        """Start to round."""
        watched = [site for site in self.sites if site.name in self.rules]
        with ExitStack() as stack:
            if watched:
                stack.enter_context(LinearCalls(module, watched, self._handler()))
            stack.enter_context(emulate_values(module, self.values, sites=self.sites))
            self.opened.setdefault(threading.get_ident(), []).append(stack.pop_all())

    def end(self, *_: Any) -> None:
        """Stop rounding, also where the forward raised."""
        stacks = self.opened.get(threading.get_ident())
        if stacks:
            stacks.pop().close()

    def _handler(self) -> Callable[[Matrix, Tensor, Operation], Tensor]:
        of_matrix = {
            matrix.name: next(self.rules[site.name] for site in matrix.sites if site.name in self.rules)
            for matrix in matrices_of(self.sites)
            if any(site.name in self.rules for site in matrix.sites)
        }

        def handle(matrix: Matrix, x: Tensor, operation: Operation) -> Tensor:
            return of_matrix[matrix.name].multiply(x, operation)

        return handle
