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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitwright.errors import MissingExtra, ModelError
from bitwright.models.gguf_layout import GgufLayout, tensor_keys
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
    #: Extents in torch's order, [out, in] for a matrix.
    shape: tuple[int, ...]
    #: ggml's number of the type.
    ggml_type: int
    #: Where the data lies in the file.
    first_byte: int
    num_bytes: int

    @property
    def num_weights(self) -> int:
        """Number of elements."""
        return prod(self.shape)


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
    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
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
            table = []
            for _ in range(num_tensors):
                name = cursor.take_string()
                (num_dims,) = cursor.take("<I")
                shape = tuple(reversed(cursor.take(f"<{num_dims}Q")))  # ggml writes the fastest extent first
                table.append((name, shape, *cursor.take("<IQ")))
            alignment = int(metadata.get("general.alignment") or 32)
            data_start = -(-cursor.position // alignment) * alignment
            tensors = []
            for name, shape, kind, offset in table:
                if kind not in block_sizes:
                    raise ModelError(f"{path}: tensor {name!r} has the unknown ggml type {kind}; update package gguf")
                block_weights, block_bytes = block_sizes[kind]
                ggml_name = GGMLQuantizationType(kind).name
                tensors.append(
                    GgufTensor(
                        name=name,
                        format=_FORMATS.get(ggml_name, ggml_name.lower()),
                        bits=8 * block_bytes / block_weights,
                        shape=shape,
                        ggml_type=kind,
                        first_byte=data_start + offset,
                        num_bytes=prod(shape) // block_weights * block_bytes,
                    )
                )
            needed_bytes = max((t.first_byte + t.num_bytes for t in tensors), default=0)
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
        from transformers import TokenizersBackend

        with _as_model_error(path, header):
            config, skeleton, layout = _open(path, header)
            model, report = type(skeleton).from_pretrained(
                None,
                config=config,
                state_dict=_read_tensors(path, header, layout),
                dtype=torch.float32,
                experts_implementation="eager",
                output_loading_info=True,
            )
        try:
            tokenizer = TokenizersBackend.from_pretrained(path.parent, gguf_file=path.name)
        except (ImportError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise ModelError(
                f"{path} has no usable tokenizer ({one_line(error)}); convert the model with its tokenizer"
            ) from error
    raise_if_incomplete(str(path), model, report["missing_keys"])
    parameter_of = layout.parameter_of
    stored = {parameter_of[key]: t for t in header.tensors for key in tensor_keys(t.name) if key in parameter_of}
    # should transformers merge tensors under a name of its own, the format of most weights stands for them
    usual = max(header.tensors, key=lambda t: sum(u.num_weights for u in header.tensors if u.format == t.format))
    names = [name for name, _ in model.named_parameters()]
    formats = {name: stored.get(name, usual).format for name in names}
    return model, tokenizer, formats, {name: stored.get(name, usual).bits for name in names}


def read_gguf_layout(path: Path, header: GgufHeader) -> GgufLayout:
    """Return which parameters a file's tensors are. Raises ModelError as `load_gguf` does."""
    with quiet_transformers(), _as_model_error(path, header):
        return _open(path, header)[2]


@contextmanager
def _as_model_error(path: Path, header: GgufHeader) -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ModelError(
            f"{path} cannot be read as a {header.architecture} model ({one_line(error)}); get an undamaged file, "
            "or convert the model to a Hugging Face folder"
        ) from error


def _open(path: Path, header: GgufHeader) -> tuple[Any, Any, GgufLayout]:
    """The config of a file's model, the model without weights, and where its weights are."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_SUPPORTED_ARCHITECTURES,
        TENSOR_PROCESSORS,
        TensorProcessor,
        load_gguf_checkpoint,
    )

    supported = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - _NOT_DECODERS)
    if _plain(header.architecture) not in {_plain(name) for name in supported}:
        raise ModelError(
            f"{path}: GGUF architecture {header.architecture!r} is not supported; "
            f"supported are {', '.join(supported)}; convert the model to a Hugging Face folder instead"
        )
    settings = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=settings)
    parameter_of = _parameters_of(header, skeleton, processor)
    return config, skeleton, GgufLayout(parameter_of=parameter_of, processor=processor, settings=settings)


def _parameters_of(header: GgufHeader, skeleton: torch.nn.Module, processor: Any) -> dict[str, str]:
    """GGUF tensor name → parameter name, as transformers' get_gguf_hf_weights_map gives it.

    That function builds gguf's name table once for every submodule, which takes seconds; here it is built once, and
    submodules are looked at (some files are converted from the bare decoder) only while a tensor has no name.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    layers = skeleton.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    table = get_tensor_name_map(architectures[header.architecture], layers)
    found: dict[str, str] = {}
    for prefix, module in skeleton.named_modules():
        inner: dict[str, str] = {}
        dotted = f"{prefix}." if prefix else ""
        for full_name in module.state_dict():
            parameter = processor.preprocess_name(full_name)
            stem, _, last = parameter.rpartition(".")
            name, suffix = (stem, f".{last}") if last in ("weight", "bias") else (parameter, "")
            gguf_name = table.get_name(name)
            if gguf_name is None:
                processor.perform_fallback_tensor_mapping(inner, suffix, dotted, parameter)
            else:
                inner[gguf_name + suffix] = dotted + parameter
        found = inner | found
        if all(any(key in found for key in tensor_keys(tensor.name)) for tensor in header.tensors):
            break
    return found


def _read_tensors(path: Path, header: GgufHeader, layout: GgufLayout) -> dict[str, torch.Tensor]:
    """Dequantise every tensor to fp32 and bring it into transformers' layout: parameter name → tensor."""
    from gguf import GGMLQuantizationType, dequantize

    parameter_of = dict(layout.parameter_of)
    tensors: dict[str, torch.Tensor] = {}
    parsed = {"config": layout.settings, "tensors": tensors}  # processors that merge experts write into it
    memory = np.memmap(path, mode="r", dtype=np.uint8)
    for tensor in header.tensors:
        data = memory[tensor.first_byte : tensor.first_byte + tensor.num_bytes]
        rows = data.reshape(*tensor.shape[:-1], -1)
        result = layout.processor.process(
            weights=dequantize(rows, GGMLQuantizationType(tensor.ggml_type)),
            name=tensor.name,
            tensor_key_mapping=parameter_of,
            parsed_parameters=parsed,
        )
        if result.name in parameter_of:
            tensors[parameter_of[result.name]] = torch.from_numpy(np.array(result.weights, dtype=np.float32))
    return tensors


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
