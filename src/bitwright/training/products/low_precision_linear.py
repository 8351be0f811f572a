"""Linear layers whose three products are of codes: one autograd function, and the layers of a model that run it.

    installed = install(model, recipe, {"layers.0.q_proj": "attn.q", …})
    …                                         # forward, backward, as often as a step has micro-batches
    optimizer.step()
    installed.end_step()

A layer gets a `forward` of its own, as an attribute of the instance: parameters, their names, hooks, `state_dict`,
wrappers (DDP, FSDP2, peft) and optimizers see the module that they saw before, and `remove` takes it away again. A
compiled model leaves its graph there.

What a layer computes: x in the dtype that autocast computes in (its own where there is none), W in whatever dtype its
parameter has, fp32 masters as a rule; both rounded by their rules; y = x · Wᵀ + b in the compute dtype, rounded once.
Gradients go straight through the rounding (Bengio, Léonard and Courville 2013): those of W and b are in the dtype of
the parameter, that of x in the compute dtype.

For the backward pass a layer keeps the codes of x where they serve it again, and x itself where the recipe rounds it
anew along another dimension. Layers that read the same x (q, k and v; gate and up) share its codes. Of W nothing is
kept but the parameter.

Rejected: replacing modules, which breaks whoever holds them; codes of W kept from micro-batch to micro-batch, since
what changed a weight in between cannot be seen under every wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.quantize.scaled_recipes import nvidia_capability
from bitwright.training.product_recipe import ProductRecipe
from bitwright.training.products.emulated import EmulatedProducts
from bitwright.training.products.linear_products import InputsInUse, LinearProducts, Place
from bitwright.training.products.lost_numbers import LostNumbers
from bitwright.training.products.native import NativeProducts
from bitwright.training.products.native_layouts import why_not_native
from bitwright.training.products.operands import Layer, Operands, Products


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRow:
    """How the products of one layer run, for tables."""

    module: str
    #: As `install` was told.
    role: str
    #: "native", "emulated", or "compute dtype" of a layer that was left as it was.
    kernel: str
    reason: str


class InstalledProducts:
    """The layers of a model that multiply codes; made by `install`."""

    def __init__(self, operands: Operands, modules: Mapping[str, nn.Module], rows: tuple[ProductRow, ...]) -> None:
        self._operands = operands
        self._modules = dict(modules)
        self._rows = rows
        self._layers = {name: Layer(name=name) for name in modules}
        self._in_use = InputsInUse()
        for name, module in self._modules.items():
            place = Place(
                operands=operands, layer=self._layers[name], in_use=self._in_use, is_transposed=_lies_in_out(module)
            )
            module.forward = functools.partial(_forward, module, place)

    def table(self) -> tuple[ProductRow, ...]:
        """A row for every layer that `install` was told of."""
        return self._rows

    def set_in_step(self, is_in_step: bool) -> None:
        """Say whether what comes is part of a step; outside of one nothing is learned. It is, until it is said."""
        self._operands.is_in_step = is_in_step

    def end_step(self) -> None:
        """End an optimizer step, updated or skipped: delayed scales and random draws move on."""
        self._operands.end_step()
        self.restart_step()

    def restart_step(self) -> None:
        """Forget a step that was given up: what is drawn next is what its first backward pass drew, and its amaxes."""
        self._in_use.forget()
        self._operands.restart_step()
        for layer in self._layers.values():
            layer.num_backward = 0

    def counters(self) -> dict[tuple[str, str], LostNumbers]:
        """(layer, operand) → what rounding lost since `reset_counters`; empty unless counting was asked for."""
        return dict(self._operands.lost)

    def reset_counters(self) -> None:
        """Count anew."""
        self._operands.lost.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint between two steps needs: histories, scales, draws."""
        return {"delayed": self._operands.delayed.state_dict(), "draws": self._operands.draws.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off.

        Raises:
            TrainingError: it is of other layers, formats or delays.
        """
        missing = {"delayed", "draws"} - state.keys()
        if missing:
            raise TrainingError(
                f"the state of products lacks {' and '.join(sorted(missing))}; load what `state_dict` gave"
            )
        self._operands.delayed.load_state_dict(state["delayed"])
        self._operands.draws.load_state_dict(state["draws"])

    def remove(self) -> None:
        """Give every layer its own forward back."""
        self._in_use.forget()
        for module in self._modules.values():
            module.__dict__.pop("forward", None)
        self._modules.clear()


def install(
    model: nn.Module,
    recipe: ProductRecipe,
    sites: Mapping[str, str],
    *,
    device: torch.device | str | None = None,
    emulate: bool = False,
    seed: int = 0,
    rank: int = 0,
    reduce_amax: Callable[[Tensor], Tensor] | None = None,
    counts_lost: bool = False,
) -> InstalledProducts:
    """Let linear layers of a model multiply codes. Nothing has changed where this raises.

    Args:
        model: has the layers; its parameters stay what they are.
        recipe: of the products.
        sites: name of a module, nn.Linear or transformers' Conv1D → its role, for tables.
        device: where the model is or will be; that of its parameters unless given.
        emulate: do not ask for native products.
        seed: of random rounding.
        rank: which process this is, so that gradients of ranks are rounded by different random bits.
        reduce_amax: the maximum over all ranks of fp32 amaxes; see `DelayedScaling`.
        counts_lost: count what rounding flushes to zero or saturates (`counters`); one more pass over every operand.

    Raises:
        TrainingError: a name without a linear layer, or a layer with a forward of its own already.
    """
    modules = _linear_modules(model, sites)
    place = torch.device(device) if device is not None else _device_of(model)
    products, reason = choose_products(recipe, place.type, emulate=emulate)
    used, rows = {}, []
    for name, module in modules.items():
        own = _why_not_its_forward(module)
        if own is None:
            used[name] = module
        kernel = products.name if own is None else "compute dtype"
        rows.append(ProductRow(module=name, role=sites[name], kernel=kernel, reason=own or reason))
    operands = Operands(
        recipe,
        used,
        products,
        seed=seed,
        rank=rank,
        counts_lost=counts_lost,
        reduce_amax=reduce_amax,
        device=place,
    )
    return InstalledProducts(operands, used, tuple(rows))


def choose_products(recipe: ProductRecipe, device_type: str, *, emulate: bool = False) -> tuple[Products, str]:
    """What multiplies the codes of a recipe on a device, and why."""
    if emulate:
        return EmulatedProducts(), "emulated in bf16 with fp32 sums, as asked for"
    lacking = why_not_native(recipe, device_type, nvidia_capability(device_type))
    if lacking is None:
        return NativeProducts(), "torch multiplies these codes in the GPU's matrix units"
    return EmulatedProducts(), f"emulated in bf16 with fp32 sums: {lacking}"


@torch.compiler.disable
def _forward(module: nn.Module, place: Place, x: Tensor) -> Tensor:
    """What a layer runs in place of its own forward."""
    device_type = x.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else x.dtype
    found: Tensor = LinearProducts.apply(x, module.weight, module.bias, place, dtype, torch.is_grad_enabled())
    return found


# --- what is asked of a model -----------------------------------------------------------------------------------------


def _linear_modules(model: nn.Module, sites: Mapping[str, str]) -> dict[str, nn.Module]:
    """The modules of those names, every one of them fit."""
    known = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for name in sites:
        module = known.get(name)
        if module is None or not (isinstance(module, nn.Linear) or _lies_in_out(module)):
            kind = "no module" if module is None else f"a {type(module).__name__}"
            raise TrainingError(
                f"'{name}' is {kind} of the model; name linear layers, such as those of `product_sites`"
            )
        if "forward" in module.__dict__:
            raise TrainingError(
                f"'{name}' has a forward of its own already; remove what was installed before, or whatever put it there"
            )
        found[name] = module
    return found


def _lies_in_out(module: nn.Module) -> bool:
    """Whether a weight is stored [in, out]: transformers' Conv1D."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _why_not_its_forward(module: nn.Module) -> str | None:
    """None if a module's class multiplies as its base does."""
    if _lies_in_out(module) or type(module).forward is nn.Linear.forward:
        return None
    return f"{type(module).__name__} has a forward of its own"


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
