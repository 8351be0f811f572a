"""Static scales from the user's own prompts.

    plan = calibrate_static(plan, loaded, prompts, rule="percentile", percentile=99.99)

A plan's static scales (of inputs of matrices, and of values per head: caches, operands of attention) are found by its
search, from the search's text. Here they are found again from prompts as they will come, over all of their tokens:

    min_max       the largest magnitude: nothing saturates on these prompts
    percentile    the magnitude that so many percent stay below; the rest saturates
    mse           the share of the largest that costs the least squared error in the scheme's format

A plan does not change: there is a new one, with new hashes, whose tensors also say what its scales were found on, which
`drift.py` looks at:

    <site>/calibrated_amax    fp32 [H], operand after operand: the largest magnitude that was seen
    <site>/calibrated_on      uint8 [64]: SHA-256 of the weights, then of the prompts' tokens

Legend: H heads (1 outside attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import DataError
from bitwright.inference.emulation.values import value_tensors_of
from bitwright.inference.static.magnitudes import Magnitudes
from bitwright.inference.static.places import StaticPlaces, hash_prompts, look_at_prompts
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.plan import Plan
from bitwright.quantize import fake_quantize
from bitwright.quantize.scaling import MSE_RATIOS
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.static_scales import find_static_scale

Rule = Literal["min_max", "percentile", "mse"]
RULES: tuple[Rule, ...] = get_args(Rule)
_NOTE = "static scales of "


def calibrate_static(
    plan: Plan,
    loaded: LoadedModel,
    prompts: Sequence[Tensor],
    *,
    rule: str = "min_max",
    percentile: float = 99.99,
    sites: Sequence[Site] | None = None,
) -> Plan:
    """A plan with static scales found from prompts; everything else stays as it is.

    Args:
        plan: for this model, with static schemes somewhere.
        loaded: the model.
        prompts: token ids, int64 [B, T] each, none of them padded; all of them are looked at.
        rule: "min_max", "percentile" or "mse".
        percentile: for that rule: percent of the magnitudes, in (0, 100].
        sites: the model's weight sites, if they are known already.

    Raises:
        PlanError: the plan has no static scheme, or does not fit the model.
        DataError: no prompts, no such rule or percentile, rule "mse" where scales have two levels, values that are not
            finite, or sites that no token reached.
    """
    if rule not in RULES:
        raise DataError(f"no rule {rule!r} for static scales; use one of {', '.join(RULES)}")
    if not 0 < percentile <= 100:
        raise DataError(f"percentile is {percentile}; give a share of the magnitudes in (0, 100], in percent")
    places = StaticPlaces.of(plan, loaded, sites)
    _raise_if_of_groups(places, rule)
    seen = _all_magnitudes(loaded, prompts, places)
    origin = np.frombuffer(bytes.fromhex(loaded.hash) + hash_prompts(prompts), dtype=np.uint8)
    tensors = dict(plan.tensors)
    for name in places.names:
        scheme = places.scheme(name)
        of_site = {operand: seen[name, operand] for operand in places.operands(name)}
        ranges = {operand: _range(m, scheme, rule, percentile) for operand, m in of_site.items()}
        if name in places.weights:
            tensors[f"{name}/input_scale"] = find_static_scale(ranges["input"].view(1, 1), scheme).numpy()
        else:
            site, known = places.values[name]
            shared = known.scheme.axis == "tensor"
            scales = {operand: _scale(range_H, scheme, shared) for operand, range_H in ranges.items()}
            tensors |= value_tensors_of(site, replace(known, scales=scales))
        amax = torch.cat([magnitudes.amax_H for magnitudes in of_site.values()])
        tensors |= {f"{name}/calibrated_amax": amax.numpy(), f"{name}/calibrated_on": origin}
    tokens = sum(ids.numel() for ids in prompts)
    how = f"{rule} {percentile:g}" if rule == "percentile" else rule
    note = f"{_NOTE}{len(places.names)} sites are by {how} over {tokens} tokens of {len(prompts)} prompts"
    kept = tuple(known_note for known_note in plan.notes if not known_note.startswith(_NOTE))
    return plan.replace(notes=(*kept, note)).attach(tensors=tensors)


def _raise_if_of_groups(places: StaticPlaces, rule: str) -> None:
    """A share of the largest that costs the least is looked for where all numbers share one scale."""
    in_groups = [name for name in places.names if (s := places.scheme(name).scaling) is not None and s.tensor_scale]
    if rule == "mse" and in_groups:
        raise DataError(
            f"rule 'mse' tries scales that all numbers share, and those of '{in_groups[0]}' have one a group besides "
            f"({len(in_groups)} such sites): the static one only gives the range; use min_max or percentile"
        )


def _all_magnitudes(
    loaded: LoadedModel, prompts: Sequence[Tensor], places: StaticPlaces
) -> dict[tuple[str, str], Magnitudes]:
    """(site, operand) → magnitudes over all tokens."""
    seen: dict[tuple[str, str], Magnitudes] = {}

    def look(name: str, operand: str, x_HTD: Tensor) -> None:
        seen.setdefault((name, operand), Magnitudes.of(x_HTD.shape[0])).add(x_HTD)

    look_at_prompts(loaded, prompts, places, look)
    missing = [name for name in places.names if any((name, o) not in seen for o in places.operands(name))]
    if missing:
        raise DataError(
            f"no token of the prompts reached '{missing[0]}' ({len(missing)} such sites); give more prompts, so that "
            "every expert is chosen"
        )
    return seen


def _range(magnitudes: Magnitudes, scheme: TensorScheme, rule: str, percentile: float) -> Tensor:
    """The largest magnitude of each head that codes are to reach, fp32 [H]."""
    match rule:
        case "min_max":
            return magnitudes.percentile(100)
        case "percentile":
            return magnitudes.percentile(percentile)
    return torch.stack([_least_error(magnitudes, head, scheme) for head in range(magnitudes.amax_H.numel())])


def _least_error(magnitudes: Magnitudes, head: int, scheme: TensorScheme) -> Tensor:
    """The share of a head's largest magnitude under which rounding costs the least squared error."""
    numbers, counts = magnitudes.numbers(head)
    amax = magnitudes.amax_H[head]
    if numbers.numel() == 0:
        return amax
    plain = TensorScheme(format=scheme.format)
    errors = []
    for ratio in MSE_RATIOS:
        scale = amax * ratio / float(formats.FORMATS[scheme.format].max)
        restored = fake_quantize(numbers / scale, plain, overflow="saturate") * scale
        errors.append(float(((restored - numbers).double().square() * counts).sum()))
    return amax * MSE_RATIOS[int(np.argmin(errors))]


def _scale(range_H: Tensor, scheme: TensorScheme, shared: bool) -> Tensor:
    """Static scales of an operand, fp32 [H], or [1] where heads share one; 1 for a head of zeros."""
    if shared:
        range_H = range_H.amax(0, keepdim=True)
    scale_H = range_H / torch.full_like(range_H, float(formats.FORMATS[scheme.format].max))
    return torch.where(scale_H > 0, scale_H, 1.0)
