"""compressed-tensors: what llm-compressor and vLLM's own tools write, layer by layer in groups of one setting each.

    pack-quantized        weight_packed int32: codes + 2^(b−1) as one stream of bits a row, filled up to whole words;
                          weight_shape; weight_zero_point packed the same way along the rows
    int-quantized         weight int8
    float-quantized       weight float8; scales of blocks need the size of a block from the settings
    nvfp4-pack-quantized  weight_packed uint8, weight_scale float8, weight_global_scale: the scale is divided by it
    mxfp4-pack-quantized  weight_packed uint8, weight_scale uint8: exponents of two plus 127

    value = (code − zero point) · weight_scale

Which group a layer is in follows from its targets: the layer's name, a pattern ("re:…"), or the name of its class, in
this order. Layers that have no scales are plain.

The second level of NVFP4 divides, where here it multiplies: of the fp32 numbers next to its reciprocal the one is taken
that gives most scales exactly, usually all, and the others to one unit in the last place.

Source: compressed-tensors 0.20, compressors/*/base.py, config/format.py, quantization/lifecycle/forward.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.float_matrix import float4_matrix, float8_matrix
from bitwright.export.source_kind import Contents, plain_tensors
from bitwright.export.stored_matrix import (
    StoredMatrix,
    input_scheme,
    integer_codes,
    raise_unless_shape,
    unpack_words,
)
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import find_sites
from bitwright.quantize import QTensor
from bitwright.quantize.granularity import ROW, TENSOR, group
from bitwright.quantize.scheme import TensorScheme, block_scheme

_Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Checkpoints of compressed-tensors."""

    name: str = "compressed-tensors"
    description: str = "compressed-tensors: pack-, int-, float-, nvfp4- and mxfp4-quantized, each layer by its group"

    def claims(self, checkpoint: Checkpoint) -> bool:
        """By its quant_method, or by the groups of settings that no other kind has."""
        method = checkpoint.settings.get("quant_method")
        return method == "compressed-tensors" or (method is None and "config_groups" in checkpoint.settings)

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """Every module that has a `weight_scale`."""
        settings = checkpoint.settings
        if "sparse" in str(settings.get("format")) or "marlin" in str(settings.get("format")):
            raise ModelError(
                f"{checkpoint.path} is stored as {settings.get('format')}; sparse and marlin layouts are not read"
            )
        if settings.get("transform_config"):
            raise ModelError(
                f"{checkpoint.path} rotates inputs at run time (transform_config), which no plan can take over from it"
            )
        classes = {name: type(module).__name__ for name, module in reference.model.named_modules()}
        names = checkpoint.modules_with("weight_scale")
        groups = {name: _group_of(name, classes.get(name, "Linear"), settings) for name in names}
        in_out = {site.module for site in find_sites(reference.model) if site.transposed and site.expert is None}
        coded = {name: _reader(checkpoint, name, groups[name], name in in_out) for name in names}
        plain = {
            name: read
            for name, read in plain_tensors(checkpoint, reference).items()
            if name.removesuffix(".weight") not in coded
        }
        left_out = "the checkpoint's rounded KV cache is left out: its plan is one of weights and inputs"
        return Contents(coded=coded, plain=plain, notes=(left_out,) if settings.get("kv_cache_scheme") else ())


def _group_of(module: str, kind: str, settings: _Settings) -> _Settings:
    """The settings of a module, by its name, a pattern, or its class."""
    groups = [found for found in settings.get("config_groups", {}).values() if isinstance(found, dict)]
    tests: tuple[Callable[[str], bool], ...] = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
        lambda target: target == kind,
    )
    for fits in tests:
        for found in groups:
            if any(fits(str(target)) for target in found.get("targets", ())):
                return found
    return {}


def _reader(checkpoint: Checkpoint, module: str, settings: _Settings, in_out: bool) -> Callable[[], StoredMatrix]:
    return lambda: _read(checkpoint, module, settings, in_out)


