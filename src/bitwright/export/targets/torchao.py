"""torchao: a model folder, the config that its `quantize_` takes, the plan's codes, and the few lines that load them.

    model.safetensors, config.json, …   the model with the values that codes stand for, as transformers loads it
    torchao_config.json                 layer → config; `torchao.core.config.config_from_dict` reads it as FqnToConfig
    torchao_codes.safetensors           "<layer>.qdata", ".scale", ".zero_point", as torchao's tensors keep them
    load_torchao.py                     load() = from_pretrained, quantize_, and the codes put in

`quantize_` finds scales by rules of its own (a symmetric int4 group is divided by 7.5, where a plan's may be by 7), so
that the config alone gives other codes than those that were measured. Therefore these are put in afterwards. Without
that step the config serves too: for fine-tuned weights, say. Inputs in int8 it divides by 127.5 where plans here divide
by 127: they are rounded otherwise than was measured, which a note says.

    int2 … int8, rows and groups            IntxWeightOnlyConfig, symmetric or with integer zero points
    int8 with int8 inputs token by token    Int8DynamicActivationInt8WeightConfig
    fp8_e4m3, rows, groups and tensors      Float8WeightOnlyConfig
    the same with fp8 inputs                Float8DynamicActivationFloat8WeightConfig; a GPU has to have FP8

Source: torchao 0.18, quantization/quant_api.py, core/config.py, quantization/quantize_/workflows; run with torch 2.13.
Rejected: its MX and NVFP4 configs, which are prototypes for one generation of GPUs; Int4WeightOnlyConfig, whose packed
layouts hold codes in no documented order.

Legend: codes [N, K], scales [N, G].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from bitwright import formats
from bitwright.export.folding import fold_factors
from bitwright.export.modules import CodedModule, coded_modules, module_reasons
from bitwright.export.site_names import spell_sites
from bitwright.export.source import PLAIN_DTYPES, ExportSource
from bitwright.export.written_folder import ShardWriter, as_stored, write_json, write_model_files
from bitwright.formats import IntFormat
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import TRANSFORMS
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scaling, Scheme
from bitwright.quantize.value_scheme import ValueScheme

CONFIG_FILE, CODES_FILE, LOADER_FILE = "torchao_config.json", "torchao_codes.safetensors", "load_torchao.py"
_LOADER = '''"""Load this folder with torchao: the config, then the codes that were measured.

    from load_torchao import load
    model = load()
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torchao.core.config import config_from_dict
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM


