"""A plan as a change of a program: an ExportedProgram goes in, one that runs under the plan comes out.

    planned = apply_to_program(plan, torch.export.export(model, (input_ids,)))
    planned.module()(input_ids)              # what emulate gives
    torch.export.save(planned, "planned.pt2")

Weights are replaced in the program's state dict by the values that their codes stand for. Values are rounded where they
arise (`program_values.py`), and a fused attention is taken apart where something inside it is. Where a choice rounds
inputs, what `emulate` does to them is inserted before the product. All of that is traced with the shapes of the very
place (`program_rewriter.py`): the operators `bitwright::fake_quantize`, `bitwright::round_values` and
`bitwright::round_channels`, and those of a transform. So there is one definition of what a choice does, and the program
needs nothing of bitwright but these operators (import bitwright.quantize before it is loaded). Everything is checked
before anything is changed, and the given program stays as it is.

Rejected: exporting an emulated model (its weights' rounding would be part of the program, and of every run), and a
pass over torch's quantisation operators (they know neither these formats nor these scales).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from bitwright.errors import PlanError
from bitwright.inference.emulation.emulate import SiteRule, emulate
from bitwright.inference.emulation.program_rewriter import Rewriter
from bitwright.inference.emulation.program_values import listed, places_of_values, round_values_in
from bitwright.inference.emulation.site_rules import site_rules
from bitwright.models.graph import WeightUse, canonical_names, weight_uses
from bitwright.models.graph_sites import GraphSites, sites_of_program
from bitwright.models.linear_calls import Matrix, matrices_of
from bitwright.models.names import EXPERT_PARAMETERS
from bitwright.models.sites import Site
from bitwright.plan import Plan, SiteChoice


def apply_to_program(plan: Plan, program: ExportedProgram, sites: Sequence[Site] | None = None) -> ExportedProgram:
    """Return the program that computes what `emulate_plan` does; `program` is not changed.

    Args:
        plan: for the model that the program was exported from.
        program: from `torch.export.export`, of the model or of a module that holds it; fp32.
        sites: what `find_sites` gave for the model; by default they are found in the program by the plan's names.

    Raises:
        PlanError: sites of the plan are not in the program, or round what the program has no place of its own for;
            all of them are named.
        SchemeError: rows of one fused matrix ask for different roundings of their one input.
    """
    graph = sites_of_program(program)
    prefix, located = _locate(plan, graph, sites)
    rules = site_rules(plan, located)
    changed = [matrix for matrix in matrices_of(located) if any(site.name in rules for site in matrix.sites)]
    roundings = _places_of_roundings(program, changed, rules, prefix)
    values = places_of_values(plan, graph, prefix)
    state_dict = _changed_weights(program, located, rules, prefix)
    rewriter = Rewriter.of(program)
    round_values_in(rewriter, values)
    for use, rule in roundings:
        rewriter.round_input(use, rule)
    return rewriter.finish(program, state_dict)


# --- where a plan's sites are in a program ----------------------------------------------------------------------------


def _locate(plan: Plan, graph: GraphSites, sites: Sequence[Site] | None) -> tuple[str, tuple[Site, ...]]:
    """What stands before the model's names in the program, and the plan's weight sites with the model's own names."""
    choices = [choice for choice in plan.sites if choice.kind == "weight"]
    program = graph.program
    names = set(program.state_dict)
    known = {} if sites is None else {site.name: site for site in sites}
    by_matrix = {(site.parameter, site.expert): site for site in graph.weights}
    missing: list[str] = []
    for prefix in _prefixes(choices, names):
        found = {
            choice.name: known.get(choice.name) or _site_of(choice, prefix, program, by_matrix) for choice in choices
        }
        missing = [name for name, site in found.items() if site is None or prefix + site.parameter not in names]
        if not missing:
            return prefix, tuple(site for site in found.values() if site is not None)
    raise PlanError(
        f"the plan chooses for {listed(missing)}, which this program does not have, or in which it does not show what "
        f"are rows; export the model that the plan is for ({plan.model.name}), and pass its sites=find_sites(model)"
    )


def _prefixes(choices: Sequence[SiteChoice], names: set[str]) -> Iterator[str]:
    """What may stand before the model's names: nothing, or the names of modules around it."""
    yield ""
    # one name tells it: whatever stands before the module of the first site
    module = choices[0].module if choices else ""
    around = {name[: name.index(f".{module}.") + 1] for name in names if module and f".{module}." in name}
    yield from sorted(around, key=len)


