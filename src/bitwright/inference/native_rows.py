"""Codes times codes, where the device multiplies them as they are: INT8, and what a GPU's matrix units have.

    y = (Σ_k c_x · c_w) · s_x · s_w        INT8: the sum in int32, exact; scales of tokens and of rows in fp32

INT8 scales may be shared by a row (a token, an output channel) or by a whole tensor, not by groups along k: those would
have to be multiplied in between. torch's `_int_mm` has it on GPUs and on CPUs with VNNI (one row at a time where there
are few, which oneDNN is slow at). FP8, MX and NVFP4 are `quantize/matmuls/scaled_mm.py`, which says what GPUs take
them; on a CPU torch has those as a loop far slower than bf16, so they are never selected there.

Legend: M tokens, N rows of the weight, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bitwright.inference.counters import PaddingCounts
from bitwright.inference.packed_weight import Rows
from bitwright.inference.padding import Multiples, Padding, fill, up_to
from bitwright.quantize.catalogs import MATMULS
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.matmuls.scaled_mm import ScaledMm, multiply_scaled, nvidia_capability, why_not_codes
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.scheme import Scheme, TensorScheme

#: Up to so many tokens a CPU multiplies INT8 row by row.
_FEW_TOKENS = 8
#: Rows of the weight that are expanded at once where inputs stay numbers.
_EXPANDED_ROWS = 1024
#: Device type → what `_int_mm` wants of shapes.
INT8_MULTIPLES = {"cpu": Multiples(), "cuda": Multiples(tokens=8, min_tokens=24, rows=8, columns=16)}
#: NVIDIA GPUs have INT8 products from Turing on.
_INT8_CAPABILITY = (7, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeProduct:
    """A product of codes with codes."""

    name: str
    description: str
    #: (scheme, device type) → why it is not multiplied so, or None.
    why_not: Callable[[Scheme, str], str | None]
    #: Packed weight → rows that multiply so.
    rows: Callable[[PackedTensor, PaddingCounts], Rows]


def why_not_int8(scheme: Scheme, device_type: str) -> str | None:
    """Why `_int_mm` does not multiply under a scheme; None if it does."""
    if device_type not in INT8_MULTIPLES:
        return f"torch._int_mm runs on {' and '.join(INT8_MULTIPLES)}, not on {device_type}"
    capability = nvidia_capability(device_type)
    if capability is not None and capability < _INT8_CAPABILITY:
        return f"torch._int_mm needs compute capability {'.'.join(map(str, _INT8_CAPABILITY))}"
    for operand, tensor in (("weights", scheme.weights), ("inputs", scheme.activations)):
        reason = _why_not_operand(tensor)
        if reason is not None:
            return f"torch._int_mm takes {operand} {reason}"
    return None


def _why_not_operand(tensor: TensorScheme | None) -> str | None:
    if tensor is None or tensor.scaling is None:
        return f"in int8 under a scale, not {'as they are' if tensor is None else tensor}"
    scaling = tensor.scaling
    if tensor.format != "int8":
        return f"in int8, not in {tensor.format}"
    plain = scaling.symmetry == "symmetric" and not scaling.tensor_scale and not scaling.element_exponent
    if scaling.granularity.scope not in ("tensor", "row") or scaling.scale_format != "fp32" or not plain:
        return f"under one symmetric fp32 scale per row or tensor, not {tensor}"
    return None


class Int8Rows(Rows):
    """Rows of INT8 codes.

    Args:
        packed: their codes, and scales in fp32.
        padding: fills up inputs.
    """

    codes: Tensor
    scale: Tensor
    takes_codes = True

    def __init__(self, packed: PackedTensor, padding: Padding) -> None:
        super().__init__()
        assert packed.scales is not None
        self.scheme, self.padding = packed.scheme, padding
        self.num_rows, self.num_columns = packed.shape
        multiples = padding.multiples
        filled = fill(packed.codes, up_to(self.num_rows, multiples.rows), up_to(self.num_columns, multiples.columns))
        self.register_buffer("codes", filled.view(torch.int8).contiguous())
        self.register_buffer("scale", packed.scales.reshape(1, -1).clone())

    def multiply_codes(self, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs fp32 [M, N]."""
        assert x.scales is not None
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return self.scale.new_zeros(0, self.num_rows)
        x_MK = self.padding.pad(x.codes).view(torch.int8)
        few = x_MK.device.type == "cpu" and num_tokens <= _FEW_TOKENS
        sums = [torch._int_mm(part, self.codes.T) for part in (x_MK.split(1) if few else (x_MK,))]
        whole = sums[0] if len(sums) == 1 else torch.cat(sums)
        return whole[:num_tokens, : self.num_rows].float() * x.scales * self._scale_1N()

    def multiply(self, x_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs that stay numbers: for tokens that overflow."""
        blocks = self.codes[: self.num_rows, : self.num_columns].split(_EXPANDED_ROWS)
        sums = torch.cat([F.linear(x_MK.float(), block.float()) for block in blocks], dim=-1)
        return (sums * self._scale_1N()).to(x_MK.dtype)

    def values(self) -> Tensor:
        """fp32 [N, K]."""
        return self.codes[: self.num_rows, : self.num_columns].float() * self._scale_1N().T

    def lookup(self, ids: Tensor) -> Tensor:
        """Some rows, fp32 [*ids.shape, K]."""
        return self.codes[ids][..., : self.num_columns].float() * self._scale_1N()[0][ids].unsqueeze(-1)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.num_rows} x {self.num_columns}, {self.scheme}, torch._int_mm"

    def _scale_1N(self) -> Tensor:
        return self.scale.expand(1, self.num_rows)


class ScaledRows(Rows):
    """Rows of FP8 or FP4 codes as torch's scaled products take them.

    Args:
        matrix: in the layout "scaled_mm".
    """

    takes_codes = True

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.layout, self.scheme = matrix.layout, matrix.scheme
        self.num_rows, self.num_columns = matrix.shape
        for name, part in matrix.parts.items():
            self.register_buffer(name, part)

    @property
    def matrix(self) -> PackedMatrix:
        """As the layout takes it."""
        parts = {name: part for name, part in self._buffers.items() if part is not None}
        shape = self.num_rows, self.num_columns
        return PackedMatrix(layout=self.layout, scheme=self.scheme, shape=shape, parts=parts)

    def multiply_codes(self, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs [M, N] in bf16, or fp16 where the model computes in that."""
        assert x.scales is not None
        matrix = self.matrix
        return multiply_scaled(
            x.codes.view(matrix.parts["codes"].dtype),
            x.scales,
            matrix,
            x_tensor_scale=x.tensor_scale,
            dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16,
        )

    def multiply(self, x_MK: Tensor) -> Tensor:
        """Outputs [M, N] of inputs that stay numbers: for tokens that overflow."""
        return MATMULS[self.layout].multiply(x_MK, self.matrix)

    def values(self) -> Tensor:
        """fp32 [N, K]."""
        return MATMULS[self.layout].unpack(self.matrix)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.num_rows} x {self.num_columns}, {self.scheme}, {self.layout}"


