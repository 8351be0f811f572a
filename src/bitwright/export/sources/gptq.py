"""GPTQ, as AutoGPTQ and GPTQModel store it: words of 32 bits along the input, zero points, an order of groups.

    qweight   int32 [K · b / 32, N]     code of column k, row n: bits of word k · b / 32 of column n, lowest first
    qzeros    int32 [G, N · b / 32]     zero points of a group, packed along the rows; in "gptq" (v1) one less is stored
    scales    fp16  [G, N]
    g_idx     int32 [K]                 the group of every column

    value = (code − zero) · scale of the column's group

Groups of consecutive columns are what schemes here have: `g_idx` must be k // group. With `desc_act` columns are put
into groups by their activations; no scheme shares scales so, and such a layer is refused. With v1 a stored zero point
of 2^b − 1 means 2^b, or what an overflow of 0 − 1 left: refused where it occurs.

Source: AutoGPTQ 0.7, qlinear_cuda.py (pack, forward); GPTQModel, "format": "gptq" | "gptq_v2".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.source_kind import Contents, plain_tensors
from bitwright.export.stored_matrix import StoredMatrix, integer_codes, raise_unless_shape, unpack_words
from bitwright.models.loaded import LoadedModel
from bitwright.quantize.granularity import ROW, group

#: Layout → what was taken off the zero points.
_TAKEN_OFF = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Gptq:
    """Checkpoints of AutoGPTQ and GPTQModel."""

    name: str = "gptq"
    description: str = "AutoGPTQ, GPTQModel: 2, 3, 4 and 8 bits, with and without zero points, layouts gptq and gptq_v2"

    def claims(self, checkpoint: Checkpoint) -> bool:
        """By its quant_method, or by the settings file that AutoGPTQ writes."""
        method = checkpoint.settings.get("quant_method")
        return method == "gptq" or (method is None and checkpoint.settings_file == "quantize_config.json")

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """Every module that has a `qweight`."""
        layout = str(checkpoint.settings.get("checkpoint_format") or checkpoint.settings.get("format") or "gptq")
        bits = checkpoint.settings.get("bits")
        if layout not in _TAKEN_OFF or bits not in (2, 3, 4, 8):
            raise ModelError(
                f"{checkpoint.path} is a GPTQ checkpoint with {bits} bits in the layout '{layout}'; 2, 3, 4 and 8 bits "
                f"in {' and '.join(_TAKEN_OFF)} are read: convert it with GPTQModel"
            )
        coded = {name: _reader(checkpoint, name, bits, layout) for name in checkpoint.modules_with("qweight")}
        return Contents(coded=coded, plain=plain_tensors(checkpoint, reference))


def _reader(checkpoint: Checkpoint, module: str, bits: int, layout: str) -> Callable[[], StoredMatrix]:
    return lambda: _read(checkpoint, module, bits, layout)


def _read(checkpoint: Checkpoint, module: str, bits: int, layout: str) -> StoredMatrix:
    words = checkpoint.read(f"{module}.qweight")
    scales_GN = checkpoint.read(f"{module}.scales")
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    num_groups = scales_GN.shape[0]
    raise_unless_shape("scales", scales_GN, (num_groups, rows))
    size = _group_size(checkpoint.settings, columns, num_groups)
    if f"{module}.g_idx" in checkpoint.tensors:
        _raise_unless_consecutive(checkpoint.read(f"{module}.g_idx"), columns, size)
    codes_NK = unpack_words(words.T, bits, columns)
    zeros_GN = unpack_words(checkpoint.read(f"{module}.qzeros"), bits, rows)
    raise_unless_shape("zero points", zeros_GN, (num_groups, rows))
    q = integer_codes(
        codes_NK,
        zeros_GN.T + _TAKEN_OFF[layout],
        scales_GN.T.contiguous(),
        bits,
        group(size) if _is_grouped(checkpoint.settings) else ROW,
    )
    return StoredMatrix(
        q=q,
        stored_bytes=checkpoint.bytes_of(module),
        words=f"{bits} bits, {f'groups of {size}' if _is_grouped(checkpoint.settings) else 'a scale a row'}"
        f"{'' if q.offsets_NG is None else ', zero points'}",
    )


def _is_grouped(settings: Any) -> bool:
    """Whether rows have several scales; the settings write −1 where they have one."""
    size = settings.get("group_size", -1)
    return isinstance(size, int) and size > 0


def _group_size(settings: Any, columns: int, num_groups: int) -> int:
    size = int(settings["group_size"]) if _is_grouped(settings) else columns
    if -(-columns // size) != num_groups:
        raise ModelError(
            f"its {columns} columns in groups of {size} need {-(-columns // size)} scales, not {num_groups}"
        )
    return size


def _raise_unless_consecutive(group_of_column: Tensor, columns: int, size: int) -> None:
    raise_unless_shape("group indices", group_of_column, (columns,))
    if not torch.equal(group_of_column.long(), torch.arange(columns) // size):
        raise ModelError(
            "its columns are in groups by their activations (desc_act), and no scheme shares scales so; quantise with "
            "desc_act=False, or with static groups"
        )


SOURCES = (Gptq(),)
