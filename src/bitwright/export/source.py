"""What an exporter reads: a plan on its model, with the codes and scales that were measured.

    source = open_source(plan, loaded)
    for site in source.sites:
        weight = source.weight(site)
        weight.scheme, weight.transform, weight.input_scale
        weight.codes()           QTensor: code values and scales, fp32; found anew on every call, so keep one at a time
        weight.packed()          PackedTensor: the same as bits
        weight.values()          fp32 [N, K]: what the original space sees, whatever the transform
    for name, tensor in source.rest():   everything of the state dict that is no chosen site's weight
        …
    source.values                value site → `ValueRule`: value scheme and static scales (caches, attention)

Codes come from `inference.codes_of`, as emulation takes them: what is written is what was measured. Nothing is kept:
beside the model there is one matrix at a time in memory.

What carries no codes is written in one dtype: that of the checkpoint, where it had a plain one, for engines run a model
in one dtype (`choose_dtype`).

Legend: N rows (out_features), K columns (in_features).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bitwright import formats
from bitwright.errors import PlanError
from bitwright.inference import ValueRule, codes_of, rule_of, value_rules
from bitwright.inference.planned_model import raise_if_other_model, sites_of
from bitwright.inference.static.origin import raise_if_stale
from bitwright.models.loaded import DTYPE_FORMATS, LoadedModel
from bitwright.models.sites import Site, site_weight
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Plan, SiteChoice
from bitwright.plan.engine import Engine
from bitwright.quantize import SCHEMES, QTensor
from bitwright.quantize.fitted import UNCHANGED, Fitted
from bitwright.quantize.pack import PackedTensor, pack_codes
from bitwright.quantize.scheme import Scheme, TensorScheme

#: What weights without codes may be written in.
PLAIN_DTYPES: Mapping[str, torch.dtype] = {
    name: dtype for dtype, name in DTYPE_FORMATS.items() if name in ("fp16", "bf16", "fp32")
}
#: Tokens that a model is run on to see how large its values become, and how much larger they may be on other text.
_NUM_TOKENS = 8
_HEADROOM = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SiteWeight:
    """One weight site as the plan has it."""

    site: Site
    #: The plan's choice; None where the plan is silent, and the weight stays as loaded.
    choice: SiteChoice | None
    #: The record of its scheme ("as_loaded" where the plan is silent).
    scheme: Scheme
    #: As loaded, fp32 [N, K]: a view of the model.
    loaded_NK: Tensor
    #: The exact change of weight and inputs that comes before rounding.
    transform: Fitted = UNCHANGED
    #: fp32 0-d: the one static scale of the inputs; None: found on every call, or none needed.
    input_scale: Tensor | None = None
    find_codes: Callable[[Tensor], QTensor] | None = field(default=None, repr=False)

    @property
    def has_codes(self) -> bool:
        """Whether the weight is stored under scales; else it is numbers of a plain format, or as loaded."""
        return self.tensor_scheme is not None and self.tensor_scheme.scaling is not None

    @property
    def tensor_scheme(self) -> TensorScheme | None:
        """Format and scaling of the weight; None as loaded."""
        return self.scheme.weights

    def codes(self) -> QTensor:
        """Codes and scales of the changed weight, W' of `transform`; not for what stays as loaded."""
        assert self.find_codes is not None
        return self.find_codes(self.loaded_NK.contiguous())

    def packed(self) -> PackedTensor:
        """The same as bits, as plans and `quantize.pack` lay them out."""
        return pack_codes(self.codes())

    def values(self) -> Tensor:
        """What multiplies the unchanged inputs, fp32 [N, K]: codes times scales, the transform taken back."""
        return self.loaded_NK if self.find_codes is None else self.transform.restore(self.codes().dequantize())


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportSource:
    """A plan on its model."""

    plan: Plan
    loaded: LoadedModel
    #: Every weight site of the model, chosen or not.
    sites: tuple[Site, ...]
    #: What is written without codes has this dtype.
    dtype: torch.dtype
    #: Why this dtype.
    dtype_reason: str
    #: Value site → scheme and scales, of those that the plan rounds.
    values: Mapping[ValueSite, ValueRule]
    #: The engine that is to load it; None where none is meant.
    engine: Engine | None = None

    @property
    def model(self) -> nn.Module:
        """The model, fp32."""
        return self.loaded.model

    def weight(self, site: Site) -> SiteWeight:
        """One site as the plan has it."""
        choice = self._choices.get(site.name)
        loaded_NK = site_weight(self.model, site).detach()
        if choice is None or SCHEMES[choice.scheme].weights is None:
            return SiteWeight(site=site, choice=choice, scheme=SCHEMES["as_loaded"], loaded_NK=loaded_NK)
        rule = rule_of(choice, self.plan.tensors)
        assert rule is not None
        return SiteWeight(
            site=site,
            choice=choice,
            scheme=SCHEMES[choice.scheme],
            loaded_NK=loaded_NK,
            transform=rule.transform,
            input_scale=rule.input_scale,
            find_codes=codes_of(choice, self.plan.tensors),
        )

    def coded_sites(self) -> tuple[Site, ...]:
        """Sites whose weights are stored under scales, in order."""
        return tuple(site for site in self.sites if self.weight(site).has_codes)

    def rest(self, replaced: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers without codes, in order of name: those under a plain format rounded to it.

        Tied parameters come once, under the first of their names. Floats are of `dtype`.

        Args:
            replaced: name → what is given in place of the model's own (a norm that factors went into).
        """
        coded = {site.parameter for site in self.coded_sites()}
        plain = {
            site.parameter: site
            for site in self.sites
            if site.parameter not in coded and self.weight(site).find_codes is not None
        }
        known = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, tensor in sorted({**known, **_persistent_buffers(self.model)}.items()):
            if name in coded:
                continue
            if replaced is not None and name in replaced:
                tensor = replaced[name]
            elif name in plain:
                tensor = self.parameter_values(name)
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def parameter_values(self, parameter: str) -> Tensor:
        """A parameter whose sites have the values that the plan gives them, fp32, in the shape that it is stored in."""
        copy = self.model.get_parameter(parameter).detach().clone()
        for site in (site for site in self.sites if site.parameter == parameter):
            part = copy if site.expert is None else copy[site.expert]
            part = part.T if site.transposed else part
            rows = slice(None) if site.rows is None else slice(*site.rows)
            part[rows] = self.weight(site).values()
        return copy

    @cached_property
    def _choices(self) -> Mapping[str, SiteChoice]:
        return {choice.name: choice for choice in self.plan.sites if choice.kind == "weight"}


def open_source(
    plan: Plan,
    loaded: LoadedModel,
    *,
    sites: Sequence[Site] | None = None,
    dtype: str | None = None,
    engine: Engine | None = None,
) -> ExportSource:
    """Put a plan on its model.

    Args:
        plan: for this model.
        loaded: fp32.
        sites: its weight sites; found unless given.
        dtype: fp16, bf16 or fp32 for what has no codes; None: see `choose_dtype`.
        engine: that is to load it.

    Raises:
        PlanError: the plan is for another model (the tensors that differ are named), lacks tensors, or has static
            scales that were never set or found with other weights; a dtype that is none of these.
    """
    known = sites_of(plan, loaded.model) if sites is None else tuple(sites)
    raise_if_other_model(plan, loaded, known)
    raise_if_stale(plan, loaded.hash)
    chosen, reason = choose_dtype(loaded, dtype)
    rounds_values = any(choice.kind != "weight" and choice.scheme != "as_loaded" for choice in plan.sites)
    values = value_rules(plan, find_value_sites(loaded.model)) if rounds_values else {}
    source = ExportSource(
        plan=plan, loaded=loaded, sites=known, dtype=chosen, dtype_reason=reason, values=values, engine=engine
    )
    for site in known:
        source.weight(site)  # what its tensors lack is told now
    return source


def choose_dtype(loaded: LoadedModel, asked: str | None) -> tuple[torch.dtype, str]:
    """The dtype of what has no codes, and why.

    A checkpoint of plain numbers keeps its dtype. One that is stored in blocks (GGUF) has none; it gets fp16, which
    holds the scales of most schemes exactly, unless what the model computes comes near the end of that range.

    Raises:
        PlanError: `asked` is no plain dtype.
    """
    if asked is not None:
        if asked not in PLAIN_DTYPES:
            raise PlanError(f"weights without codes are written in {', '.join(PLAIN_DTYPES)}, not in {asked!r}")
        return PLAIN_DTYPES[asked], "asked for"
    weights_in: Counter[str] = Counter()
    for name, parameter in loaded.model.named_parameters():
        weights_in[loaded.loaded_format.get(name, "fp32")] += parameter.numel()
    usual = max(weights_in, key=lambda name: weights_in[name])
    if usual in PLAIN_DTYPES:
        return PLAIN_DTYPES[usual], f"as most of the checkpoint is stored ({usual})"
    largest = _largest_value(loaded.model)
    seen = f"the checkpoint is stored in {usual}, and what the model computes reaches {largest:.3g} in a short run"
    if largest * _HEADROOM <= float(formats.FORMATS["fp16"].max):
        return torch.float16, f"{seen}: fp16 holds it"
    return torch.bfloat16, f"{seen}: too near to the end of fp16"


def _largest_value(model: nn.Module) -> float:
    """The largest magnitude among the outputs of all modules, in a run on a few tokens; Inf where it is no number."""
    seen: list[float] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            seen.append(float(output.abs().amax().nan_to_num(nan=math.inf)))

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        model(input_ids=torch.arange(_NUM_TOKENS).unsqueeze(0))
    return max(seen, default=math.inf)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    names = dict(model.named_buffers())
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}
