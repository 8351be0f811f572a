"""ModelOpt: a `quant_cfg` for `modelopt.torch.quantization.quantize`, with the weights and amax that it goes with.

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = yaml.safe_load((folder / "quant_cfg.yaml").read_text())
    model = modelopt.torch.quantization.quantize(model, config)
    for name, amax in safetensors.torch.load_file(folder / "amax.safetensors").items():
        model.get_submodule(name).amax = amax

ModelOpt rounds to the nearest code under amax / (largest code). The folder's weights have the values of the plan's
codes already, and amax is the plan's scale times the largest code, so that ModelOpt finds these very codes, whatever
rounding they came from. Without the last two lines it takes amax from the weights, which is the same for codes that
reach the largest one in every group (round-to-nearest).

`quant_cfg` enables quantisers one by one, by the names of their modules; all others are off. It is YAML, since the
numbers of axes are keys in it, which JSON would make text.

Source: NVIDIA/Model-Optimizer modelopt/torch/quantization/config.py (QuantizerAttributeConfig, QuantizerCfgEntry).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from bitwright import formats
from bitwright.export.folding import fold_factors
from bitwright.export.modules import CodedModule, coded_modules, module_reasons
from bitwright.export.source import ExportSource
from bitwright.export.written_folder import ShardWriter, write_model_files
from bitwright.formats import FloatFormat, IntFormat
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import TRANSFORMS
from bitwright.quantize.scheme import Scheme, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

CONFIG_FILE = "quant_cfg.yaml"
AMAX_FILE = "amax.safetensors"
_SCALE_FORMATS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOpt:
    """See the opening of this file."""

    name: str = "modelopt"
    description: str = "a quant_cfg for modelopt.torch.quantization.quantize, with weights and amax to go with it"
    engines: tuple[str, ...] = ()
    loaded_by: tuple[str, ...] = ("ModelOpt",)
    keeps_caches: bool = False

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """See `Exporter`."""
        if isinstance(scheme, ValueScheme):
            return (
                None if scheme.values.scaling is None else f"quant_cfg is written for matrices, not for {choice.role}"
            )
        if scheme.weights is None or scheme.weights.scaling is None:
            return None
        if "signs" in TRANSFORMS[choice.transform].parts:
            return f"ModelOpt has no change of inputs that {choice.transform} needs"
        return _why_not_weights(scheme.weights) or _why_not_inputs(scheme)

    def why_not_plan(self, plan: Plan) -> str | None:
        """See `Exporter`."""
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """See `Exporter`."""
        return {**module_reasons(source), **fold_factors(source).refused}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """See `Exporter`."""
        modules = coded_modules(source)
        entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        amax: dict[str, Tensor] = {}
        with ShardWriter(folder) as shards:
            for name, tensor in source.rest(fold_factors(source).parameters):
                shards.add(name, tensor)
            for module in modules:
                q = module.codes()
                shards.add(f"{module.name}.weight", q.dequantize())
                assert q.scales_NG is not None
                largest = float(formats.FORMATS[q.scheme.format].max)
                amax[f"{module.name}.weight_quantizer"] = _laid_out(q.scales_NG * largest, q.scheme)
                if module.input_scale is not None and module.scheme.activations is not None:
                    input_largest = float(formats.FORMATS[module.scheme.activations.format].max)
                    amax[f"{module.name}.input_quantizer"] = module.input_scale * input_largest
                entries += _entries(module)
        lines = ["algorithm: max", "quant_cfg:", *(f"- {_flow(entry)}" for entry in entries)]
        (folder / CONFIG_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / AMAX_FILE).write_bytes(
            safetensors.torch.save({name: amax[name].contiguous() for name in sorted(amax)})
        )
        return write_model_files(source, folder)


def _why_not_weights(weights: TensorScheme) -> str | None:
    scaling, number = weights.scaling, formats.FORMATS[weights.format]
    assert scaling is not None
    if number.name != "fp8_e4m3" and not (isinstance(number, IntFormat) and number.min < 0):
        return f"quant_cfg is written for signed integers and fp8_e4m3, not for {weights.format}"
    if scaling.symmetry != "symmetric" or scaling.tensor_scale or scaling.scale_format not in _SCALE_FORMATS:
        return f"quant_cfg is written for symmetric codes under plain scales, not for {weights}"
    return None


def _why_not_inputs(scheme: Scheme) -> str | None:
    inputs = scheme.activations
    if inputs is None:
        return None
    if inputs.format not in ("int8", "fp8_e4m3") or inputs.scaling is None or inputs.scaling.rule != "amax":
        return f"quant_cfg is written for inputs in int8 or fp8_e4m3 under amax, not for {inputs}"
    if inputs.scaling.granularity.scope not in ("row", "tensor"):
        return f"quant_cfg is written for inputs under scales per token or tensor, not for {inputs}"
    return None


def _entries(module: CodedModule) -> list[dict[str, Any]]:
    """The entries of one module's quantisers."""
    scheme = module.scheme
    assert scheme.weights is not None
    found = [{"quantizer_name": f"{module.name}.weight_quantizer", "cfg": _attributes(scheme.weights), "enable": True}]
    if scheme.activations is not None:
        attributes: dict[str, Any] = {"num_bits": _bits(scheme.activations.format), "axis": None}
        if not scheme.static_activations:
            attributes = {"num_bits": attributes["num_bits"], "block_sizes": {-1: None, "type": "dynamic"}}
        found.append({"quantizer_name": f"{module.name}.input_quantizer", "cfg": attributes, "enable": True})
    return found


def _attributes(weights: TensorScheme) -> dict[str, Any]:
    assert weights.scaling is not None
    granularity = weights.scaling.granularity
    match granularity.scope:
        case "row":
            return {"num_bits": _bits(weights.format), "axis": 0}
        case "group":
            return {"num_bits": _bits(weights.format), "block_sizes": {-1: granularity.group_size}}
        case "block":
            sizes = {-1: granularity.group_size, -2: granularity.block_rows}
            return {"num_bits": _bits(weights.format), "block_sizes": sizes}
    return {"num_bits": _bits(weights.format), "axis": None}


def _bits(name: str) -> int | list[int]:
    number = formats.FORMATS[name]
    return [number.exponent_bits, number.fraction_bits] if isinstance(number, FloatFormat) else number.bits


def _flow(value: Any) -> str:
    """YAML on one line: JSON, with keys as they are."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _laid_out(amax_RG: Tensor, weights: TensorScheme) -> Tensor:
    """amax in the shape that ModelOpt keeps it in."""
    assert weights.scaling is not None
    match weights.scaling.granularity.scope:
        case "group":
            return amax_RG.reshape(-1, 1)
        case "tensor":
            return amax_RG.reshape(())
    return amax_RG


EXPORTERS = (ModelOpt(),)
