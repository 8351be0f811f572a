"""A copy of a model whose matrices are packed codes, made matrix by matrix.

What is given stays as it is, and the copy begins as its structure alone: modules are new, tensors are those of the
original. Then one matrix after the other is quantised, packed and put in its place, and whatever no choice touches
becomes a tensor of the copy's dtype. So beside the original there are never more than the packed codes and the values
of one matrix.

A parameter is replaced wherever it is used (a head that is the embedding too has one set of codes), by what its module
is:

    nn.Linear       PackedLinear
    nn.Embedding    PackedEmbedding
    others          PackedOperand in the parameter's place: Conv1D, experts, routers, subclasses with another forward

Buffers keep their dtype: the frequencies of a rotary embedding in bf16 would turn by another angle.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitwright.inference.counters import FallbackCounts
from bitwright.inference.emulation.emulate import SiteRule, input_rule
from bitwright.inference.emulation.site_rules import codes_of, site_rules
from bitwright.inference.fallback import Fallback
from bitwright.inference.hysteresis import FallbackSettings, Hysteresis
from bitwright.inference.modes import Mode, spell_dtype
from bitwright.inference.overflow_watch import OverflowWatch
from bitwright.inference.packed.choice import Multiplication, choose, raise_if_not_native
from bitwright.inference.packed.input_rounding import InputRounding
from bitwright.inference.packed.modules import PackedEmbedding, PackedLinear, PackedOperand, raise_if_planned
from bitwright.inference.packed.rows import Rows, packed_rows, plain_rows
from bitwright.inference.packed.weight import PackedWeight
from bitwright.inference.run_report import RunReport, SiteRun
from bitwright.models.linear_calls import Matrix, matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import SCHEMES
from bitwright.quantize.backends.cpu.arrays import new_memory
from bitwright.quantize.catalogs import MATMULS
from bitwright.quantize.fitted import UNCHANGED
from bitwright.quantize.pack import pack_codes


@torch.no_grad()
def packed_model(
    plan: Plan,
    model: nn.Module,
    sites: Sequence[Site],
    mode: Mode,
    *,
    dtype: torch.dtype,
    dtype_reason: str,
    fallback: FallbackSettings | None,
) -> tuple[nn.Module, RunReport]:
    """A copy of a model with its weights as a plan has them, and the report of how it runs.

    Args:
        plan: choices for weights; those for values are not looked at.
        model: the model as loaded.
        sites: all of its weight sites.
        mode: any but "emulate".
        dtype: what everything beside codes is computed in.
        dtype_reason: why, for the report.
        fallback: what happens to tokens whose inputs overflow; None: they saturate.

    Raises:
        PlanError: the plan does not fit the model, or a site is not native where all have to be.
        SchemeError: rows of one matrix ask for different roundings of their one input.
        ModelError: the model runs packed already.
    """
    raise_if_planned(model)
    device_type = next(iter(model.parameters())).device.type
    rules = site_rules(plan, sites)
    chosen = {
        choice.name: (choice, choose(SCHEMES[choice.scheme], choice.shape, mode, device_type, dtype))
        for choice in plan.sites
        if choice.kind == "weight"
    }
    if mode == "native":
        raise_if_not_native(plan.model.name, chosen)
    for matrix in matrices_of(sites):
        input_rule(matrix, rules)
    # everything that can be refused is refused by now
    run = RunReport(
        mode=mode,
        dtype=dtype,
        dtype_reason=dtype_reason,
        device_type=device_type,
        sites=(),
        other_bytes=0,
        watch=OverflowWatch() if fallback is None else OverflowWatch(steps=Hysteresis(settings=fallback)),
    )
    builder = _Builder(plan=plan, model=model, sites=sites, fallback=fallback, rules=rules, chosen=chosen, run=run)
    planned = _structure_of(model)
    builder.replace_matrices(planned)
    _copy_tensors(planned, dtype)
    _run_experts_one_by_one(planned)
    return planned, builder.report(planned)


@torch.no_grad()
def plain_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model with its parameters in a dtype, made one by one: what packed models are held against."""
    copied = _structure_of(model)
    _copy_tensors(copied, dtype)
    return copied


