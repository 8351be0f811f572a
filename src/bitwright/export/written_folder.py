"""A model folder as transformers and engines read it, written shard by shard.

    with ShardWriter(folder) as shards:
        shards.add("model.norm.weight", tensor)         # in any order; a full shard is written and forgotten
    write_model_files(source, folder, quantization={…})  # config, generation config, tokenizer

At most one shard lies in memory beside the model. One shard becomes `model.safetensors`; several get the names and the
index that transformers gives them. Equal tensors give equal bytes: the order of names decides, not that of `add` within
a shard.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.export.source import ExportSource
from bitwright.models.quiet import quiet_transformers

#: A shard is written when it holds this much.
SHARD_BYTES = 2 << 30
INDEX_FILE = "model.safetensors.index.json"


class ShardWriter:
    """Context that takes tensors and writes them as safetensors files; complete when it is left without an error."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        #: Name → number of its shard.
        self._shard_of: dict[str, int] = {}
        self._num_shards = 0
        self._total_bytes = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._finish()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is copied where it is a view."""
        assert name not in self._shard_of, f"{name} was added before"
        num_bytes = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + num_bytes > self._shard_bytes:
            self._write()
        self._held[name] = tensor.detach().contiguous()
        self._held_bytes += num_bytes
        self._shard_of[name] = self._num_shards

    def _write(self) -> None:
        held = dict(sorted(self._held.items()))
        try:
            safetensors.torch.save_file(held, self._file(self._num_shards), metadata={"format": "pt"})
        except SafetensorError as error:
            # the library wraps errors of the system in its own; its text ends in "(os error 28)"
            code = str(error).rpartition("os error ")[2].partition(")")[0]
            if not code.isdigit():
                raise
            raise OSError(int(code), os.strerror(int(code))) from error
        self._total_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0
        self._num_shards += 1

    def _file(self, shard: int) -> Path:
        return self._folder / f"shard-{shard}.safetensors"

    def _finish(self) -> None:
        if self._held or not self._num_shards:
            self._write()
        if self._num_shards == 1:
            self._file(0).rename(self._folder / "model.safetensors")
            return
        names = [f"model-{i + 1:05}-of-{self._num_shards:05}.safetensors" for i in range(self._num_shards)]
        for shard, name in enumerate(names):
            self._file(shard).rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": {tensor: names[shard] for tensor, shard in sorted(self._shard_of.items())},
        }
        write_json(self._folder / INDEX_FILE, index)


def write_model_files(
    source: ExportSource, folder: Path, *, quantization: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Write config.json, generation_config.json and the tokenizer's files; return notes.

    Args:
        source: whose model and tokenizer.
        folder: is there.
        quantization: `quantization_config` of config.json.

    Raises:
        ExportError: the model has no config that transformers writes.
    """
    config = getattr(source.model, "config", None)
    if config is None or not hasattr(config, "to_json_file"):
        raise ExportError(
            f"{source.loaded.name!r} has no config of transformers, so no engine knows how to build it; export a model "
            "that transformers loads"
        )
    written = copy.deepcopy(config)
    written.dtype = str(source.dtype).removeprefix("torch.")
    written.architectures = [type(source.model).__name__]
    written.name_or_path = ""  # where the model lay on this machine
    if quantization is not None:
        written.quantization_config = dict(quantization)
    written.to_json_file(folder / "config.json", use_diff=True)
    generation: Any = getattr(source.model, "generation_config", None)
    notes: tuple[str, ...] = ()
    with quiet_transformers():
        if generation is not None:
            try:
                generation.save_pretrained(folder)
            except ValueError as error:
                notes = (f"generation_config.json is left out, since transformers refuses its values: {error}",)
        if source.loaded.tokenizer is not None:
            source.loaded.tokenizer.save_pretrained(folder)
    return notes


def as_stored(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of the model's state dict as checkpoints of its kind have it: transformers joins and renames some.

    Args:
        model: whose tensor it is.
        name: in the model's state dict.
        tensor: in any dtype.

    Returns:
        Name in the checkpoint → tensor; several where the model holds a list as one parameter (experts).
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return {name: tensor}
    return dict(revert_weight_conversion(model, {name: tensor}))


def write_json(path: Path, content: Any) -> None:
    """Write JSON as people read it; keys keep their order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
