"""INT4 and INT8 weights as torch's own packed CPU operators take them: bf16 inputs, bf16 scales.

    torch_int4    _weight_int4pack_mm_for_cpu    y = x · ((c − 8) · s + z)ᵀ, c in 0 … 15, a pair (s, z) a group and row
    torch_int8    _weight_int8pack_mm            y = (x · cᵀ) · s, c in −128 … 127, one s a row

Both take scales in the dtype of x. In bf16 they have vector kernels that sum in fp32; in fp32 and fp16 they are loops
that take many times as long as torch's bf16 product (34 ms against 1 ms for one token, 2048 × 2048, one thread), as
`torch._scaled_mm` is on a CPU. So they hold weights whose scales are numbers of bf16 as they are stored, and nothing
else: scales of fp16 would be rounded to three bits fewer, and what ran would no longer be what was verified. A minimum
or a zero point is a third number of that kind: z = (8 − zero point) · s is in general none of bf16, so that only
symmetric codes fit.

`select_matmul` comes to them after "planar": that holds every such weight, needs no scale z of zero beside each s
(4.25 bits a weight against 4.125 in groups of 128), and is not slower than bf16 at 16 tokens, where the operator of
torch is (INT4, 2048 × 2048, one thread: 1.6 ms, bf16 1.4, "planar" 1.0; `benchmarks/inference.py matmul` has both side
by side). Mode native asks for them alone.

The order of INT4 codes in memory follows the vectors of the processor that packed them. It is not documented, so codes
are read back by a product with the identity, exactly; and a witness, packed along, tells a weight that was packed on a
processor with other vectors, which would be read in the wrong order without a word.

Legend: M tokens, N rows, K columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize.matmuls import PackedMatrix
from bitwright.quantize.pack import PackedTensor, unpack_codes
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scaling, TensorScheme

#: Groups that the INT4 operator knows, and what rows come in.
_INT4_GROUPS, _INT4_ROWS = (32, 64, 128, 256), 16
#: Rows whose codes lie together, whatever the vectors are.
_BLOCK_ROWS = 64
#: With other numbers of columns the INT8 operator reads past the end of a row.
_INT8_COLUMNS = 16
#: Columns that are read back at once.
_READ_COLUMNS = 1024
_MIDDLE = 8


def _why_not(scheme: TensorScheme, device_type: str, dtype: torch.dtype, format: str, sharers: str) -> str | None:
    """What both operators ask."""
    scaling = scheme.scaling
    if device_type != "cpu":
        return f"torch has it for CPUs, not for {device_type}"
    if scheme.format != format or scaling is None:
        return f"it multiplies {format} under scales, not {scheme}"
    if dtype != torch.bfloat16:
        return f"in {str(dtype)[6:]} it is a loop, far slower than torch's own product; run in bf16"
    if scaling.scale_format != "bf16":
        return (
            f"its scales are numbers of bf16, and those in {scaling.scale_format} would be rounded once more; choose "
            f"scales in bf16 ({format}:{sharers}:bf16)"
        )
    if scaling.symmetry != "symmetric" or scaling.tensor_scale or scaling.element_exponent:
        return f"it takes symmetric codes under one scale, not {scheme}"
    return None


@dataclass(frozen=True, slots=True)
class TorchInt4:
    """torch's product with INT4 weights."""

    name: str = "torch_int4"
    description: str = "int4 codes under bf16 scales, by torch._weight_int4pack_mm_for_cpu"
    preference: int = 910

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Other codes, scales that are no numbers of bf16, groups and rows that it does not know."""
        reason = _why_not(scheme, device_type, dtype, "int4", "g128")
        if reason is not None:
            return reason
        (rows, columns), granularity = shape, _scaling(scheme).granularity
        if granularity.scope != "group" or granularity.group_size not in _INT4_GROUPS:
            return f"it takes groups of {', '.join(map(str, _INT4_GROUPS))}, not {scheme}"
        if columns % granularity.group_size or rows % _INT4_ROWS or not rows:
            return f"it takes rows in multiples of {_INT4_ROWS} and whole groups, not {rows} x {columns}"
        return None

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """Codes in torch's order; scales and zeros bf16 [G, N, 2]; the witness."""
        q = unpack_codes(packed)
        assert q.scales_NG is not None
        scales_GN = q.scales_NG.T
        parts = {
            "codes": torch._convert_weight_to_int4pack_for_cpu((q.codes_NK + _MIDDLE).to(torch.int32), 1),
            "scales_and_zeros": torch.stack((scales_GN, torch.zeros_like(scales_GN)), -1).bfloat16().contiguous(),
            "witness": _witness().clone(),
        }
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts=parts)

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ; see `MatmulLayout`."""
        _raise_if_packed_elsewhere(matrix)
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, matrix.shape[0])
        size, codes = _scaling(matrix.scheme).granularity.group_size, matrix.parts["codes"]
        x = x_MK.bfloat16().contiguous()
        return torch._weight_int4pack_mm_for_cpu(x, codes, size, matrix.parts["scales_and_zeros"]).to(x_MK.dtype)

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """The same for any number of tokens."""
        return "torch's operator, in bf16 for any number of tokens"

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K]; see `MatmulLayout`."""
        _raise_if_packed_elsewhere(matrix)
        blocks, place = torch.unique(ids // _BLOCK_ROWS, return_inverse=True)
        if len(ids) == 0:
            return torch.empty(0, matrix.shape[1])
        starts = [int(block) * _BLOCK_ROWS for block in blocks]
        codes = [_int4_codes(matrix.parts["codes"][start : start + _BLOCK_ROWS]) for start in starts]
        first = torch.tensor([0, *(len(part) for part in codes)]).cumsum(0)
        scales_NG = matrix.parts["scales_and_zeros"][..., 0].T
        return _values(matrix, torch.cat(codes)[first[place] + ids % _BLOCK_ROWS], scales_NG[ids])

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K]."""
        _raise_if_packed_elsewhere(matrix)
        return _values(matrix, _int4_codes(matrix.parts["codes"]), matrix.parts["scales_and_zeros"][..., 0].T)


@dataclass(frozen=True, slots=True)
class TorchInt8:
    """torch's product with INT8 weights."""

    name: str = "torch_int8"
    description: str = "int8 codes under one bf16 scale a row, by torch._weight_int8pack_mm"
    preference: int = 920

    def why_not(self, scheme: TensorScheme, shape: tuple[int, int], device_type: str, dtype: torch.dtype) -> str | None:
        """Other codes, scales that are no numbers of bf16 or not of rows, columns that it does not know."""
        reason = _why_not(scheme, device_type, dtype, "int8", "row")
        if reason is not None:
            return reason
        if _scaling(scheme).granularity.scope != "row":
            return f"it takes one scale a row, not {scheme}"
        if shape[1] % _INT8_COLUMNS or not shape[1]:
            return f"it takes columns in multiples of {_INT8_COLUMNS}, not {shape[1]}"
        return None

    def prepare(self, packed: PackedTensor) -> PackedMatrix:
        """Codes int8 [N, K], scales bf16 [N]."""
        assert packed.scales is not None
        parts = {"codes": packed.codes.view(torch.int8).contiguous(), "scales": packed.scales.reshape(-1).clone()}
        return PackedMatrix(layout=self.name, scheme=packed.scheme, shape=packed.shape, parts=parts)

    def multiply(self, x_MK: Tensor, matrix: PackedMatrix) -> Tensor:
        """x Wᵀ; see `MatmulLayout`."""
        if x_MK.shape[0] == 0:
            return x_MK.new_empty(0, matrix.shape[0])
        x = x_MK.bfloat16().contiguous()
        return torch._weight_int8pack_mm(x, matrix.parts["codes"], matrix.parts["scales"]).to(x_MK.dtype)

    def how(self, num_tokens: int, matrix: PackedMatrix, dtype: torch.dtype) -> str:
        """The same for any number of tokens."""
        return "torch's operator, in bf16 for any number of tokens"

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Some rows, fp32 [n, K]; see `MatmulLayout`."""
        return matrix.parts["codes"][ids].float() * matrix.parts["scales"][ids].float().unsqueeze(-1)

    def unpack(self, matrix: PackedMatrix) -> Tensor:
        """fp32 [N, K]."""
        return matrix.parts["codes"].float() * matrix.parts["scales"].float().unsqueeze(-1)


MATMULS = (TorchInt4(), TorchInt8())


def _scaling(scheme: TensorScheme) -> Scaling:
    assert scheme.scaling is not None
    return scheme.scaling


def _values(matrix: PackedMatrix, codes_NK: Tensor, scales_NG: Tensor) -> Tensor:
    """Values fp32 of codes under their scales."""
    return QTensor(scheme=matrix.scheme, codes_NK=codes_NK, scales_NG=scales_NG.float()).dequantize()


def _int4_codes(packed: Tensor) -> Tensor:
    """Codes − 8 … 7, fp32 [n, K], of whole blocks in torch's order: a product with the identity, under scales of 1."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    ones = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).repeat(columns // _INT4_GROUPS[0], rows, 1)
    identity = torch.eye(columns, dtype=torch.bfloat16)
    starts = [*range(0, columns, _READ_COLUMNS), columns]
    read = [
        torch._weight_int4pack_mm_for_cpu(identity[first:last], packed, _INT4_GROUPS[0], ones)
        for first, last in pairwise(starts)
    ]
    return torch.cat(read).T.float().contiguous()


@cache
def _witness() -> Tensor:
    """Codes of different rows and columns as this processor packs them."""
    codes = (torch.arange(2 * _BLOCK_ROWS).reshape(_BLOCK_ROWS, 2) * 7 // 3 % 16).to(torch.int32)
    return torch._convert_weight_to_int4pack_for_cpu(codes, 1)


def _raise_if_packed_elsewhere(matrix: PackedMatrix) -> None:
    if not torch.equal(matrix.parts["witness"], _witness()):
        raise SchemeError(
            "INT4 weights were packed by torch on a processor with other vectors, and their codes lie in another order "
            "here; apply the plan on this machine, or in mode packed, whose codes lie alike everywhere"
        )
