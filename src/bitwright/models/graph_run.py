"""A module run as its program, operator by operator, with every value at a value site offered on its way.

    run = GraphRun.of(module, ids, call, sites)
    run.logits(module, ids, offer, names)

Code that is nobody's known architecture has no place where a hook could see q·k or a softmax; its program shows each as
an operator. The program takes weights from the module at every run, by name, so that whatever lies in the module's
parameters (codes' values, say) is computed with, and products with them are seen by `LinearCalls` like any other. It is
traced with free sizes, and held against the module itself on texts of other sizes before it is trusted.

Rejected: hooks on torch functions (a transposed `matmul` does not say that it is attention), and changing the module's
code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node

from bitwright.errors import ModelError
from bitwright.models.attention_calls import Offer
from bitwright.models.graph import PREFIX, trace
from bitwright.models.graph_norms import name_norm_input
from bitwright.models.graph_places import NORMS, compute, places_of
from bitwright.models.graph_sites import uses_in_program
from bitwright.models.graph_values import find_graph_values, graph_values_left_out
from bitwright.models.sites import Site
from bitwright.models.value_sites import ValueSite

_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphRun:
    """What is needed to run a module as its program."""

    module: GraphModule
    #: Placeholder's name → parameter or buffer of the module; a tensor of the program's own.
    names: Mapping[str, str]
    constants: Mapping[str, Tensor]
    #: Name of the placeholder of the ids.
    ids: str
    values: tuple[ValueSite, ...]
    #: Node → its site names, by part.
    parts: Mapping[str, Mapping[str, str]]
    #: Role, and what of it is no site although the program computes it.
    left_out: tuple[tuple[str, str], ...]
    #: Whether operators write into tensors that they read, as `+=` does: what is offered is then a copy of its own.
    mutates: bool

    def __deepcopy__(self, memo: Any) -> GraphRun:
        return self  # holds no weights: they are those of the module that it runs

    @staticmethod
    def of(
        module: nn.Module,
        ids: Tensor,
        call: Callable[[nn.Module, Tensor], Tensor],
        sites: Sequence[Site],
        vocabulary: int,
    ) -> GraphRun:
        """Trace a module and find its values.

        Args:
            module: fp32, in eval mode.
            ids: int64 [sequences, length], two or more of each.
            call: (module, ids) → logits.
            sites: the module's weight sites.
            vocabulary: how many ids there are.

        Raises:
            ModelError: the module cannot be traced, or its program holds for these ids' sizes alone, changes buffers,
                or computes something else on other texts.
        """
        program = trace(module, (ids,), call=call, free=True)
        signature = program.graph_signature
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            raise ModelError("it changes its own buffers or inputs, which a program would do at every run")
        names, constants, users = {}, {}, []
        for spec in signature.input_specs:
            target = str(spec.target)
            match spec.kind:
                case InputKind.PARAMETER | InputKind.BUFFER:
                    names[spec.arg.name] = target.removeprefix(f"{PREFIX}.")
                case InputKind.CONSTANT_TENSOR:
                    constants[spec.arg.name] = program.constants[target]
                case InputKind.USER_INPUT:
                    users.append(spec.arg.name)
                case _:
                    raise ModelError(f"its program takes in a {spec.kind.name}, which no tensor is")
        uses = uses_in_program(program, sites)
        values = find_graph_values(program, sites, uses)
        parts: dict[str, dict[str, str]] = {}
        for site, nodes in values.items():
            for node in nodes:
                parts.setdefault(node, {})[site.part] = site.name
        left_out = tuple(graph_values_left_out(program, sites, uses))
        for node in [node for node in program.graph.nodes if "norm" in parts.get(node.name, {})]:
            if node.target not in NORMS:
                parts[name_norm_input(program.graph, node).name] = {"norm": parts[node.name]["norm"]}
        run = GraphRun(
            module=program.graph_module,
            names=names,
            constants=constants,
            ids=users[0],
            values=tuple(values),
            parts=parts,
            left_out=left_out,
            mutates=any(_is_mutable(node) for node in program.graph.nodes),
        )
        run._check(module, call, vocabulary, [(1, 1), (ids.shape[0] + 1, max(1, ids.shape[1] - 1))])
        return run

    def logits(self, module: nn.Module, ids: Tensor, offer: Offer, names: Collection[str] | None) -> Tensor:
        """The module's logits, with the values of some sites offered.

        Args:
            module: that was traced, or a copy.
            ids: int64 [sequences, length].
            offer: sees a value, and says what is used in its place.
            names: of the sites that need be offered; None: all.
        """
        kept = dict(module.named_buffers(remove_duplicate=False))
        held = {**dict(module.named_parameters(remove_duplicate=False)), **kept}
        inputs = {
            **{placeholder: held[name] for placeholder, name in self.names.items()},
            **{placeholder: constant.to(ids.device) for placeholder, constant in self.constants.items()},
            self.ids: ids,
        }
        order = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        running = _Running(self, offer, None if names is None else frozenset(names))
        (logits,) = running.run(*(inputs[name] for name in order), enable_io_processing=False)
        found: Tensor = logits
        return found

    def _check(
        self,
        module: nn.Module,
        call: Callable[[nn.Module, Tensor], Tensor],
        vocabulary: int,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """Raise ModelError where the program is not what the module computes on ids of some shapes."""
        given = next(node for node in self.module.graph.nodes if node.name == self.ids)
        sizes = list(given.meta["val"].shape)
        if any(isinstance(size, int) for size in sizes):
            raise ModelError(
                f"its program holds for ids of shape {sizes} alone: its forward fixes a size, or one of the example "
                "ids is 1; pass example_ids of two sequences or more"
            )
        device = next(module.parameters()).device
        with torch.no_grad():
            for shape in shapes:
                ids = torch.arange(prod(shape), device=device).reshape(shape) % vocabulary
                try:
                    found = self.logits(module, ids, lambda _, __, value: value, ())
                except RuntimeError as error:
                    raise ModelError(
                        f"its program does not run on ids of shape {list(shape)}: its forward fixes a size"
                    ) from error
                if not torch.allclose(found, call(module, ids), rtol=_TOLERANCE, atol=_TOLERANCE):
                    raise ModelError(f"its program computes something else than it does on ids of shape {list(shape)}")


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


class _Running(Interpreter):
    """One run of a program."""

    def __init__(self, run: GraphRun, offer: Offer, names: frozenset[str] | None) -> None:
        super().__init__(run.module)
        self._offer = offer
        self._run = run
        self._wanted = names

    def run_node(self, n: Node) -> Any:
        """Run an operator, with what is wanted of its values offered."""
        parts = self._run.parts.get(n.name, {})
        wanted = {part: name for part, name in parts.items() if self._wanted is None or name in self._wanted}
        if not wanted:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)

        def offer(part: str, operand: str, value: Tensor) -> Tensor:
            if part not in wanted:
                return value
            if not self._run.mutates:
                return self._offer(wanted[part], operand, value)
            return self._offer(wanted[part], operand, value.clone()).clone()

        return compute(n, places_of(n, wanted), offer, args, kwargs)
