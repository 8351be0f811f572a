"""Tensors of safetensors files, read piece by piece: a checkpoint of any size goes through a small buffer.

A file is an 8-byte little-endian length, a JSON header of that length, and the data: the header maps each name to
dtype, shape, and the range of its bytes, counted from the end of the header. A checkpoint is one file, or shards that
``model.safetensors.index.json`` lists (name → file), or a folder with either.

Everything that can be wrong is looked at before the first byte of data is read: lengths, JSON, dtypes, shapes against
ranges, ranges against each other and against the file. Like the safetensors library this refuses gaps, so that no file
hides data.

Bytes go through `preadv` into memory of the caller, who uses it again. Rejected: mapping the file, whose pages count as
memory of the process until the system takes them back; the safetensors library, which hands out whole tensors.

Source: the format's description, https://github.com/huggingface/safetensors#format (limit of the header: 100 MB).
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.errors import ModelError, UnknownName

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000

#: dtype in a header → (bits of an element, canonical name of its number format where it is a float of whole bytes).
DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (64, "fp64"),
    "F32": (32, "fp32"),
    "F16": (16, "fp16"),
    "BF16": (16, "bf16"),
    "F8_E4M3": (8, "fp8_e4m3"),
    "F8_E5M2": (8, "fp8_e5m2"),
    "F8_E4M3FNUZ": (8, "fp8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "fp8_e5m2fnuz"),
    "F8_E8M0": (8, "e8m0"),
    "F6_E3M2": (6, None),
    "F6_E2M3": (6, None),
    "F4": (4, None),
    "C64": (64, None),
    **{f"{sign}{bits}": (bits, None) for sign in "IU" for bits in (8, 16, 32, 64)},
    "BOOL": (8, None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    #: Name in its file.
    name: str
    #: As the header spells it: "BF16".
    dtype: str
    shape: tuple[int, ...]
    file: Path
    #: First byte, counted from the start of the file.
    start_byte: int
    num_bytes: int

    @property
    def format(self) -> str | None:
        """Canonical name of its number format; None for integers, booleans, complex and packed sub-byte elements."""
        return DTYPES[self.dtype][1]

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return DTYPES[self.dtype][0]


def list_tensors(source: str | os.PathLike[str]) -> tuple[StoredTensor, ...]:
    """Return every tensor of a checkpoint, in the order of files and bytes.

    Args:
        source: a ``.safetensors`` file, an index (``….safetensors.index.json``), or a folder that holds
            ``model.safetensors``, an index, or any shards.

    Raises:
        ModelError: there is no such file or nothing to read in it, or a file is damaged; the message says where.
    """
    path = Path(source)
    if path.is_dir():
        return _list_folder(path)
    if not path.is_file():
        what = "is no regular file, which alone can be read in pieces" if path.exists() else "does not exist"
        raise ModelError(f"{path} {what}; pass a .safetensors file, its index, or their folder")
    if path.name.endswith(".json"):
        return _list_index(path)
    return read_header(path)


def select_tensors(tensors: Sequence[StoredTensor], patterns: Iterable[str]) -> tuple[StoredTensor, ...]:
    """Return the tensors that any pattern matches, in their order; all of them without a pattern.

    A pattern is a name or a glob (``*``, ``?``, ``[…]``) that matches a whole name, never a part of one.

    Raises:
        UnknownName: a pattern matches nothing; the nearest names are suggested.
    """
    chosen: set[str] = set()
    names = [tensor.name for tensor in tensors]
    given = list(patterns)
    for pattern in given:
        matched = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.strip("*?"), names, n=3, cutoff=0.3) or names[:3]
            raise UnknownName(
                f"no tensor is named {pattern!r}; a pattern matches whole names, * standing for any part. "
                f"{'Nearest' if len(names) > 3 else 'There are'}: {', '.join(near) or 'none'}"
            )
        chosen.update(matched)
    return tuple(tensor for tensor in tensors if not given or tensor.name in chosen)


def read_into(memory: memoryview, tensor: StoredTensor, first_byte: int) -> None:
    """Fill `memory` with the bytes of a tensor from `first_byte` of it on.

    Safe to call from several threads at once, which the interpreter's lock does not hold up.

    Raises:
        ModelError: the file cannot be read, or became shorter.
    """
    filled = 0
    try:
        descriptor = os.open(tensor.file, os.O_RDONLY)
        try:
            while filled < len(memory):
                num_read = os.preadv(descriptor, [memory[filled:]], tensor.start_byte + first_byte + filled)
                if num_read == 0:
                    raise ModelError(
                        f"{tensor.file} ended within {_short(tensor.name)}: it became shorter while it was read"
                    )
                filled += num_read
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelError(f"{tensor.file} cannot be read: {error.strerror or error}") from error


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of one safetensors file in the order of their bytes.

    Raises:
        ModelError: the file is damaged or no safetensors file; the message says what is wrong.
    """
    try:
        with open(path, "rb") as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            opening = file.read(9)
            if len(opening) < 8:
                raise _damaged(path, f"it has {num_file_bytes} bytes, and a header begins with 8")
            (length,) = struct.unpack("<Q", opening[:8])
            if length > min(num_file_bytes - 8, _MAX_HEADER_BYTES):
                if opening[8:] not in (b"{", b""):
                    raise ModelError(
                        f"{path} is no safetensors file: it begins with {opening!r}, and such a file with the length "
                        "of its header and '{'; pass a .safetensors file, its index, or their folder"
                    )
                raise _damaged(
                    path,
                    f"its header is said to take {length:,} bytes, and the file has {num_file_bytes:,}",
                )
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _once(path, pairs))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is no valid JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = [_read_entry(path, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start_byte, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        if tensor.start_byte != end:
            what = "overlaps the tensor before it" if tensor.start_byte < end else "leaves a gap before it"
            raise _damaged(path, f"{_short(tensor.name)} {what}")
        end += tensor.num_bytes
    if end != num_file_bytes:
        raise _damaged(path, f"its tensors end at byte {end:,}, and the file has {num_file_bytes:,}")
    return tuple(tensors)


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _damaged(path, f"its header has {_short(key)} twice")
        found[key] = value
    return found


def _read_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(path, f"{_short(name)} has the dtype {_short(dtype)}, which is none of {', '.join(DTYPES)}")
    if shape is None or offsets is None or not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise _damaged(path, f"{_short(name)} has the shape {_short(shape)} and the byte range {_short(offsets)}")
    num_bits = math.prod(shape) * DTYPES[dtype][0]
    num_bytes = offsets[1] - offsets[0]
    if num_bits != 8 * num_bytes:
        raise _damaged(path, f"{_short(name)} is {dtype} {_short(shape)}, which is not the {num_bytes} bytes it has")
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=path,
        start_byte=data_start + offsets[0],
        num_bytes=num_bytes,
    )


def _short(value: Any) -> str:
    """What a damaged file holds, quoted, and no longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged or no safetensors file: {what}; write or download it again")


def _list_folder(folder: Path) -> tuple[StoredTensor, ...]:
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _list_index(folder / INDEX_FILE)
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        present = sorted(path.name for path in folder.iterdir())
        raise ModelError(
            f"{folder} holds no .safetensors file ({', '.join(present[:6]) or 'it is empty'}"
            f"{', …' if len(present) > 6 else ''}); pass a folder that does, or a file"
        )
    return _joined(files)


def _list_index(index: Path) -> tuple[StoredTensor, ...]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{index} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{index} is no valid JSON; download it again") from error
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(name, str) for name in file_of.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files; pass the index of a sharded checkpoint")
    shards = sorted(set(file_of.values()))
    outside = [shard for shard in shards if Path(shard).name != shard or shard in ("", ".", "..")]
    if outside:
        raise ModelError(f"{index} names {outside[0]!r}, which is no file beside it; download it again")
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise ModelError(
            f"{index} names {len(shards)} files, of which {len(absent)} are missing ({', '.join(absent[:3])}"
            f"{', …' if len(absent) > 3 else ''}); download the whole folder"
        )
    tensors = _joined([index.parent / shard for shard in shards])
    found = {tensor.name: tensor.file.name for tensor in tensors}
    for name, shard in file_of.items():
        if found.get(name) != shard:
            raise ModelError(f"{index} says that '{name}' is in {shard}, which it is not; download the whole folder")
    return tensors


def _joined(files: Sequence[Path]) -> tuple[StoredTensor, ...]:
    home: dict[str, Path] = {}
    tensors = [tensor for file in files for tensor in read_header(file)]
    for tensor in tensors:
        if tensor.name in home:
            raise ModelError(
                f"'{tensor.name}' is in {home[tensor.name].name} and in {tensor.file.name}; pass one of these files"
            )
        home[tensor.name] = tensor.file
    return tuple(tensors)