def load(folder=Path(__file__).parent, device="cpu"):
    """The model with quantised layers."""
    folder = Path(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    config = config_from_dict(json.loads((folder / "torchao_config.json").read_text()))
    quantize_(model, config, filter_fn=None)
    with torch.no_grad(), safe_open(folder / "torchao_codes.safetensors", framework="pt", device=device) as codes:
        for name in codes.keys():
            module, _, part = name.rpartition(".")
            getattr(model.get_submodule(module).weight, part).copy_(codes.get_tensor(name))
    return model
'''
#: (formats, scopes, symmetries, what inputs are rounded to as (format, scope), config).
_KINDS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, str] | None, str], ...] = (
    (tuple(f"int{b}" for b in range(2, 9)), ("row", "group"), ("symmetric",), None, "IntxWeightOnlyConfig"),
    (tuple(f"uint{b}" for b in range(2, 9)), ("row", "group"), ("zero_point",), None, "IntxWeightOnlyConfig"),
    (("int8",), ("row",), ("symmetric",), ("int8", "row"), "Int8DynamicActivationInt8WeightConfig"),
    (("fp8_e4m3",), ("tensor", "row", "group"), ("symmetric",), None, "Float8WeightOnlyConfig"),
    (("fp8_e4m3",), ("row",), ("symmetric",), ("fp8_e4m3", "row"), "Float8DynamicActivationFloat8WeightConfig"),
)


@dataclass(frozen=True, slots=True)
class TorchAo:
    """See the opening of this file."""

    name: str = "torchao"
    description: str = "a folder, the config that torchao's quantize_ takes, and the plan's codes to put in"
    engines: tuple[str, ...] = ("torchao",)
    loaded_by: tuple[str, ...] = ("torchao",)
    keeps_caches: bool = True

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """See `Exporter`."""
        if isinstance(scheme, ValueScheme):
            return None if scheme.values.scaling is None else "torchao's configs are of layers, and round no values"
        assert scheme.weights is not None
        scaling = scheme.weights.scaling
        if scaling is None:
            return None
        if _config_of(scheme) is None:
            return f"torchao has no config for weights {scheme.weights} with inputs {_spell_inputs(scheme)}"
        if scaling.granularity.has_ragged_group(choice.shape[1]):
            size = scaling.granularity.group_size
            return f"torchao refuses groups of {size} in {choice.shape[1]} columns, which they do not divide"
        if choice.role == "embedding":
            return "torchao's configs here are of linear layers"
        if "signs" in TRANSFORMS[choice.transform].parts:
            return f"torchao changes no inputs at run time, which {choice.transform} needs"
        return None

    def why_not_plan(self, plan: Plan) -> str | None:
        """See `Exporter`."""
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """See `Exporter`."""
        return {**module_reasons(source), **fold_factors(source).refused}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """See `Exporter`."""
        modules = coded_modules(source)
        codes: dict[str, Tensor] = {}
        with ShardWriter(folder) as shards:
            for name, tensor in source.rest(fold_factors(source).parameters):
                for stored, value in as_stored(source.model, name, tensor).items():
                    shards.add(stored, value)
            for module in modules:
                q = module.codes()
                shards.add(f"{module.stored}.weight", q.dequantize(source.dtype))
                codes |= {f"{module.name}.{part}": tensor for part, tensor in _parts_of(q, module.scheme).items()}
        notes = write_model_files(source, folder)
        by_layer = {module.name: _config(module) for module in modules}
        write_json(folder / CONFIG_FILE, _record("FqnToConfig", 1, fqn_to_config=by_layer))
        safetensors.torch.save_file(codes, folder / CODES_FILE)
        (folder / LOADER_FILE).write_text(_LOADER, encoding="utf-8")
        rounded = [module.name for module in modules if _rounds_to_int8(module.scheme)]
        said = f"torchao divides int8 inputs by 127.5, and the plan by 127: {spell_sites(rounded)}"
        how = f"{LOADER_FILE} loads the folder: quantize_ with {CONFIG_FILE}, then the plan's own codes"
        return (*notes, how, said) if rounded else (*notes, how)


def _config_of(scheme: Scheme) -> str | None:
    """Name of the config of a scheme; None without."""
    weights, inputs = scheme.weights, scheme.activations
    assert weights is not None and weights.scaling is not None
    if scheme.static_activations or weights.scaling.tensor_scale or weights.scaling.element_exponent:
        return None
    if weights.scaling.scale_format not in PLAIN_DTYPES:
        return None
    asked = None
    if inputs is not None:
        asked = (inputs.format, "none" if inputs.scaling is None else inputs.scaling.granularity.scope)
    facts = (weights.format, weights.scaling.granularity.scope, weights.scaling.symmetry)
    for numbers, scopes, symmetries, of_inputs, config in _KINDS:
        if facts[0] in numbers and facts[1] in scopes and facts[2] in symmetries and asked == of_inputs:
            return config
    return None


def _rounds_to_int8(scheme: Scheme) -> bool:
    return scheme.activations is not None and scheme.activations.format == "int8"


def _spell_inputs(scheme: Scheme) -> str:
    return "that are not rounded" if scheme.activations is None else str(scheme.activations)


# --- the config, as `config_to_dict` writes it ------------------------------------------------------------------------


def _config(module: CodedModule) -> dict[str, Any]:
    scheme = module.scheme
    name, weights = _config_of(scheme), scheme.weights
    assert name is not None and weights is not None and weights.scaling is not None
    sharers = _granularity(weights.scaling, axis=name == "IntxWeightOnlyConfig")
    fields: dict[str, dict[str, Any]] = {
        "IntxWeightOnlyConfig": {
            "weight_dtype": _dtype(f"int{formats.FORMATS[weights.format].bits}"),
            "granularity": sharers,
            "mapping_type": _member("MappingType", _mapping(weights.scaling)),
            "scale_dtype": _dtype(str(PLAIN_DTYPES[weights.scaling.scale_format]).removeprefix("torch.")),
        },
        "Int8DynamicActivationInt8WeightConfig": {"granularity": sharers, "set_inductor_config": False},
        "Float8WeightOnlyConfig": {
            "weight_dtype": _dtype("float8_e4m3fn"),
            "granularity": sharers,
            "set_inductor_config": False,
        },
        "Float8DynamicActivationFloat8WeightConfig": {"granularity": sharers, "set_inductor_config": False},
    }
    return _record(name, 2, **fields[name])


def _mapping(scaling: Scaling) -> str:
    return "SYMMETRIC" if scaling.symmetry == "symmetric" else "ASYMMETRIC"


def _granularity(scaling: Scaling, *, axis: bool) -> dict[str, Any]:
    match scaling.granularity.scope:
        case "group":
            return _record("PerGroup", 1, group_size=scaling.granularity.group_size)
        case "tensor":
            return _record("PerTensor", 1)
    return _record("PerAxis", 1, axis=0) if axis else _record("PerRow", 1, dim=-1)


def _record(name: str, version: int, **fields: Any) -> dict[str, Any]:
    return {"_type": name, "_version": version, "_data": fields}


def _member(name: str, value: str) -> dict[str, Any]:
    return {"_type": name, "_data": value}


def _dtype(name: str) -> dict[str, Any]:
    return _member("torch.dtype", name)


# --- codes, as torchao's tensors keep them ----------------------------------------------------------------------------


def _parts_of(q: QTensor, scheme: Scheme) -> dict[str, Tensor]:
    """Parts of the weight's tensor: signed codes, scales [N, G] ([1, 1] per tensor), zero points."""
    number, scaling = formats.FORMATS[q.scheme.format], q.scheme.scaling
    assert scaling is not None and q.scales_NG is not None
    if not isinstance(number, IntFormat):
        return {"qdata": q.codes_NK.to(torch.float8_e4m3fn), "scale": q.scales_NG.contiguous()}
    middle = 0 if number.signed else 1 << (number.bits - 1)
    zeros = torch.zeros_like(q.scales_NG) if q.offsets_NG is None else q.offsets_NG - middle
    scale_dtype = PLAIN_DTYPES[scaling.scale_format]
    return {
        "qdata": (q.codes_NK - middle).to(torch.int8),
        "scale": q.scales_NG.to(scale_dtype if scheme.activations is None else torch.float32).contiguous(),
        "zero_point": zeros.to(torch.int8),
    }


EXPORTERS = (TorchAo(),)
