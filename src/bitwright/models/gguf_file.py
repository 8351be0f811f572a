"""Read a .gguf file into a plain transformers model with fp32 weights.

Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, two counts, key-value metadata, tensor table, data.
The header is read here first, so that a truncated file or a foreign architecture is refused by name before anything
is built. Names, permutations and dequantisation are those of transformers and the ``gguf`` package. The model is
built from the config rather than by ``from_pretrained(gguf_file=…)``: that leaves a quantizer on the model, which
then refuses ``save_pretrained``, and needs one more package.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from bitwright.errors import MissingExtra, ModelError
from bitwright.models.quiet import quiet_transformers

#: struct letter of the scalar metadata types, by type number.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: ggml types that are number formats, by their canonical names; the others keep ggml's name in lower case.
_FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}
#: Entries of transformers' table that are no decoder architecture.
_NOT_DECODERS = frozenset({"general", "tokenizer", "t5", "umt5"})


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    #: Format: fp32, fp16, bf16, or ggml's name such as q4_1.
    format: str
    #: Stored bits per weight, scales included.
    bits: float
    num_weights: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What a .gguf file says about itself."""

    architecture: str
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read architecture and tensor table; ModelError if the file is no GGUF or ends too early."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingExtra("gguf", "gguf", f"reading {path.name}") from error
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is no GGUF file (it does not begin with 'GGUF'); download it again")
        file.seek(0)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            cursor = _Cursor(path, memory)
            cursor.position = 4
            version, num_tensors, num_entries = cursor.take("<IQQ")
            if version not in (2, 3):
                raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 are read, so convert it again")
            metadata = {}
            for _ in range(num_entries):
                key = cursor.take_string()
                (kind,) = cursor.take("<I")
                metadata[key] = cursor.take_value(kind)
            tensors = []
            data_bytes = 0
            for _ in range(num_tensors):
                name = cursor.take_string()
                (num_dims,) = cursor.take("<I")
                num_weights = prod(cursor.take(f"<{num_dims}Q"))
                kind, offset = cursor.take("<IQ")
                if kind not in {int(known) for known in GGML_QUANT_SIZES}:
                    raise ModelError(f"{path}: tensor {name!r} has the unknown ggml type {kind}; update package gguf")
                ggml_type = GGMLQuantizationType(kind)
                block_weights, block_bytes = GGML_QUANT_SIZES[ggml_type]
                data_bytes = max(data_bytes, offset + num_weights // block_weights * block_bytes)
                tensors.append(
                    GgufTensor(
                        name=name,
                        format=_FORMATS.get(ggml_type.name, ggml_type.name.lower()),
                        bits=8 * block_bytes / block_weights,
                        num_weights=num_weights,
                    )
                )
            alignment = int(metadata.get("general.alignment") or 32)
            needed_bytes = -(-cursor.position // alignment) * alignment + data_bytes
            if len(memory) < needed_bytes:
                raise ModelError(
                    f"{path} is truncated: its tensors need {needed_bytes:,} bytes, the file has {len(memory):,}; "
                    "download it again"
                )
    return GgufHeader(architecture=str(metadata.get("general.architecture")), tensors=tuple(tensors))


def load_gguf(path: Path) -> tuple[torch.nn.Module, Any, dict[str, str], dict[str, float]]:
    """Return (model with fp32 weights, tokenizer, parameter → format, parameter → bits per weight).

    Raises ModelError for a damaged file, an architecture that transformers cannot rebuild, or missing tensors.
    """
    header = read_gguf_header(path)
    with quiet_transformers():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import (
            GGUF_SUPPORTED_ARCHITECTURES,
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
        )

        supported = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - _NOT_DECODERS)
        if _plain(header.architecture) not in {_plain(name) for name in supported}:
            raise ModelError(
                f"{path}: GGUF architecture {header.architecture!r} is not supported; "
                f"supported are {', '.join(supported)}; convert the model to a Hugging Face folder instead"
            )
        try:
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(config)
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)["tensors"]
            processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
            parameter_of = get_gguf_hf_weights_map(skeleton, processor)
            model, report = type(skeleton).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                experts_implementation="eager",
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except (ImportError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise ModelError(f"{path} cannot be read as a {header.architecture} model: {one_line(error)}") from error
    raise_if_incomplete(str(path), model, report["missing_keys"])
    stored = {parameter_of[t.name]: t for t in header.tensors if t.name in parameter_of}
    names = [name for name, _ in model.named_parameters()]
    # tensors that transformers merges (experts) carry no name of their own: the format of most weights stands for them
    usual = max(header.tensors, key=lambda t: sum(u.num_weights for u in header.tensors if u.format == t.format))
    formats = {name: stored.get(name, usual).format for name in names}
    return model, tokenizer, formats, {name: stored.get(name, usual).bits for name in names}


def raise_if_incomplete(source: str, model: torch.nn.Module, missing: Any) -> None:
    """Raise ModelError if parameters were not in the checkpoint: transformers would fill them with random numbers."""
    absent = sorted(set(missing) & {name for name, _ in model.named_parameters()})
    if absent:
        raise ModelError(
            f"{source} lacks {len(absent)} tensors of a {type(model).__name__}, the first is {absent[0]!r}; "
            "the checkpoint is incomplete or of another architecture, so get a complete one"
        )


def one_line(error: BaseException) -> str:
    """The first words of a library's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _plain(architecture: str) -> str:
    """transformers writes qwen2_moe and gpt_oss for ggml's qwen2moe and gpt-oss."""
    return re.sub(r"[-_]", "", architecture)


class _Cursor:
    """Reads little-endian values one after the other; a read past the end is a ModelError."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        start = self.position
        if start + num_bytes > len(self.memory):
            raise ModelError(
                f"{self.path} is truncated: it ends inside its header, at byte {len(self.memory):,}; download it again"
            )
        self.position += num_bytes
        return start

    def take(self, layout: str) -> tuple[Any, ...]:
        start = self.skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self.memory, start)

    def take_string(self) -> str:
        (num_bytes,) = self.take("<Q")
        start = self.skip(num_bytes)
        return self.memory[start : start + num_bytes].decode("utf-8", errors="replace")

    def take_value(self, kind: int) -> Any:
        """A scalar or string; arrays are passed over and give None."""
        if kind in _SCALARS:
            return self.take("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self.take_string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path} is damaged: metadata of the unknown type {kind}; download it again")
        element, count = self.take("<IQ")
        if element in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[element]))
        else:
            for _ in range(count):
                self.take_value(element)
        return None