def _structure_of(model: nn.Module) -> nn.Module:
    """A copy of the modules alone, with the tensors of the original."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo=cast(Any, shared))


def _copy_tensors(planned: nn.Module, dtype: torch.dtype) -> None:
    """Give a copy parameters and buffers of its own: parameters in its dtype, once for all uses of each."""

    def copied(parameter: nn.Parameter) -> nn.Parameter:
        own = dtype if parameter.is_floating_point() else parameter.dtype
        return nn.Parameter(_copy(parameter.detach(), own), requires_grad=parameter.requires_grad)

    made: dict[int, nn.Parameter] = {}
    for module in planned.modules():
        if isinstance(module, Rows | InputRounding):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = copied(parameter)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.clone()
    config = getattr(planned, "config", None)
    if hasattr(config, "dtype"):
        cast(Any, config).dtype = dtype


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On a CPU in memory that is read as fast as that of packed codes: in huge pages where it is large."""
    if tensor.device.type != "cpu":
        return tensor.to(dtype, copy=True)
    return new_memory(tensor.shape, dtype).copy_(tensor)


@dataclass(kw_only=True, eq=False)
class _Builder:
    plan: Plan
    model: nn.Module
    sites: Sequence[Site]
    fallback: FallbackSettings | None
    #: Site → what it runs with and how; sites that stay as loaded are not there.
    rules: Mapping[str, SiteRule]
    chosen: Mapping[str, tuple[SiteChoice, Multiplication]]
    #: Without its sites, bytes and notes, which are known at the end (`report`).
    run: RunReport
    #: Site → bytes of its codes and scales.
    num_bytes: dict[str, int] = field(default_factory=dict)

    # --- matrices -----------------------------------------------------------------------------------------------------

    def replace_matrices(self, planned: nn.Module) -> None:
        """Put packed weights in the place of every parameter that a choice packs."""
        by_parameter: dict[str, list[Matrix]] = {}
        for matrix in matrices_of(self.sites):
            by_parameter.setdefault(matrix.parameter, []).append(matrix)
        for parameter, matrices in by_parameter.items():
            if any(self._is_packed(site) for matrix in matrices for site in matrix.sites):
                original = planned.get_parameter(parameter)
                places = list(_places_of(planned, original))
                packed = [self._packed(matrix) for matrix in matrices]
                for owner, name in places:
                    self._put(planned, owner, name, packed, matrices[0])

    def _is_packed(self, site: Site) -> bool:
        found = self.chosen.get(site.name)
        return found is not None and found[1].kind != "plain"

    def _packed(self, matrix: Matrix) -> PackedWeight:
        rule = input_rule(matrix, self.rules)
        inputs = None
        fallback = None
        if rule is not None and any(self._is_packed(site) for site in matrix.sites):
            inputs = InputRounding(rule.transform, rule.activations, rule.input_scale)
            fallback = self._fallback(matrix, inputs)
        rows = [self._rows(matrix, first, last, site) for first, last, site in self._runs_of_rows(matrix)]
        changes = []
        for _, _, site in self._runs_of_rows(matrix):
            own = self.rules.get(site.name) if site is not None and self._is_packed(site) else None
            transform = UNCHANGED if own is None or own.activations is not None else own.transform
            changes.append(InputRounding(transform, None, None))
        return PackedWeight(rows, changes, inputs, self.run.dtype, fallback)

    def _runs_of_rows(self, matrix: Matrix) -> list[tuple[int, int, Site | None]]:
        """(first row, end, site) of every run of rows, in order; None for rows that are no site."""
        num_rows = self._weight(matrix).shape[0]
        runs: list[tuple[int, int, Site | None]] = []
        end = 0
        for site in matrix.sites:
            first, last = site.rows or (0, num_rows)
            if first > end:
                runs.append((end, first, None))
            runs.append((first, last, site))
            end = last
        if end < num_rows:
            runs.append((end, num_rows, None))
        return runs

    def _rows(self, matrix: Matrix, first: int, last: int, site: Site | None) -> Rows:
        if site is None or not self._is_packed(site):
            rows = plain_rows(self._weight(matrix)[first:last].to(self.run.dtype, copy=True).contiguous())
        else:
            choice, how = self.chosen[site.name]
            # in fp32 on a device: `codes_of` is arithmetic of torch like any other
            q = codes_of(choice, self.plan.tensors)(site_weight(self.model, site).float().contiguous())
            if how.native is not None:
                rows = how.native.rows(pack_codes(q), self.run.counters.padding)
            else:
                rows = packed_rows(MATMULS[how.kernel].prepare(pack_codes(q)), how.inputs_dtype, self.run.device_type)
        if site is not None:
            self.num_bytes[site.name] = rows.nbytes()
        return rows

    def _weight(self, matrix: Matrix) -> Tensor:
        """The loaded matrix as [out, in]: a view."""
        stored = self.model.get_parameter(matrix.parameter).data
        stored = stored if matrix.expert is None else stored[matrix.expert]
        return stored.T if matrix.transposed else stored

    def _fallback(self, matrix: Matrix, inputs: InputRounding) -> Fallback | None:
        nothing = torch.empty(0, self._weight(matrix).shape[1], device=self._weight(matrix).device)
        if self.fallback is None or inputs.overflows(nothing) is None:
            return None
        counts = self.run.counters.fallbacks.setdefault(matrix.name, FallbackCounts())
        return Fallback.new(self.fallback, self.run.watch, counts)

    def _put(self, planned: nn.Module, owner: str, name: str, packed: Sequence[PackedWeight], matrix: Matrix) -> None:
        module = planned.get_submodule(owner)
        replacement = _replacement(module, name, packed) if owner else None
        if replacement is not None:
            parent, _, own_name = owner.rpartition(".")
            setattr(planned.get_submodule(parent), own_name, _with_hooks_of(module, replacement))
            return
        del module._parameters[name]
        is_list = matrix.expert is not None
        setattr(
            module,
            name,
            PackedOperand(packed, is_list, matrix.transposed, f"{owner}.{name}", self.run.counters),
        )

    # --- what is told of it -------------------------------------------------------------------------------------------

    def report(self, planned: nn.Module) -> RunReport:
        """How it runs."""
        total = sum(t.numel() * t.element_size() for t in (*planned.parameters(), *_weights_as_buffers(planned)))
        runs = tuple(self._site_run(site) for site in self.sites)
        other_bytes = total - sum(run.bytes for run in runs)
        return replace(self.run, sites=runs, other_bytes=other_bytes, notes=tuple(self._notes(planned)))

    def _site_run(self, site: Site) -> SiteRun:
        choice, how = self.chosen.get(site.name, (None, None))
        plain = site.num_weights * self.run.dtype.itemsize
        return SiteRun(
            name=site.name,
            role=site.role,
            scheme="as_loaded" if choice is None else choice.scheme,
            kernel=spell_dtype(self.run.dtype) if how is None else how.kernel,
            reason="the plan says nothing of it" if how is None else how.reason,
            own_reason=None if how is None else how.own_reason,
            passed_over=() if how is None else how.passed_over,
            bytes=self.num_bytes.get(site.name, plain),
            plan_bytes=plain if choice is None else choice.bytes,
        )

    def _notes(self, planned: nn.Module) -> Iterator[str]:
        bits = 8 * self.run.dtype.itemsize
        wider = [
            choice
            for choice, how in self.chosen.values()
            if how.kind == "plain" and choice.bytes and choice.bytes < 0.99 * _numbers(choice) * bits / 8
        ]
        if wider:
            yield (
                f"{len(wider)} sites that stay as loaded, such as {wider[0].name}, take {bits} bits "
                f"a weight here, and {wider[0].bits:g} in the checkpoint"
            )
        operands = [name for name, module in planned.named_modules() if isinstance(module, PackedOperand)]
        if operands:
            yield (
                f"{len(operands)} parameters of modules with code of their own, such as {operands[0]}, are packed in "
                "place; torch functions on them that are no products expand them, and are counted"
            )


