"""TensorRT-LLM: a folder as ModelOpt's unified export lays it out, with hf_quant_config.json.

For a module `m` with codes, by the algorithm that its scheme is:

    FP8_PER_CHANNEL_PER_TOKEN   m.weight float8_e4m3fn [N, K]   m.weight_scale fp32 [N]
    FP8                         m.weight float8_e4m3fn [N, K]   m.weight_scale fp32 []   m.input_scale fp32 []
    NVFP4                       m.weight uint8 [N, K / 2]       m.weight_scale float8_e4m3fn [N, K / 16]
                                m.weight_scale_2 fp32 [], the tensor scale; m.input_scale fp32 [], that of the inputs
    W4A16_AWQ                   m.weight uint8 [N / 2, K]: rows 2i and 2i + 1 in the low and the high nibble
                                m.weight_scale [N, K / 128]

One algorithm everywhere is `quant_algo` with the modules that it leaves out; several are MIXED_PRECISION with a list of
layers. Column factors go into the norm before (`folding.py`), as ModelOpt does with q, k, v, gate and up; where they
cannot, they are refused: which of a fused matrix's factors would multiply its input is not written down anywhere. FP8
caches have m.k_proj.k_scale and m.v_proj.v_scale.

Source: NVIDIA/Model-Optimizer modelopt/torch/export (quant_utils.py, unified_export_hf.py, convert_hf_config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwright.export.coded_shards import write_coded_shards
from bitwright.export.folding import fold_factors
from bitwright.export.modules import CodedModule, coded_modules, linear_modules, module_reasons, shared_scale_reasons
from bitwright.export.source import ExportSource
from bitwright.export.written_folder import write_json, write_model_files
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import TRANSFORMS
from bitwright.quantize.pack import PackedTensor, pack_codes
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.value_scheme import ValueScheme

CONFIG_FILE = "hf_quant_config.json"
_Parts = dict[str, Tensor]


def _float8(q: QTensor, packed: PackedTensor) -> _Parts:
    assert q.scales_NG is not None
    scales = q.scales_NG.reshape(()) if q.scales_NG.numel() == 1 < len(q.codes_NK) else q.scales_NG.squeeze(-1)
    return {"weight": q.codes_NK.to(torch.float8_e4m3fn), "weight_scale": scales}


def _nibbles(q: QTensor, packed: PackedTensor) -> _Parts:
    assert packed.scales is not None
    low, high = (q.codes_NK.to(torch.int8) & 0xF).view(torch.uint8).unflatten(0, (-1, 2)).unbind(1)
    return {"weight": low | (high << 4), "weight_scale": packed.scales}


def _fours(q: QTensor, packed: PackedTensor) -> _Parts:
    assert packed.scales is not None and q.tensor_scale is not None
    return {"weight": packed.codes, "weight_scale": packed.scales, "weight_scale_2": q.tensor_scale.reshape(())}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Algorithm:
    """One of ModelOpt's, as a pattern over the facts of a scheme."""

    name: str
    format: str
    scope: str
    group_size: int = 0
    #: (format, scope, static) of inputs; None: not rounded.
    inputs: tuple[str, str, bool] | None = None
    #: Further fields of the layer's entry.
    fields: Mapping[str, Any]
    store: Callable[[QTensor, PackedTensor], _Parts]

    def fits(self, scheme: Scheme) -> bool:
        """Whether a scheme is this."""
        weights = scheme.weights
        if weights is None or weights.scaling is None or weights.scaling.symmetry != "symmetric":
            return False
        granularity = weights.scaling.granularity
        return (weights.format, granularity.scope, granularity.group_size) == (
            self.format,
            self.scope,
            self.group_size,
        ) and _inputs_of(scheme) == self.inputs


