"""Sites of a module that is nobody's known architecture, read off the operators that it runs.

    found = find_graph_sites(module, (input_ids,))
    found.weights      sites as find_sites gives them, for any code: nn.Linear, x @ self.w, einsum, F.linear
    found.kept         matrices that are no sites, each with its reason
    found.values()     what is computed between them (graph_values.py)

A parameter is a site where every operator that computes with it multiplies an input by it, or looks rows up in it by
the ids that the model is given. Roles follow from names (names.py); two follow from the program itself: the table in
which an input is looked up is the embedding, and a product of its height that is the program's result is the head.
A parameter that is both is one site, as with tied weights of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from bitwright.models.graph import (
    PREFIX,
    RESHAPES,
    SAME_VALUES,
    WeightUse,
    call_module,
    canonical_names,
    node_named,
    parameters_of,
    trace,
    weight_uses,
)
from bitwright.models.graph_values import find_graph_values
from bitwright.models.names import EXPERT_PARAMETERS
from bitwright.models.sites import Site, no_sites_error, role_of
from bitwright.models.value_sites import ValueSite


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptWeight:
    """A parameter of two dimensions or more whose precision is not chosen."""

    parameter: str
    #: As a matrix: [out, in · kernel] of a convolution, otherwise as it is stored.
    shape: tuple[int, ...]
    #: Why it stays as it was loaded.
    reason: str

    def describe(self) -> str:
        """One sentence for a plan's notes."""
        return f"{self.parameter} {list(self.shape)} stays as it was loaded: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GraphSites:
    """What a traced program says about its sites."""

    program: ExportedProgram
    #: In the order of the program; then the embedding, then the head.
    weights: tuple[Site, ...]
    #: Site name → the places where the program computes with it.
    uses: Mapping[str, tuple[WeightUse, ...]]
    kept: tuple[KeptWeight, ...]

    def values(self) -> dict[ValueSite, tuple[str, ...]]:
        """Value site → names of the nodes of the program that compute it, in its order."""
        return find_graph_values(self.program, self.weights, self.uses)


def find_graph_sites(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    call: Callable[..., Any] = call_module,
) -> GraphSites:
    """Trace a module on example inputs and name its sites.

    Args:
        module: any module in eval mode; it may take several inputs and return a tensor, tuple, dict or an object with
            `.logits`.
        args, kwargs: example inputs.
        call: (module, *args, **kwargs) → tensors, for modules that are called otherwise.

    Raises:
        ModelError: the module cannot be traced, or none of its parameters is a site; says what was seen, and how to
            name sites in a file.
    """
    found = sites_of_program(trace(module, args, kwargs, call=call))
    if not any(site.role != "embedding" for site in found.weights):
        raise no_sites_error(module, [kept.describe() for kept in found.kept])
    return found


def sites_of_program(program: ExportedProgram) -> GraphSites:
    """Name the sites of an exported program; the names of parameters are those of the program."""
    canonical, by_matrix = _by_matrix(program)
    vocabulary = _heights_of_input_tables(program, by_matrix)
    decoder: list[Site] = []
    ends: list[Site] = []
    uses: dict[str, tuple[WeightUse, ...]] = {}
    kept: list[KeptWeight] = []
    named: set[str] = set()
    for (parameter, expert), places in by_matrix.items():
        reason = _why_kept(program, places)
        stored = _shape_of(program, parameter)
        named.add(parameter)
        if reason is not None:
            matrix = (stored[0], prod(stored[1:])) if places[0].kind == "convolution" else stored
            kept.append(KeptWeight(parameter=parameter, shape=matrix, reason=reason))
            continue
        site = _site(program, parameter, expert, places, stored, vocabulary)
        uses[site.name] = tuple(places)
        (ends if site.role in ("embedding", "lm_head") else decoder).append(site)
    kept += [
        KeptWeight(parameter=parameter, shape=shape, reason="the program does not compute with it")
        for name in parameters_of(program).values()
        if (parameter := canonical.get(_plain(name), _plain(name))) not in named
        and len(shape := _shape_of(program, parameter)) >= 2
    ]
    ends.sort(key=lambda site: site.role == "lm_head")
    return GraphSites(program=program, weights=(*decoder, *ends), uses=uses, kept=tuple(kept))


