"""A checkpoint of somebody else's: where its tensors lie, and what its files say of how they were quantised.

    model folder    safetensors, in one file or shards; the quantiser's settings in config.json ("quantization_config",
                    formerly "compression_config"), hf_quant_config.json (ModelOpt), quantize_config.json (AutoGPTQ) or
                    quant_config.json (AWQ)
    .gguf file      types stand in its table of tensors

Files are looked at before anything is read: what is truncated or missing is told by name (`models/tensor_files.py`,
`models/gguf_file.py`). Tensors are read one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bitwright.errors import ModelError
from bitwright.models.tensor_files import StoredTensor, list_tensors

#: File → the keys that may hold the settings; None: the whole file.
_SETTINGS_FILES: Mapping[str, tuple[str | None, ...]] = {
    "config.json": ("quantization_config", "compression_config"),
    "hf_quant_config.json": ("quantization",),
    "quantize_config.json": (None,),
    "quant_config.json": (None,),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A folder, or a file, of tensors."""

    path: Path
    #: The quantiser's own settings; empty where the files say nothing.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: File that the settings stand in; None without.
    settings_file: str | None = None
    #: Tensor name → where it lies; empty for GGUF, whose source reads the file itself.
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        """Whether it is one .gguf file."""
        return self.path.is_file()

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises:
            ModelError: it is not there, or its file cannot be read.
        """
        place = self.tensors.get(name)
        if place is None:
            raise ModelError(f"it lacks the tensor '{name}'")
        try:
            with safe_open(place.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{place.file} cannot be read ({error}); download it again") from error
        return tensor

    def bytes_of(self, module: str) -> int:
        """Bytes of all tensors of a module, its bias left out."""
        start = f"{module}."
        return sum(
            place.num_bytes
            for name, place in self.tensors.items()
            if name.startswith(start) and "." not in name[len(start) :] and not name.endswith(".bias")
        )

    def modules_with(self, *parts: str) -> tuple[str, ...]:
        """Modules that have a tensor of one of these names, in order: `model.layers.0.mlp.up_proj` for "qweight"."""
        found = (name.rpartition(".") for name in self.tensors)
        return tuple(dict.fromkeys(module for module, _, part in found if part in parts))


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Look at a checkpoint.

    Raises:
        ModelError: nothing is there, a file is damaged or missing, or it is neither a model folder nor a .gguf file.
    """
    where = Path(path).expanduser()
    if where.is_file() and where.suffix == ".gguf":
        return Checkpoint(path=where)
    if where.is_file() and where.suffix == ".safetensors":
        raise ModelError(f"{where} holds weights alone; pass the folder with its config.json: {str(where.parent)!r}")
    if not where.is_dir():
        what = "is neither a model folder nor a .gguf file" if where.exists() else "is not there"
        raise ModelError(f"{where} {what}; pass the folder of a quantised model, or a .gguf file")
    settings, file = _settings(where)
    return Checkpoint(
        path=where,
        settings=settings,
        settings_file=file,
        tensors={tensor.name: tensor for tensor in list_tensors(where)},
    )


def _settings(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    for name, keys in _SETTINGS_FILES.items():
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is no valid JSON ({error}); download it again") from error
        for key in keys:
            found = content if key is None else content.get(key) if isinstance(content, dict) else None
            if isinstance(found, dict) and found:
                return found, name
    return {}, None
