"""Tensors that lie on disk while nothing needs them, for models that nearly fill the memory.

A spool is one file without a name: it is gone when it is closed, when nothing refers to the spool any more, and when
the process is killed, so that nothing has to be cleaned up. It only grows; what no longer counts is freed with the
whole.

    with Spool(folder) as spool:
        kept = spool.keep(tensor)
        spool.read(kept)

It is read and written, not mapped: mapped pages count as memory of the process, and stay as long as the system likes.

`Originals` is the use that models make of it: a parameter's values as loaded, while others stand in their place. They
are written once, however often the parameter is replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import DataError

#: Bytes moved by one call of the system: some take no more than 2 GiB.
_CHUNK_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Where a tensor lies in its spool."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Spool:
    """A nameless file in `folder`, which is made if it is absent.

    Raises:
        DataError: the folder cannot be written to, or is full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._end = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._refusal(error) from error
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Kept:
        """Room for a tensor; it reads as zeros until it is written."""
        kept = Kept(offset=self._end, shape=shape, dtype=dtype)
        self._end += dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return kept

    def keep(self, tensor: Tensor) -> Kept:
        """Write a tensor."""
        kept = self.reserve(tuple(tensor.shape), tensor.dtype)
        self.write(kept, tensor)
        return kept

    def write(self, kept: Kept, tensor: Tensor) -> None:
        """Fill room that was reserved; values are cast to its dtype.

        Raises:
            DataError: the disk is full; what was kept before is untouched.
        """
        content = _bytes_of(tensor.detach().to(kept.dtype).expand(kept.shape).contiguous())
        done = 0
        try:
            while done < len(content):
                part = content[done : done + _CHUNK_BYTES]
                done += os.pwrite(self._descriptor, part, kept.offset + done)
        except OSError as error:
            raise self._refusal(error) from error

    def read(self, kept: Kept) -> Tensor:
        """A new tensor with the values that were written."""
        tensor = torch.zeros(kept.shape, dtype=kept.dtype)
        self.read_into(kept, tensor)
        return tensor

    def read_into(self, kept: Kept, tensor: Tensor) -> None:
        """Fill a contiguous tensor of zeros with the values that were written."""
        content = _bytes_of(tensor)
        done = 0
        try:
            while done < len(content):
                count = os.preadv(self._descriptor, [content[done : done + _CHUNK_BYTES]], kept.offset + done)
                if count == 0:  # behind the end of the file: reserved and never written
                    return
                done += count
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> DataError:
        needed = f", after {self._end / 2**30:.2f} GiB" if self._end else ""
        try:
            free = f"; {shutil.disk_usage(self.folder).free / 2**30:.2f} GiB are free there"
        except OSError:
            free = ""
        return DataError(
            f"cannot spool to '{self.folder}'{needed} ({error.strerror}){free}: low memory needs room for every input "
            "and gradient of the calibration text and for the weights; make room, name a folder on a larger disk with "
            "--spool (spool=…), or use fewer --tokens"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class SpooledArrays(MutableMapping[str, np.ndarray]):
    """Name → array, on disk: each is read when it is asked for."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._kept: dict[str, Kept] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        found: np.ndarray = self._spool.read(self._kept[name]).numpy()
        return found

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self._kept[name] = self._spool.keep(torch.from_numpy(np.asarray(array)))

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class Originals(Protocol):
    """Values of parameters while others stand in their place."""

    def keep(self, name: str, values: Tensor) -> None:
        """Keep the values of a parameter as loaded."""

    def read(self, name: str) -> Tensor:
        """Values that were kept, asked for once each time they were."""


class InMemory:
    """Originals that stay where they are."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def keep(self, name: str, values: Tensor) -> None:
        """See `Originals`."""
        self._held[name] = values

    def read(self, name: str) -> Tensor:
        """See `Originals`."""
        return self._held.pop(name)


class OnDisk:
    """Originals that are written once and read back every time.

    Args:
        spool: where they lie.
        in_use: parameters that something else holds anyway (an output head, of the reference): these stay in memory.
    """

    def __init__(self, spool: Spool, in_use: Collection[str] = ()) -> None:
        self._spool = spool
        self._in_use = frozenset(in_use)
        self._held: dict[str, Tensor] = {}
        self._kept: dict[str, Kept] = {}

    def keep(self, name: str, values: Tensor) -> None:
        """See `Originals`."""
        if name in self._in_use:
            self._held[name] = values
        elif name not in self._kept:
            self._kept[name] = self._spool.keep(values)

    def read(self, name: str) -> Tensor:
        """See `Originals`."""
        return self._held.pop(name) if name in self._held else self._spool.read(self._kept[name])


def output_head(model: Any) -> frozenset[str]:
    """Names of the parameters of the model's output head; none where it declares none."""
    declared = getattr(model, "get_output_embeddings", None)
    head = None if declared is None else declared()
    own = {id(parameter) for parameter in head.parameters()} if isinstance(head, torch.nn.Module) else set()
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in own)
