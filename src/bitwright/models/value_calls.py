"""Seeing every value that a model computes or keeps at a value site, and putting another in its place.

    with ValueCalls(model, offer):
        model(input_ids)

`offer(name, operand, value)` is called with the site's name ("<module>:<part>") and returns what is used from there on:
the value itself, or a rounded one. Four ways lead to values, none of which knows an architecture:

    attention    transformers' registry and cache                  attention_calls.py
    residual     sums with the stream as an operand                residual_calls.py
    products     the functions that compute with a weight          linear_calls.py    gate, up, down, router logits
    modules      hooks on norms and activation functions, which are known by their class

A model of another kind may offer its values itself (`OffersItsValues`): one of plain torch runs as its program then.

Outside attention a value is [..., width]. Values of experts come expert by expert, with the tokens that chose them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from bitwright.models.attention_calls import AttentionCalls, Offer, may_attend
from bitwright.models.linear_calls import LinearCalls, Matrix
from bitwright.models.residual_calls import ResidualCalls
from bitwright.models.sites import Site, find_sites

#: Parts of an attention layer's sites.
ATTENTION_PARTS = ("k_cache", "v_cache", "qk", "softmax", "softmax_sum", "pv", "output")
#: Role of a weight site → part of the value site that its product is.
PRODUCT_PARTS: Mapping[str, str] = {
    "mlp.gate": "gate",
    "mlp.up": "up",
    "mlp.gate_up": "gate_up",
    "mlp.down": "down",
    "expert.gate": "gate",
    "expert.up": "up",
    "expert.gate_up": "gate_up",
    "expert.down": "down",
    "router": "logits",
}
#: Classes of norms, by pattern.
NORM_CLASSES = ("*Norm", "*LayerNorm*")
#: Modules that define activation functions as classes.
ACTIVATION_HOMES = ("transformers.activations", "torch.nn.modules.activation")
#: Classes found there that are no function of one number.
NOT_ELEMENTWISE = ("*Softmax*", "*Softmin*", "MultiheadAttention")


@runtime_checkable
class OffersItsValues(Protocol):
    """A model that offers its values itself, since they cannot be reached through its modules."""

    def offering(self, offer: Offer, names: Collection[str] | None) -> AbstractContextManager[None]:
        """A context in which it offers those of some sites; None: all."""


class ValueCalls:
    """Context in which a model's values at value sites are offered.

    Args:
        model: fp32, eager.
        offer: sees a value, and says what is used in its place.
        names: only these sites need be offered; None means all that can be reached.
        groups: site name → tokens that its cache rounds together; 1 where absent.
        sites: the model's weight sites, if they are known already.
    """

    def __init__(
        self,
        model: nn.Module,
        offer: Offer,
        names: Collection[str] | None = None,
        groups: Mapping[str, int] | None = None,
        sites: Sequence[Site] | None = None,
    ) -> None:
        self._model = model
        self._offer = offer
        self._names = None if names is None else frozenset(names)
        self._groups = groups
        self._sites = sites
        self._stack = ExitStack()

    def __enter__(self) -> ValueCalls:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack) -> None:
        if isinstance(self._model, OffersItsValues):
            stack.enter_context(self._model.offering(self._offer, self._names))
            return
        if self._names is None or any(name.rpartition(":")[2] in ATTENTION_PARTS for name in self._names):
            stack.enter_context(AttentionCalls(self._model, self._offer, self._groups))
        for name, module in norms_of(self._model).items():
            if self._wants(name):
                stack.callback(module.register_forward_pre_hook(self._input_hook(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._output_hook(name, "output")).remove)
        all_products = products_of(self._model, self._sites)
        products = {name: sites for name, sites in all_products.items() if self._wants(name)}
        for name, module in activations_of(self._model, all_products).items():
            if self._wants(name):
                stack.callback(module.register_forward_hook(self._output_hook(name, "y")).remove)
        layers = {name: layer for name, layer in layers_of(self._model).items() if self._wants(name)}
        if layers:
            stack.enter_context(ResidualCalls(layers, self._offer))
        if products:
            stack.enter_context(self._linear_calls(products))

    def _wants(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _input_hook(self, name: str) -> Any:
        def offer_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (self._offer(name, "input", args[0]), *args[1:]), kwargs
            first = next(iter(kwargs))
            return args, {**kwargs, first: self._offer(name, "input", kwargs[first])}

        return offer_input

    def _output_hook(self, name: str, operand: str) -> Any:
        def offer_output(_: nn.Module, __: Any, output: Any) -> Any:
            return self._offer(name, operand, output) if isinstance(output, Tensor) else None

        return offer_output

    def _linear_calls(self, products: Mapping[str, list[Site]]) -> LinearCalls:
        names = {site.name: name for name, sites in products.items() for site in sites}

        def handle(matrix: Matrix, x: Tensor, operation: Any) -> Tensor:
            return self._offer(names[matrix.sites[0].name], "y", operation(x))

        return LinearCalls(self._model, [site for sites in products.values() for site in sites], handle)


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """Site name → norm."""
    return {f"{name}:norm": module for name, module in model.named_modules() if _is_like(module, NORM_CLASSES)}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Site name → layer: an entry of a list of modules that has attention inside."""
    found: dict[str, nn.Module] = {}
    for list_name, modules in model.named_modules():
        if isinstance(modules, nn.ModuleList) and not any(list_name.startswith(f"{name[:-9]}.") for name in found):
            for index, layer in enumerate(modules):
                if any(may_attend(module) for module in layer.modules()):
                    found[f"{list_name}.{index}:residual"] = layer
    return found


def products_of(model: nn.Module, sites: Sequence[Site] | None = None) -> dict[str, list[Site]]:
    """Site name → the weight sites whose product it is: rows of one matrix, and all experts of a list.

    Rows of a fused matrix that are gate and up are one value, "gate_up".
    """
    found: dict[str, list[Site]] = {}
    for site in find_sites(model) if sites is None else sites:
        part = PRODUCT_PARTS.get(site.role)
        if part is None:
            continue
        if site.tied_group is not None:
            part = "gate_up"
        owner = site.module if site.expert is not None or part == "logits" else site.module.rpartition(".")[0]
        found.setdefault(f"{owner}:{part}", []).append(site)
    return found


def activations_of(model: nn.Module, products: Mapping[str, list[Site]]) -> dict[str, nn.Module]:
    """Site name → activation function: the one that a module with an MLP's products holds."""
    owners = {name.rpartition(":")[0] for name in products if not name.endswith(":logits")}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        owner = name.rpartition(".")[0]
        if type(module).__module__ in ACTIVATION_HOMES and not _is_like(module, NOT_ELEMENTWISE) and owner in owners:
            found.setdefault(f"{owner}:act", module)
    return found


def _is_like(module: nn.Module, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(type(module).__name__, pattern) for pattern in patterns)
