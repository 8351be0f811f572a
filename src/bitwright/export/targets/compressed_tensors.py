"""compressed-tensors: what vLLM and SGLang serve and transformers loads, each layer under its own config group.

For a module `m` with codes the folder holds, by the layout of its group (compressed_tensors/compressors, 0.17 … 0.20):

    pack-quantized        m.weight_packed int32 [N, ⌈K b / 32⌉]: code + 2^(b−1), bit i·b of the row's stream
                          m.weight_scale [N, G]   m.weight_shape int64 [2]
                          m.weight_zero_point int32 [⌈N b / 32⌉, G]: the same stream down each column
    int-quantized         m.weight int8 [N, K]    m.weight_scale [N, 1]    m.input_scale [1] where static
    float-quantized       m.weight float8_e4m3fn  m.weight_scale [N, 1], or [⌈N / 128⌉, ⌈K / 128⌉] in blocks
    nvfp4-pack-quantized  m.weight_packed uint8 [N, K / 2]    m.weight_scale float8_e4m3fn [N, K / 16]
                          m.weight_global_scale [1] = 1 / tensor scale
                          m.input_global_scale [1], the same of static inputs; scales of their groups are found there
    mxfp4-pack-quantized  the same with m.weight_scale uint8 [N, K / 32] (E8M0), no global scale
    mxfp8-quantized       m.weight float8_e4m3fn  m.weight_scale uint8 [N, K / 32]

Our own bitstreams have the same order, so that packing is padding to whole words. Layers whose `config_groups` differ
make the format "mixed-precision". Factors of SmoothQuant and AWQ go into the norm before (`folding.py`). FP8 caches
become `kv_cache_scheme`, with k_scale and v_scale of every attention layer.

Engines hold group scales of packed weights in the dtype of the model: an fp16 scale is exact in an fp16 model and
rounded in a bf16 one. Inputs under two-level scales need a tensor scale from calibration there, which a plan that finds
it on every call does not have. Where an engine computes several modules at once it multiplies all of them by one tensor
scale: `shared_scales.py` makes a plan of that kind.

Source: github.com/vllm-project/compressed-tensors; vllm/model_executor/layers/quantization/compressed_tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwright import formats
from bitwright.export.coded_shards import write_coded_shards
from bitwright.export.compressed_layouts import Layout, has_tensor_scale, layout_of
from bitwright.export.folding import fold_factors
from bitwright.export.modules import CodedModule, coded_modules, linear_modules, module_reasons, shared_scale_reasons
from bitwright.export.source import ExportSource
from bitwright.export.written_folder import write_model_files
from bitwright.formats import IntFormat
from bitwright.models.loaded import DTYPE_FORMATS
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import TRANSFORMS
from bitwright.quantize.pack import PackedTensor, pack_bits, pack_codes
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scheme, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

_METHOD = "compressed-tensors"
_MIXED = "mixed-precision"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTensors:
    """See the opening of this file."""

    name: str = "compressed-tensors"
    description: str = "a folder that vLLM, SGLang and transformers load, mixed layer by layer"
    engines: tuple[str, ...] = ("vllm", "transformers")
    loaded_by: tuple[str, ...] = ("vllm", "transformers")
    keeps_caches: bool = True

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """See `Exporter`."""
        if isinstance(scheme, ValueScheme):
            return _why_not_values(choice, scheme)
        assert scheme.weights is not None
        scaling = scheme.weights.scaling
        if scaling is None:
            return None
        layout, reason = layout_of(scheme)
        if layout is None:
            return f"{_METHOD} {reason}"
        if choice.role == "embedding":
            return f"{_METHOD} is written with plain embeddings"
        if scaling.granularity.scope == "group" and scaling.granularity.has_ragged_group(choice.shape[1]):
            size = scaling.granularity.group_size
            return f"{_METHOD} refuses groups of {size} in {choice.shape[1]} columns, which they do not divide"
        if "signs" in TRANSFORMS[choice.transform].parts:
            return f"{_METHOD} is written without changes of inputs at run time, which {choice.transform} needs"
        return None

    def why_not_plan(self, plan: Plan) -> str | None:
        """See `Exporter`."""
        caches = {choice.scheme for choice in plan.sites if choice.role == "kv_cache"}
        if len(caches) > 1:
            return f"{_METHOD} has one setting for all caches, and the plan has {', '.join(sorted(caches))}"
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """See `Exporter`."""
        return {**module_reasons(source), **shared_scale_reasons(source), **fold_factors(source).refused}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """See `Exporter`."""
        modules = coded_modules(source)
        write_coded_shards(source, folder, modules, _tensors_of, _cache_scales(source))
        notes = write_model_files(source, folder, quantization=_config(source, modules))
        return (*notes, *_notes(source, modules))


def _why_not_values(choice: SiteChoice, scheme: ValueScheme) -> str | None:
    if scheme.values.scaling is None:
        return None
    if choice.role != "kv_cache":
        return f"{_METHOD} keeps scales of caches, and none of {choice.role}"
    if scheme.values.format != "fp8_e4m3" or not scheme.static:
        return f"{_METHOD} keeps caches in fp8_e4m3 with static scales, not in {scheme.name}"
    return None


# --- config -----------------------------------------------------------------------------------------------------------


def _config(source: ExportSource, modules: Sequence[CodedModule]) -> dict[str, Any] | None:
    """`quantization_config` of config.json; None where nothing has codes."""
    cache = _cache_args(source)
    if not modules and cache is None:
        return None
    groups: dict[str, list[CodedModule]] = {}
    for module in modules:
        groups.setdefault(module.scheme.name, []).append(module)
    layouts = {name: layout_of(members[0].scheme)[0] for name, members in groups.items()}
    names = list(dict.fromkeys(layout.name for layout in layouts.values() if layout is not None))
    return {
        "quant_method": _METHOD,
        "format": names[0] if len(names) == 1 else _MIXED if names else "dense",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": _group(name, members, layouts[name])
            for index, (name, members) in enumerate(groups.items())
        },
        "ignore": sorted(linear_modules(source.model) - {module.name for module in modules}),
        "kv_cache_scheme": cache,
    }


def _group(name: str, members: Sequence[CodedModule], layout: Layout | None) -> dict[str, Any]:
    scheme = members[0].scheme
    assert layout is not None and scheme.weights is not None
    inputs = None
    if scheme.activations is not None:
        inputs = _args(scheme.activations, layout) | {"dynamic": _dynamic(scheme)}
        inputs["strategy"] = {"channel": "token"}.get(inputs["strategy"], inputs["strategy"])
    return {
        "targets": _targets(members),
        "weights": _args(scheme.weights, layout) | {"dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
        "format": layout.name,
    }


def _targets(members: Sequence[CodedModule]) -> list[str]:
    """Names in the checkpoint, which vLLM asks for, and in the model; transformers knows experts by a pattern alone."""
    names = [name for module in members for name in (module.stored, module.name) if name is not None]
    experts = [_of_any_expert(module.stored) for module in members if module.is_expert and module.stored is not None]
    return list(dict.fromkeys([*names, *experts]))


def _of_any_expert(name: str) -> str:
    """The pattern of a name, any number in the place of the last one."""
    parts = [re.escape(part) for part in name.split(".")]
    last = max(place for place, part in enumerate(parts) if part.isdigit())
    return "re:" + r"\.".join([*parts[:last], r"\d+", *parts[last + 1 :]]) + "$"


def _dynamic(scheme: Scheme) -> bool | str:
    """Whether scales of inputs are found on every call; "local": those of groups, in units of a static one."""
    if not scheme.static_activations:
        return True
    return "local" if has_tensor_scale(scheme.activations) else False


def _args(tensor: TensorScheme, layout: Layout) -> dict[str, Any]:
    """`QuantizationArgs` of weights or inputs."""
    number, scaling = formats.FORMATS[tensor.format], tensor.scaling
    assert scaling is not None
    granularity = scaling.granularity
    strategy = {"row": "channel", "group": "tensor_group" if scaling.tensor_scale else "group"}
    args: dict[str, Any] = {
        "num_bits": number.bits,
        "type": "int" if isinstance(number, IntFormat) else "float",
        "symmetric": scaling.symmetry == "symmetric",
        "strategy": strategy.get(granularity.scope, granularity.scope),
        "group_size": granularity.group_size if granularity.scope == "group" else None,
    }
    if granularity.scope == "block":
        args["block_structure"] = [granularity.block_rows, granularity.group_size]
    if layout.scale_dtype is not None:
        args["scale_dtype"] = layout.scale_dtype
    return args


def _cache_args(source: ExportSource) -> dict[str, Any] | None:
    rule = next((rule for site, rule in source.values.items() if site.role == "kv_cache"), None)
    if rule is None or rule.scheme.values.scaling is None:
        return None
    strategy = {"head": "attn_head"}.get(rule.scheme.axis, rule.scheme.axis)
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors_of(module: CodedModule) -> dict[str, Tensor]:
    """Part of the module's name → what is stored."""
    q = module.codes()
    packed = pack_codes(q)
    layout = layout_of(module.scheme)[0]
    assert layout is not None and packed.scales is not None
    parts = _STORED[layout.name](q, packed)
    if module.input_scale is not None:
        scale = module.input_scale.reshape(1).float()
        is_second = has_tensor_scale(module.scheme.activations)
        parts |= {"input_global_scale": scale.reciprocal()} if is_second else {"input_scale": scale}
    return parts


