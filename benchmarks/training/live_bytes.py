"""Memory as operations make it and let it go: what a step allocates, counted storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {arg.untyped_storage()._cdata for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
