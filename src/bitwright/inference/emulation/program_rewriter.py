"""A copy of a program's graph that operators are inserted into: what a function of tensors does, traced in place.

    rewriter = Rewriter.of(program)
    rewriter.change_values(name, places, offer)      # values at a node, as graph_places.py has them
    rewriter.round_input(use, rule)                  # what a product with a weight takes in
    planned = rewriter.finish(program, state_dict)

A function is traced with the shapes of the very place where it goes, free ones included; what tensors it holds become
constants of the program. Places are changed in the program's order, so that each sees what was put before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from bitwright.inference.emulation.emulate import SiteRule
from bitwright.models.attention_calls import PartOffer
from bitwright.models.graph import WeightUse
from bitwright.models.graph_norms import name_norm_input
from bitwright.models.graph_places import Place
from bitwright.models.graph_products import with_operand
from bitwright.quantize.static_scales import round_input

#: Names of the constants that are added to a program begin with it.
CONSTANT_PREFIX = "bitwright_constant_"


@dataclass(kw_only=True)
class Rewriter:
    """The copy, and what was put into it."""

    module: GraphModule
    #: By the names that the program gives them.
    nodes: dict[str, Node]
    input_specs: list[InputSpec]
    constants: dict[str, Any]
    #: Name of a node whose result is changed → the changed one.
    results: dict[str, Node] = field(default_factory=dict)
    #: (name of the node whose values are rounded, rule, rounded node): products that share an input share its rounding.
    rounded: list[tuple[str, SiteRule, Node]] = field(default_factory=list)

    @classmethod
    def of(cls, program: ExportedProgram) -> Rewriter:
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

    def name_norm_input(self, name: str) -> Node:
        """Give the input of a written norm a node of its own; `name` is the norm's last operator."""
        return name_norm_input(self.module.graph, self.nodes[name])

    def change_values(self, node: Node, places: Sequence[Place], offer: PartOffer) -> None:
        """Put the operators of what `offer` does at the values of a node in their place."""
        for place in places:
            change = partial(place.change, offer)
            match place.kind:
                case "before":
                    node.args = with_operand(node, node.args, place.position, partial(self._before, node, change))
                case "behind":
                    result = _tensor_of(node)
                    readers = list(result.users)
                    changed = self._insert(change, [result], before=_behind(result))
                    self._replace(result, changed, readers)
                case "instead":
                    self._replace(node, self._compute(node, change), list(node.users))
                    self.module.graph.erase_node(node)

    def round_input(self, use: WeightUse, rule: SiteRule) -> None:
        """Round what a product takes in; what is looked up in a changed weight is changed back instead."""
        user = self.nodes[use.node]
        if use.kind == "lookup":
            if not rule.transform.is_identity:
                readers = list(user.users)
                self._replace(user, self._insert(rule.transform.restore, [user], before=_behind(user)), readers)
            return
        assert use.x is not None and rule.activations is not None
        scheme = rule.activations
        source = self.results.get(use.x, self.nodes[use.x])
        result = next((n for name, r, n in self.rounded if name == use.x and r.rounds_inputs_like(rule)), None)
        if result is None:
            result = self._insert(
                lambda x: round_input(rule.transform.input(x), scheme, rule.input_scale),
                [source],
                before=_behind(source),
            )
            self.rounded.append((use.x, rule, result))
        user.replace_input_with(source, result)

    def _before(self, node: Node, change: Callable[[Tensor], Tensor], operand: Node) -> Node:
        return self._insert(change, [operand], before=node)

    def _replace(self, node: Node, by: Node, readers: Sequence[Node]) -> None:
        for reader in readers:
            reader.replace_input_with(node, by)
        self.results[node.name] = by

    def _compute(self, node: Node, function: Callable[..., Tensor]) -> Node:
        """What a function gives for a node's arguments, before the node."""
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]

        def of_tensors(*tensors: Tensor) -> Tensor:
            given = dict(zip(sources, tensors, strict=True))
            arguments: Any = map_arg((node.args, node.kwargs), lambda source: given.get(source, source.meta.get("val")))
            return function(*arguments[0], **arguments[1])

        return self._insert(of_tensors, sources, before=node)

    def _insert(self, function: Callable[..., Tensor], sources: Sequence[Node], *, before: Node) -> Node:
        """Put the operators of a function of some nodes before another; returns the node of its result."""
        fakes = [source.meta["val"] for source in sources]
        with torch.no_grad(), fakes[0].fake_mode:
            traced = make_fx(lambda *tensors: function(*tensors), _allow_non_fake_inputs=True)(*fakes)
        graph = self.module.graph
        placed: dict[Node, Node] = {}
        given = iter(sources)
        with graph.inserting_before(before):
            for node in traced.graph.nodes:
                match node.op:
                    case "placeholder":
                        placed[node] = next(given)
                    case "get_attr":
                        placed[node] = self._constant(getattr(traced, str(node.target)), fakes[0])
                    case "output":
                        result: Any = node.args[0]
                        return placed[result]
                    case _:
                        copied = graph.node_copy(node, lambda other: placed[other])
                        copied.meta = {**node.meta, "nn_module_stack": sources[0].meta.get("nn_module_stack", {})}
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
        signature = program.graph_signature
        results: Any = next(node for node in self.module.graph.nodes if node.op == "output").args[0]
        output_specs = [
            replace(spec, arg=TensorArgument(name=result.name)) if isinstance(spec.arg, TensorArgument) else spec
            for spec, result in zip(signature.output_specs, results, strict=True)
        ]
        return ExportedProgram(
            root=self.module,
            graph=self.module.graph,
            graph_signature=replace(signature, input_specs=self.input_specs, output_specs=output_specs),
            state_dict=dict(state_dict),
            range_constraints=copy.copy(program.range_constraints),
            module_call_graph=copy.copy(program.module_call_graph),
            example_inputs=program.example_inputs,
            constants=dict(self.constants),
            verifiers=program.verifiers,
        )


def _tensor_of(node: Node) -> Node:
    """The node of a result that is a tensor: itself, or the first of several that it gives."""
    if isinstance(node.meta["val"], Tensor):
        return node
    return next(user for user in node.users if user.args[1] == 0)


def _behind(node: Node) -> Node:
    """The node before which everything that needs `node` alone can stand: placeholders come first of all."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following
