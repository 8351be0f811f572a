"""GGUF files: types per tensor, among them the super-blocks whose inner scales are written out here.

What a type's bytes hold is in `gguf_codes.py`; names of tensors and the order of their rows are those of
`models/gguf_layout.py`. Rows of codes move as rows of weights do, with their scales. Tensors in F32, F16 or BF16 are
plain numbers. Types whose codes are places in lists (IQ…, TQ…) are refused, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.gguf_codes import GGUF_CODES
from bitwright.export.source_kind import Contents
from bitwright.export.stored_matrix import StoredMatrix
from bitwright.models.gguf_file import GgufTensor, read_gguf_header, read_gguf_layout
from bitwright.models.gguf_layout import GgufLayout, tensor_keys
from bitwright.models.loaded import LoadedModel
from bitwright.quantize import QTensor

_PLAIN = frozenset({"fp32", "fp16", "bf16", "fp64"})


@dataclass(frozen=True, slots=True)
class Gguf:
    """Files of llama.cpp."""

    name: str = "gguf"
    description: str = "llama.cpp: Q4_0 … Q8_0, MXFP4 and the k-quants, each tensor by its type"

    def claims(self, checkpoint: Checkpoint) -> bool:
        """By its being a .gguf file."""
        return checkpoint.is_gguf

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """Every tensor that is one of the reference's parameters."""
        header = read_gguf_header(checkpoint.path)
        layout = read_gguf_layout(checkpoint.path, header)
        coded: dict[str, Callable[[], StoredMatrix]] = {}
        plain: dict[str, Callable[[], Tensor]] = {}
        for tensor in header.tensors:
            key = next((key for key in tensor_keys(tensor.name) if key in layout.parameter_of), None)
            if key is None:
                continue  # what engines compute themselves, such as rotary factors
            parameter = layout.parameter_of[key]
            if tensor.format in _PLAIN:
                plain[parameter] = _plain_reader(checkpoint, tensor, layout)
            else:
                coded[parameter.removesuffix(".weight")] = _reader(checkpoint, tensor, layout)
        return Contents(coded=coded, plain=plain)


def _reader(checkpoint: Checkpoint, tensor: GgufTensor, layout: GgufLayout) -> Callable[[], StoredMatrix]:
    return lambda: _read(checkpoint, tensor, layout)


def _plain_reader(checkpoint: Checkpoint, tensor: GgufTensor, layout: GgufLayout) -> Callable[[], Tensor]:
    return lambda: _read_plain(checkpoint, tensor, layout)


def _read(checkpoint: Checkpoint, tensor: GgufTensor, layout: GgufLayout) -> StoredMatrix:
    kind = GGUF_CODES.get(tensor.format)
    if kind is None:
        raise ModelError(
            f"it is stored as {tensor.format}, whose codes no format here has; {', '.join(GGUF_CODES)} are read"
        )
    if len(tensor.shape) != 2:
        raise ModelError(f"it has {len(tensor.shape)} dimensions; matrices alone are read with their codes")
    rows, columns = tensor.shape
    order = layout.rows_of(tensor.name, rows)
    if order is None:
        raise ModelError("its rows are not those of the parameter; the file merges or changes them")
    stored = _bytes_of(checkpoint, tensor).reshape(-1, kind.block_bytes)
    codes, scales, minima = kind.unpack(stored)

    def in_order(part: np.ndarray, width: int) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(part.reshape(rows, width)[order]))

    num_groups = columns // kind.group_size
    q = QTensor(
        scheme=kind.scheme,
        codes_NK=in_order(codes, columns),
        scales_NG=in_order(scales, num_groups),
        offsets_NG=None if minima is None else in_order(minima, num_groups),
        follows_from_scales=False,
    )
    return StoredMatrix(q=q, stored_bytes=tensor.num_bytes, words=tensor.format.upper())


def _read_plain(checkpoint: Checkpoint, tensor: GgufTensor, layout: GgufLayout) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    stored = _bytes_of(checkpoint, tensor).reshape(*tensor.shape[:-1], -1)
    values = layout.bring(tensor.name, dequantize(stored, GGMLQuantizationType(tensor.ggml_type)))
    if values is None:
        raise ModelError("the file merges it into another tensor")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(tensor.format, torch.float32)
    return torch.from_numpy(values).to(dtype)


def _bytes_of(checkpoint: Checkpoint, tensor: GgufTensor) -> np.ndarray:
    memory = np.memmap(checkpoint.path, mode="r", dtype=np.uint8)
    return np.array(memory[tensor.first_byte : tensor.first_byte + tensor.num_bytes])


SOURCES = (Gguf(),)
