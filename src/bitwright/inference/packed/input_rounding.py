"""What is done to the input of a packed matrix: the same arithmetic as in emulation, with its tensors as buffers.

    x' = transform.input(x)          in fp32, whatever the model computes in
    x″ = round(x' / scale) · scale   where the scheme rounds inputs: in fp32 too

A model that computes in bf16 so rounds its inputs as `emulate` does (`static_scales.round_input`): codes of fp8 times
an fp32 scale are no numbers of bf16, and narrowing them would round a second time. What multiplies takes them in fp32,
or as codes with their scales (`codes`), which are exact in 8 bits. Inputs that are changed but not rounded go on in
the model's dtype.

Legend: M tokens, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bitwright.quantize import pack, quantize
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.pack import PackedTensor, pack_codes
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.static_scales import overflows, round_input, stored_scales


class InputRounding(nn.Module):
    """A change of inputs, and a rounding of what comes out."""

    column_scales: Tensor | None
    signs: Tensor | None
    scale: Tensor | None

    def __init__(self, transform: Fitted, activations: TensorScheme | None, scale: Tensor | None) -> None:
        super().__init__()
        self.activations = activations
        self.register_buffer("column_scales", transform.column_scales_K)
        self.register_buffer("signs", transform.signs_K)
        self.register_buffer("scale", scale)
        self._fitted: Fitted | None = None
        #: Whether x' is x: found once, like all of a transform that a GPU would have to wait for.
        self.changes_nothing = activations is None and transform.is_identity

    @property
    def transform(self) -> Fitted:
        """The change, on the device of its tensors."""
        if self._fitted is None:
            self._fitted = Fitted(column_scales_K=self.column_scales, signs_K=self.signs)
        return self._fitted

    def change(self, x_MK: Tensor) -> Tensor:
        """x' in fp32 where anything is changed or rounded; x itself where nothing is."""
        if self.changes_nothing:
            return x_MK
        return self.transform.input(x_MK.float())

    def round(self, changed_MK: Tensor) -> Tensor:
        """x″ of an x', fp32; x' itself where inputs are not rounded."""
        return changed_MK if self.activations is None else round_input(changed_MK, self.activations, self.scale)

    def codes(self, changed_MK: Tensor) -> PackedTensor:
        """The codes and scales of an x'."""
        assert self.activations is not None
        if self.scale is None:
            return pack(changed_MK, self.activations)
        stored = stored_scales(changed_MK, self.activations, self.scale)
        return pack_codes(quantize(changed_MK, self.activations, scales=stored))

    def overflows(self, changed_MK: Tensor) -> Tensor | None:
        """Which numbers of an x' lie beyond the format, bool [M, K]; None where scales found per call cover them."""
        return None if self.activations is None else overflows(changed_MK, self.activations, self.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._fitted = None
        return super()._apply(keeping_dtypes(fn), recurse)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        scale = ", static" if self.scale is not None else ""
        return f"{self.activations}{scale}" if self.activations is not None else "not rounded"


def keeping_dtypes(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `.to(…)` does to tensors, without changing what they are: codes and scales have the dtype that they have."""

    def moved(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        return result if result.dtype == tensor.dtype else tensor.to(result.device)

    return moved
