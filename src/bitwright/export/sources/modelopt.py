"""NVIDIA ModelOpt's Hugging Face checkpoints: `hf_quant_config.json`, or quant_method "modelopt" in config.json.

    FP8                             weight float8 [N, K], weight_scale and input_scale one number each
    FP8_PER_CHANNEL_PER_TOKEN       weight_scale [N]; inputs token by token
    FP8_PB_WO                       weight_scale of blocks of 128 × 128; inputs as they are
    NVFP4, W4A16_NVFP4              weight uint8 [N, K / 2], weight_scale float8 [N, K / 16], weight_scale_2 one number:
                                    what multiplies is their product; input_scale one number

Source: ModelOpt 0.4x, modelopt/torch/export (unified Hugging Face export), from memory; vLLM's modelopt.py.
Rejected: algorithms that pack integers (W4A8_AWQ, W4A16_AWQ), in an order that no document fixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bitwright.errors import ModelError
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.float_matrix import float4_matrix, float8_matrix
from bitwright.export.source_kind import Contents, plain_tensors
from bitwright.export.stored_matrix import StoredMatrix, input_scheme
from bitwright.models.loaded import LoadedModel
from bitwright.quantize.granularity import ROW, TENSOR
from bitwright.quantize.scheme import TensorScheme, block_scheme

_METHODS = ("modelopt", "modelopt_fp4")
_BLOCK = (128, 128)
_Inputs = Literal["static", "token", "nvfp4", "plain"]
#: Algorithm → what its inputs are rounded to.
_INPUTS: dict[str, _Inputs] = {
    "FP8": "static",
    "FP8_PER_CHANNEL_PER_TOKEN": "token",
    "FP8_PB_WO": "plain",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "plain",
}


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """Checkpoints of NVIDIA ModelOpt."""

    name: str = "modelopt"
    description: str = "NVIDIA ModelOpt: FP8 (tensor, row, block) and NVFP4"

    def claims(self, checkpoint: Checkpoint) -> bool:
        """By its quant_method, or by the settings file that ModelOpt writes."""
        method = checkpoint.settings.get("quant_method")
        return method in _METHODS or (method is None and checkpoint.settings_file == "hf_quant_config.json")

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """Every module that has a `weight_scale`."""
        algorithm = str(checkpoint.settings.get("quant_algo"))
        if algorithm not in _INPUTS:
            raise ModelError(
                f"{checkpoint.path} is a ModelOpt checkpoint with quant_algo {algorithm}; {', '.join(_INPUTS)} are "
                "read: quantise with one of these"
            )
        coded = {name: _reader(checkpoint, name, algorithm) for name in checkpoint.modules_with("weight_scale")}
        plain = {
            name: read
            for name, read in plain_tensors(checkpoint, reference).items()
            if name.removesuffix(".weight") not in coded
        }
        return Contents(coded=coded, plain=plain)


def _reader(checkpoint: Checkpoint, module: str, algorithm: str) -> Callable[[], StoredMatrix]:
    return lambda: _read(checkpoint, module, algorithm)


def _read(checkpoint: Checkpoint, module: str, algorithm: str) -> StoredMatrix:
    weight, scales = checkpoint.read(f"{module}.weight"), checkpoint.read(f"{module}.weight_scale")
    second = f"{module}.weight_scale_2"
    if second in checkpoint.tensors:
        q = float4_matrix(weight, scales, checkpoint.read(second))
    else:
        q = float8_matrix(weight, scales, _BLOCK if scales.dim() > 1 and scales.shape[1] > 1 else None)
    inputs = _INPUTS[algorithm]
    activations: dict[_Inputs, TensorScheme | None] = {
        "static": input_scheme("fp8_e4m3", TENSOR),
        "token": input_scheme("fp8_e4m3", ROW),
        "nvfp4": block_scheme("nvfp4"),
        "plain": None,
    }
    return StoredMatrix(
        q=q,
        activations=activations[inputs],
        input_scale=_input_scale(checkpoint, module) if inputs in ("static", "nvfp4") else None,
        stored_bytes=checkpoint.bytes_of(module),
        words=f"{algorithm}, {q.scheme.format} per {q.scheme.scaling.granularity if q.scheme.scaling else 'tensor'}",
    )


def _input_scale(checkpoint: Checkpoint, module: str) -> Tensor:
    return checkpoint.read(f"{module}.input_scale").float().reshape(())


SOURCES = (ModelOpt(),)
