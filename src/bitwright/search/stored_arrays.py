"""Arrays in a safetensors file, written and read one at a time: codes of a whole model need not fit into memory.

The safetensors library takes all tensors of a file at once, and hands out maps of it, whose pages count as memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bitwright.errors import ModelError
from bitwright.models.tensor_files import StoredTensor, read_header, read_into

_NUMPY_OF = {"U8": np.uint8, "I8": np.int8, "F16": np.float16, "F32": np.float32}
_NAME_OF = {np.dtype(dtype): name for name, dtype in _NUMPY_OF.items()}


class StoredArrays(Mapping[str, np.ndarray]):
    """Name → array of a file that must not change meanwhile; each is read when it is asked for.

    Raises:
        ModelError: the file is absent or damaged, or holds what is no array of codes or scales.
    """

    def __init__(self, path: Path) -> None:
        self._stored: dict[str, StoredTensor] = {tensor.name: tensor for tensor in read_header(path)}
        unknown = [tensor.dtype for tensor in self._stored.values() if tensor.dtype not in _NUMPY_OF]
        if unknown:
            raise ModelError(f"{path} holds {unknown[0]}, and found codes only {', '.join(_NUMPY_OF)}; delete it")

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._stored[name]
        array: np.ndarray = np.empty(stored.shape, _NUMPY_OF[stored.dtype])
        if array.nbytes:
            read_into(array.reshape(-1).view(np.uint8).data, stored, 0)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file; every array is asked for twice, and held only while it is written."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAME_OF[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in header:
        file.write(np.ascontiguousarray(arrays[name]).tobytes())
