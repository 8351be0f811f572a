"""Codes times codes, where the device multiplies them as they are: INT8, and what a GPU's matrix units have.

    y = (Σ_k c_x · c_w) · s_x · s_w        INT8: the sum in int32, exact; scales of tokens and of rows in fp32

INT8 scales may be shared by a row (a token, an output channel) or by a whole tensor, not by groups along k: those would
have to be multiplied in between. torch's `_int_mm` has it on GPUs and on CPUs with VNNI (one row at a time where there
are few, which oneDNN is slow at). FP8, MX and NVFP4 are `quantize/matmuls/scaled_mm.py`, which says what GPUs take
them; on a CPU torch has those as a loop far slower than bf16, so they are never selected there.

Inputs that stay numbers meet codes in torch's packed operators for CPUs (`quantize/matmuls/torch_packed.py`), which are
packed layouts like others: `select_native_layout`.

Legend: M tokens, N rows of the weight, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bitwright.inference.counters import PaddingCounts
from bitwright.inference.packed.padding import Multiples, Padding, fill, up_to
from bitwright.inference.packed.rows import Multiply, Parts, Rows, rows_of_layout
from bitwright.quantize.catalogs import MATMULS
from bitwright.quantize.matmuls import MatmulLayout, PackedMatrix
from bitwright.quantize.matmuls.scaled_mm import ScaledMm, multiply_scaled, nvidia_capability, why_not_codes
from bitwright.quantize.matmuls.torch_packed import TorchInt4, TorchInt8
from bitwright.quantize.pack import PackedTensor
from bitwright.quantize.packed_matmul import packed_matmul
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Product:
    """INT8 codes, filled up, and scales in fp32."""

    scheme: TensorScheme
    shape: tuple[int, int]
    #: Fills up inputs.
    padding: Padding

    def multiply_codes(self, parts: Parts, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs fp32 [M, N]."""
        assert x.scales is not None
        num_tokens, codes = x.shape[0], parts["codes"]
        if num_tokens == 0:
            return parts["scale"].new_zeros(0, self.shape[0])
        x_MK = self.padding.pad(x.codes).view(torch.int8)
        few = x_MK.device.type == "cpu" and num_tokens <= _FEW_TOKENS
        sums = [torch._int_mm(part, codes.T) for part in (x_MK.split(1) if few else (x_MK,))]
        whole = sums[0] if len(sums) == 1 else torch.cat(sums)
        return whole[:num_tokens, : self.shape[0]].float() * x.scales * self._scale_1N(parts)

    def prepared(self, parts: Parts) -> Multiply:
        """Inputs that stay numbers: tokens that overflow."""
        num_rows, columns = self.shape

        def multiply(x: Tensor) -> Tensor:
            blocks = parts["codes"][:num_rows, :columns].split(_EXPANDED_ROWS)
            sums = torch.cat([F.linear(x.float(), block.float()) for block in blocks], dim=-1)
            return (sums * self._scale_1N(parts)).to(x.dtype)

        return multiply

    def traced(self, parts: Parts, x: Tensor) -> Tensor:
        """The same."""
        return self.prepared(parts)(x)

    def values(self, parts: Parts) -> Tensor:
        """fp32 [N, K]."""
        return parts["codes"][: self.shape[0], : self.shape[1]].float() * self._scale_1N(parts).T

    def lookup(self, parts: Parts, ids: Tensor) -> Tensor:
        """Some rows, fp32 [*ids.shape, K]."""
        return parts["codes"][ids][..., : self.shape[1]].float() * self._scale_1N(parts)[0][ids].unsqueeze(-1)

    def __str__(self) -> str:
        return f"{self.scheme}, torch._int_mm"

    def _scale_1N(self, parts: Parts) -> Tensor:
        return parts["scale"].expand(1, self.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledProduct:
    """FP8 or FP4 codes as torch's scaled products take them: parts of the layout "scaled_mm"."""

    layout: str
    scheme: TensorScheme
    shape: tuple[int, int]

    def multiply_codes(self, parts: Parts, x: PackedTensor, dtype: torch.dtype) -> Tensor:
        """Outputs [M, N] in bf16, or fp16 where the model computes in that."""
        assert x.scales is not None
        return multiply_scaled(
            x.codes.view(parts["codes"].dtype),
            x.scales,
            self._matrix(parts),
            x_tensor_scale=x.tensor_scale,
            dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16,
        )

    def prepared(self, parts: Parts) -> Multiply:
        """Inputs that stay numbers: tokens that overflow."""
        matrix = self._matrix(parts)
        return lambda x: packed_matmul(x, matrix)

    def traced(self, parts: Parts, x: Tensor) -> Tensor:
        """The same."""
        return packed_matmul(x, self._matrix(parts))

    def values(self, parts: Parts) -> Tensor:
        """fp32 [N, K]."""
        return MATMULS[self.layout].unpack(self._matrix(parts))

    def lookup(self, parts: Parts, ids: Tensor) -> Tensor:
        """Some rows, fp32 [*ids.shape, K]."""
        return rows_of_layout(self._matrix(parts), ids)

    def __str__(self) -> str:
        return f"{self.scheme}, {self.layout}"

    def _matrix(self, parts: Parts) -> PackedMatrix:
        return PackedMatrix(layout=self.layout, scheme=self.scheme, shape=self.shape, parts=dict(parts))


def int8_rows(packed: PackedTensor, padding: Padding) -> Rows:
    """Rows of INT8 codes under scales in fp32, filled up to what `_int_mm` wants of shapes."""
    assert packed.scales is not None
    (rows, columns), multiples = packed.shape, padding.multiples
    codes = fill(packed.codes, up_to(rows, multiples.rows), up_to(columns, multiples.columns))
    parts = {"codes": codes.view(torch.int8).contiguous(), "scale": packed.scales.reshape(1, -1).clone()}
    return Rows(parts, Int8Product(scheme=packed.scheme, shape=packed.shape, padding=padding))


def scaled_rows(packed: PackedTensor) -> Rows:
    """Rows of FP8 or FP4 codes in the layout "scaled_mm"."""
    matrix = ScaledMm().prepare(packed)
    return Rows(matrix.parts, ScaledProduct(layout=matrix.layout, scheme=matrix.scheme, shape=matrix.shape))


def _counted_int8_rows(packed: PackedTensor, counts: PaddingCounts) -> Rows:
    return int8_rows(packed, Padding(multiples=INT8_MULTIPLES[packed.codes.device.type], counts=counts))


NATIVE_PRODUCTS = (
    NativeProduct(
        name="torch._int_mm",
        description="INT8 codes times INT8 codes in int32",
        why_not=why_not_int8,
        rows=_counted_int8_rows,
    ),
    NativeProduct(
        name=ScaledMm().name,
        description=ScaledMm().description,
        why_not=lambda scheme, device_type: why_not_codes(scheme, device_type, nvidia_capability(device_type)),
        rows=lambda packed, counts: scaled_rows(packed),
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


#: Layouts whose product is an operator of torch for numbers times codes.
NATIVE_LAYOUTS: tuple[str, ...] = tuple(layout.name for layout in (TorchInt4(), TorchInt8()))


def select_native_layout(
    scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype
) -> tuple[MatmulLayout | None, str]:
    """The operator of torch that multiplies numbers with codes of a weight, or None; and the reason."""
    reasons = []
    for name in NATIVE_LAYOUTS:
        layout = MATMULS[name]
        reason = layout.why_not(scheme, shape, device_type, dtype)
        if reason is None:
            return layout, layout.description
        reasons.append(f"not {name}: {reason}")
    return None, "; ".join(reasons)
