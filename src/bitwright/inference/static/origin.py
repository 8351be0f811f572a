"""What a plan's static scales were found on, as far as the plan itself tells: looked at before anything runs under it.

    never set        all scales of a site are 1.0, which engines take for scales that nobody calibrated, and nothing
                     says that they were found
    other weights    they were found with weights of another hash than those that are to run

Neither costs a run of the model; whether scales fit other prompts is `drift.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bitwright.errors import PlanError
from bitwright.models.value_sites import OPERANDS
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import SCHEMES, VALUE_SCHEMES
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.static_scales import reach

#: Findings that an error lists.
_NAMED = 5
#: A scale of 1.0 counts as one that was found, where this share of its range was met.
LEAST_USED = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A scale that does not fit."""

    site: str
    what: Literal["never set", "other weights", "other prompts", "unknown origin", "beyond the range", "other range"]
    sentence: str


def raise_if_stale(plan: Plan, weights_hash: str | None = None) -> None:
    """Raise PlanError, naming the sites, where static scales were never set, or found with other weights.

    Args:
        plan: any.
        weights_hash: of the weights that are to run; None: those that the plan was made for.
    """
    static = list(_static_sites(plan))
    findings = stale_scales(plan, plan.model.hash if weights_hash is None else weights_hash)
    raise_findings(findings, len(static))


def stale_scales(plan: Plan, weights_hash: str) -> tuple[Finding, ...]:
    """What does not fit, site by site."""
    found: list[Finding] = []
    for choice, scheme in _static_sites(plan):
        found += of_weights(choice.name, plan.tensors, weights_hash)
        found += _unset(choice, scheme, plan.tensors)
    return tuple(found)


def raise_findings(findings: Sequence[Finding], num_sites: int) -> None:
    """Raise PlanError, naming the sites, unless there are none."""
    if not findings:
        return
    kinds = ", ".join(sorted({finding.what for finding in findings}))
    listed = "; ".join(f"{finding.site}: {finding.sentence}" for finding in findings[:_NAMED])
    more = f"; and {len(findings) - _NAMED} more" if len(findings) > _NAMED else ""
    raise PlanError(
        f"the static scales of {len({finding.site for finding in findings})} of {num_sites} sites do not fit "
        f"({kinds}): {listed}{more}; find them anew on prompts like those to come: bitwright verify PLAN --static "
        "PROMPTS --rule min_max --out NEW-PLAN, or calibrate_static(…)"
    )


def of_weights(name: str, tensors: Mapping[str, np.ndarray], weights_hash: str) -> Iterator[Finding]:
    """Whether a site's scales were found with weights of another hash."""
    origin = tensors.get(f"{name}/calibrated_on")
    if origin is not None and origin.tobytes()[:32].hex() != weights_hash:
        told = f"found with weights {origin.tobytes()[:32].hex()[:12]}, and these are {weights_hash[:12]}"
        yield Finding(site=name, what="other weights", sentence=told)


def _static_sites(plan: Plan) -> Iterator[tuple[SiteChoice, TensorScheme]]:
    """Sites with scales that are found beforehand, and what is rounded to under them."""
    for choice in plan.sites:
        if choice.kind == "weight":
            scheme = SCHEMES[choice.scheme]
            if scheme.static_activations and scheme.activations is not None:
                yield choice, scheme.activations
        elif choice.scheme != "as_loaded" and VALUE_SCHEMES[choice.scheme].static and _scales_of(choice, plan.tensors):
            yield choice, VALUE_SCHEMES[choice.scheme].values


def _unset(choice: SiteChoice, scheme: TensorScheme, tensors: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    scales = _scales_of(choice, tensors)
    if not scales or not all(bool((scale == 1).all()) for scale in scales):
        return
    amax = tensors.get(f"{choice.name}/calibrated_amax")
    if amax is not None and (not amax.any() or float(amax.max()) >= LEAST_USED * reach(scheme)):
        return
    told = "its scale is 1.0, and nothing says that it was found"
    if amax is not None:
        told = f"its scale is 1.0, and the largest magnitude that was met is {float(amax.max()):.3g}"
    yield Finding(site=choice.name, what="never set", sentence=told)


def _scales_of(choice: SiteChoice, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Of inputs, or of values: one, or one for each of several operands."""
    if choice.kind == "weight":
        names = [f"{choice.name}/input_scale"]
    else:
        operands = OPERANDS.get(choice.name.rpartition(":")[2], ("y",))
        names = [f"{choice.name}/scale", *(f"{choice.name}/scale_{operand}" for operand in operands)]
    return [tensors[name] for name in names if name in tensors]
