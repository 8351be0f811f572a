"""Sites as the linear modules that a checkpoint names: the rows of one fused matrix are one module.

    for module in coded_modules(source):
        module.name, module.scheme, module.input_scale
        module.codes()              all rows, in order

What cannot be written as a module of its own is told by `module_reasons`; what an engine that computes several modules
at once would multiply by one scale in place of two, by `shared_scale_reasons`.

Legend: N rows (out_features), K columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bitwright.export.source import ExportSource, SiteWeight
from bitwright.plan.rules import ties
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scheme


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodedModule:
    """A linear module whose weight is stored under scales."""

    #: Dotted name in the model.
    name: str
    #: In the order of their rows.
    weights: tuple[SiteWeight, ...]

    @property
    def scheme(self) -> Scheme:
        """The one of all rows."""
        return self.weights[0].scheme

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of all rows."""
        return sum(weight.site.shape[0] for weight in self.weights), self.weights[0].site.shape[1]

    @property
    def input_scale(self) -> Tensor | None:
        """fp32 0-d: the static scale of the input; None where it has none."""
        return self.weights[0].input_scale

    def codes(self) -> QTensor:
        """Codes and scales of all rows."""
        parts = [weight.codes() for weight in self.weights]
        first = parts[0]
        if len(parts) == 1:
            return first
        assert first.scales_NG is not None
        return replace(
            first,
            codes_NK=torch.cat([part.codes_NK for part in parts]),
            scales_NG=torch.cat([part.scales_NG for part in parts if part.scales_NG is not None]),
            offsets_NG=None
            if first.offsets_NG is None
            else torch.cat([part.offsets_NG for part in parts if part.offsets_NG is not None]),
        )


def coded_modules(source: ExportSource) -> tuple[CodedModule, ...]:
    """Every module with codes, in the order of the sites."""
    grouped: dict[str, list[SiteWeight]] = {}
    for site in source.coded_sites():
        grouped.setdefault(site.module, []).append(source.weight(site))
    return tuple(
        CodedModule(name=name, weights=tuple(sorted(weights, key=lambda weight: weight.site.rows or (0, 0))))
        for name, weights in grouped.items()
    )


def linear_modules(model: nn.Module) -> set[str]:
    """Every linear module, by its name: what a target of class "Linear" would mean."""
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def module_reasons(source: ExportSource) -> dict[str, str]:
    """Site → why its codes are no linear module of the checkpoint."""
    reasons: dict[str, str] = {}
    for module in coded_modules(source):
        reason = _module_reason(source, module)
        if reason is not None:
            reasons |= {weight.site.name: reason for weight in module.weights}
    return reasons


def shared_scale_reasons(source: ExportSource) -> dict[str, str]:
    """Site → why the engine, which computes it at once with others, would run it under a scale that is not its own.

    That concerns what there is one of for a whole matrix: static scales of the input and second-level scales.
    """
    if source.engine is None:
        return {}
    groups: dict[str, list[SiteWeight]] = {}
    tied = ties(source.sites, source.engine)
    for site in source.coded_sites():
        if site.name in tied:
            groups.setdefault(tied[site.name], []).append(source.weight(site))
    reasons: dict[str, str] = {}
    for group, weights in groups.items():
        for what, scales in (
            ("static scale of the input", _input_scales(weights)),
            ("tensor scale", _tensor_scales(weights)),
        ):
            if len(set(scales)) > 1:
                said = f"{source.engine.name} computes {group} at once under one {what}, and its parts have several"
                reasons |= {weight.site.name: said for weight in weights}
    return reasons


def _module_reason(source: ExportSource, module: CodedModule) -> str | None:
    sites = [weight.site for weight in module.weights]
    if any(site.expert is not None for site in sites):
        return "experts that are stored as one parameter of three dimensions are not written with codes"
    if any(site.transposed for site in sites):
        return "a weight that is stored [in, out] is no linear module of the checkpoint"
    if len(sites[0].uses) > 1:
        return f"{' and '.join(sites[0].uses)} are one weight, which is stored once and without codes"
    whole = source.model.get_parameter(sites[0].parameter).shape[0]
    if module.shape[0] != whole:
        return f"{module.name} has {whole} rows, of which the plan covers {module.shape[0]}"
    scheme = module.weights[0].tensor_scheme
    scaling = scheme.scaling if scheme is not None and len(sites) > 1 else None
    if scaling is None:
        return None
    if scaling.tensor_scale or scaling.granularity.scope == "tensor":
        return f"{module.name} is one matrix, whose parts have scales of their own for the whole matrix"
    block_rows = scaling.granularity.block_rows
    if block_rows and any(site.shape[0] % block_rows for site in sites[:-1]):
        return f"{module.name} is one matrix, in which blocks of {block_rows} rows reach over two parts"
    return None


def _input_scales(weights: Sequence[SiteWeight]) -> Iterator[float]:
    return (float(weight.input_scale) for weight in weights if weight.input_scale is not None)


def _tensor_scales(weights: Sequence[SiteWeight]) -> Iterator[float]:
    for weight in weights:
        scheme = weight.tensor_scheme
        if scheme is not None and scheme.scaling is not None and scheme.scaling.tensor_scale:
            scale = weight.codes().tensor_scale
            assert scale is not None
            yield float(scale)
