"""Read a Hugging Face folder: config.json, weights in safetensors (one file or shards), tokenizer.

Everything that can be wrong with the files is looked at before transformers builds anything: each safetensors header
is opened (it knows its own length, so a truncated file shows), every shard of the index must exist, pickled weights
are refused unless allowed, and a checkpoint that is stored in codes of a quantizer is refused by name. The headers
also tell in which format each tensor is stored.

A folder holds a causal language model or an encoder. It is an encoder if sentence-transformers' `modules.json` lies
in it, or if its config names an architecture that transformers knows, but not as a causal language model.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bitwright.errors import MissingExtra, ModelError
from bitwright.models.gguf_file import one_line, raise_if_incomplete
from bitwright.models.loaded import DTYPE_FORMATS
from bitwright.models.pooling import Pooling, read_pooling
from bitwright.models.quiet import quiet_transformers

#: safetensors dtype → (canonical format, bits).
_SAFETENSORS_FORMATS: dict[str, tuple[str, float]] = {
    "F64": ("fp64", 64.0),
    "F32": ("fp32", 32.0),
    "F16": ("fp16", 16.0),
    "BF16": ("bf16", 16.0),
    "F8_E4M3": ("fp8_e4m3", 8.0),
    "F8_E5M2": ("fp8_e5m2", 8.0),
    "I8": ("int8", 8.0),
    "U8": ("uint8", 8.0),
}
#: Tensor name → ((format, bits), number of elements).
_Stored = dict[str, tuple[tuple[str, float], int]]


@dataclass(frozen=True, kw_only=True)
class FolderContent:
    """What a model folder held."""

    #: With fp32 weights.
    model: torch.nn.Module
    tokenizer: Any
    #: Parameter → format, and → stored bits per weight.
    formats: dict[str, str]
    bits: dict[str, float]
    notes: tuple[str, ...]
    #: What the folder says of an encoder's pooling, if anything.
    pooling: Pooling | None


def load_folder(folder: Path, *, allow_pickle: bool) -> FolderContent:
    """Read a model, its tokenizer and what its files say.

    Raises ModelError naming the file at fault: config missing or damaged, weights missing, truncated, pickled, or
    stored as a quantizer's codes; tensors missing; no tokenizer; an architecture that is neither a causal language
    model nor an encoder.
    """
    config = _read_config(folder)
    files, pickled = _weight_files(folder, allow_pickle=allow_pickle)
    stored: _Stored = {}
    for file in files:
        stored.update(_read_pickle_dtypes(file) if pickled else _read_safetensors_dtypes(file))
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtra("transformers", "hf", f"loading {folder.name}") from error
    with quiet_transformers():
        from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

        is_encoder = _is_encoder(folder, config)
        pooling = read_pooling(folder) if is_encoder else None
        try:
            model, report = (AutoModel if is_encoder else AutoModelForCausalLM).from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=not pickled,
                experts_implementation="eager",
                output_loading_info=True,
            )
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"{folder} cannot be loaded as {'an encoder' if is_encoder else 'a causal language model'} "
                f"({one_line(error)}); check model_type in its config.json against the installed transformers"
            ) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"{folder} has no usable tokenizer ({one_line(error)}); save the model's tokenizer into the folder"
            ) from error
    notes = _leave_pooler_out(model, stored) if is_encoder else ()
    raise_if_incomplete(str(folder), model, report["missing_keys"])
    formats, bits = _by_parameter(model, stored)
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        notes += (
            f"{len(unexpected)} tensors of the checkpoint are not used by {type(model).__name__}: "
            f"{', '.join(unexpected[:3])}{', …' if len(unexpected) > 3 else ''}",
        )
    return FolderContent(model=model, tokenizer=tokenizer, formats=formats, bits=bits, notes=notes, pooling=pooling)


def _is_encoder(folder: Path, config: dict[str, Any]) -> bool:
    """See the opening of this file."""
    if (folder / "modules.json").is_file():
        return True
    from transformers.models.auto import modeling_auto

    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    plain = set(modeling_auto.MODEL_MAPPING_NAMES.values())
    architectures = {str(name) for name in config.get("architectures") or ()}
    return bool(architectures & (masked | plain)) and not architectures & causal


def _leave_pooler_out(model: torch.nn.Module, stored: _Stored) -> tuple[str, ...]:
    """Take away the layer that BERT's relatives put behind their first token, for another task than this."""
    if isinstance(getattr(model, "pooler", None), torch.nn.Module):
        model.pooler = None  # type: ignore[assignment]
    num_weights = sum(count for name, (_, count) in stored.items() if "pooler" in name.split("."))
    if not num_weights:
        return ()
    return (f"the pooler ({num_weights:,} weights) is left out: no vector of a text passes through it",)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is no Hugging Face model folder; "
            "pass the folder that save_pretrained wrote"
        )
    config = _read_json(path)
    quantizer = config.get("quantization_config")
    if quantizer:
        method = quantizer.get("quant_method", "unknown") if isinstance(quantizer, dict) else "unknown"
        raise ModelError(
            f"{path}: the checkpoint is stored as codes of the quantizer {method!r}; "
            "precision is chosen from unquantised weights, so pass the original model"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no valid JSON ({one_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}; download it again")
    return content


def _weight_files(folder: Path, *, allow_pickle: bool) -> tuple[list[Path], bool]:
    """The files that hold the weights, and whether they are pickled."""
    for name, pickled in (("model.safetensors", False), ("pytorch_model.bin", True)):
        index, single = folder / f"{name}.index.json", folder / name
        if not index.is_file() and not single.is_file():
            continue
        if pickled and not allow_pickle:
            raise ModelError(
                f"{index if index.is_file() else single} is a pickled checkpoint, and unpickling can run code; "
                "convert it to safetensors, or pass --allow-pickle (allow_pickle=True) if you trust its source"
            )
        if single.is_file():
            return [single], pickled
        shards = sorted({str(shard) for shard in _read_json(index).get("weight_map", {}).values()})
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent or not shards:
            raise ModelError(
                f"{index} names {len(shards)} weight files, of which {', '.join(absent) or 'none'} is missing; "
                "download the whole folder"
            )
        return [folder / shard for shard in shards], pickled
    present = sorted(path.name for path in folder.iterdir() if path.is_file())
    raise ModelError(
        f"{folder} has no weights: neither model.safetensors nor its index is among its files "
        f"({', '.join(present[:8])}{', …' if len(present) > 8 else ''}); pass the folder that save_pretrained wrote"
    )


def _read_safetensors_dtypes(path: Path) -> _Stored:
    stored: _Stored = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                dtype = part.get_dtype()
                num_weights = 1
                for extent in part.get_shape():
                    num_weights *= extent
                stored[name] = (_SAFETENSORS_FORMATS.get(dtype, (dtype.lower(), 8.0)), num_weights)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is truncated or no safetensors file ({one_line(error)}); download it again"
        ) from error
    return stored


def _read_pickle_dtypes(path: Path) -> _Stored:
    try:
        tensors = torch.load(path, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged or holds more than tensors ({one_line(error)})") from error
    return {
        name: ((DTYPE_FORMATS.get(t.dtype, str(t.dtype)), 8.0 * t.dtype.itemsize), t.numel())
        for name, t in tensors.items()
        if isinstance(t, torch.Tensor)
    }


def _by_parameter(model: torch.nn.Module, stored: _Stored) -> tuple[dict[str, str], dict[str, float]]:
    """Format and bits of each parameter.

    transformers renames and merges some tensors (a mixture's experts); for those, the format of most weights stands.
    """
    weights_in: Counter[tuple[str, float]] = Counter()
    for kind, num_weights in stored.values():
        weights_in[kind] += num_weights
    usual = weights_in.most_common(1)[0][0] if weights_in else ("fp32", 32.0)
    kinds = {name: stored[name][0] if name in stored else usual for name, _ in model.named_parameters()}
    return {name: kind[0] for name, kind in kinds.items()}, {name: kind[1] for name, kind in kinds.items()}
