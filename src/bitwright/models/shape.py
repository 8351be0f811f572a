"""The sizes of a model that its memory in training follows from, by name, from its config, or from the model itself.

    shape_of("llama-65b")            a model known by its name (`hardware/model_shapes`): nothing is loaded
    shape_of("path/to/folder")       its config.json is enough: the model is built without memory for its weights
    shape_of("owner/name")           the same, with the config fetched from the hub
    shape_of("demo")                 a built-in model, or a .gguf file
    model_shape(model, name="mine")  a model that is there

Parameters are counted in the model, so any architecture that transformers builds has its exact number; sizes are those
of its config and of its sites.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bitwright.catalog import nearest_name_hint
from bitwright.errors import MissingExtra, ModelError
from bitwright.hardware.model_shape import ModelShape
from bitwright.hardware.model_shape_file import KNOWN_MODELS
from bitwright.models.load import BUILT_IN, load
from bitwright.models.sites import Site, find_sites

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: What a config has to tell, under the names that transformers gives them for every architecture.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def shape_of(source: str | Path) -> ModelShape:
    """Return the shape of a model by whatever names it.

    Raises:
        ModelError: nothing is there, or its config cannot be built or does not tell its sizes.
        MissingExtra: transformers is not installed.
    """
    text = str(source)
    path = Path(source).expanduser()
    if not path.exists():
        if text.strip().lower() in (*KNOWN_MODELS.records, *_aliases()):
            return KNOWN_MODELS.get(text).shape
        if text not in BUILT_IN and not _HUB_ID.fullmatch(text):
            known = [*KNOWN_MODELS.records, *_aliases(), *BUILT_IN]
            raise ModelError(
                f"no folder, config or known model at {text!r}{nearest_name_hint(text, known)} Known by name: "
                f"{', '.join(KNOWN_MODELS.names)}; or pass a folder with its config.json"
            )
    if text in BUILT_IN or path.suffix == ".gguf":
        loaded = load(source)
        return model_shape(loaded.model, name=loaded.name)
    return model_shape(_skeleton(path, text), name=path.resolve().name if path.exists() else text)


def model_shape(model: nn.Module, *, name: str) -> ModelShape:
    """Return the shape of a model; its weights are not looked at and may be on the meta device.

    Raises:
        ModelError: its config does not tell its sizes, or it has no sites.
    """
    missing = missing_sizes(model)
    if missing:
        raise ModelError(
            f"the config of {name!r} does not tell {', '.join(missing)}, so its activations cannot be counted; pass a "
            "decoder of transformers, or a model that is known by name"
        )
    sites = find_sites(model)
    linear = [site for site in sites if site.role not in ("embedding", "lm_head", "router")]
    embedding, head = _ends(model, sites)
    linear_weights = sum(site.num_weights for site in linear)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    max_positions = getattr(_text_config(model), "max_position_embeddings", None)
    return ModelShape(
        name=name,
        **decoder_sizes(model, sites),
        is_gated=any(site.role in ("mlp.gate", "expert.gate") for site in sites),
        norm="layer" if any(isinstance(module, nn.LayerNorm) for module in model.modules()) else "rms",
        num_qkv_matrices=_num_qkv_matrices(sites),
        num_experts=1 + max((site.expert for site in sites if site.expert is not None), default=0),
        experts_per_token=getattr(_text_config(model), "num_experts_per_tok", None) or 1,
        linear_weights=linear_weights,
        embedding_weights=embedding,
        head_weights=head,
        other_parameters=num_parameters - linear_weights - embedding - head,
        max_positions=max_positions,
        has_learned_positions=max_positions is not None and _has_learned_positions(model),
    )


def _has_learned_positions(model: nn.Module) -> bool:
    """Whether positions have vectors of their own: GPT-2's `wpe`, OPT's `embed_positions`, …"""
    return any(
        isinstance(module, nn.Embedding) and ("position" in (last := name.rpartition(".")[2]) or last == "wpe")
        for name, module in model.named_modules()
    )


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def missing_sizes(model: nn.Module) -> list[str]:
    """Sizes that none can do without and that the model's config does not tell."""
    config = _text_config(model)
    return [size for size in _SIZES if not isinstance(getattr(config, size, None), int)]


def decoder_sizes(model: nn.Module, sites: Sequence[Site]) -> dict[str, int]:
    """The sizes that activations, caches and times follow from, by the names that shapes have for them.

    Args:
        model: no size is missing (`missing_sizes`).
        sites: its weight sites.
    """
    config = _text_config(model)
    layers, hidden, heads, vocabulary = (int(getattr(config, size)) for size in _SIZES)
    downs = [site.shape[1] for site in sites if site.role in ("mlp.down", "expert.down")]
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": max(downs, default=4 * hidden),
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "vocab_size": vocabulary,
    }


def _ends(model: nn.Module, sites: tuple[Site, ...]) -> tuple[int, int]:
    """Weights of the embedding, and of a head of its own."""
    ends = {site.role: site.num_weights for site in sites if site.role in ("embedding", "lm_head")}
    return ends.get("embedding", ends.get("lm_head", 0)), ends.get("lm_head", 0) if "embedding" in ends else 0


def _num_qkv_matrices(sites: tuple[Site, ...]) -> int:
    """Matrices of the first layer that q, k and v come from."""
    attention = [site for site in sites if site.role in ("attn.q", "attn.k", "attn.v", "attn.qkv")]
    if not attention:
        return 1
    first = attention[0].module.rpartition(".")[0]
    return len({site.parameter for site in attention if site.module.rpartition(".")[0] == first})


def _skeleton(path: Path, text: str) -> nn.Module:
    """The model of a config, without memory for its weights."""
    try:
        import torch
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtra("transformers", "hf", f"building {text!r} from its config") from error
    from bitwright.models.quiet import quiet_transformers

    where = path.parent if path.name == "config.json" else path
    if path.exists() and not (where / "config.json").is_file():
        raise ModelError(f"{text!r} has no config.json, so its sizes are unknown; pass the folder of a model")
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(where if path.exists() else text)
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        except StrictDataclassError as error:
            # Its first line names a function of transformers; what contradicts what is below.
            reason = str(error).splitlines()[-1].strip()
            raise ModelError(f"{text!r} cannot be built from its config ({reason}); correct its config.json") from error
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].strip()
            raise ModelError(
                f"{text!r} cannot be built from its config ({reason}); check its spelling, its model_type against the "
                "installed transformers, or the network"
            ) from error
    return model


def _aliases() -> tuple[str, ...]:
    return tuple(alias for model in KNOWN_MODELS.records.values() for alias in model.aliases)
