"""A decoder's architecture in llama.cpp's terms: what its file says of sizes, and which models it is written for.

One record a kind of model; adding one is adding a record, whose settings are facts of its config. Which tensor is which
parameter, and the order of rows, are those of the packages that read such files (`models/gguf_layout.py`).

Rotary frequencies that differ from base^(−2i/d) (llama 3's, linear ones) become the factors that llama.cpp divides by,
`rope_freqs.weight`: they are read off the model itself.

Source: llama.cpp, gguf-py/gguf/constants.py (Keys), convert_hf_to_gguf.py (LlamaModel, Qwen2Model), from the package
gguf 0.19 and from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import MissingExtra
from bitwright.models.gguf_layout import GgufLayout

#: Key behind "<architecture>." → attribute of the config.
_COUNTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A kind of model that llama.cpp runs and that is written."""

    #: llama.cpp's name.
    name: str
    #: `model_type` of configs.
    model_types: tuple[str, ...]
    #: Attribute of the config → values under which llama.cpp computes the same; absent counts as the first.
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_SILU = {"hidden_act": ("silu", "swish")}
ARCHITECTURES = (
    Architecture(name="llama", model_types=("llama", "mistral"), needs={**_SILU, "sliding_window": (None,)}),
    Architecture(name="qwen2", model_types=("qwen2",), needs={**_SILU, "use_sliding_window": (False, None)}),
)


def architecture_of(config: Any) -> Architecture | None:
    """The record of a config's kind; None where there is none."""
    kind = getattr(config, "model_type", None)
    return next((record for record in ARCHITECTURES if kind in record.model_types), None)


def why_not_architecture(model: nn.Module) -> str | None:
    """Why llama.cpp would not compute what this model does; None if it would."""
    config: Any = getattr(model, "config", None)
    record = architecture_of(config)
    if record is None:
        known = ", ".join(kind for item in ARCHITECTURES for kind in item.model_types)
        kind = getattr(config, "model_type", type(model).__name__)
        return f"GGUF is written for {known}, and not for '{kind}'"
    for attribute, allowed in record.needs.items():
        value = getattr(config, attribute, allowed[0])
        if value not in allowed:
            return f"llama.cpp's {record.name} has {attribute} {allowed[0]}, and the model has {value}"
    rotary = _rotary(model)
    if rotary is None:
        return "the model has no rotary embedding that could be read"
    if float(getattr(rotary, "attention_scaling", 1.0)) != 1.0:
        return f"its rotary embedding scales attention by {rotary.attention_scaling}, which is not written"
    layout = layout_of(model)
    named = set(layout.parameter_of.values())
    unnamed = [name for name, _ in model.named_parameters() if name not in named]
    if unnamed:
        return f"llama.cpp's {record.name} has no tensor for {', '.join(unnamed[:3])}"
    return None


def layout_of(model: nn.Module) -> GgufLayout:
    """Tensor names and rows of a model of one of the architectures.

    Raises:
        MissingExtra: package gguf is absent.
    """
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
    except ImportError as error:
        raise MissingExtra("gguf", "gguf", "writing GGUF files") from error
    config: Any = model.config
    record = architecture_of(config)
    assert record is not None
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == record.name)
    table = get_tensor_name_map(number, config.num_hidden_layers)
    parameter_of = {}
    for name, _ in model.named_parameters():
        stem, _, last = name.rpartition(".")
        found = table.get_name(stem)
        if found is not None:
            parameter_of[f"{found}.{last}"] = name
    settings = config.to_dict()
    processor = TENSOR_PROCESSORS.get(record.name, TensorProcessor)(config=settings)
    return GgufLayout(parameter_of=parameter_of, processor=processor, settings=settings)


def metadata_of(model: nn.Module) -> dict[str, int | float]:
    """Key → value of everything that llama.cpp sizes the model by; whole numbers are uint32, others fp32."""
    config: Any = model.config
    record = architecture_of(config)
    assert record is not None
    head_dim = _head_dim(config)
    found: dict[str, int | float] = {
        **{key: int(getattr(config, attribute)) for key, attribute in _COUNTS.items()},
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": _base(config),
    }
    return {f"{record.name}.{key}": value for key, value in found.items()}


def rotary_factors(model: nn.Module) -> Tensor | None:
    """What llama.cpp divides each frequency by, fp32 [head_dim / 2]; None where they are all 1."""
    config: Any = model.config
    rotary, head_dim = _rotary(model), _head_dim(config)
    assert rotary is not None
    frequencies = 1.0 / _base(config) ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factors = frequencies / rotary.inv_freq.double()
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors.float()


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _base(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def _rotary(model: nn.Module) -> Any:
    """The module that holds rotary frequencies; None without."""
    return next((module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)), None)