def uses_in_program(program: ExportedProgram, sites: Sequence[Site]) -> dict[str, tuple[WeightUse, ...]]:
    """Site name → the places where a program computes with it, for sites that were named otherwise."""
    canonical, by_matrix = _by_matrix(program)
    return {
        site.name: tuple(by_matrix.get((canonical.get(site.parameter, site.parameter), site.expert), ()))
        for site in sites
    }


def _by_matrix(program: ExportedProgram) -> tuple[dict[str, str], dict[tuple[str, int | None], list[WeightUse]]]:
    """Parameter → its first name, and (that name, expert) → uses, in the program's order."""
    canonical = {_plain(name): _plain(first) for name, first in canonical_names(program).items()}
    by_matrix: dict[tuple[str, int | None], list[WeightUse]] = {}
    for use in weight_uses(program):
        by_matrix.setdefault((canonical.get(use.parameter, use.parameter), use.expert), []).append(use)
    return canonical, by_matrix


def _site(
    program: ExportedProgram,
    parameter: str,
    expert: int | None,
    places: Sequence[WeightUse],
    stored: tuple[int, ...],
    vocabulary: frozenset[int],
) -> Site:
    products = [place for place in places if place.kind == "product"]
    transposed = bool(products) and products[0].transposed
    rows, columns = stored[-2:]
    shape = (columns, rows) if transposed else (rows, columns)
    head = next((use for use in products if shape[0] in vocabulary and _is_result(program, use.node)), None)
    # a tied matrix is called as its head is, which is where its precision tells most
    own_name = head.parameter if head is not None else parameter
    owner, _, leaf = own_name.rpartition(".")
    name = owner if leaf == "weight" and owner else own_name
    role = "lm_head" if head is not None else role_of(name) if products else "embedding"
    if expert is not None:
        known = {entry: (short, expert_role) for entry, short, expert_role in EXPERT_PARAMETERS}
        short, role = known.get(leaf, (leaf, "other"))
        name = f"{owner}.{expert}.{short}" if owner else f"{expert}.{short}"
    return Site(
        name=name,
        kind="weight",
        role=role,
        module=owner,
        parameter=parameter,
        rows=None,
        expert=expert,
        transposed=transposed,
        tied_group=None,
        shape=shape,
        uses=tuple(dict.fromkeys(place.module for place in places)),
    )


def _why_kept(program: ExportedProgram, places: Sequence[WeightUse]) -> str | None:
    """Why a parameter with these uses is no site; None where it is one."""
    for place in places:
        if place.kind == "convolution":
            return "it is the kernel of a convolution, and schemes are defined on matrices"
        if place.kind == "lookup" and not _comes_from_input(program, place.x):
            return "it is looked up by numbers that the program makes itself, as positions are"
        if place.kind == "other":
            return f"{place.remark}, which is no product of an input with a matrix"
    if len({place.transposed for place in places if place.kind == "product"}) > 1:
        return f"{places[0].module or 'the model'} and another use it as [out, in] and as [in, out]"
    if any(place.transposed for place in places) and any(place.kind == "lookup" for place in places):
        return "rows are looked up in it, and a product takes it as [in, out]"
    return None


def _heights_of_input_tables(
    program: ExportedProgram, by_matrix: Mapping[tuple[str, int | None], Sequence[WeightUse]]
) -> frozenset[int]:
    """Rows of every table in which an input of the program is looked up."""
    return frozenset(
        _shape_of(program, parameter)[0]
        for (parameter, _), places in by_matrix.items()
        if any(place.kind == "lookup" and _comes_from_input(program, place.x) for place in places)
    )


def _comes_from_input(program: ExportedProgram, name: str | None) -> bool:
    """Whether a node is an input of the program, seen in whatever shape."""
    assert name is not None
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    node = node_named(program, name)
    while node.target in SAME_VALUES | RESHAPES and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.name in inputs


def _is_result(program: ExportedProgram, name: str) -> bool:
    """Whether a node's result leaves the program as it is, in whatever shape."""
    front = [node_named(program, name)]
    while front:
        for user in front.pop().users:
            if user.op == "output":
                return True
            if user.target in SAME_VALUES | RESHAPES:
                front.append(user)
    return False


def _shape_of(program: ExportedProgram, parameter: str) -> tuple[int, ...]:
    tensors = program.state_dict
    return tuple((tensors[parameter] if parameter in tensors else tensors[f"{PREFIX}.{parameter}"]).shape)


def _plain(name: str) -> str:
    return name.removeprefix(f"{PREFIX}.")
