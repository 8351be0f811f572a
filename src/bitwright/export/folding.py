"""Column factors that go into the norm before: W x = (W s)(x / s), and x / s is the norm with its weight divided.

    y = norm(h) · g          y / s = norm(h) · (g / s)

So an engine that knows nothing of a transform runs the changed weights, if *every* matrix that reads the norm's output
is changed by the same factors. Who reads what is seen, not guessed: the model runs on a few tokens, and a module reads
a norm if its input lies in the memory of the norm's output. That a norm multiplies by its weight alone is tried as well
(some multiply by 1 + weight).

Rejected: factors of attention's last matrix that go into the rows of v, as AWQ does: those rows have codes of their
own, whose scales would be rounded again.

Legend: K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.export.source import ExportSource
from bitwright.models.value_calls import norms_of

#: Tokens that the model is run on.
_NUM_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Folding:
    """What goes into norms, and what cannot."""

    #: Parameter of a norm → its values divided by the factors, fp32.
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    #: Site → why its factors go nowhere.
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class SeenNorm:
    """A norm, as it was called, and the modules that read what it gave."""

    module: nn.Module
    arguments: tuple[Any, ...] = ()
    output: Tensor | None = None
    readers: list[str] = field(default_factory=list)


def fold_factors(source: ExportSource) -> Folding:
    """Find the norms that the column factors of coded sites go into."""
    factors: dict[str, Tensor] = {}
    sites_of: dict[str, list[str]] = {}
    for site in source.coded_sites():
        scales_K = source.weight(site).transform.column_scales_K
        if scales_K is not None:
            factors[site.name] = scales_K
        sites_of.setdefault(site.module, []).append(site.name)
    if not factors:
        return Folding()
    modules_of = {name: module for module, names in sites_of.items() for name in names}
    norms = norms_seen(source.model)
    read_by = {reader: norm for norm, seen in norms.items() for reader in seen.readers}
    parameters: dict[str, Tensor] = {}
    refused: dict[str, str] = {}
    for name, scales_K in factors.items():
        norm = read_by.get(modules_of[name])
        if norm is None:
            refused[name] = "its factors have no norm to go into: what it reads comes from elsewhere"
            continue
        readers = norms[norm].readers
        unlike = [
            reader
            for reader in readers
            if not all(
                (other := factors.get(site)) is not None and torch.equal(other, scales_K)
                for site in sites_of.get(reader, [""])
            )
        ]
        if unlike:
            refused[name] = f"its factors cannot go into {norm}: {', '.join(unlike)} read it with others, or none"
            continue
        folded = _folded(norms[norm], scales_K)
        if folded is None:
            refused[name] = f"its factors cannot go into {norm}, which does more than to multiply by its weight"
            continue
        parameters |= {f"{norm}.{part}": value for part, value in folded.items()}
    return Folding(parameters=parameters, refused=refused)


def _folded(norm: SeenNorm, scales_K: Tensor) -> dict[str, Tensor] | None:
    """Parameters of a norm that gives its output divided by the factors; None where they do not do that."""
    parameters = {name: parameter.detach() for name, parameter in norm.module.named_parameters(recurse=False)}
    if any(parameter.shape != scales_K.shape for parameter in parameters.values()) or "weight" not in parameters:
        return None
    divided = {name: parameter / scales_K for name, parameter in parameters.items()}
    assert norm.output is not None
    with torch.no_grad():
        tried = torch.func.functional_call(norm.module, divided, norm.arguments)
    return divided if torch.allclose(tried, norm.output / scales_K, rtol=1e-4, atol=1e-6) else None


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
        model(input_ids=torch.arange(_NUM_TOKENS).unsqueeze(0))
    return norms
