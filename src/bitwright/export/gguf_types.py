"""Which of ggml's types a tensor takes, and the bytes: the codes of the plan where a type can hold them.

    exactly     blocks of 32 with the plan's own codes and scales, the fewest bits first: groups of 64 and 128 are
                several blocks with one scale, zero points go into the codes (−15 … 15 are five bits)
    nearest     the plan's codes under scales rounded to fp16, or codes found anew in the widest type with at most
                2.5 bits more than the scheme, whichever is less off; the error is measured and told
    plain       weights without codes: as they were stored (a GGUF type that holds them exactly), else the dtype of
                the export; and rows that blocks of 32 do not divide, in fp16

Only a type that holds exactly what the plan runs keeps its proof; of the others the note says how far off they are,
as the root of the mean squared difference ÷ that of the weights.

Legend: N rows, K columns, values and codes [N, K].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright import formats
from bitwright.export.gguf_codes import GGUF_CODES, GgufCodes
from bitwright.formats import IntFormat
from bitwright.formats.gguf_blocks import Bytes
from bitwright.quantize.granularity import spread
from bitwright.quantize.qtensor import QTensor

#: Types whose codes are found from values, in `formats`.
_ENCODED = ("q4_0", "q4_1", "q5_0", "q4_k", "q6_k", "q8_0")
#: A nearest type has at most so many bits more than the scheme: six bits become Q8_0, since a plan's quality is not to
#: be lost where its size all but stays.
_MORE_BITS = 2.5
_PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoded:
    """A tensor as a type stores it."""

    #: ggml's name in lower case.
    type: str
    #: uint8 [N, bytes of a row], or plain numbers in the shape of the tensor.
    data: npt.NDArray[np.generic]
    #: Relative error against what the plan runs, 0 where exact.
    error: float
    #: How the plan's weight got here.
    words: str


def encode_coded(q: QTensor, values_NK: Tensor) -> Encoded:
    """The type and the bytes of a matrix of codes.

    Args:
        q: codes and scales of what is multiplied, rows in ggml's order.
        values_NK: what they stand for, fp32.
    """
    tried = [*_with_codes(q, values_NK)]
    exact = min((found for found in tried if found.error == 0), key=_bits, default=None)
    if exact is not None:
        return exact
    bits = 8 * q.scheme.stored_bytes(*q.codes_NK.shape) / q.codes_NK.numel()
    return min([*tried, encode_values(values_NK, bits)], key=lambda found: found.error)


def encode_values(values_NK: Tensor, bits: float) -> Encoded:
    """The nearest type of values whose codes are no type's, or that have none in their own space.

    Args:
        values_NK: fp32, rows in ggml's order.
        bits: stored bits of the scheme.
    """
    columns = values_NK.shape[1]
    fitting = [GGUF_CODES[name] for name in _ENCODED if columns % GGUF_CODES[name].block_size == 0]
    if not fitting:
        plain = encode_plain(values_NK, torch.float16)
        return replace(plain, words=f"numbers without codes, for blocks of 32 do not divide {columns} columns")
    near = [kind for kind in fitting if kind.bits_per_value <= bits + _MORE_BITS]
    kind = max(near, key=_fineness) if near else min(fitting, key=_fineness)
    stored: Bytes = formats.encode(kind.name, values_NK.numpy())
    error = _relative_error(_values(kind, stored, values_NK.shape), values_NK)
    words = "rounded again" if error else "rounded again, without loss"
    return Encoded(type=kind.name, data=stored, error=error, words=words)


def encode_plain(values: Tensor, dtype: torch.dtype, loaded: str | None = None) -> Encoded:
    """Numbers without codes.

    Args:
        values: fp32, any shape.
        dtype: fp32, fp16 or bf16, where `loaded` does not hold them.
        loaded: the format that the tensor was loaded from.
    """
    if loaded in _ENCODED and values.dim() == 2 and values.shape[1] % GGUF_CODES[loaded].block_size == 0:
        stored = formats.encode(loaded, values.numpy())
        if np.array_equal(formats.decode(loaded, stored), values.numpy()):
            return Encoded(type=loaded, data=stored, error=0.0, words="as loaded")
    narrow = values.to(dtype)
    error = _relative_error(narrow.float(), values)
    words = "as loaded" if error == 0 else f"numbers rounded to {_PLAIN[dtype]}"
    data = narrow.view(torch.uint16).numpy() if dtype == torch.bfloat16 else narrow.numpy()
    return Encoded(type=_PLAIN[dtype], data=data, error=error, words=words)


def _with_codes(q: QTensor, values_NK: Tensor) -> Iterator[Encoded]:
    """The plan's codes under each type that has them, scales rounded to the type's where they have to be."""
    parts = _in_blocks_of_32(q)
    if parts is None:
        return
    codes_NK, scales_NG, minima_NG = parts
    for kind in GGUF_CODES.values():
        if (
            kind.pack is None
            or kind.has_minimum != (minima_NG is not None)
            or not _holds(kind, q.scheme.format, codes_NK)
        ):
            continue
        stored = kind.pack(
            codes_NK.reshape(-1, 32), scales_NG.reshape(-1, 1), None if minima_NG is None else minima_NG.reshape(-1, 1)
        )
        error = _relative_error(_values(kind, stored, values_NK.shape), values_NK)
        words = "the plan's codes" if error == 0 else f"the plan's codes, scales rounded to {kind.scale_format}"
        yield Encoded(type=kind.name, data=stored.reshape(values_NK.shape[0], -1), error=error, words=words)


def _in_blocks_of_32(
    q: QTensor,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32] | None] | None:
    """Codes [N, K], and scales and minima of every 32 of them [N, K / 32]; None where a scale covers fewer."""
    scaling = q.scheme.scaling
    rows, columns = q.codes_NK.shape
    if scaling is None or q.scales_NG is None or columns % 32 or scaling.granularity.group_columns(columns) % 32:
        return None
    scales = q.scales_NG if q.tensor_scale is None else q.scales_NG * q.tensor_scale

    def of_blocks(per_group: Tensor) -> Tensor:
        return spread(per_group, rows, columns, scaling.granularity).expand(rows, columns)[:, ::32].contiguous()

    codes, minima = q.codes_NK, None
    if q.offsets_NG is not None and scaling.symmetry == "zero_point":
        codes = codes - spread(q.offsets_NG, rows, columns, scaling.granularity)
    elif q.offsets_NG is not None:
        minima = of_blocks(q.offsets_NG).numpy()
    return codes.numpy(), of_blocks(scales).numpy(), minima


def _holds(kind: GgufCodes, number: str, codes_NK: npt.NDArray[np.float32]) -> bool:
    """Whether a type has all of some codes: integers within its range, or floats of its own format."""
    own = formats.FORMATS[kind.number]
    if not (isinstance(own, IntFormat) and isinstance(formats.FORMATS[number], IntFormat)):
        return number == kind.number
    return codes_NK.size == 0 or bool(codes_NK.min() >= own.min and codes_NK.max() <= own.max)


def _fineness(kind: GgufCodes) -> tuple[float, int]:
    """Bits, and of equal ones the larger block, whose scales have scales."""
    return kind.bits_per_value, kind.block_size


def _bits(found: Encoded) -> float:
    return GGUF_CODES[found.type].bits_per_value


def _values(kind: GgufCodes, stored: Bytes, shape: torch.Size) -> Tensor:
    codes, scales, minima = kind.unpack(stored.reshape(-1, kind.block_bytes))
    groups = codes.reshape(codes.shape[0], scales.shape[1], -1) * scales[..., None]
    if minima is not None:
        groups = groups + minima[..., None]
    return torch.from_numpy(groups.reshape(shape))


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(wanted.double()))
    difference = float(torch.linalg.vector_norm((found - wanted).double()))
    return difference / norm if norm else difference