def _read(checkpoint: Checkpoint, module: str, settings: _Settings, in_out: bool) -> StoredMatrix:
    weights = settings.get("weights")
    if not isinstance(weights, dict):
        raise ModelError("it has scales, but no group of the settings names it")
    if f"{module}.weight_g_idx" in checkpoint.tensors:
        raise ModelError(
            "its columns are in groups by their activations (actorder 'group'), and no scheme shares scales so; "
            "quantise with actorder 'weight', or without"
        )
    scales = checkpoint.read(f"{module}.weight_scale")
    zeros = f"{module}.weight_zero_point"
    packed = f"{module}.weight_packed"
    bits = int(weights["num_bits"])
    if weights.get("type") == "float":
        q = _float_matrix(checkpoint, module, scales, weights, in_out)
    elif packed in checkpoint.tensors:
        rows, columns = (int(size) for size in checkpoint.read(f"{module}.weight_shape"))
        stored = checkpoint.read(packed)
        raise_unless_shape("codes", stored, (rows, -(-columns * bits // 32)))
        zero_points = None
        if zeros in checkpoint.tensors:
            zero_points = unpack_words(checkpoint.read(zeros).T, bits, rows).T
        q = _integer_matrix(unpack_words(stored, bits, columns), zero_points, scales, weights)
    else:
        middle = 1 << (bits - 1)
        codes = _weight(checkpoint, module, in_out).int() + middle
        zero_points = checkpoint.read(zeros).int() + middle if zeros in checkpoint.tensors else None
        q = _integer_matrix(codes, zero_points, scales, weights)
    activations, input_scale = _inputs(checkpoint, module, settings.get("input_activations"))
    scaling = q.scheme.scaling
    assert scaling is not None
    return StoredMatrix(
        q=q,
        activations=activations,
        input_scale=input_scale,
        stored_bytes=checkpoint.bytes_of(module),
        words=f"{weights.get('type', 'int')}{bits} per {scaling.granularity}, {scaling.scale_format} scales"
        f"{'' if scaling.symmetry == 'symmetric' else ', zero points'}",
    )


def _integer_matrix(codes_NK: Tensor, zeros: Tensor | None, scales: Tensor, weights: _Settings) -> QTensor:
    """Codes 0 … 2^b − 1 under the scales that the settings say."""
    bits = int(weights["num_bits"])
    sharers = {"tensor": TENSOR, "channel": ROW}
    if weights.get("strategy") in ("group", "tensor_group"):
        sharers[str(weights["strategy"])] = group(int(weights["group_size"]))
    granularity = sharers.get(str(weights.get("strategy")))
    if granularity is None:
        raise ModelError(f"its weights share scales by '{weights.get('strategy')}'; tensor, channel and group are read")
    shape = granularity.scale_shape(*codes_NK.shape)
    if scales.numel() != shape[0] * shape[1]:
        raise ModelError(f"its scales have shape {list(scales.shape)}, and {granularity} needs {list(shape)}")
    if zeros is None:
        zeros = torch.full(shape, 1 << (bits - 1), dtype=torch.int32)
    return integer_codes(codes_NK, zeros.reshape(shape), scales.reshape(shape), bits, granularity)


def _weight(checkpoint: Checkpoint, module: str, in_out: bool) -> Tensor:
    """Codes [N, K] of what is called "weight", which lies as the model's own weight does."""
    stored = checkpoint.read(f"{module}.weight")
    return stored.T.contiguous() if in_out else stored


def _float_matrix(checkpoint: Checkpoint, module: str, scales: Tensor, weights: _Settings, in_out: bool) -> QTensor:
    packed, second = f"{module}.weight_packed", f"{module}.weight_global_scale"
    if packed not in checkpoint.tensors:
        size = weights.get("block_structure")
        of_blocks = (int(size[0]), int(size[1])) if size and weights.get("strategy") == "block" else None
        return float8_matrix(_weight(checkpoint, module, in_out), scales, of_blocks)
    if second not in checkpoint.tensors:
        exponents = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        return float4_matrix(checkpoint.read(packed), exponents, None)
    return float4_matrix(checkpoint.read(packed), scales, _multiplier(scales, checkpoint.read(second).float()))


def _multiplier(scales_NG: Tensor, divisor: Tensor) -> Tensor:
    """What to multiply scales by so that most come out as if divided: fp32 0-d."""
    near = divisor.reshape(()).reciprocal()
    wanted = scales_NG.float() / divisor
    up, down = (torch.nextafter(near, torch.tensor(end)) for end in (torch.inf, 0.0))
    return max((near, up, down), key=lambda tried: int((scales_NG.float() * tried == wanted).sum()))


def _inputs(
    checkpoint: Checkpoint, module: str, settings: _Settings | None
) -> tuple[TensorScheme | None, Tensor | None]:
    """What inputs are rounded to, and their static scale."""
    if not settings:
        return None, None
    strategy, bits = str(settings.get("strategy")), int(settings.get("num_bits", 8))
    if strategy == "tensor_group":
        if settings.get("dynamic") is True:
            return block_scheme("nvfp4"), None
        return block_scheme("nvfp4"), checkpoint.read(f"{module}.input_global_scale").float().reciprocal().reshape(())
    is_float = settings.get("type") == "float"
    if is_float and bits == 4:
        return block_scheme("mxfp4"), None
    if not settings.get("symmetric", True):
        raise ModelError("its inputs have zero points, which inputs here have not; quantise with symmetric inputs")
    number = {8: "fp8_e4m3"}.get(bits, f"fp{bits}") if is_float else f"int{bits}"
    sharers = {"token": ROW, "tensor": TENSOR, "group": group(int(settings.get("group_size") or 1))}
    if strategy not in sharers:
        raise ModelError(f"its inputs share scales by '{strategy}'; token, tensor and group are read")
    if settings.get("dynamic", False) is not False:
        return input_scheme(number, sharers[strategy]), None
    scale = checkpoint.read(f"{module}.input_scale")
    if scale.numel() != 1:
        raise ModelError(f"its input has {scale.numel()} static scales, and one is what schemes here have")
    return input_scheme(number, TENSOR), scale.float().reshape(())


SOURCES = (CompressedTensors(),)