_ALGORITHMS = (
    _Algorithm(
        name="FP8_PER_CHANNEL_PER_TOKEN",
        format="fp8_e4m3",
        scope="row",
        inputs=("fp8_e4m3", "row", False),
        fields={},
        store=_float8,
    ),
    _Algorithm(
        name="FP8", format="fp8_e4m3", scope="tensor", inputs=("fp8_e4m3", "tensor", True), fields={}, store=_float8
    ),
    _Algorithm(
        name="NVFP4",
        format="fp4_e2m1",
        scope="group",
        group_size=16,
        inputs=("fp4_e2m1", "group", True),
        fields={"group_size": 16},
        store=_fours,
    ),
    _Algorithm(
        name="W4A16_AWQ",
        format="int4",
        scope="group",
        group_size=128,
        fields={"group_size": 128, "has_zero_point": False, "pre_quant_scale": True},
        store=_nibbles,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtLlm:
    """See the opening of this file."""

    name: str = "tensorrt-llm"
    description: str = "a folder that TensorRT-LLM loads, laid out as ModelOpt's export, with hf_quant_config.json"
    engines: tuple[str, ...] = ("tensorrt-llm",)
    loaded_by: tuple[str, ...] = ("tensorrt-llm",)
    keeps_caches: bool = True

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """See `Exporter`."""
        if isinstance(scheme, ValueScheme):
            kept = scheme.values.format == "fp8_e4m3" and scheme.static and scheme.axis == "tensor"
            if scheme.values.scaling is None or (choice.role == "kv_cache" and kept):
                return None
            return f"ModelOpt's checkpoints keep caches in fp8_e4m3 per tensor, and nothing as {scheme.name}"
        assert scheme.weights is not None
        if scheme.weights.scaling is None:
            return None
        algorithm = _algorithm_of(scheme)
        if algorithm is None:
            return _spell_missing(scheme)
        if choice.role == "embedding":
            return "ModelOpt's checkpoints have plain embeddings"
        if "signs" in TRANSFORMS[choice.transform].parts:
            return f"ModelOpt's checkpoints have no change of inputs that {choice.transform} needs"
        rows, columns = choice.shape
        if algorithm.group_size and columns % algorithm.group_size:
            return f"{algorithm.name} has groups of {algorithm.group_size}, which do not divide {columns} columns"
        if algorithm.store is _nibbles and rows % 2:
            return f"{algorithm.name} packs rows in pairs, and there are {rows}"
        return None

    def why_not_plan(self, plan: Plan) -> str | None:
        """See `Exporter`."""
        caches = {choice.scheme for choice in plan.sites if choice.role == "kv_cache"}
        if len(caches) > 1:
            return (
                f"ModelOpt's checkpoints have one setting for all caches, and the plan has {', '.join(sorted(caches))}"
            )
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """See `Exporter`."""
        return {**module_reasons(source), **shared_scale_reasons(source), **fold_factors(source).refused}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """See `Exporter`."""
        modules = coded_modules(source)
        write_coded_shards(source, folder, modules, _tensors_of, _cache_scales(source))
        write_json(folder / CONFIG_FILE, _config(source, modules))
        return write_model_files(source, folder)


def _algorithm_of(scheme: Scheme) -> _Algorithm | None:
    return next((algorithm for algorithm in _ALGORITHMS if algorithm.fits(scheme)), None)


def _inputs_of(scheme: Scheme) -> tuple[str, str, bool] | None:
    if scheme.activations is None:
        return None
    scaling = scheme.activations.scaling
    scope = "none" if scaling is None else scaling.granularity.scope
    return scheme.activations.format, scope, scheme.static_activations


def _spell_missing(scheme: Scheme) -> str:
    inputs = "inputs in 16 bits" if scheme.activations is None else f"inputs as {scheme.activations}"
    if scheme.activations is not None and scheme.activations.scaling is not None:
        if scheme.activations.scaling.tensor_scale:
            inputs += ", whose tensor scale is found on every call and not kept"
        elif scheme.static_activations:
            inputs += " (static)"
    return f"ModelOpt's checkpoints have no {scheme.weights} with {inputs}"


def _tensors_of(module: CodedModule) -> _Parts:
    """Part of the module's name → what is stored."""
    algorithm = _algorithm_of(module.scheme)
    assert algorithm is not None
    q = module.codes()
    parts = algorithm.store(q, pack_codes(q))
    if module.input_scale is not None:
        parts["input_scale"] = module.input_scale.float()
    return parts


def _cache_scales(source: ExportSource) -> _Parts:
    found = {}
    for site, rule in source.values.items():
        if site.role == "kv_cache":
            (operand,) = site.operands
            scale = rule.scale(operand)
            assert scale is not None
            found[f"{site.module}.{operand}_proj.{operand}_scale"] = scale.reshape(()).float()
    return found


def _config(source: ExportSource, modules: Sequence[CodedModule]) -> dict[str, Any]:
    """hf_quant_config.json."""
    layers = {}
    for module in modules:
        algorithm = _algorithm_of(module.scheme)
        assert algorithm is not None
        layers[str(module.stored)] = {"quant_algo": algorithm.name, **algorithm.fields}
    kinds = {entry["quant_algo"]: entry for entry in layers.values()}
    has_cache = any(site.role == "kv_cache" and rule.scheme.static for site, rule in source.values.items())
    quantization: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8" if has_cache else None}
    if len(kinds) > 1:
        quantization |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    elif kinds:
        quantization |= next(iter(kinds.values()))
        quantization["exclude_modules"] = sorted(linear_modules(source.model) - {module.name for module in modules})
    return {"producer": {"name": "bitwright", "version": metadata.version("bitwright")}, "quantization": quantization}


EXPORTERS = (TensorRtLlm(),)
