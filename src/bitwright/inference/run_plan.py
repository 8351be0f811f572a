"""One door to running a plan: `apply` takes a model or an exported program, and gives one that runs under the plan.

    planned = bitwright.inference.apply(plan, model, mode="auto")
    planned.generate(**inputs)               # still a transformers model
    print(planned.bitwright_run.table())     # what runs as what, and why

A program becomes another program (`emulation/program.py`). A model is copied. Under mode "emulate" the copy's weights
hold the fp32 values of their codes, and where inputs or values are rounded, they are for the time of every forward of
the copy, by hooks on the model as a whole. So the copy runs as `emulate_plan` lets the model run, bit for bit, with
nothing to close afterwards. Whatever needs no rounding at run time needs no hooks: it is a plain model with other
weights.

Under the other modes its weights are packed codes (`packed/`) and the rest is of the dtype that the model computes in;
a cache keeps codes too (`cache/`). It computes what emulation does, but for the order in which products are added up
and for the rounding of everything else to that dtype.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from bitwright.errors import PlanError
from bitwright.inference.counters import FallbackCounts
from bitwright.inference.emulation.emulate import SiteRule, emulate
from bitwright.inference.emulation.program import apply_to_program
from bitwright.inference.emulation.program_values import listed
from bitwright.inference.emulation.site_rules import site_rules
from bitwright.inference.emulation.values import Fallbacks, ValueRule, emulate_values, value_fallbacks, value_rules
from bitwright.inference.fallback import Fallback
from bitwright.inference.hysteresis import DEFAULT_FALLBACK, FallbackSettings
from bitwright.inference.modes import Mode, find_mode
from bitwright.inference.packed.compute_dtype import settle_dtype
from bitwright.inference.packed.model import packed_model
from bitwright.inference.packed.modules import raise_if_planned
from bitwright.inference.packed.value_hooks import round_values_of
from bitwright.inference.planned_model import sites_of
from bitwright.inference.run_report import RunReport, emulated_report
from bitwright.inference.static.origin import raise_if_stale
from bitwright.inference.value_runs import value_runs
from bitwright.models.linear_calls import LinearCalls, Matrix, Operation, matrices_of
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.models.value_calls import PRODUCT_PARTS, OffersItsValues
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Plan
from bitwright.quantize.static_scales import overflows


@overload
def apply(plan: Plan, model: ExportedProgram, *, sites: Sequence[Site] | None = None) -> ExportedProgram:
    """A program gives a program."""


@overload
def apply(
    plan: Plan,
    model: nn.Module | LoadedModel,
    *,
    mode: str = "emulate",
    dtype: torch.dtype | None = None,
    fallback: FallbackSettings | Literal["as_the_mode"] | None = "as_the_mode",
    sites: Sequence[Site] | None = None,
) -> nn.Module:
    """A model gives a model."""


def apply(
    plan: Plan,
    model: nn.Module | LoadedModel | ExportedProgram,
    *,
    mode: str = "emulate",
    dtype: torch.dtype | None = None,
    fallback: FallbackSettings | Literal["as_the_mode"] | None = "as_the_mode",
    sites: Sequence[Site] | None = None,
) -> nn.Module | ExportedProgram:
    """Return a model or program that runs as the plan says; what was given stays as it is.

    Args:
        plan: for this model.
        model: fp32: a model, what `models.load` or `models.plain_model` gave, or the exported program of either.
        mode: "emulate", "packed", "native" or "auto" (`modes.py`); programs are emulated.
        dtype: what everything beside codes is computed in; by default the checkpoint's own (`packed/compute_dtype.py`).
            Emulation is fp32.
        fallback: what happens to tokens whose inputs or values overflow a static scale or fp16; None: they saturate.
            "as_the_mode": `FallbackSettings()` where codes run; in emulation they saturate and are counted, as where
            plans are measured.
        sites: its weight sites; found by `find_sites`, or in the program, unless given.

    Returns:
        The program, or the model with a `RunReport` as its attribute `bitwright_run`.

    Raises:
        PlanError: static scales that were never set, or found with other weights (`static/origin.py`); sites of the
            plan that the model or program lacks, or has no place for; named. Under "native" also sites that the device
            does not multiply natively.
        ModelError: nothing in the model is a site, or it runs packed already.
        SchemeError: rows of one fused matrix ask for different roundings of their one input.
        UnknownName: no such mode.
    """
    wanted = find_mode(mode)
    raise_if_stale(plan, model.hash if isinstance(model, LoadedModel) else None)
    match model:
        case ExportedProgram():
            if wanted != "emulate":
                raise PlanError(f"a program is emulated, and mode {mode!r} was asked for; apply the plan to its model")
            return apply_to_program(plan, model, sites)
        case LoadedModel() | nn.Module():
            module = model.model if isinstance(model, LoadedModel) else model
            if wanted == "emulate":
                return _emulated(plan, module, None if fallback == "as_the_mode" else fallback, sites)
            settings = DEFAULT_FALLBACK if fallback == "as_the_mode" else fallback
            return _packed(plan, model, module, wanted, dtype, settings, sites)
    raise PlanError(
        f"a plan is applied to a model or an ExportedProgram, not to {type(model).__name__}; load the model first: "
        "bitwright.models.load(…)"
    )


def _packed(
    plan: Plan,
    model: nn.Module | LoadedModel,
    module: nn.Module,
    mode: Mode,
    dtype: torch.dtype | None,
    fallback: FallbackSettings | None,
    sites: Sequence[Site] | None,
) -> nn.Module:
    raise_if_planned(module)
    _raise_if_values_are_in_a_program(plan, module)
    known = sites_of(plan, module) if sites is None else tuple(sites)
    values = value_rules(plan, find_value_sites(module)) if _rounds_values(plan) else {}
    settled, reason = settle_dtype(model, dtype)
    planned, report = packed_model(plan, module, known, mode, dtype=settled, dtype_reason=reason, fallback=fallback)
    if values:
        fallbacks: Fallbacks = {}
        if fallback is not None:
            fallbacks = value_fallbacks(values, fallback, report.counters, report.watch, settled)
        on_products = round_values_of(planned, values, known, fallbacks)
        report = _with_values(report, values, planned, on_products)
    planned.bitwright_run = report  # type: ignore[assignment]
    return planned


def _raise_if_values_are_in_a_program(plan: Plan, module: nn.Module) -> None:
    """Values that a module offers as a program, which has no packed weights; products have modules of their own."""
    if not isinstance(module, OffersItsValues):
        return
    rounded = (c.name for c in plan.sites if c.kind != "weight" and c.scheme != "as_loaded")
    inside = [name for name in rounded if name.rpartition(":")[2] not in PRODUCT_PARTS.values()]
    if inside:
        raise PlanError(
            f"the plan rounds values at {listed(inside)} of a module that is not transformers', reached in its program "
            'alone; run it with mode "emulate", or plan it with values="none"'
        )


def _with_values(
    report: RunReport, rules: Mapping[ValueSite, ValueRule], planned: nn.Module, on_products: Collection[str] = ()
) -> RunReport:
    schemes = {site: rule.scheme.name for site, rule in rules.items()}
    values, notes = value_runs(schemes, report.mode, planned, on_products)
    return replace(report, values=values, notes=(*report.notes, *notes))


def _rounds_values(plan: Plan) -> bool:
    return any(choice.kind != "weight" and choice.scheme != "as_loaded" for choice in plan.sites)


def _emulated(
    plan: Plan, model: nn.Module, fallback: FallbackSettings | None, sites: Sequence[Site] | None
) -> nn.Module:
    known = sites_of(plan, model) if sites is None else tuple(sites)
    rules = site_rules(plan, known)
    values = value_rules(plan, find_value_sites(model)) if _rounds_values(plan) else {}
    planned = copy.deepcopy(model)
    parameters = {site.parameter for site in known if site.name in rules}
    with emulate(planned, known, rules):
        changed = {name: planned.get_parameter(name).data for name in parameters}
    for name, weight in changed.items():
        planned.get_parameter(name).data = weight
    rounding = {site.name: rule for site in known if (rule := rules.get(site.name)) and rule.activations is not None}
    report = _with_values(emulated_report(plan, planned, known), values, planned)
    if rounding or values:
        fallbacks = value_fallbacks(values, fallback, report.counters, report.watch, torch.float32)
        inputs = _input_fallbacks(known, rounding, fallback, report)
        roundings = _Roundings(sites=known, rules=rounding, values=values, fallbacks=fallbacks, inputs=inputs)
        planned.register_forward_pre_hook(roundings.begin)
        planned.register_forward_hook(roundings.end, always_call=True)
    planned.bitwright_run = report  # type: ignore[assignment]
    return planned


def _input_fallbacks(
    sites: Sequence[Site], rules: Mapping[str, SiteRule], settings: FallbackSettings | None, report: RunReport
) -> dict[str, Fallback]:
    """Matrix → what happens where its inputs overflow, of those whose inputs may."""
    found = {}
    for matrix in matrices_of(sites):
        rule = next((rules[site.name] for site in matrix.sites if site.name in rules), None)
        scheme = None if rule is None else rule.activations
        if (
            rule is not None
            and scheme is not None
            and overflows(torch.empty(0, 1), scheme, rule.input_scale) is not None
        ):
            counts = report.counters.fallbacks.setdefault(matrix.name, FallbackCounts())
            found[matrix.name] = Fallback.new(settings, report.watch, counts)
    return found


@dataclass(kw_only=True, eq=False)
class _Roundings:
    """What is rounded during a forward of a planned model: hooks that open and close it."""

    sites: Sequence[Site]
    #: Site name → rule, of those that round inputs.
    rules: Mapping[str, SiteRule]
    values: Mapping[ValueSite, ValueRule]
    #: What happens where values, or inputs of a matrix, overflow.
    fallbacks: Fallbacks
    inputs: Mapping[str, Fallback]
    #: Thread → what its forwards have opened, innermost last.
    opened: dict[int, list[ExitStack]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> _Roundings:
        # rules never change, and every forward names its own module; a copy of a model counts for itself
        return replace(
            self,
            fallbacks=copy.deepcopy(self.fallbacks, memo),
            inputs=copy.deepcopy(self.inputs, memo),
            opened={},
        )

    @torch.compiler.disable
    def begin(self, module: nn.Module, _: Any) -> None:
        """Start to round."""
        watched = [site for site in self.sites if site.name in self.rules]
        with ExitStack() as stack:
            if watched:
                stack.enter_context(LinearCalls(module, watched, self._handler()))
            stack.enter_context(emulate_values(module, self.values, sites=self.sites, fallbacks=self.fallbacks))
            self.opened.setdefault(threading.get_ident(), []).append(stack.pop_all())

    @torch.compiler.disable
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

        @torch.compiler.disable
        def handle(matrix: Matrix, x: Tensor, operation: Operation) -> Tensor:
            return of_matrix[matrix.name].multiply(x, operation, fallback=self.inputs.get(matrix.name))

        return handle
