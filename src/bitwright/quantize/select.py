"""Which backend runs, and why.

A device has its backends in order of preference; the last one, torch, has no exceptions. Each of the others is asked
why it cannot do what is wanted, and the first that has no reason is taken. `Selection.reason` says what was passed over
and why; it goes to the log once.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from bitwright import formats
from bitwright.errors import SchemeError, UnknownName
from bitwright.formats.encode import find_overflow
from bitwright.formats.round import find_mode
from bitwright.quantize.scheme import TensorScheme

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A way to run kernels."""

    #: As `Selection.backend` and the documentation call it.
    name: str
    #: One line for tables.
    description: str
    #: Module that has the functions of `backends`.
    module: str
    #: Package that it needs, and the extra of bitwright that brings it.
    package: str
    #: Device types that it is preferred on; empty: any.
    device_types: tuple[str, ...]


#: In order of preference.
BACKENDS = (
    Backend(
        name="cpu",
        description="Numba kernels at the speed of memory",
        module="bitwright.quantize.backends.cpu",
        package="numba",
        device_types=("cpu",),
    ),
    Backend(
        name="triton",
        description="Triton kernels for GPUs",
        module="bitwright.quantize.backends.triton",
        package="triton",
        device_types=("cuda",),
    ),
    Backend(
        name="torch",
        description="torch operations, for every scheme and device",
        module="bitwright.quantize.backends.torch",
        package="torch",
        device_types=(),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A backend and the reason for it."""

    backend: str
    reason: str

    @property
    def module(self) -> ModuleType:
        """The functions of the backend."""
        return _module(self.backend)


@cache
def select_rounding(
    format: str, device_type: str, dtype: torch.dtype, rounding: str = "nearest_even", overflow: str = "saturate"
) -> Selection:
    """Return the backend that rounds numbers by themselves to the format of that name.

    Raises:
        SchemeError: no backend can; the reason of each is said.
        UnknownName: no such format, rounding or overflow rule.
    """
    number = formats.FORMATS[format]
    find_mode(rounding), find_overflow(overflow)  # for their errors
    return _first(device_type, lambda backend: backend.why_not_round(number, dtype, rounding, overflow))


@cache
def select_scaled(
    scheme: TensorScheme, device_type: str, dtype: torch.dtype, rounding: str = "nearest_even"
) -> Selection:
    """Return the backend that quantises groups under a scale. Raises as `select_rounding`."""
    find_mode(rounding)
    return _first(device_type, lambda backend: backend.why_not_scaled(scheme, dtype), rounding)


@cache
def select_packing(
    scheme: TensorScheme, device_type: str, dtype: torch.dtype, rounding: str = "nearest_even"
) -> Selection:
    """Return the backend that packs codes and reads them. Raises as `select_rounding`."""
    find_mode(rounding)
    return _first(device_type, lambda backend: backend.why_not_packed(scheme, dtype), rounding)


@cache
def select_delayed(format: str, device_type: str, dtype: torch.dtype) -> Selection:
    """Return the backend that quantises under a scale that is known, and finds amax on the way.

    Raises:
        SchemeError: no backend can; the reason of each is said.
        UnknownName: no such format.
    """
    number = formats.FORMATS[format]
    return _first(device_type, lambda backend: backend.why_not_delayed(number, dtype))


def _first(device_type: str, why_not: Callable[[Any], str | None], rounding: str = "nearest_even") -> Selection:
    passed_over: list[str] = []
    for candidate in BACKENDS:
        if candidate.device_types and device_type not in candidate.device_types:
            continue
        reason = _why_not(candidate, why_not, rounding)
        if reason is None:
            passed = "; ".join(passed_over)
            selection = Selection(
                backend=candidate.name, reason=f"{candidate.description}{f' ({passed})' if passed else ''}"
            )
            _LOG.info("backend %s: %s", selection.backend, selection.reason)
            return selection
        passed_over.append(f"not {candidate.name}: {reason}")
    raise SchemeError(f"no backend does that: {'; '.join(passed_over)}; choose another dtype, format or scheme")


def _why_not(candidate: Backend, why_not: Callable[[Any], str | None], rounding: str) -> str | None:
    if find_spec(candidate.package) is None:
        return f"the package {candidate.package} is not installed"
    if candidate.device_types and rounding != "nearest_even":
        return f"its scaled kernels round to nearest even only, not {rounding}"
    return why_not(_module(candidate.name))


@cache
def _module(name: str) -> ModuleType:
    for candidate in BACKENDS:
        if candidate.name == name:
            return importlib.import_module(candidate.module)
    raise UnknownName(f"unknown backend {name!r}. Known: {', '.join(backend.name for backend in BACKENDS)}")
