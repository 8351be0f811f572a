"""A package's front page whose names are fetched when they are first used.

`import bitwright.quantize.statistics` runs `bitwright/quantize/__init__.py` first. Where that page imported what it
offers, reading a histogram would load torch. So it only says which module is the home of each name (PEP 562):

    open_lazily(__name__, {"quantize": "bitwright.quantize.quantize", …})

Type checkers read the same names under ``if TYPE_CHECKING``. A name that is a submodule's too (the function `quantize`
of the module `quantize`) stays the function: the import system binds every loaded submodule to its package, and a plain
module-level ``__getattr__`` would not be asked again after that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _LazyPage(ModuleType):
    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(self._homes[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self._homes and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def open_lazily(package: str, homes: Mapping[str, str]) -> None:
    """Let ``package`` fetch each name of ``homes`` from the module it is mapped to, when it is first used."""
    page = sys.modules[package]
    page.__dict__["_homes"] = homes
    page.__class__ = _LazyPage