def _site_of(
    choice: SiteChoice, prefix: str, program: ExportedProgram, by_matrix: Mapping[tuple[str, int | None], Site]
) -> Site | None:
    """The site of a choice by its name alone: the parameter, the expert in it, and which way it is stored."""
    whole = choice.name.partition("[")[0]
    expert: int | None = None
    parameter = next((n for n in (f"{whole}.weight", whole) if prefix + n in program.state_dict), None)
    if parameter is None:  # an expert: "<module>.<index>.<short>"
        owner, _, short = whole.rpartition(".")
        owner, _, index = owner.rpartition(".")
        leaf = next((name for name, known, _ in EXPERT_PARAMETERS if known == short), short)
        parameter, expert = f"{owner}.{leaf}", int(index) if index.isdigit() else None
        if expert is None or prefix + parameter not in program.state_dict:
            return None
    transposed = _is_transposed(choice, prefix + parameter, expert, program, by_matrix)
    if transposed is None:
        return None
    return Site(
        name=choice.name,
        kind="weight",
        role=choice.role,
        module=choice.module,
        parameter=parameter,
        rows=choice.rows,
        expert=expert,
        transposed=transposed,
        tied_group=choice.tied_group,
        shape=choice.shape,
        uses=(choice.module,),
    )


def _is_transposed(
    choice: SiteChoice,
    parameter: str,
    expert: int | None,
    program: ExportedProgram,
    by_matrix: Mapping[tuple[str, int | None], Site],
) -> bool | None:
    """Which way a matrix is stored: as the program uses it, else as its shape says; None where neither does."""
    used = by_matrix.get((canonical_names(program)[parameter], expert))
    if used is not None:
        return used.transposed
    rows, columns = program.state_dict[parameter].shape[-2:]
    fits = (choice.shape[1] == columns, choice.shape[1] == rows)
    return fits[1] if fits[0] != fits[1] else None


def _places_of_roundings(
    program: ExportedProgram, changed: Sequence[Matrix], rules: Mapping[str, SiteRule], prefix: str
) -> list[tuple[WeightUse, SiteRule]]:
    """Every place where an input is rounded, with its rule.

    Raises:
        PlanError: a matrix whose input is rounded is computed with in other ways too, or in none.
    """
    canonical = canonical_names(program)
    uses: dict[tuple[str, int | None], list[WeightUse]] = {}
    for use in weight_uses(program):
        uses.setdefault((canonical[use.parameter], use.expert), []).append(use)
    places: list[tuple[WeightUse, SiteRule]] = []
    without: list[str] = []
    for matrix in changed:
        own = [rules[site.name] for site in matrix.sites if site.name in rules]
        rule = next((rule for rule in own if rule.activations is not None), None)  # emulate checks that all agree
        if rule is None:
            continue
        parameter = canonical[prefix + matrix.parameter]
        found = uses.get((parameter, matrix.expert), [])
        others = uses.get((parameter, None), []) if matrix.expert is not None else []
        if not found or others or any(use.kind not in ("product", "lookup") for use in found):
            without += [site.name for site in matrix.sites]
        places += [(use, rule) for use in found]
    _raise_if_no_place(without)
    return places


def _raise_if_no_place(names: Sequence[str]) -> None:
    if names:
        raise PlanError(
            f"the plan rounds inputs at {listed(names)}, for which this program has no place of its own; run the plan "
            "on the model itself (bitwright.inference.apply(plan, model)), or choose schemes that round weights alone"
        )


# --- weights ----------------------------------------------------------------------------------------------------------


class _Parameters(nn.Module):
    """The program's tensors as a module that `emulate` can change: it asks for nothing but parameters by name."""

    def __init__(self, program: ExportedProgram, prefix: str) -> None:
        super().__init__()
        canonical = canonical_names(program)
        by_name = {name: nn.Parameter(program.state_dict[name].detach(), requires_grad=False) for name in canonical}
        self._by_name = {name.removeprefix(prefix): by_name[first] for name, first in canonical.items()}

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of a name; tied names give one."""
        return self._by_name[target]


def _changed_weights(
    program: ExportedProgram, sites: Sequence[Site], rules: Mapping[str, SiteRule], prefix: str
) -> dict[str, Any]:
    """The state dict in which every chosen weight holds the values of its codes."""
    parameters = _Parameters(program, prefix)
    chosen = {prefix + site.parameter for site in sites if site.name in rules}
    canonical = canonical_names(program)
    changed_first = {canonical[name] for name in chosen}
    with emulate(parameters, sites, rules):
        values = {first: parameters.get_parameter(first.removeprefix(prefix)).data for first in changed_first}
    wanted = {name: tensor.requires_grad for name, tensor in program.state_dict.items()}
    replaced = {first: nn.Parameter(value, requires_grad=wanted[first]) for first, value in values.items()}
    return {name: replaced.get(canonical[name], tensor) for name, tensor in program.state_dict.items()}
