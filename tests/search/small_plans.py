"""Plans made by hand, without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bitwright.inference import input_tensors_of
from bitwright.models.sites import Site
from bitwright.models.value_sites import ValueSite
from bitwright.plan import Budget, ModelInfo, Plan, SiteChoice, Summary, TextInfo
from bitwright.quantize import SCHEMES
from bitwright.quantize.fitted import Fitted

HASH = "ab" * 32
#: Parts that a plan stores of a transform → its name.
TRANSFORM_OF = {frozenset[str](): "none", frozenset({"signs"}): "hadamard", frozenset({"column_scales"}): "smoothquant"}


def choice(site: Site | ValueSite, scheme: str, rounding: str = "rtn", **changes: Any) -> SiteChoice:
    fields: dict[str, Any] = dict(
        name=site.name,
        kind=site.kind,
        role=site.role,
        module=site.module,
        rows=getattr(site, "rows", None),
        tied_group=site.tied_group,
        shape=site.shape,
        scheme=scheme,
        rounding=rounding,
        transform="none",
        reason="a test",
        bytes=0,
        bits=0.0,
        predicted_kl=0.0,
    )
    return SiteChoice(**(fields | changes))


def plan_of(choices: Sequence[SiteChoice], tensors: Mapping[str, np.ndarray] | None = None) -> Plan:
    text = TextInfo(source="docs", tokens=1, sequences=1, hash=HASH)
    plan = Plan(
        model=ModelInfo(name="tiny", hash=HASH, params=1),
        hardware="x86-avx512-bf16",
        task="text",
        budget=Budget(effective_bits=5.0),
        objective="kl",
        seed=0,
        calibration=text,
        evaluation=text,
        sites=tuple(choices),
        summary=Summary(effective_bits=0.0, nominal_bits=0.0, weight_bytes=0, predicted_kl=0.0),
        met=False,
    )
    return plan.attach(tensors=tensors or {})


def uniform_plan(sites: Sequence[Site], scheme: str, part: str | None = None, *, ends: bool = False) -> Plan:
    """Every site under one scheme, the ends only if asked for.

    With `part` ("signs" or "column_scales") inputs go through a made-up transform that has it, the same wherever
    inputs are as wide; static schemes get one made-up scale.
    """
    chosen = [site for site in sites if ends or site.role not in ("embedding", "lm_head")]
    tensors: dict[str, np.ndarray] = {}
    for site in chosen:
        scale = torch.tensor(0.02) if SCHEMES[scheme].static_activations else None
        generator = torch.Generator().manual_seed(site.shape[1])
        drawn = torch.rand(site.shape[1], generator=generator)
        made = {"signs": ("signs_K", (drawn > 0.5) * 2.0 - 1), "column_scales": ("column_scales_K", drawn + 0.5)}
        fitted = Fitted() if part is None else Fitted(**dict([made[part]]))
        tensors |= input_tensors_of(site.name, fitted, scale)
    transform = TRANSFORM_OF[frozenset() if part is None else frozenset({part})]
    return plan_of([choice(site, scheme, transform=transform) for site in chosen], tensors)