def _int8_rows(packed: PackedTensor, counts: PaddingCounts) -> Rows:
    return Int8Rows(packed, Padding(multiples=INT8_MULTIPLES[packed.codes.device.type], counts=counts))


def _scaled_rows(packed: PackedTensor, counts: PaddingCounts) -> Rows:
    return ScaledRows(ScaledMm().prepare(packed))


NATIVE_PRODUCTS = (
    NativeProduct(
        name="torch._int_mm",
        description="INT8 codes times INT8 codes in int32",
        why_not=why_not_int8,
        rows=_int8_rows,
    ),
    NativeProduct(
        name=ScaledMm().name,
        description=ScaledMm().description,
        why_not=lambda scheme, device_type: why_not_codes(scheme, device_type, nvidia_capability(device_type)),
        rows=_scaled_rows,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSelection:
    """A product, or None; and the reason."""

    product: NativeProduct | None
    reason: str


def select_native(scheme: Scheme, device_type: str) -> NativeSelection:
    """What a device multiplies codes of a scheme with, if anything."""
    if scheme.activations is None:
        return NativeSelection(product=None, reason="its inputs are not rounded, so codes meet numbers")
    reasons = []
    for product in NATIVE_PRODUCTS:
        reason = product.why_not(scheme, device_type)
        if reason is None:
            return NativeSelection(product=product, reason=product.description)
        reasons.append(reason)
    return NativeSelection(product=None, reason="; ".join(reasons))