def _numbers(choice: SiteChoice) -> int:
    return choice.shape[0] * choice.shape[1]


def _places_of(model: nn.Module, parameter: nn.Parameter) -> Iterator[tuple[str, str]]:
    """(module, attribute) of every use of a parameter."""
    for module_name, module in model.named_modules():
        for name, own in module._parameters.items():
            if own is parameter:
                yield module_name, name


def _replacement(module: nn.Module, name: str, packed: Sequence[PackedWeight]) -> nn.Module | None:
    """A module that takes the place of one of a class that is known; None for others."""
    if name != "weight" or len(packed) != 1:
        return None
    if type(module) is nn.Linear:
        return PackedLinear(packed[0], module.bias)
    if type(module) is nn.Embedding and module.max_norm is None:
        return PackedEmbedding(packed[0], module.padding_idx)
    return None


def _with_hooks_of(module: nn.Module, replacement: nn.Module) -> nn.Module:
    """The replacement with the mode and the hooks that the module had."""
    replacement.training = module.training
    for attribute in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        getattr(replacement, attribute).update(getattr(module, attribute))
    return replacement


def _weights_as_buffers(planned: nn.Module) -> Iterator[Tensor]:
    """Tensors of packed weights, once each."""
    for module in planned.modules():
        if isinstance(module, Rows | InputRounding):
            yield from module.buffers(recurse=False)


def _run_experts_one_by_one(planned: nn.Module) -> None:
    """Experts that are computed all at once would have to be expanded all at once."""
    for module in planned.modules():
        operands = [child for child in module.children() if isinstance(child, PackedOperand) and child.is_list]
        config = getattr(module, "config", None)
        if operands and hasattr(config, "_experts_implementation"):
            cast(Any, config)._experts_implementation = "eager"
