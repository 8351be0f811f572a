"""How the values that a plan rounds run, site by site and why: what of `run_report.py` is not about weights.

No kernel of a device takes values as a plan has them inside attention, so that wherever a plan rounds there, attention
runs step by step in fp32 (`models/attention_calls.py`), in place of the fused function that the model would call.
Caches of codes are read as numbers, which any function of attention takes.

    site                                     emulate          other modes
    cache                                    rounded fp32     codes, in a cache that grows; else rounded numbers
    operands, sums, output of attention      step by step     step by step
    product of a packed matrix               rounded fp32     rounded behind the matrix's kernel
    all others                               rounded fp32     rounded fp32
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from bitwright.inference.modes import Mode
from bitwright.inference.run_report import ValueRun
from bitwright.models.value_calls import ATTENTION_PARTS
from bitwright.models.value_sites import ValueSite

#: What attention runs as where values are rounded inside it.
STEP_BY_STEP = "step by step, fp32"


def value_runs(
    schemes: Mapping[ValueSite, str], mode: Mode, model: nn.Module, on_products: Collection[str] = ()
) -> tuple[tuple[ValueRun, ...], tuple[str, ...]]:
    """How each value site runs, and what a reader must know of attention.

    Args:
        schemes: value site → the scheme that it is rounded under.
        mode: of the run.
        model: whose attention it is.
        on_products: names of sites that are rounded behind the kernel of a packed matrix.
    """
    fused = getattr(getattr(model, "config", None), "_attn_implementation", None) or "the model's own function"
    runs = tuple(
        ValueRun(name=site.name, role=site.role, scheme=scheme, kernel=kernel, reason=reason)
        for site, scheme in schemes.items()
        for kernel, reason in [_how(site, mode, fused, site.name in on_products)]
    )
    return runs, tuple(_notes(schemes, mode, fused))


def _how(site: ValueSite, mode: Mode, fused: Any, is_product: bool) -> tuple[str, str]:
    """What runs, and why."""
    if site.kind == "state":
        if mode == "emulate":
            return "fp32", "rounded when it is written to the cache, and kept as fp32"
        return "codes", "in a cache that is new and grows; one of a fixed size keeps rounded numbers"
    if site.part in ATTENTION_PARTS:
        return STEP_BY_STEP, f"no kernel rounds inside attention, so that torch's functions run in place of {fused}"
    if is_product:
        return "behind the kernel", "rounded in fp32 when the kernel of its matrix has multiplied"
    return "fp32", "rounded where it arises"


def _notes(schemes: Mapping[ValueSite, str], mode: Mode, fused: Any) -> Iterator[str]:
    inside = sorted({site.role for site in schemes if site.part in ATTENTION_PARTS and site.kind != "state"})
    if inside:
        yield (
            f"attention runs {STEP_BY_STEP} in all layers, in place of {fused}, since {', '.join(inside)} are rounded "
            "inside it: exact, and slower than a fused kernel"
        )
    elif any(site.kind == "state" for site in schemes):
        when = "" if mode == "emulate" else " without a cache, or with one of a fixed size, and is "
        own = "" if mode == "emulate" else f"{fused} with one that grows"
        yield f"attention runs {STEP_BY_STEP}{when}{own}, since keys and values are rounded before they are read"
