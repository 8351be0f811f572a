"""Sites as the linear modules that a checkpoint names: rows of one fused matrix are one module, and so is an expert.

    for module in coded_modules(source):
        module.name, module.stored, module.scheme, module.input_scale
        module.codes()              all rows, in order

transformers joins and renames what checkpoints hold: experts are one parameter of three dimensions in the model and a
matrix each in the file. Which rows of a parameter are which matrix there is asked of transformers itself, with numbers
of rows in place of weights (`written_folder.as_stored`).

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
from bitwright.export.written_folder import as_stored
from bitwright.models.sites import Site
from bitwright.plan.rules import ties
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import Scheme


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodedModule:
    """A linear module whose weight is stored under scales."""

    #: Dotted name in the model; an expert's is its name in the checkpoint, where only that has one for it.
    name: str
    #: Dotted name in the checkpoint; None where it has no matrix of these rows.
    stored: str | None
    #: In the order of their rows.
    weights: tuple[SiteWeight, ...]
    #: Rows of the matrix in the checkpoint.
    num_rows: int

    @property
    def scheme(self) -> Scheme:
        """The one of all rows."""
        return self.weights[0].scheme

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of all rows."""
        return sum(weight.site.shape[0] for weight in self.weights), self.weights[0].site.shape[1]

    @property
    def is_expert(self) -> bool:
        """Whether it is one of a list that the model has as one parameter."""
        return self.weights[0].site.expert is not None

    @property
    def is_in_out(self) -> bool:
        """Whether the model, and so the checkpoint, stores the weight [in, out]."""
        return self.weights[0].site.transposed and not self.is_expert

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
    places: dict[str, tuple[_Place, ...]] = {}
    grouped: dict[tuple[str, str | None, int], list[SiteWeight]] = {}
    for site in source.coded_sites():
        if site.parameter not in places:
            places[site.parameter] = _places_of(source.model, site)
        place = next((place for place in places[site.parameter] if place.holds(site)), None)
        key = (site.module, None, 0) if place is None else (site.module, place.name, place.last - place.first)
        grouped.setdefault(key, []).append(source.weight(site))
    return tuple(
        CodedModule(
            name=stored if stored is not None and weights[0].site.expert is not None else module,
            stored=stored,
            weights=tuple(sorted(weights, key=lambda weight: weight.site.rows or (0, 0))),
            num_rows=num_rows,
        )
        for (module, stored, num_rows), weights in grouped.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A matrix of a checkpoint: rows [first, last) of a parameter, or of one expert in it."""

    name: str
    expert: int | None
    first: int
    last: int

    def holds(self, site: Site) -> bool:
        """Whether all rows of a site lie in it."""
        first, last = site.rows or (0, site.shape[0])
        return site.expert == self.expert and self.first <= first and last <= self.last


def _places_of(model: nn.Module, site: Site) -> tuple[_Place, ...]:
    """The matrices that a checkpoint has of the parameter of a site; none where it has no matrices of its rows."""
    parameter = model.get_parameter(site.parameter)
    experts, size = (parameter.shape[0] if parameter.dim() == 3 else 1), parameter.shape[-1 if site.transposed else -2]
    numbers = torch.arange(experts * size).view(experts, size, 1)
    numbers = (numbers.mT if site.transposed else numbers).expand(experts, *parameter.shape[-2:])
    found = []
    for name, stored in as_stored(model, site.parameter, numbers if parameter.dim() == 3 else numbers[0]).items():
        rows = _rows_of(stored)
        if rows is None:
            return ()
        expert, first = divmod(int(rows[0]), size)
        of_list = expert if site.expert is not None else None
        found.append(_Place(name=name.removesuffix(".weight"), expert=of_list, first=first, last=first + len(rows)))
    return tuple(found)


def _rows_of(stored: Tensor) -> Tensor | None:
    """The numbers of a matrix's rows, whichever way it lies; None where they are no row of a matrix after another."""
    if stored.dim() != 2:
        return None
    rows = stored[:, 0] if bool((stored[:, 0] == stored[:, -1]).all()) else stored[0]
    return rows if torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows))) else None


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
        for what, scales, advice in (
            ("static scale of the input", _input_scales(weights), ""),
            ("tensor scale", _tensor_scales(weights), " (bitwright.export.share_tensor_scales gives a plan with one)"),
        ):
            if len(set(scales)) > 1:
                said = f"{source.engine.name} computes {group} at once under one {what}, and its parts have several"
                said += advice
                reasons |= {weight.site.name: said for weight in weights}
    return reasons


def _module_reason(source: ExportSource, module: CodedModule) -> str | None:
    sites = [weight.site for weight in module.weights]
    loaded = () if source.engine is None else source.engine.coded_modules
    who = "this target" if source.engine is None else source.engine.name
    if module.stored is None:
        return "checkpoints of this model have no matrix of these rows alone, so that codes of it have no place there"
    if module.is_expert and "experts" not in loaded:
        return f"experts are one parameter of three dimensions, of which {who} takes no codes"
    if module.is_in_out and "in_out" not in loaded:
        return f"its weight is stored [in, out], as that of no linear module, and {who} takes no codes of such"
    if len(sites[0].uses) > 1:
        return f"{' and '.join(sites[0].uses)} are one weight, which is stored once and without codes"
    if module.shape[0] != module.num_rows:
        return f"{module.name} has {module.num_rows} rows, of which the plan covers {module.shape[0]}"
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
