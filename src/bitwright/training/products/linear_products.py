"""The autograd function of a linear layer: three products of codes, forward and backward.

    forward    y  = x · Wᵀ + b
    backward   dx = g · W,  dW = gᵀ · x,  db = Σ g       each only where somebody asks for it

Codes of W are written twice, for the forward product and for dgrad, and are the same: kept in between, they would be
two bytes a parameter, of every parameter, also where weights are put together from all ranks for one layer at a time
(FSDP). To write them takes less than a hundredth of a step of 1024 tokens.

Autocast is switched off inside: what is multiplied here has its dtype already.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitwright.training.products.operands import Layer, Operands, Written


@dataclass(kw_only=True, slots=True, eq=False)
class InputsInUse:
    """Codes of the last x of any layer, for the next one that reads the same x."""

    _x: weakref.ref[Tensor] | None = None
    _version: int = 0
    _dtype: torch.dtype | None = None
    _written: Written | None = None

    def find(self, x: Tensor, dtype: torch.dtype) -> Written | None:
        """What was written of this very tensor, if nobody changed it since."""
        is_it = self._x is not None and self._x() is x and not x.is_inference()
        return self._written if is_it and x._version == self._version and self._dtype == dtype else None

    def keep(self, x: Tensor, dtype: torch.dtype, written: Written) -> None:
        """Remember what was written of a tensor."""
        if not x.is_inference():
            self._x, self._version, self._dtype, self._written = weakref.ref(x), x._version, dtype, written

    def forget(self) -> None:
        """Keep no codes alive."""
        self._x = self._written = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A layer and what writes its operands."""

    operands: Operands
    layer: Layer
    in_use: InputsInUse
    #: The weight is stored [K, N].
    is_transposed: bool

    def inputs(self, x: Tensor, dtype: torch.dtype, records: bool) -> tuple[Any, Tensor]:
        """x as an operand of the forward product, and as a matrix [M, K] in the compute dtype."""
        x_MK = x.reshape(-1, x.shape[-1]).to(dtype)
        before = self.in_use.find(x, dtype)
        if before is not None:
            again = self.operands.write_again(self.layer, "forward_x", before, records=records)
            if again is not None:
                return again, x_MK
        written = self.operands.write(self.layer, "forward_x", x_MK, records=records)
        self.in_use.keep(x, dtype, written)
        return written.operand, x_MK

    def write(self, operand: str, x_RS: Tensor, records: bool = True) -> Any:
        """An operand of this layer."""
        return self.operands.write(self.layer, operand, x_RS, records=records).operand

    def seen(self, operand: str, kept: Any) -> Any:
        """An operand from what was kept of it: its codes seen from the other side, or the matrix [rows, summed]."""
        if self.operands.is_seen_before(operand):
            return self.operands.products.transposed(kept)
        return self.write(operand, kept)

    def weights_again(self, weight: Tensor) -> Any:
        """Wᵀ for the product with gradients: codes of the forward pass, written again, or codes of its own."""
        if self.operands.is_seen_before("dgrad_w"):
            written = self.operands.write(self.layer, "forward_w", self.w_NK(weight), is_again=True)
            return self.operands.products.transposed(written.operand)
        return self.write("dgrad_w", self.w_NK(weight).t())

    def w_NK(self, weight: Tensor) -> Tensor:
        """The weight, out by in."""
        return weight.t() if self.is_transposed else weight


class LinearProducts(torch.autograd.Function):
    """y [..., N] of x [..., K]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: Place, dtype: torch.dtype, records: bool
    ) -> Tensor:
        """The product, in `dtype`; `records`: delayed scales learn from it."""
        operands = place.operands
        with torch.autocast(x.device.type, enabled=False):
            a, x_MK = place.inputs(x, dtype, records)
            b = place.write("forward_w", place.w_NK(weight), records)
            y_MN = operands.products.multiply(a, b, dtype, bias)
        ctx.place, ctx.x_shape, ctx.x_dtype = place, x.shape, x.dtype
        kept_x: Any = None
        if ctx.needs_input_grad[1]:
            kept_x = a if operands.is_seen_before("wgrad_x") else x_MK
        kept_w = weight if ctx.needs_input_grad[0] else None
        ctx.kept = _Kept.of(kept_x, kept_w)
        ctx.save_for_backward(*ctx.kept.tensors)
        ctx.kept.tensors = ()
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        place: Place = ctx.place
        place.in_use.forget()
        kept_x, kept_w = ctx.kept.restored(ctx.saved_tensors)
        g_MN = g.reshape(-1, g.shape[-1])
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            operands, products = place.operands, place.operands.products
            shares_g = operands.is_seen_before("wgrad_g")
            of_g = None
            if ctx.needs_input_grad[0] or (shares_g and ctx.needs_input_grad[1]):
                of_g = place.write("dgrad_g", g_MN)
            if ctx.needs_input_grad[0]:
                w = place.weights_again(kept_w)
                dx = products.multiply(of_g, w, g.dtype).to(ctx.x_dtype).reshape(ctx.x_shape)
            if ctx.needs_input_grad[1]:
                x = kept_x if operands.is_seen_before("wgrad_x") else kept_x.t()
                first, second = place.seen("wgrad_g", of_g if shares_g else g_MN.t()), place.seen("wgrad_x", x)
                if place.is_transposed:
                    first, second = second, first
                dw = products.multiply(first, second, ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                db = g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if operands.is_in_step:
            place.layer.num_backward += 1
        return dx, dw, db, None, None, None


@dataclass(kw_only=True, slots=True, eq=False)
class _Kept:
    """What a layer keeps for its backward pass, taken apart into tensors, which autograd guards, and the rest."""

    tensors: tuple[Tensor, ...]
    #: Of each thing: itself without its tensors, and the names of those; no name for a tensor alone.
    rest: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)

    @staticmethod
    def of(*things: Any) -> _Kept:
        """Take operands, tensors and None apart."""
        tensors: list[Tensor] = []
        rest: list[tuple[Any, tuple[str, ...]]] = []
        for thing in things:
            if thing is None or isinstance(thing, Tensor):
                tensors += [] if thing is None else [thing]
                rest.append((thing is not None, ()))
                continue
            names = tuple(part.name for part in fields(thing) if isinstance(getattr(thing, part.name), Tensor))
            tensors += [getattr(thing, name) for name in names]
            rest.append((replace(thing, **dict.fromkeys(names)), names))
        return _Kept(tensors=tuple(tensors), rest=rest)

    def restored(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """Put them together again."""
        left = iter(tensors)
        return [
            replace(thing, **{name: next(left) for name in names}) if names else (next(left) if thing else None)
            for thing, names in self.rest
        ]
