"""Do a plan's static scales fit what a model meets? Held-out prompts tell, before users do.

    check_static(plan, loaded, held_out, prompts=prompts).raise_if_any()

    never set           a scale of 1.0, of whose range little is used: engines take 1.0 for what nobody calibrated
    other weights       it was found with weights of another hash
    other prompts       it was found on prompts of another hash than those given
    unknown origin      the plan does not say what it was found on, and prompts are given
    beyond the range    more of the held-out values saturate than may
    other range         the largest held-out magnitude is far above that which it was found on, or far below

Origins are there once `calibrate_static` has found the scales. What lies beyond the range is counted before it is cast
(`quantize/static_scales.py`). What a plan tells of its scales by itself is asked wherever it is run or exported
(`origin.py`).

Legend: H heads (1 outside attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bitwright.inference.static.origin import LEAST_USED, Finding, of_weights, raise_findings
from bitwright.inference.static.places import StaticPlaces, hash_prompts, look_at_prompts
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.plan import Plan
from bitwright.quantize.static_scales import overflows, reach


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftLimits:
    """When a scale does not fit what held-out prompts hold."""

    #: Share of the numbers that may lie beyond the range.
    max_beyond: float = 1e-3
    #: Largest magnitude that is met, in units of the largest that the scale was found on: between these.
    min_ratio: float = 0.125
    max_ratio: float = 2.0
    #: A scale of 1.0 counts as one that was never set, unless this share of its range is used.
    min_used: float = LEAST_USED


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticCheck:
    """What was found of a plan's static scales."""

    num_sites: int
    num_tokens: int
    findings: tuple[Finding, ...]

    def raise_if_any(self) -> None:
        """Raise PlanError, naming the sites, where any scale does not fit."""
        raise_findings(self.findings, self.num_sites)


def check_static(
    plan: Plan,
    loaded: LoadedModel,
    held_out: Sequence[Tensor],
    *,
    prompts: Sequence[Tensor] | None = None,
    limits: DriftLimits | None = None,
    sites: Sequence[Site] | None = None,
) -> StaticCheck:
    """Hold a plan's static scales against prompts that they were not found on.

    Args:
        plan: with static schemes somewhere.
        loaded: the model that is to run under it.
        held_out: token ids, int64 [B, T] each.
        prompts: those that the scales should have been found on; None: whatever they were.
        limits: when a scale does not fit.
        sites: the model's weight sites, if they are known already.

    Raises:
        PlanError: the plan has no static scheme, or does not fit the model.
        DataError: no prompts, or values that are not finite.
    """
    places = StaticPlaces.of(plan, loaded, sites)
    met = {(name, operand): _Met() for name in places.names for operand in places.operands(name)}

    def look(name: str, operand: str, x_HTD: Tensor) -> None:
        beyond = overflows(x_HTD, places.scheme(name), places.scale(name, operand).view(-1, 1, 1))
        assert beyond is not None, "a static scale has an end"
        met[name, operand].add(x_HTD, beyond)

    look_at_prompts(loaded, held_out, places, look)
    prompts_hash = None if prompts is None else hash_prompts(prompts)
    chosen = DriftLimits() if limits is None else limits
    findings: list[Finding] = []
    for name in places.names:
        findings += _of_origin(name, plan.tensors, loaded.hash, prompts_hash)
        of_site = {operand: met[name, operand] for operand in places.operands(name)}
        if all(found.num_values for found in of_site.values()):
            findings += _of_range(name, plan.tensors, places, of_site, chosen)
    tokens = sum(ids.numel() for ids in held_out)
    return StaticCheck(num_sites=len(places.names), num_tokens=tokens, findings=tuple(findings))


@dataclass(kw_only=True, slots=True, eq=False)
class _Met:
    """What came by of one operand."""

    num_values: int = 0
    num_beyond: int = 0
    amax_H: Tensor = field(default_factory=lambda: torch.zeros(1))

    def add(self, x_HTD: Tensor, beyond: Tensor) -> None:
        if x_HTD.numel():
            self.num_values += x_HTD.numel()
            self.num_beyond += int(beyond.sum())
            self.amax_H = torch.maximum(self.amax_H, x_HTD.abs().amax((1, 2)).cpu())


def _of_origin(
    name: str, tensors: Mapping[str, np.ndarray], weights_hash: str, prompts_hash: bytes | None
) -> Iterator[Finding]:
    origin = tensors.get(f"{name}/calibrated_on")
    if origin is None:
        if prompts_hash is not None:
            yield Finding(site=name, what="unknown origin", sentence="the plan does not say what it was found on")
        return
    yield from of_weights(name, tensors, weights_hash)
    of_prompts = origin.tobytes()[32:]
    if prompts_hash is not None and of_prompts != prompts_hash:
        told = f"found on prompts {of_prompts.hex()[:12]}, and those given are {prompts_hash.hex()[:12]}"
        yield Finding(site=name, what="other prompts", sentence=told)


def _of_range(
    name: str,
    tensors: Mapping[str, np.ndarray],
    places: StaticPlaces,
    met: Mapping[str, _Met],
    limits: DriftLimits,
) -> Iterator[Finding]:
    largest = reach(places.scheme(name))
    ends = {operand: places.scale(name, operand).float() * largest for operand in met}
    for operand, found in met.items():
        used = float((found.amax_H / ends[operand]).max())
        if bool((places.scale(name, operand) == 1).all()) and used < limits.min_used:
            told = f"its scale is 1.0, of whose range these prompts use {100 * used:.2g} %"
            yield Finding(site=name, what="never set", sentence=told)
            return
    share = sum(found.num_beyond for found in met.values()) / sum(found.num_values for found in met.values())
    if share > limits.max_beyond:
        told = f"{100 * share:.3g} % of the values lie beyond its range, limit {100 * limits.max_beyond:.3g} %"
        yield Finding(site=name, what="beyond the range", sentence=told)
    known = tensors.get(f"{name}/calibrated_amax")
    found_on = max(float(end.max()) for end in ends.values()) if known is None else float(known.max())
    largest_met = max(float(found.amax_H.max()) for found in met.values())
    ratio = largest_met / found_on if found_on > 0 else 1.0 + largest_met * float(np.finfo(np.float32).max)
    if not limits.min_ratio <= ratio <= limits.max_ratio:
        told = f"the largest magnitude is {ratio:.3g} times that which it was found on"
        yield Finding(site=name, what="other range", sentence=told)
