"""Quantised checkpoints as other tools write them, packed by their documented layouts, number by number.

Each writer returns what the format says the weights are: module → fp32 [N, K], computed here and not by the package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Rows of a word of AutoAWQ's GEMM layout, from the lowest bits up.
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
Weights = dict[str, Tensor]
#: (module, weight fp32 [N, K]) → (tensors to store under the module's name, what they stand for).
Quantizer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def linear_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Matrices of layers: also those of experts, which checkpoints call w1, w2 and w3."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight") or ".experts." in name]


def write(
    folder: Path, reference: Path, settings: Mapping[str, Any], quantize: Quantizer, *, file: str = "config.json"
) -> Weights:
    """Write the reference again with its linear layers in another form; settings go into `file`."""
    shutil.copytree(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    values: Weights = {}
    for name in linear_names(tensors):
        stored, values[name] = quantize(name, tensors.pop(f"{name}.weight").float())
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    if file == "config.json":
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, "quantization_config": dict(settings)}))
    else:
        (folder / file).write_text(json.dumps(dict(settings)))
    return values


def asymmetric(weight_NK: Tensor, size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], zero points [N, G] and fp16 scales [N, G] of some quantiser: which one does not matter."""
    groups = weight_NK.reshape(weight_NK.shape[0], -1, size).numpy()
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 1, 2**bits - 1).astype(np.int64)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 2**bits - 1).astype(np.int64)
    return codes.reshape(weight_NK.shape), zeros, scales


def values_of(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, size: int) -> Tensor:
    """(code − zero) · scale, in fp32."""
    whole = (codes - zeros.repeat(size, 1)).astype(np.float32) * scales.astype(np.float32).repeat(size, 1)
    return torch.from_numpy(whole)


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Words of 32 bits along the last dimension, place after place: [M, L] → int32 [M, L · bits / 32].

    Without an order the codes are one stream of bits, which for 3 bits runs over the ends of words.
    """
    rows, length = codes.shape
    if order is not None:
        codes = codes.reshape(rows, length // 8, 8)[..., list(order)].reshape(rows, length)
    stream = (codes[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.reshape(rows, length * bits).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def gptq(
    size: int = 32, bits: int = 4, *, layout: str = "gptq", symmetric: bool = False, order: Tensor | None = None
) -> Quantizer:
    """AutoGPTQ's tensors; with `order` the group of every column."""

    def quantize(name: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = asymmetric(weight_NK, size, bits)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        taken_off = {"gptq": 1, "gptq_v2": 0}[layout]
        groups = torch.arange(weight_NK.shape[1]) // size if order is None else order[: weight_NK.shape[1]]
        stored = {
            "qweight": words(codes, bits).T,
            "qzeros": words(zeros.T - taken_off, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": groups.int(),
        }
        return stored, values_of(codes, zeros, scales, size)

    return quantize


def awq(size: int = 32) -> Quantizer:
    """AutoAWQ's tensors for its GEMM kernels."""

    def quantize(name: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = asymmetric(weight_NK, size, 4)
        stored = {
            "qweight": words(codes.T, 4, AWQ_ROWS),
            "qzeros": words(zeros.T, 4, AWQ_ROWS),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return stored, values_of(codes, zeros, scales, size)

    return quantize


def fp8_blocks(rows: int, columns: int, *, name: str = "weight_scale_inv", dtype: Any = torch.float32) -> Quantizer:
    """float8 under scales of blocks; the last blocks may be cut off."""

    def quantize(_: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_rows, num_columns = weight_NK.shape
        shape = (-(-num_rows // rows), -(-num_columns // columns))
        scales = torch.empty(shape)
        codes = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
        values = torch.empty(num_rows, num_columns)
        for i in range(shape[0]):
            for j in range(shape[1]):
                here = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = (weight_NK[here].abs().max() / 448).to(dtype).float()
                codes[here] = (weight_NK[here] / scales[i, j]).to(torch.float8_e4m3fn)
                values[here] = codes[here].float() * scales[i, j]
        return {"weight": codes, name: scales.to(dtype)}, values

    return quantize


def fp8(scope: str = "tensor", *, static: bool = False, shape: tuple[int, ...] | None = None) -> Quantizer:
    """float8 under one scale a tensor or a row."""

    def quantize(_: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        amax = weight_NK.abs().max() if scope == "tensor" else weight_NK.abs().amax(1, keepdim=True)
        scales = amax / 448
        codes = (weight_NK / scales).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": scales if shape is None else scales.reshape(shape)}
        if static:
            stored["input_scale"] = torch.tensor(0.0625)
        return stored, codes.float() * scales

    return quantize


def nvfp4_of_modelopt(_: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """E2M1 codes two a byte, float8 scales of 16, and one fp32 number that multiplies them."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    second = weight_NK.abs().max() / (448 * 6)
    groups = weight_NK.reshape(weight_NK.shape[0], -1, 16)
    scales = (groups.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
    units = groups / (scales.float() * second)[..., None]
    places = (units.abs()[..., None] - positive).abs().argmin(-1)
    codes = (places | (units < 0).long() << 3).reshape(weight_NK.shape)
    values = positive[places] * units.sign() * (scales.float() * second)[..., None]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": second, "input_scale": torch.tensor(0.01)}
    return stored, values.reshape(weight_NK.shape)


def pack_quantized(size: int, bits: int, *, zero_points: bool) -> Quantizer:
    """compressed-tensors' packed integers: codes + 2^(b−1) as a stream of bits a row."""

    def quantize(_: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = asymmetric(weight_NK, size, bits)
        if not zero_points:
            zeros[:] = 1 << (bits - 1)
        stored = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight_NK.shape),
        }
        if zero_points:
            stored["weight_zero_point"] = words(zeros.T, bits).T
        return stored, values_of(codes, zeros, scales, size)

    return quantize


def config_groups(num_bits: int, *, kind: str = "int", inputs: Mapping[str, Any] | None = None, **weights: Any) -> Any:
    """Settings of compressed-tensors: one group of all linear layers but the head."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": num_bits, "type": kind, **weights},
                "input_activations": None if inputs is None else dict(inputs),
            }
        },
    }
