"""Running a model with rounded values: what attention multiplies, what a cache keeps, what an MLP and a norm give.

    with emulate_values(model, {site: ValueRule(scheme=VALUE_SCHEMES["fp8_e4m3_token"])}):
        model.generate(input_ids)

Values are rounded where they arise (`models/value_calls.py`, `models/attention_calls.py` for the order of attention's
arithmetic) and everything else stays fp32. A key or value is rounded once, when it is written to a cache; without a
cache all of them are, before they are read. So a whole text in one pass and the same text token by token see the same
keys, as long as scales do not reach over several tokens. Keys under scales per channel are rounded when their group of
tokens is full, and are whole until then: generation sees the latest few unrounded, one pass over a text sees them so
only behind its last full group.

Overflows are counted before the cast, as with inputs of matrices (`inference/counters.py`). With `fallbacks` a token
that overflows goes on as it is, by the rule of `inference/fallback.py`: its q, k or v is multiplied unrounded, its keys
and values are kept unrounded. What it is multiplied with stays what it was, as codes of weights do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from bitwright import formats
from bitwright.errors import PlanError
from bitwright.inference.counters import Counters, FallbackCounts, Overflows, RunCounters
from bitwright.inference.fallback import Fallback
from bitwright.inference.hysteresis import FallbackSettings
from bitwright.inference.overflow_watch import OverflowWatch
from bitwright.models.sites import Site
from bitwright.models.value_calls import ATTENTION_PARTS, ValueCalls
from bitwright.models.value_sites import ValueSite
from bitwright.plan import Plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.static_scales import overflows
from bitwright.quantize.value_rounding import round_values, spread, static_scale
from bitwright.quantize.value_scheme import OPERAND_BOUNDS, ValueScheme


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueRule:
    """What one value site runs with."""

    scheme: ValueScheme
    #: Operand → static scale, fp32 [heads] or [1]; those whose range is known need none.
    scales: Mapping[str, Tensor] = field(default_factory=dict)

    def scale(self, operand: str) -> Tensor | None:
        """The static scale of an operand; None where it is found on every call, or there is none."""
        if not self.scheme.static:
            return None
        if operand in OPERAND_BOUNDS and operand not in self.scales:
            return static_scale(self.scheme, operand, torch.ones(1))
        return self.scales[operand]

    def on(self, device: torch.device, operands: Sequence[str]) -> ValueRule:
        """The same with the scales of these operands on a device, so that no call has to bring them there."""
        if not self.scheme.static:
            return self
        found = {operand: self.scale(operand) for operand in operands}
        return replace(self, scales={name: scale.to(device) for name, scale in found.items() if scale is not None})


#: (site, operand) → what happens where it overflows; those that cannot are not there.
Fallbacks = Mapping[tuple[str, str], Fallback]


def value_fallbacks(
    rules: Mapping[ValueSite, ValueRule],
    settings: FallbackSettings | None,
    counters: RunCounters,
    watch: OverflowWatch,
    dtype: torch.dtype,
) -> Fallbacks:
    """Fallbacks of all values that may overflow.

    Args:
        rules: of the sites that are rounded.
        settings: how much falls back; None: what overflows saturates, and is counted.
        counters: where it is counted, under the site's name, with "/<operand>" where it has several.
        watch: of the model.
        dtype: what the model computes in: what is as wide as that cannot be fallen back from.
    """
    found = {}
    for site, rule in rules.items():
        for operand in site.operands:
            if not _may_overflow(rule, operand, dtype):
                continue
            name = site.name if len(site.operands) == 1 else f"{site.name}/{operand}"
            counts = counters.fallbacks.setdefault(name, FallbackCounts())
            found[site.name, operand] = Fallback.new(settings, watch, counts)
    return found


def _may_overflow(rule: ValueRule, operand: str, dtype: torch.dtype) -> bool:
    if rule.scheme.static:
        return operand not in OPERAND_BOUNDS
    narrower = float(formats.FORMATS[rule.scheme.values.format].max) < torch.finfo(dtype).max
    return rule.scheme.values.scaling is None and narrower


def round_operand(name: str, operand: str, x: Tensor, rule: ValueRule, fallback: Fallback | None = None) -> Tensor:
    """A value after rounding, fp32; tokens that overflow as the fallback says.

    Args:
        name: of the site.
        operand: which of its values.
        x: fp32 [B, H, T, D] of attention, else [..., width].
        rule: of the site.
        fallback: None: what overflows saturates.
    """
    scale = rule.scale(operand)
    if fallback is None or x.numel() == 0:
        return round_values(x, rule.scheme, scale)
    beyond = overflows(x, rule.scheme.values, None if scale is None else spread(scale, x))
    assert beyond is not None, "nothing falls back where scales cover what they meet"
    return fallback.rescue(x, beyond, tokens_of(name, beyond), lambda: round_values(x, rule.scheme, scale))


def tokens_of(name: str, beyond: Tensor) -> Tensor:
    """In which tokens of a value anything is set: [B, 1, T, 1] of attention, else [..., 1]."""
    by_head = beyond.any(-1, keepdim=True)
    return by_head.any(1, keepdim=True) if name.rpartition(":")[2] in ATTENTION_PARTS else by_head


@contextmanager
def emulate_values(
    model: nn.Module,
    rules: Mapping[ValueSite, ValueRule],
    *,
    sites: Sequence[Site] | None = None,
    counters: Counters | None = None,
    fallbacks: Fallbacks | None = None,
) -> Iterator[nn.Module]:
    """Run `model` with the values of some sites rounded, for the time of the block.

    Args:
        model: fp32, eager.
        rules: value site → what it runs with; sites without an entry keep what they have.
        sites: the model's weight sites, if they are known already.
        counters: counts of rounded and of overflowing values are added to it, site by site.
        fallbacks: what happens to tokens that overflow (`value_fallbacks`); None: they saturate.
    """
    known = {} if fallbacks is None else fallbacks
    by_name = {site.name: rule for site, rule in rules.items()}

    def rounded(name: str, operand: str, value: Tensor) -> Tensor:
        rule = by_name.get(name)
        if rule is None:
            return value
        if counters is not None:
            counted = _count(name, value, rule.scheme, rule.scale(operand))
            counters[name] = counters.get(name, Overflows()) + counted
        return round_operand(name, operand, value, rule, known.get((name, operand)))

    if not rules:
        yield model
        return
    groups = {name: rule.scheme.group_tokens for name, rule in by_name.items()}
    with ValueCalls(model, rounded, names=by_name, groups=groups, sites=sites):
        yield model


def value_rules(plan: Plan, sites: Iterable[ValueSite]) -> dict[ValueSite, ValueRule]:
    """Rules of the value sites that a plan rounds.

    Raises:
        PlanError: the plan names value sites that the model lacks, or lacks the scales of one.
        UnknownName: the plan chooses a value scheme that this version does not have.
    """
    known = {site.name: site for site in sites}
    rules = {}
    for choice in plan.sites:
        if choice.kind == "weight" or choice.scheme == "as_loaded":
            continue
        site = known.get(choice.name)
        if site is None:
            raise PlanError(
                f"the plan rounds values at '{choice.name}', which this model does not have; load the model that the "
                f"plan is for: {plan.model.name}"
            )
        rules[site] = value_rule(site, VALUE_SCHEMES[choice.scheme], plan.tensors)
    return rules


def value_rule(site: ValueSite, scheme: ValueScheme, tensors: Mapping[str, np.ndarray]) -> ValueRule:
    """A site's rule under a scheme whose static scales, if any, are among `tensors`, as `value_tensors_of` names them.

    Raises:
        PlanError: a scale is not there.
    """
    scales = {operand: _stored(tensors, site, operand, scheme) for operand in scaled_operands(site, scheme)}
    return ValueRule(scheme=scheme, scales=scales)


def scaled_operands(site: ValueSite, scheme: ValueScheme) -> tuple[str, ...]:
    """Operands whose static scales a plan has to keep."""
    return tuple(o for o in site.operands if o not in OPERAND_BOUNDS) if scheme.static else ()


def value_tensors_of(site: ValueSite, rule: ValueRule) -> dict[str, np.ndarray]:
    """What a plan keeps of a value site: "<site>/scale", or one with the operand's name each, fp32 [heads] or [1]."""
    operands = scaled_operands(site, rule.scheme)
    return {
        _tensor_name(site, operand, rule.scheme): rule.scales[operand].cpu().numpy().astype(np.float32)
        for operand in operands
    }


