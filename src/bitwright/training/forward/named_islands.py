"""Modules that run in fp32 whatever surrounds them, because of what they are: routers, and tables of positions.

    router      autocast off, input and parameters in fp32: a rounded logit sends a token to another expert
    positions   autocast off, input in fp32: bf16 counts to 256; and an angle is position · frequency, which with
                frequencies in bf16 is wrong by half a radian after 500 tokens

Routers are known by the role of their name (`models/names.py`), what makes positions by its class. Parameters of norms
and routers are fp32 under every policy: they are a ten-thousandth of a model, and everything passes through them.

A model that was cast to 16 bits as a whole has cast its frequencies too, and no cast brings back what they lost. They
are computed anew by a fresh module of the same class and config; where that cannot be done, `repair_tables` says so
instead of training on wrong positions.

A module's `forward` is set on the instance, as a bound method, so that copies of the model copy it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.models.sites import role_of
from bitwright.models.value_calls import norms_of
from bitwright.training.forward.islands import NARROW_DTYPES, in_fp32

#: Classes of modules that turn positions into angles, biases or vectors; those with matrices inside are none.
POSITION_CLASSES = (
    "*Rotary*",
    "*RoPE*",
    "*Rope*",
    "*Alibi*",
    "*ALiBi*",
    "*Position*Embedding*",
    "*PositionalEncoding*",
)
#: Buffers that hold frequencies, or tables made of them.
TABLES = (
    "*inv_freq", "inv_timescales", "sinusoid_freq", "freqs", "freqs_cis", "*cos_cached", "*sin_cached",
    "embed_positions",
)  # fmt: skip

_PLAIN = "_forward_outside_island"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedIsland:
    """One module that runs in fp32."""

    module: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledIslands:
    """The modules of a model that run in fp32, until `remove` is called."""

    islands: tuple[NamedIsland, ...]
    modules: tuple[nn.Module, ...]

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module in self.modules:
            plain = module.__dict__.pop(_PLAIN, None)
            module.__dict__.pop("forward", None)
            if plain is not None:
                module.__dict__["forward"] = plain


def install(model: nn.Module) -> InstalledIslands:
    """Let routers of a model, and what makes its positions, run in fp32.

    Raises:
        TrainingError: they do so already.
    """
    found = tuple(find_islands(model))
    modules = tuple(model.get_submodule(island.module) for island in found)
    for island, module in zip(found, modules, strict=True):
        if getattr(module.__dict__.get("forward"), "__func__", None) is _in_island:
            raise TrainingError(
                f"{island.module} is an island in fp32 already: the model was prepared before; call run.close() on "
                "the run that it belongs to, or use that run"
            )
    for module in modules:
        plain = module.__dict__.get("forward")
        if plain is not None:
            module.__dict__[_PLAIN] = plain
        module.__dict__["forward"] = MethodType(_in_island, module)
    return InstalledIslands(islands=found, modules=modules)


def _in_island(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = in_fp32(args), {name: in_fp32(value) for name, value in kwargs.items()}
    plain = self.__dict__.get(_PLAIN) or MethodType(type(self).forward, self)
    with torch.autocast(_device_type(self, args), enabled=False):
        return plain(*args, **kwargs)


def _device_type(module: nn.Module, args: tuple[Any, ...]) -> str:
    tensors = [value for value in args if isinstance(value, Tensor)] or [*module.buffers(), *module.parameters()]
    return tensors[0].device.type if tensors else "cpu"


def find_islands(model: nn.Module) -> Iterator[NamedIsland]:
    """Every router of a model and everything that makes positions; of nested ones the outermost."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
            continue
        if is_router(name, module):
            why = "router: rounding changes which experts a token reaches"
        elif _makes_positions(module):
            why = "positions: errors of an angle, position · frequency, grow with the position"
        else:
            continue
        inside = (*inside, f"{name}.")
        yield NamedIsland(module=name, why=why)


def is_router(name: str, module: nn.Module) -> bool:
    """Whether a module's name says that it chooses experts, and it has weights to do so."""
    return role_of(name) == "router" and next(module.parameters(), None) is not None


def _makes_positions(module: nn.Module) -> bool:
    is_named_so = any(fnmatchcase(type(module).__name__, pattern) for pattern in POSITION_CLASSES)
    return is_named_so and not any(isinstance(inner, nn.Linear) for inner in module.modules())


def island_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of norms and routers, which are fp32 under every policy."""
    prefixes = [name.removesuffix(":norm") for name in norms_of(model)]
    prefixes += [name for name, module in model.named_modules() if is_router(name, module)]
    found: dict[str, nn.Parameter] = {}
    for prefix in prefixes:
        for name, parameter in model.get_submodule(prefix).named_parameters():
            found[f"{prefix}.{name}"] = parameter
    return found


def narrow_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(module's name, module, name of its buffer) of every table of positions that is in 16 bits."""
    for name, module in model.named_modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            is_table = any(fnmatchcase(buffer_name, pattern) for pattern in TABLES)
            if is_table and buffer.dtype in NARROW_DTYPES:
                yield name, module, buffer_name


def repair_tables(model: nn.Module) -> tuple[str, ...]:
    """Compute tables of positions anew that were cast to 16 bits; returns their names.

    Raises:
        TrainingError: a table cannot be computed from its module's config. No table was changed then.
    """
    fresh: list[tuple[str, nn.Module, str, Tensor]] = []
    for name, module, buffer_name in narrow_tables(model):
        full = f"{name}.{buffer_name}" if name else buffer_name
        table = _computed_anew(module, buffer_name)
        if table is None:
            raise TrainingError(
                f"{full} is in {str(module.get_buffer(buffer_name).dtype).removeprefix('torch.')}: positions are wrong "
                "with it, and its module cannot be built again from a config; cast parameters instead of the model: "
                "load it in fp32 and let prepare cast"
            )
        fresh.append((full, module, buffer_name, table))
    for _, module, buffer_name, table in fresh:
        module._buffers[buffer_name] = table
    return tuple(full for full, _, _, _ in fresh)


def _computed_anew(module: nn.Module, buffer_name: str) -> Tensor | None:
    """The buffer of a fresh module of the same class and config, in fp32; None where there is none of that shape."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    try:
        fresh = type(module)(config)
    except (TypeError, AttributeError, KeyError):  # a constructor that asks for more than a config
        return None
    here, there = module.get_buffer(buffer_name), dict(fresh.named_buffers(recurse=False)).get(buffer_name)
    if there is None or there.shape != here.shape or there.dtype in NARROW_DTYPES:
        return None
    return there.to(here.device)
