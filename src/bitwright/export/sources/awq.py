"""AWQ, as AutoAWQ stores it for its GEMM kernels: words of eight rows each, in an order of their own.

    qweight   int32 [K, N / 8]      word j of column k: the codes of rows 8 j … 8 j + 7
    qzeros    int32 [G, N / 8]      zero points of a group, the same
    scales    fp16  [G, N]

    value = (code − zero) · scale of the column's group

From the lowest bits up a word holds rows 0, 2, 4, 6, 1, 3, 5, 7 of its eight. What AWQ multiplied columns by was taken
into the norms and matrices before (`folded_scales.py`).

Source: AutoAWQ 0.2, awq/utils/packing_utils.py, awq/modules/linear/gemm.py.
Rejected: the layouts for other kernels (gemv, gemv_fast, marlin), which no hub checkpoint of transformers loads as is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.source_kind import Contents, plain_tensors
from bitwright.export.stored_matrix import StoredMatrix, integer_codes, raise_unless_shape, unpack_words
from bitwright.models.loaded import LoadedModel
from bitwright.quantize.granularity import ROW, group

_BITS = 4
_ROWS_OF_A_WORD = 32 // _BITS
#: Place in a word, counted from its lowest bits, of each of its rows.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """Checkpoints of AutoAWQ."""

    name: str = "awq"
    description: str = "AutoAWQ: 4 bits in groups, with zero points, layout GEMM; scales that it folded into norms too"

    def claims(self, checkpoint: Checkpoint) -> bool:
        """By its quant_method, or by the settings file that AutoAWQ and llm-awq wrote."""
        method = checkpoint.settings.get("quant_method")
        return method == "awq" or (method is None and checkpoint.settings_file == "quant_config.json")

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """Every module that has a `qweight`."""
        settings = checkpoint.settings
        layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
        bits = settings.get("bits", settings.get("w_bit"))
        if layout != "gemm" or bits != _BITS:
            raise ModelError(
                f"{checkpoint.path} is an AWQ checkpoint with {bits} bits in the layout '{layout}'; 4 bits in the "
                "layout 'gemm' are read: quantise with version GEMM"
            )
        coded = {name: _reader(checkpoint, name) for name in checkpoint.modules_with("qweight")}
        return Contents(coded=coded, plain=plain_tensors(checkpoint, reference))


def _reader(checkpoint: Checkpoint, module: str) -> Callable[[], StoredMatrix]:
    return lambda: _read(checkpoint, module)


def _read(checkpoint: Checkpoint, module: str) -> StoredMatrix:
    codes_KN = _in_order(checkpoint.read(f"{module}.qweight"))
    zeros_GN = _in_order(checkpoint.read(f"{module}.qzeros"))
    scales_GN = checkpoint.read(f"{module}.scales")
    columns, rows = codes_KN.shape
    num_groups = scales_GN.shape[0]
    raise_unless_shape("scales", scales_GN, (num_groups, rows))
    raise_unless_shape("zero points", zeros_GN, (num_groups, rows))
    size = columns // num_groups
    if size * num_groups != columns:
        raise ModelError(f"its {columns} columns do not divide into {num_groups} groups")
    asked = checkpoint.settings.get("group_size", checkpoint.settings.get("q_group_size", size))
    granularity = ROW if asked == -1 else group(size)
    q = integer_codes(codes_KN.T.contiguous(), zeros_GN.T, scales_GN.T.contiguous(), _BITS, granularity)
    return StoredMatrix(
        q=q,
        stored_bytes=checkpoint.bytes_of(module),
        words=f"4 bits, groups of {size}{'' if q.offsets_NG is None else ', zero points'}",
    )


def _in_order(words: Tensor) -> Tensor:
    """Codes of words [M, W] in the order of their rows: int32 [M, 8 W]."""
    num_codes = words.shape[1] * _ROWS_OF_A_WORD
    codes = unpack_words(words, _BITS, num_codes).reshape(-1, words.shape[1], _ROWS_OF_A_WORD)
    return codes[..., torch.tensor(_PLACES)].reshape(-1, num_codes)


SOURCES = (Awq(),)