def _tensor_name(site: ValueSite, operand: str, scheme: ValueScheme) -> str:
    alone = len(scaled_operands(site, scheme)) == 1
    return f"{site.name}/scale" if alone else f"{site.name}/scale_{operand}"


def _stored(tensors: Mapping[str, np.ndarray], site: ValueSite, operand: str, scheme: ValueScheme) -> Tensor:
    name = _tensor_name(site, operand, scheme)
    found = tensors.get(name)
    if found is None or found.ndim != 1:
        raise PlanError(
            f"the plan's tensors hold no '{name}' of one dimension, which value scheme '{scheme.name}' needs; the "
            "folder's tensors.safetensors is from another plan: make the plan again"
        )
    return torch.from_numpy(found.astype(np.float32))


def _count(name: str, x: Tensor, scheme: ValueScheme, scale: Tensor | None) -> Overflows:
    beyond = overflows(x, scheme.values, None if scale is None else spread(scale, x))
    in_heads = name.rpartition(":")[2] in ATTENTION_PARTS
    num_tokens = x.numel() // max(1, x.shape[-1]) // (x.shape[1] if in_heads else 1)
    if beyond is None:
        return Overflows(num_values=x.numel(), num_tokens=num_tokens)
    return Overflows(
        num_values=x.numel(),
        num_overflows=int(beyond.sum()),
        num_tokens=num_tokens,
        num_overflowed_tokens=int(tokens_of(name, beyond).sum()),
    )
