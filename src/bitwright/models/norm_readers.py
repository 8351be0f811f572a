"""Which norm a matrix reads, and whether factors of the matrix's columns can go into it.

    W x = (W s)(x / s)        x = norm(h) · g        x / s = norm(h) · (g / s)

So an engine that knows nothing of a change of inputs runs the changed weights, if *every* matrix that reads the norm's
output is changed by the same factors. Who reads what is seen, not guessed: the model runs on a few tokens, and a module
reads a norm if its input lies in the memory of the norm's output. That a norm multiplies by its weight alone is tried
as well (some multiply by 1 + weight), and so is that nothing else reads it (the next sum, where norms follow sums):
where norms give quotients and their readers take products again, the model has to give what it gave before.

Legend: K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.models.sites import Site
from bitwright.models.value_calls import norms_of

#: Tokens that the model is run on.
_NUM_TOKENS = 8
#: Least and largest factor that is tried.
_TRIED = (0.5, 2.0)
#: How far outputs may move, relative to their norm: rounding in fp32 moves them by 1e-6, a wrong reader by a tenth.
_TOLERANCE = 1e-3


@dataclass(kw_only=True, slots=True)
class SeenNorm:
    """A norm, as it was called, and the modules that read what it gave."""

    module: nn.Module
    arguments: tuple[Any, ...] = ()
    output: Tensor | None = None
    readers: list[str] = field(default_factory=list)

    def divided(self, scales_K: Tensor) -> dict[str, Tensor] | None:
        """Parameters that give its output divided by the factors; None where dividing them does not do that."""
        parameters = {name: parameter.detach() for name, parameter in self.module.named_parameters(recurse=False)}
        if any(parameter.shape != scales_K.shape for parameter in parameters.values()) or "weight" not in parameters:
            return None
        divided = {name: parameter / scales_K for name, parameter in parameters.items()}
        assert self.output is not None
        with torch.no_grad():
            tried = torch.func.functional_call(self.module, divided, self.arguments)
        return divided if torch.allclose(tried, self.output / scales_K, rtol=1e-4, atol=1e-6) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorHomes:
    """Where factors of columns can go."""

    #: Site → the norm that takes them, if all sites of that norm have the same ones.
    norms: Mapping[str, str] = field(default_factory=dict)
    #: Site → why they go nowhere.
    refused: Mapping[str, str] = field(default_factory=dict)


@torch.no_grad()
def find_factor_homes(model: nn.Module, sites: Sequence[Site]) -> FactorHomes:
    """Find the norms that take factors of sites.

    Args:
        model: fp32, eager; it is left as it is.
        sites: those that can be changed. What else reads a norm, reads it as it is.
    """
    seen = norms_seen(model)
    read_by = {reader: norm for norm, found in seen.items() for reader in found.readers}
    able = {site.module for site in sites}
    why = {norm: _why_none(norm, seen[norm], able) for norm in dict.fromkeys(read_by.values())}
    taking = {norm: seen[norm] for norm, reason in why.items() if reason is None}
    before = _output_of(model)
    if not _stays(model, taking, before):
        for norm, found in taking.items():
            if not _stays(model, {norm: found}, before):
                why[norm] = f"its factors cannot go into {norm}: more reads it than {', '.join(found.readers)}"
    norms: dict[str, str] = {}
    refused: dict[str, str] = {}
    for site in sites:
        read = read_by.get(site.module)
        reason = why[read] if read else "its factors have no norm to go into: what it reads comes from elsewhere"
        if reason is not None:
            refused[site.name] = reason
        elif read is not None:
            norms[site.name] = read
    return FactorHomes(norms=norms, refused=refused)


def _why_none(norm: str, seen: SeenNorm, able: Collection[str]) -> str | None:
    """Why a norm takes no factors, as far as its parameters and its readers tell; None if it may."""
    assert seen.output is not None
    others = [reader for reader in seen.readers if reader not in able]
    if others:
        return f"its factors cannot go into {norm}: {', '.join(others)} reads it too, and cannot be changed"
    if seen.divided(_tried(seen.output)) is None:
        return f"its factors cannot go into {norm}, which does more than to multiply by its weight"
    return None


def _stays(model: nn.Module, norms: Mapping[str, SeenNorm], before: Tensor) -> bool:
    """Whether a model gives what it gave if norms give quotients, and their readers take products again."""
    #: Memory of what a norm gives → the factors.
    given: dict[int, Tensor] = {}
    kept: list[Tensor] = []

    def divide(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        quotient = output / _tried(output)
        given[quotient.untyped_storage().data_ptr()] = _tried(output)
        kept.append(quotient)
        return quotient

    def multiplied(value: Any) -> Any:
        scales_K = given.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
        return value if scales_K is None else value * scales_K

    def multiply(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return tuple(map(multiplied, arguments)), {name: multiplied(value) for name, value in keywords.items()}

    with ExitStack() as stack:
        for norm, seen in norms.items():
            stack.callback(model.get_submodule(norm).register_forward_hook(divide).remove)
            for reader in seen.readers:
                module = model.get_submodule(reader)
                stack.callback(module.register_forward_pre_hook(multiply, with_kwargs=True).remove)
        moved = torch.linalg.vector_norm(_output_of(model) - before)
    return bool(moved <= _TOLERANCE * torch.linalg.vector_norm(before))


def _tried(output: Tensor) -> Tensor:
    """Factors [K] that are all different."""
    return torch.linspace(*_TRIED, output.shape[-1])


def _output_of(model: nn.Module) -> Tensor:
    """The first tensor that the model gives for a few tokens."""
    found = _run(model)
    first = found if isinstance(found, Tensor) else found[0]
    assert isinstance(first, Tensor)
    return first


def norms_seen(model: nn.Module) -> dict[str, SeenNorm]:
    """Norm → how it was called, and by whom its output was read, in a run on a few tokens."""
    norms = {name.rpartition(":")[0]: SeenNorm(module=module) for name, module in norms_of(model).items()}
    #: Memory of an output → the norm; outputs are kept, so that none is given away again meanwhile.
    by_memory: dict[int, str] = {}

    def gave(name: str) -> Any:
        def note(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                norms[name].arguments, norms[name].output = arguments, output
                by_memory[output.untyped_storage().data_ptr()] = name

        return note

    def read(name: str) -> Any:
        def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            for value in (*arguments, *keywords.values()):
                norm = by_memory.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
                if norm is not None and name not in norms[norm].readers:
                    norms[norm].readers.append(name)

        return note

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(read(name), with_kwargs=True).remove)
            if name in norms:
                stack.callback(module.register_forward_hook(gave(name)).remove)
        _run(model)
    return norms


def _run(model: nn.Module) -> Any:
    """What the model gives for a few tokens."""
    return model(input_ids=torch.arange(_NUM_TOKENS).unsqueeze(0))
