"""FP8 weights with scales beside them: blocks (DeepSeek, transformers' fine-grained fp8), rows, or one scale a tensor.

    weight             float8 [N, K]
    weight_scale_inv   fp32, bf16 or e8m0 [⌈N / r⌉, ⌈K / c⌉]    blocks of r × c; in spite of its name it multiplies
    weight_scale       one number, or one a row [N] or [N, 1]
    input_scale        one number: static inputs; formerly "activation_scale"

Dynamic inputs are rounded in groups of c under scales of blocks, and else token by token.

Source: transformers 5, integrations/finegrained_fp8.py (FP8Linear, _dequantize_fp8_weight) and fbgemm_fp8.py; vLLM's
checkpoints with quant_method "fp8", from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bitwright.errors import ModelError
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.float_matrix import float8_matrix
from bitwright.export.source_kind import Contents, plain_tensors
from bitwright.export.stored_matrix import StoredMatrix, input_scheme
from bitwright.models.loaded import LoadedModel
from bitwright.quantize.granularity import ROW, TENSOR, group

_METHODS = ("fp8", "fbgemm_fp8")
_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class Fp8:
    """Checkpoints whose linear weights are float8."""

    name: str = "fp8"
    description: str = "fine-grained fp8 of transformers and DeepSeek (blocks), fp8 of vLLM and FBGEMM (tensor, row)"

    def claims(self, checkpoint: Checkpoint) -> bool:
        """By its quant_method."""
        return checkpoint.settings.get("quant_method") in _METHODS

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """Every module that has scales."""
        coded = {name: _reader(checkpoint, name) for name in checkpoint.modules_with(*_SCALES)}
        plain = {
            name: read
            for name, read in plain_tensors(checkpoint, reference).items()
            if name.removesuffix(".weight") not in coded
        }
        return Contents(coded=coded, plain=plain)


def _reader(checkpoint: Checkpoint, module: str) -> Callable[[], StoredMatrix]:
    return lambda: _read(checkpoint, module)


def _read(checkpoint: Checkpoint, module: str) -> StoredMatrix:
    name = next(part for part in _SCALES if f"{module}.{part}" in checkpoint.tensors)
    size = _block_size(checkpoint.settings)
    weight = checkpoint.read(f"{module}.weight")
    matrix = float8_matrix(weight, checkpoint.read(f"{module}.{name}"), size)
    static = [f"{module}.{part}" for part in ("input_scale", "activation_scale")]
    kept = next((checkpoint.read(part) for part in static if part in checkpoint.tensors), None)
    asks_static = checkpoint.settings.get("activation_scheme") == "static"
    if asks_static and kept is None:
        raise ModelError("its inputs are static, and it lacks their scale ('input_scale')")
    if kept is not None and kept.numel() != 1:
        raise ModelError(f"its input has {kept.numel()} static scales, and one is what schemes here have")
    scaling = matrix.scheme.scaling
    assert scaling is not None
    columns = scaling.granularity.group_size
    number = matrix.scheme.format
    per_token = input_scheme(number, group(columns) if columns and kept is None else ROW)
    return StoredMatrix(
        q=matrix,
        activations=per_token if kept is None else input_scheme(number, TENSOR),
        input_scale=None if kept is None else kept.float().reshape(()),
        stored_bytes=checkpoint.bytes_of(module),
        words=f"{number} per {scaling.granularity}, {'static' if kept is not None else 'dynamic'} inputs",
    )


def _block_size(settings: Any) -> tuple[int, int] | None:
    size = settings.get("weight_block_size")
    return None if not size else (int(size[0]), int(size[1]))


SOURCES = (Fp8(),)
