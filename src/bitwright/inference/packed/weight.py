"""A weight matrix as packed codes: what modules multiply with, and read rows from, where a plan runs packed.

A matrix is one or more runs of rows, each with its own codes and scales: q, k and v of a fused matrix were quantised
apart (`rows.py`). Inputs are rounded once for all of them (`input_rounding.py`); an exact change of inputs that
belongs to one run alone, as weight-only schemes may have it, is made for that run.

Codes and scales are buffers: they travel with `state_dict`, `.to(device)` and `deepcopy`, and `.to(dtype)` leaves them
what they are. Gradients go to inputs only, through the values of the weights (as QLoRA has them), and straight through
what is rounded.

Most matrices are one run of rows whose inputs stay as they are. For those a call is that of the kernel: a step of
decoding makes hundreds, of a few microseconds each. To `torch.compile` they are one operator of its graph; at all
others it breaks its graph, and runs what happens there as it is.

Legend: M tokens, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitwright.inference.fallback import Action, Fallback, places_of
from bitwright.inference.packed.input_rounding import InputRounding
from bitwright.inference.packed.rows import Rows


class PackedWeight(nn.Module):
    """One matrix [N, K] of a model.

    Args:
        rows: its rows, in order.
        changes: what is done to the inputs of each of them alone.
        inputs: what is done to the inputs of all of them.
        dtype: what the model computes in.
        fallback: what happens to tokens whose inputs overflow; None where none can.
    """

    #: Whoever looks for weights as numbers finds none here (`models/sites.py`).
    holds_codes = True

    def __init__(
        self,
        rows: Sequence[Rows],
        changes: Sequence[InputRounding],
        inputs: InputRounding | None,
        dtype: torch.dtype,
        fallback: Fallback | None = None,
    ) -> None:
        super().__init__()
        self.rows = nn.ModuleList(rows)
        self.changes = nn.ModuleList(changes)
        self.inputs = inputs
        self.dtype = dtype
        self.fallback = fallback
        # beside the lists of modules, which take a while to go through
        self._rows, self._changes = tuple(rows), tuple(changes)
        #: One run of rows, and inputs that stay as they are.
        self._is_plain = len(self._rows) == 1 and inputs is None and self._changes[0].changes_nothing

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((sum(rows.num_rows for rows in self._rows), self._rows[0].num_columns))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., N] of inputs [..., K], in their dtype."""
        if self._is_plain and torch.compiler.is_compiling():
            return self._rows[0].traced(x)
        if x.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Product.apply(x, self))
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """The same without gradients."""
        if torch.compiler.is_compiling():
            return cast(Tensor, _untraced(self, x))
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        if self._is_plain:
            return self._rows[0].multiply(x)
        x_MK = x.reshape(-1, x.shape[-1])
        if self.inputs is None:
            y_MN = self._multiply(x_MK)
        else:
            y_MN = self._rounded(self.inputs, self.inputs.change(x_MK))
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], y_MN.shape[-1])

    @torch.compiler.disable
    def values(self) -> Tensor:
        """The weight that the model as it was loaded would have to have, fp32 [N, K]."""
        parts = [
            change.transform.restore(rows.values()) for rows, change in zip(self._rows, self._changes, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if self.inputs is None else self.inputs.transform.restore(whole)

    @torch.compiler.disable
    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of `values()`, in the model's dtype [*ids.shape, K]."""
        if len(self._rows) > 1:
            return self.values()[ids].to(self.dtype)
        found = self._changes[0].transform.restore(self._rows[0].lookup(ids))
        return (found if self.inputs is None else self.inputs.transform.restore(found)).to(self.dtype)

    def nbytes(self) -> int:
        """Bytes of codes and scales; what transforms and static scales take is in the buffers beside them."""
        return sum(rows.nbytes() for rows in self._rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(self.buffers()).device)).dtype
        return super()._apply(fn, recurse)

    def narrow(self, changed_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs after their change, which are rounded here."""
        assert self.inputs is not None
        if self._rows[0].takes_codes:
            codes = self.inputs.codes(changed_MK)
            return _beside([rows.multiply_codes(codes, self.dtype) for rows in self._rows])
        return self._multiply(self.inputs.round(changed_MK))

    def wide(self, changed_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs after their change, which stay numbers of the model's dtype."""
        return self._multiply(changed_MK.to(self.dtype))

    def _rounded(self, inputs: InputRounding, changed_MK: Tensor) -> Tensor:
        """Outputs of inputs that are rounded, but for tokens that overflow."""
        beyond = None if self.fallback is None else inputs.overflows(changed_MK)
        if self.fallback is None or beyond is None:
            return self.narrow(changed_MK)
        overflowed_M = beyond.any(-1)
        match self.fallback.decide(beyond, overflowed_M):
            case Action.NARROW:
                return self.narrow(changed_MK)
            case Action.WIDE:
                return self.wide(changed_MK)
            case Action.TOKENS:
                y_MN = self.narrow(changed_MK)
                places = places_of(overflowed_M)
                return y_MN.index_copy(0, places, self.wide(changed_MK[places]).to(y_MN.dtype))
            case Action.BOTH:
                y_MN = self.narrow(changed_MK)
                rescued_M1 = self.fallback.rescued(overflowed_M).unsqueeze(-1)
                return torch.where(rescued_M1, self.wide(changed_MK).to(y_MN.dtype), y_MN)

    def _multiply(self, x_MK: Tensor) -> Tensor:
        """Products with inputs that are numbers, in their dtype."""
        return _beside(
            [
                rows.multiply(change.change(x_MK).to(x_MK.dtype))
                for rows, change in zip(self._rows, self._changes, strict=True)
            ]
        )


@torch.compiler.disable
def _untraced(weight: PackedWeight, x: Tensor) -> Tensor:
    return weight._product(x)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=-1)


class _Product(torch.autograd.Function):
    """The product, with the gradient of its inputs."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        context.weight = weight
        return weight.product(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient.float() @ context.weight.values()).to(gradient.dtype), None
