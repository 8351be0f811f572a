"""A plan as a change of a program: an ExportedProgram goes in, one that runs under the plan comes out.

    planned = apply_to_program(plan, torch.export.export(model, (input_ids,)))
    planned.module()(input_ids)              # what emulate gives
    torch.export.save(planned, "planned.pt2")

Weights are replaced in the program's state dict by the values that their codes stand for, and values that are some
operator's result (of an MLP, a router, the residual stream) are rounded behind it. Where a choice rounds inputs,
what `emulate` does to them is traced with the shapes of that very place and inserted before the product: the operators
`bitwright::fake_quantize` and `bitwright::round_values`, and those of a transform. So there is one definition of what a
choice does, and the program needs nothing of bitwright but these operators (import bitwright.quantize before it is
loaded). Everything is checked before anything is changed, and the given program stays as it is.

Rejected: exporting an emulated model (its weights' rounding would be part of the program, and of every run), and a
pass over torch's quantisation operators (they know neither these formats nor these scales).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from bitwright.errors import PlanError
from bitwright.inference.emulation.emulate import SiteRule, emulate
from bitwright.inference.emulation.site_rules import site_rules
from bitwright.inference.emulation.values import ValueRule, value_rules
from bitwright.models.graph import WeightUse, canonical_names, weight_uses
from bitwright.models.graph_sites import GraphSites, sites_of_program
from bitwright.models.linear_calls import Matrix, matrices_of
from bitwright.models.names import EXPERT_PARAMETERS
from bitwright.models.sites import Site
from bitwright.models.value_calls import ATTENTION_PARTS
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize.static_scales import round_input
from bitwright.quantize.value_rounding import round_values

#: Names of the constants that are added to a program begin with it.
CONSTANT_PREFIX = "bitwright_constant_"


def apply_to_program(plan: Plan, program: ExportedProgram, sites: Sequence[Site] | None = None) -> ExportedProgram:
    """Return the program that computes what `emulate_plan` does; `program` is not changed.

    Args:
        plan: for the model that the program was exported from.
        program: from `torch.export.export`, of the model or of a module that holds it; fp32.
        sites: what `find_sites` gave for the model; by default they are found in the program by the plan's names.

    Raises:
        PlanError: sites of the plan are not in the program, or round what the program computes nowhere as a product
            of its own; all of them are named.
        SchemeError: rows of one fused matrix ask for different roundings of their one input.
    """
    graph = sites_of_program(program)
    prefix, located = _locate(plan, graph, sites)
    rules = site_rules(plan, located)
    changed = [matrix for matrix in matrices_of(located) if any(site.name in rules for site in matrix.sites)]
    roundings = _places_of_roundings(program, changed, rules, prefix)
    values = _places_of_values(plan, graph, prefix)
    state_dict = _changed_weights(program, located, rules, prefix)
    rewriter = _Rewriter.of(program)
    for node, operand, value_rule in values:
        rewriter.round_result(node, operand, value_rule)
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
        f"the plan chooses for {_listed(missing)}, which this program does not have, or in which it does not show what "
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
    _raise_if_no_place(without, "inputs")
    return places


def _places_of_values(plan: Plan, graph: GraphSites, prefix: str) -> list[tuple[str, str, ValueRule]]:
    """Every node whose result is rounded, what value sites call it, and its rule.

    Raises:
        PlanError: values that are no operator's result in this program: what attention does inside a fused softmax,
            what a cache keeps, and what a norm takes in.
    """
    chosen = [choice.name for choice in plan.sites if choice.kind != "weight" and choice.scheme != "as_loaded"]
    if not chosen:
        return []
    nodes = {site.name.removeprefix(prefix): nodes for site, nodes in graph.values().items()}
    known = {replace(site, name=site.name.removeprefix(prefix)) for site in graph.values()}
    alone = {site.name for site in known if len(site.operands) == 1 and site.part not in ATTENTION_PARTS}
    _raise_if_no_place([name for name in chosen if name not in alone], "values")
    rules = value_rules(plan, known)
    return [(node, site.operands[0], rule) for site, rule in rules.items() for node in nodes[site.name]]


def _raise_if_no_place(names: Sequence[str], what: str) -> None:
    if names:
        raise PlanError(
            f"the plan rounds {what} at {_listed(names)}, for which this program has no place of its own; run the plan "
            "on the model itself (bitwright.inference.apply(plan, model)), or choose schemes that round weights alone"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


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


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Rewriter:
    """A copy of a program's graph that operators are inserted into."""

    module: GraphModule
    nodes: dict[str, Node]
    input_specs: list[InputSpec]
    constants: dict[str, Any]
    #: Name of a node whose result is rounded → the rounded one.
    results: dict[str, Node] = field(default_factory=dict)
    #: (name of the node whose values are rounded, rule, rounded node): products that share an input share its rounding.
    rounded: list[tuple[str, SiteRule, Node]] = field(default_factory=list)

    @classmethod
    def of(cls, program: ExportedProgram) -> _Rewriter:
        """Copy what will be changed."""
        module = copy.deepcopy(program.graph_module)
        nodes: dict[str, Node] = {}
        for given, copied in zip(program.graph.nodes, module.graph.nodes, strict=True):
            copied.name = given.name  # copying renames what is called like a function of Python ("input")
            nodes[given.name] = copied
        return cls(
            module=module,
            nodes=nodes,
            input_specs=list(program.graph_signature.input_specs),
            constants=dict(program.constants),
        )

    def round_result(self, name: str, operand: str, rule: ValueRule) -> None:
        """Round what a node computes, for all that read it."""
        scale = rule.scale(operand)
        node = self.nodes[name]
        readers = list(node.users)
        result = self._insert(lambda value: round_values(value, rule.scheme, scale), node)
        for reader in readers:
            reader.replace_input_with(node, result)
        self.results[name] = result

    def round_input(self, use: WeightUse, rule: SiteRule) -> None:
        """Round what a product takes in; what is looked up in a changed weight is changed back instead."""
        user = self.nodes[use.node]
        if use.kind == "lookup":
            readers = list(user.users)
            restored = user if rule.transform.is_identity else self._insert(lambda w: rule.transform.restore(w), user)
            for reader in readers:
                reader.replace_input_with(user, restored)
            return
        assert use.x is not None and rule.activations is not None
        scheme = rule.activations
        source = self.results.get(use.x, self.nodes[use.x])
        result = next((n for name, r, n in self.rounded if name == use.x and r.rounds_inputs_like(rule)), None)
        if result is None:
            result = self._insert(lambda x: round_input(rule.transform.input(x), scheme, rule.input_scale), source)
            self.rounded.append((use.x, rule, result))
        user.replace_input_with(source, result)

    def _insert(self, function: Callable[[Tensor], Tensor], source: Node) -> Node:
        """Put the operators of a function behind a node; returns the node of its result."""
        fake = source.meta["val"]
        with torch.no_grad(), fake.fake_mode:
            traced = make_fx(function, _allow_non_fake_inputs=True)(fake)
        graph = self.module.graph
        placed: dict[Node, Node] = {}
        with graph.inserting_before(_behind(source)):
            for node in traced.graph.nodes:
                match node.op:
                    case "placeholder":
                        placed[node] = source
                    case "get_attr":
                        placed[node] = self._constant(getattr(traced, str(node.target)), fake)
                    case "output":
                        result: Any = node.args[0]
                        return placed[result]
                    case _:
                        copied = graph.node_copy(node, lambda other: placed[other])
                        copied.meta = {**node.meta, "nn_module_stack": source.meta.get("nn_module_stack", {})}
                        placed[node] = copied
        raise AssertionError("a traced function ends with its output")

    def _constant(self, value: Tensor, like: Any) -> Node:
        """An input of the program that holds a constant, before those of its user."""
        name = f"{CONSTANT_PREFIX}{sum(key.startswith(CONSTANT_PREFIX) for key in self.constants)}"
        first_user = next(i for i, spec in enumerate(self.input_specs) if spec.kind is InputKind.USER_INPUT)
        before = self.nodes[self.input_specs[first_user].arg.name]
        with self.module.graph.inserting_before(before):
            node = self.module.graph.placeholder(name)
        node.meta["val"] = like.fake_mode.from_tensor(value, static_shapes=True)
        self.nodes[node.name] = node
        self.constants[name] = value
        spec = InputSpec(kind=InputKind.CONSTANT_TENSOR, arg=TensorArgument(name=node.name), target=name)
        self.input_specs.insert(first_user, spec)
        return node

    def finish(self, program: ExportedProgram, state_dict: Mapping[str, Any]) -> ExportedProgram:
        """The program of the changed graph, verified."""
        self.module.graph.lint()
        self.module.recompile()
        return ExportedProgram(
            root=self.module,
            graph=self.module.graph,
            graph_signature=replace(program.graph_signature, input_specs=self.input_specs),
            state_dict=dict(state_dict),
            range_constraints=copy.copy(program.range_constraints),
            module_call_graph=copy.copy(program.module_call_graph),
            example_inputs=program.example_inputs,
            constants=dict(self.constants),
            verifiers=program.verifiers,
        )


def _behind(node: Node) -> Node:
    """The node before which everything that needs `node` alone can stand: placeholders come first of all."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following
