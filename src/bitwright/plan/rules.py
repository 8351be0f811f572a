"""What a device and an engine allow at a site, and why not: a sentence for every choice that is ruled out.

    why_not(site, scheme, device=…, engine=…)     the reason, or None        device_rules.py, engine_rules.py
    ruled_out(sites, schemes, device=…, engine=…) the same for all, grouped by reason
    ties(sites, engine)                           who has to choose together  ties.py
    remarks(scheme, device=…, engine=…)           no reason to refuse, but worth knowing

All facts are data of device files (`hardware/devices`), engine files (`engines`) and schemes; the rules compare them.
A site is anything with a name, a role and a shape. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bitwright.hardware import Device
from bitwright.plan.device_rules import device_reason, device_value_reason, plain_formats, rule_of
from bitwright.plan.engine import Engine, engines, get_engine
from bitwright.plan.engine_rules import (
    engine_reason,
    engine_value_reason,
    is_folded,
    negative_scales_allowed,
    runs_alone,
    runs_on,
    transform_reason,
)
from bitwright.plan.site_facts import SiteFacts, TransformFacts
from bitwright.plan.ties import ties
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.value_scheme import ValueScheme

__all__ = [
    "Engine",
    "RuledOut",
    "SiteFacts",
    "TransformFacts",
    "engines",
    "get_engine",
    "is_folded",
    "negative_scales_allowed",
    "remarks",
    "ruled_out",
    "runs_alone",
    "runs_on",
    "ties",
    "why_not",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """One scheme that one reason rules out, with the sites where it does."""

    scheme: str
    reason: str
    sites: tuple[str, ...]
    roles: tuple[str, ...]

    def __str__(self) -> str:
        where = self.sites[0] if len(self.sites) == 1 else f"{len(self.sites)} sites ({', '.join(self.roles)})"
        return f"{self.scheme} at {where}: {self.reason}"


def why_not(
    site: SiteFacts,
    scheme: Scheme | ValueScheme,
    *,
    device: Device | None = None,
    engine: Engine | None = None,
    transform: TransformFacts | None = None,
    kernels_on: Device | None = None,
) -> str | None:
    """Return the first reason that rules a scheme out at a site, or None.

    Args:
        site: where.
        scheme: of weights (and activations) or, at a value site, of values.
        device, engine: whose rules count; None asks for none.
        transform: what is done to the tensor first; an engine has to be able to change the inputs accordingly.
        kernels_on: the device that the engine has to have kernels on; None: `device`.
    """
    where = device if kernels_on is None else kernels_on
    if isinstance(scheme, ValueScheme):
        reason = device_value_reason(site, scheme, device) if device is not None else None
        return reason or (engine_value_reason(site, scheme, engine, where) if engine is not None else None)
    if scheme.weights is None:
        return None
    reason = device_reason(site, scheme, device) if device is not None else None
    if reason is None and engine is not None:
        reason = engine_reason(site, scheme, scheme.weights, engine, where)
        if reason is None and transform is not None:
            reason = transform_reason(site, transform, engine)
    return reason


def ruled_out(
    sites: Iterable[SiteFacts],
    schemes: Sequence[Scheme | ValueScheme],
    *,
    device: Device | None = None,
    engine: Engine | None = None,
) -> tuple[RuledOut, ...]:
    """Return every (scheme, reason) with all sites where it holds, in the order of the schemes.

    Each site is asked about every scheme: pass weight sites with weight schemes, value sites with those that fit them.
    """
    found: dict[tuple[str, str], list[SiteFacts]] = {}
    asked = list(sites)
    for scheme in schemes:
        for site in asked:
            reason = why_not(site, scheme, device=device, engine=engine)
            if reason is not None:
                found.setdefault((scheme.name, reason), []).append(site)
    return tuple(
        RuledOut(
            scheme=name,
            reason=reason,
            sites=tuple(site.name for site in where),
            roles=tuple(dict.fromkeys(site.role for site in where)),
        )
        for (name, reason), where in found.items()
    )


def remarks(scheme: Scheme, *, device: Device | None = None, engine: Engine | None = None) -> tuple[str, ...]:
    """Return what is worth knowing of a scheme that is allowed: accumulators, formats that are no faster, notes."""
    said: list[str] = []
    activations = scheme.activations
    if device is not None and activations is not None and activations.scaling is not None:
        rate = device.matmul_tflops.get(activations.format)
        plain = max((device.matmul_tflops[name] for name in plain_formats(device)), default=0.0)
        if rate is not None and rate <= plain:
            said.append(
                f"{device.name} multiplies {activations.format} at {rate:g} TFLOP/s, no faster than 16 bits at "
                f"{plain:g}: it saves memory, not arithmetic"
            )
        rule = rule_of(device, activations)
        if rule is not None and rule.accumulator_bits is not None:
            said.append(
                f"{device.name} keeps {rule.accumulator_bits} significant bits of a sum of {activations.format} "
                f"products, fp32 keeps 24 ({rule.source})"
            )
    return (*said, *(engine.notes if engine is not None else ()))
