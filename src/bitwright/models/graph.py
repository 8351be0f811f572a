"""A model as the operations it runs, and which of them compute with its weights.

`torch.export` turns a module into a list of torch operators, whatever its code looks like: a product with a weight is
one of a few operators (linear, addmm, mm, matmul, einsum, embedding, convolution), and the weight is one of the
program's inputs, with the dotted name it has in the module. From its input every weight is followed through
operators that only look at it otherwise (a transpose, a cast, one expert of a 3-D parameter) to those that compute
with it.

    program = trace(module, (input_ids,))
    weight_uses(program)        # where, how, and with which module around it

What each operator is stands in two tables, `VIEWS` and `PRODUCTS`; there is no branch on an architecture. Training IR
(what `torch.export.export` gives) and its decomposed forms are read alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from bitwright.errors import ModelError
from bitwright.models.linear_calls import einsum_is_in_out

_ATEN: Any = torch.ops.aten
#: Name under which a traced module hangs in the program that `trace` returns.
PREFIX = "module"

#: Operators after which a tensor holds the same values in the same places.
SAME_VALUES: frozenset[Any] = frozenset(
    {
        _ATEN.alias.default,
        _ATEN.clone.default,
        _ATEN.contiguous.default,
        _ATEN.detach.default,
        _ATEN.lift_fresh_copy.default,
        _ATEN.to.device,
        _ATEN.to.dtype,
        _ATEN.to.dtype_layout,
        _ATEN._to_copy.default,
        _ATEN.dropout.default,  # exported in eval mode, where it passes everything
    }
)
#: Operators after which the same values lie in another shape or order.
RESHAPES: frozenset[Any] = frozenset(
    {
        _ATEN.expand.default,
        _ATEN.flatten.using_ints,
        _ATEN.movedim.int,
        _ATEN.numpy_T.default,
        _ATEN.mT.default,
        _ATEN.permute.default,
        _ATEN.reshape.default,
        _ATEN.slice.Tensor,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unflatten.int,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN.chunk.default,
        _ATEN.split.Tensor,
        _ATEN.split_with_sizes.default,
        _ATEN.select.int,
    }
)


class Product(NamedTuple):
    """How an operator multiplies an input by a matrix: argument positions, and which way the matrix lies."""

    x: int
    weight: int
    #: True: the operator takes the matrix as [in, out].
    in_out: bool


#: Operators y = x Wᵀ.
PRODUCTS: Mapping[Any, Product] = {
    _ATEN.linear.default: Product(x=0, weight=1, in_out=False),
    _ATEN.addmm.default: Product(x=1, weight=2, in_out=True),
    _ATEN.mm.default: Product(x=0, weight=1, in_out=True),
    _ATEN.matmul.default: Product(x=0, weight=1, in_out=True),
}
_LOOKUPS: frozenset[Any] = frozenset({_ATEN.embedding.default})
_CONVOLUTIONS: frozenset[Any] = frozenset(
    getattr(getattr(_ATEN, name), overload)
    for name in ("conv1d", "conv2d", "conv3d", "convolution")
    for overload in getattr(_ATEN, name).overloads()
    if overload in ("default", "padding")
)
#: What flips a matrix, by how its dimensions are given; see `_flips`.
_FLIPS: frozenset[Any] = frozenset({_ATEN.t.default, _ATEN.numpy_T.default, _ATEN.mT.default})

Kind = Literal["product", "lookup", "convolution", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUse:
    """One place where the program computes with a parameter."""

    #: Dotted name of the parameter in the module.
    parameter: str
    #: Index into dim 0 of a 3-D parameter; None for the whole of it.
    expert: int | None
    kind: Kind
    #: Name of the graph's node that computes.
    node: str
    #: Name of the node whose result is multiplied by the matrix, or looked up in it; None for "other".
    x: str | None
    #: True if the parameter is stored [in, out].
    transposed: bool
    #: Dotted name of the innermost module that runs the operator.
    module: str
    #: Of kind "other": what the operator does with the weight.
    remark: str = ""


# --- tracing ----------------------------------------------------------------------------------------------------------


class _Traced(nn.Module):
    """A module under the name `PREFIX`, which returns nothing but what `call` makes of it."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.add_module(PREFIX, module)
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call."""
        return self._call(self.get_submodule(PREFIX), *args, **kwargs)


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module and return the tensors of its output: a tensor, tuple, list, dict, or an object's `.logits`."""
    output = module(*args, **kwargs)
    if isinstance(output, Tensor | tuple | list | Mapping):
        return output
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(module).__name__} returns a {type(output).__name__}, in which no tensor can be found; return a "
            "tensor, a tuple, a dict or an object with .logits, or pass a call that does"
        )
    return logits