def _packed_integers(q: QTensor, packed: PackedTensor) -> dict[str, Tensor]:
    number = formats.FORMATS[q.scheme.format]
    lowest = int(number.min)
    assert packed.scales is not None
    parts = {
        "weight_packed": _words((q.codes_NK - lowest).int(), number.bits),
        "weight_scale": packed.scales,
        "weight_shape": torch.tensor(q.codes_NK.shape, dtype=torch.int64),
    }
    if q.offsets_NG is not None:
        parts["weight_zero_point"] = _words((q.offsets_NG - lowest).int().T, number.bits).T
    return parts


def _words(codes: Tensor, bits: int) -> Tensor:
    """The bitstream of each row as whole words: int32 [rows, ⌈columns · bits / 32⌉]."""
    stream = pack_bits(codes, bits)
    return nn.functional.pad(stream, (0, -stream.shape[1] % 4)).view(torch.int32)


def _plain_bytes(q: QTensor, packed: PackedTensor) -> dict[str, Tensor]:
    assert packed.scales is not None
    dtype = torch.int8 if isinstance(formats.FORMATS[q.scheme.format], IntFormat) else torch.float8_e4m3fn
    scaling = q.scheme.scaling
    is_tensor = scaling is not None and scaling.granularity.scope == "tensor"
    scales = packed.scales.reshape(1) if is_tensor else packed.scales
    return {"weight": q.codes_NK.to(dtype), "weight_scale": scales.view(torch.uint8) if _is_e8m0(q) else scales}


