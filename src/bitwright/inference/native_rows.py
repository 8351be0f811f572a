"""Codes times codes, where the device multiplies them as they are: INT8 and FP8 for weights and inputs alike.

    y = (Σ_k c_x · c_w) · s_x · s_w        the sum in int32 or fp32, scales of tokens and of rows in fp32

So a scale may be shared by a row (a token, an output channel) or by a whole tensor, not by groups along k: those would
have to be multiplied in between. What a kernel takes is a record; nothing branches on a scheme's name.

torch's `_int_mm` is exact, also on CPUs with VNNI (one row at a time where there are few, which oneDNN is slow at).
`_scaled_mm` multiplies FP8 on GPUs from Ada and Hopper on. On a CPU it is a reference loop, 60 times slower than bf16,
so it is never selected there.

Legend: M tokens, N rows of the weight, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bitwright.inference.packed_weight import Rows
from bitwright.inference.padding import Multiples, Padding, fill, up_to
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scheme, TensorScheme

#: Up to so many tokens a CPU multiplies INT8 row by row.
_FEW_TOKENS = 8
#: Rows of the weight that are expanded at once where inputs stay numbers.
_EXPANDED_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeKernel:
    """A product of codes with codes."""

    name: str
    description: str
    #: Number format of both operands, and torch's dtype for it.
    format: str
    dtype: torch.dtype
    device_types: tuple[str, ...]
    #: Compute capability of NVIDIA GPUs from which on they have it.
    min_capability: tuple[int, int]
    #: Device type → what shapes have to be multiples of.
    multiples: dict[str, Multiples]
    #: (codes [M, K], codes [N, K], scales fp32 [M, 1] or [1, 1], scales fp32 [1, N]) → fp32 [M, N].
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def why_not(self, scheme: Scheme, device_type: str) -> str | None:
        """Why it does not compute products under a scheme; None if it does."""
        if device_type not in self.device_types:
            return f"{self.name} runs on {' and '.join(self.device_types)}, not on {device_type}"
        if device_type == "cuda" and torch.cuda.get_device_capability() < self.min_capability:
            needed = ".".join(map(str, self.min_capability))
            return f"{self.name} needs compute capability {needed}"
        for operand, tensor in (("weights", scheme.weights), ("inputs", scheme.activations)):
            reason = self._why_not_operand(tensor)
            if reason is not None:
                return f"{self.name} takes {operand} {reason}"
        return None

    def _why_not_operand(self, tensor: TensorScheme | None) -> str | None:
        if tensor is None or tensor.scaling is None:
            return f"in {self.format} under a scale, not {'as they are' if tensor is None else tensor}"
        if tensor.format != self.format:
            return f"in {self.format}, not in {tensor.format}"
        scaling = tensor.scaling
        plain = scaling.symmetry == "symmetric" and not scaling.tensor_scale and not scaling.element_exponent
        if scaling.granularity.scope not in ("tensor", "row") or not plain:
            return f"under one symmetric scale per row or tensor, not {tensor}"
        return None


def _int_mm(x_MK: Tensor, w_NK: Tensor, scale_x: Tensor, scale_w_1N: Tensor) -> Tensor:
    few = x_MK.device.type == "cpu" and x_MK.shape[0] <= _FEW_TOKENS
    parts = x_MK.split(1) if few else (x_MK,)
    sums = [torch._int_mm(part, w_NK.T) for part in parts]
    whole = sums[0] if len(sums) == 1 else torch.cat(sums)
    return whole.float() * scale_x * scale_w_1N


def _scaled_mm(x_MK: Tensor, w_NK: Tensor, scale_x: Tensor, scale_w_1N: Tensor) -> Tensor:
    scale_M1 = scale_x.expand(x_MK.shape[0], 1).contiguous()
    y: Tensor = torch._scaled_mm(
        x_MK, w_NK.T, scale_a=scale_M1, scale_b=scale_w_1N.contiguous(), out_dtype=torch.bfloat16, use_fast_accum=False
    )
    return y.float()


NATIVE_KERNELS = (
    NativeKernel(
        name="torch._int_mm",
        description="INT8 codes times INT8 codes in int32",
        format="int8",
        dtype=torch.int8,
        device_types=("cpu", "cuda"),
        min_capability=(7, 5),
        multiples={"cpu": Multiples(), "cuda": Multiples(tokens=8, min_tokens=24, rows=8, columns=16)},
        multiply=_int_mm,
    ),
    NativeKernel(
        name="torch._scaled_mm",
        description="E4M3 codes times E4M3 codes in fp32, scales per token and output channel",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        device_types=("cuda",),
        min_capability=(8, 9),
        multiples={"cuda": Multiples(rows=16, columns=16)},
        multiply=_scaled_mm,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSelection:
    """A kernel, or None; and the reason."""

    kernel: NativeKernel | None
    reason: str


def select_native(scheme: Scheme, device_type: str) -> NativeSelection:
    """What a device multiplies codes of a scheme with, if anything."""
    if scheme.activations is None:
        return NativeSelection(kernel=None, reason="its inputs are not rounded, so codes meet numbers")
    reasons = []
    for kernel in NATIVE_KERNELS:
        reason = kernel.why_not(scheme, device_type)
        if reason is None:
            return NativeSelection(kernel=kernel, reason=kernel.description)
        reasons.append(reason)
    return NativeSelection(kernel=None, reason="; ".join(reasons))


class NativeRows(Rows):
    """Rows whose codes are multiplied with codes of inputs.

    Args:
        kernel: does it.
        q: codes and scales of the rows.
        padding: fills up inputs.
    """

    codes: Tensor
    scale: Tensor
    takes_codes = True

    def __init__(self, kernel: NativeKernel, q: QTensor, padding: Padding) -> None:
        super().__init__()
        assert q.scales_NG is not None
        self.kernel, self.scheme, self.padding = kernel, q.scheme, padding
        self.num_rows, self.num_columns = q.codes_NK.shape
        multiples = padding.multiples
        codes = fill(q.codes_NK, up_to(self.num_rows, multiples.rows), up_to(self.num_columns, multiples.columns))
        self.register_buffer("codes", codes.to(kernel.dtype).contiguous())
        self.register_buffer("scale", q.scales_NG.reshape(1, -1).clone())

    def multiply_codes(self, x: QTensor) -> Tensor:
        """Outputs fp32 [M, N]."""
        assert x.scales_NG is not None
        num_tokens = x.codes_NK.shape[0]
        if num_tokens == 0:
            return x.codes_NK.new_zeros(0, self.num_rows)
        x_MK = self.padding.pad(x.codes_NK).to(self.kernel.dtype)
        scale_x = fill(x.scales_NG, x_MK.shape[0], 1) if x.scales_NG.numel() > 1 else x.scales_NG.reshape(1, 1)
        scale_w = fill(self._scale_1N(), 1, self.codes.shape[0])
        y_MN = self.kernel.multiply(x_MK, self.codes, scale_x, scale_w)
        return y_MN[:num_tokens, : self.num_rows]

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
        # bytes are gathered: not every device indexes FP8
        codes = self.codes.view(torch.uint8)[ids].view(self.kernel.dtype)[..., : self.num_columns]
        return codes.float() * self._scale_1N()[0][ids].unsqueeze(-1)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.num_rows} x {self.num_columns}, {self.scheme}, {self.kernel.name}"

    def _scale_1N(self) -> Tensor:
        return self.scale.expand(1, self.num_rows)