def trace(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    call: Callable[..., Any] = call_module,
    free: bool = False,
) -> ExportedProgram:
    """The operators that a module runs on example inputs; its parameters are called ``module.<their name>``.

    Args:
        module: in eval mode.
        args, kwargs: example inputs, passed on by `call`.
        call: (module, *args, **kwargs) → tensors.
        free: leave every dimension of `args`, all tensors, free that the module leaves free; without `kwargs`.

    Raises:
        ModelError: `torch.export` cannot trace the module; the message has its reason and the next step.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shapes = None
            if free:
                auto = torch.export.Dim.AUTO
                shapes = {"args": tuple(dict.fromkeys(range(arg.dim()), auto) for arg in args)}
            traced = _Traced(module, call)
            return torch.export.export(traced, tuple(args), dict(kwargs or {}), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        # whatever a user's own forward raises comes out of torch.export as it is: no narrower class catches it
        if isinstance(error, ModelError):
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        advice = "name its sites in a file (--sites FILE, or find_sites(model, site_file=…)), or pass"
        raise ModelError(
            f"{type(module).__name__} cannot be traced by torch.export"
            f"{' with free sizes' if free else ''} ({type(error).__name__}: {reason[:200]}); "
            f"{'pass' if free else advice} example inputs that its forward takes and keep branches on values of "
            "tensors out of it"
        ) from error


# --- reading ----------------------------------------------------------------------------------------------------------


def parameters_of(program: ExportedProgram) -> dict[str, str]:
    """Placeholder's node name → dotted name of its parameter, as the program has it."""
    return {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER and spec.target is not None
    }


def canonical_names(program: ExportedProgram) -> dict[str, str]:
    """Parameter → the first name in the program of the same tensor: tied parameters have several."""
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    names = {}
    for name, tensor in program.state_dict.items():
        identity = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape))
        names[name] = first.setdefault(identity, name)
    return names


def module_of(node: Node) -> str:
    """Dotted name of the innermost module that ran an operator, "" for the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()), ("",))[0]) if stack else ""
    return path.removeprefix(PREFIX).removeprefix(".") if path.split(".")[0] == PREFIX else path


def node_named(program: ExportedProgram, name: str) -> Node:
    """The graph's node of a name that was read off the same program."""
    return next(node for node in program.graph.nodes if node.name == name)


def weight_uses(program: ExportedProgram) -> tuple[WeightUse, ...]:
    """Every place where the program computes with a parameter of two dimensions or more, in the program's order.

    The prefix that `trace` adds is left out of the names.
    """
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    names = parameters_of(program)
    found: list[tuple[int, WeightUse]] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names and node.meta["val"].dim() >= 2:
            start = WeightUse(
                parameter=names[node.name].removeprefix(f"{PREFIX}."),
                expert=None,
                kind="other",
                node=node.name,
                x=None,
                transposed=False,
                module="",
            )
            found += [(order[user], use) for user, use in _follow(node, start)]
    return tuple(use for _, use in sorted(found, key=lambda item: item[0]))


def _follow(node: Node, seen: WeightUse) -> Iterator[tuple[Node, WeightUse]]:
    """All operators that compute with what `node` holds: a parameter, of which `seen` says how it lies by now."""
    for user in node.users:
        if user.target in SAME_VALUES:
            yield from _follow(user, seen)
        elif _flips(user):
            yield from _follow(user, replace(seen, transposed=not seen.transposed))
        elif _takes_expert(user, seen):
            yield from _follow(user, replace(seen, expert=int(str(user.args[2]))))
        elif user.op != "output" and "_assert" not in str(user.target):
            yield user, _use(user, node, seen)


def _flips(node: Node) -> bool:
    """Whether a node is the transpose of a matrix."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(value := source.meta.get("val"), Tensor) or value.dim() != 2:
        return False
    if node.target in _FLIPS:
        return True
    dims: Any = node.args[1:]
    if node.target is _ATEN.transpose.int:
        return {dim % 2 for dim in dims} == {0, 1}
    return bool(node.target is _ATEN.permute.default) and [dim % 2 for dim in dims[0]] == [1, 0]


def _takes_expert(node: Node, seen: WeightUse) -> bool:
    arguments: Any = node.args
    if node.target is not _ATEN.select.int or seen.expert is not None:
        return False
    return bool(arguments[0].meta["val"].dim() == 3) and arguments[1] == 0 and isinstance(arguments[2], int)


def _use(user: Node, weight: Node, seen: WeightUse) -> WeightUse:
    here = replace(seen, node=user.name, module=module_of(user))
    arguments: Any = user.args
    product = PRODUCTS.get(user.target)
    is_matrix = weight.meta["val"].dim() == 2
    if product is not None and is_matrix and arguments[product.weight] is weight:
        x = arguments[product.x]
        if x is not weight:
            return replace(here, kind="product", x=x.name, transposed=seen.transposed != product.in_out)
    if user.target is _ATEN.einsum.default and is_matrix and len(operands := arguments[1]) == 2:
        position = operands.index(weight)
        in_out = einsum_is_in_out(str(arguments[0]), position)
        if in_out is not None:
            return replace(here, kind="product", x=operands[1 - position].name, transposed=seen.transposed != in_out)
    if user.target in _LOOKUPS and arguments[0] is weight:
        return replace(here, kind="lookup", x=arguments[1].name)
    if user.target in _CONVOLUTIONS and arguments[1] is weight:
        return replace(here, kind="convolution", x=arguments[0].name)
    return replace(here, remark=f"{user.target} takes it as {list(weight.meta['val'].shape)}")