def _packed_floats(q: QTensor, packed: PackedTensor) -> dict[str, Tensor]:
    assert packed.scales is not None
    parts = {
        "weight_packed": packed.codes,
        "weight_scale": packed.scales.view(torch.uint8) if _is_e8m0(q) else packed.scales,
    }
    if q.tensor_scale is not None:
        parts["weight_global_scale"] = (1 / q.tensor_scale).reshape(1)
    return parts


def _is_e8m0(q: QTensor) -> bool:
    return q.scheme.scaling is not None and q.scheme.scaling.scale_format == "e8m0"


#: Layout → (codes, the same as bits) → parts.
_STORED: Mapping[str, Callable[[QTensor, PackedTensor], dict[str, Tensor]]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _plain_bytes,
    "float-quantized": _plain_bytes,
    "naive-quantized": _plain_bytes,
    "mxfp8-quantized": _plain_bytes,
    "nvfp4-pack-quantized": _packed_floats,
    "mxfp4-pack-quantized": _packed_floats,
}


def _cache_scales(source: ExportSource) -> dict[str, Tensor]:
    """ "<attention>.k_scale" and v_scale: [1], or [heads, 1, 1]."""
    found = {}
    for site, rule in source.values.items():
        if site.role == "kv_cache":
            (operand,) = site.operands
            scale = rule.scale(operand)
            assert scale is not None
            shape = (-1, 1, 1) if rule.scheme.axis == "head" else (1,)
            found[f"{site.module}.{operand}_scale"] = scale.reshape(shape).float()
    return found


def _notes(source: ExportSource, modules: Sequence[CodedModule]) -> Iterable[str]:
    """What the checkpoint cannot say."""
    dtype = DTYPE_FORMATS[source.dtype]
    schemes = {module.scheme.name: module.scheme.weights for module in modules if module.scheme.activations is None}
    scalings = {name: weights.scaling for name, weights in schemes.items() if weights is not None}
    rounded = [
        name
        for name, scaling in scalings.items()
        if scaling is not None and scaling.scale_format in ("fp16", "bf16", "fp32") and dtype != "fp32"
        if scaling.scale_format != dtype
    ]
    if rounded:
        yield f"engines keep the scales of {', '.join(rounded)} in the dtype of the model, here {dtype}"
    if any(_rounds_to_mx(module.scheme) for module in modules):
        yield (
            "engines find the exponents of MX inputs in other ways than OCP's, which the plan has: compressed-tensors "
            "takes the next one where the largest number is 1.75 powers of two or more"
        )
    if any(has_tensor_scale(module.scheme.weights) for module in modules):
        yield "transformers with compressed-tensors multiplies NVFP4 weights in bf16, to which it rounds their values"
    has_zero_points = any(s is not None and s.symmetry == "zero_point" for s in scalings.values())
    has_experts = any(module.is_expert for module in modules)
    if has_zero_points or has_experts:
        what = " and ".join(["zero points"] * has_zero_points + ["experts"] * has_experts)
        yield (
            f"transformers with compressed-tensors 0.20 loads {what} with "
            "quantization_config=CompressedTensorsConfig(dequantize=True) only"
        )
        if len({module.scheme.name for module in modules if not module.is_expert}) > 1:
            yield "transformers reads all layers but experts under the settings of one group then: it cannot load this"


def _rounds_to_mx(scheme: Scheme) -> bool:
    scaling = None if scheme.activations is None else scheme.activations.scaling
    return scaling is not None and scaling.scale_format == "e8m0"


EXPORTERS = (CompressedTensors(),)
