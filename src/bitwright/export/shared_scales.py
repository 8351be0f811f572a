"""One tensor scale for all matrices that an engine computes at once.

    shared = share_tensor_scales(plan, loaded, "vllm")        # another plan: `bitwright verify` measures it

The second level of NVFP4's scales is one number a matrix. An engine that multiplies q, k and v, or gate and up, as one
matrix has room for one, and takes the largest range for all: parts whose numbers are smaller would come out wrong by
the ratio of the two. So the parts are rounded again, to nearest, with the scales of their groups in units of the one
tensor scale that all of them share, which is the largest of their own:

    scale of a group = E4M3(amax / 6 / shared)        shared = the largest amax of the parts / 2688

What that costs is resolution of E4M3 where a part is much smaller than another. A plan keeps these scales; its codes
follow from them ("shared" of `quantize/rounding/stored.py`).

Rejected: the largest tensor scale written over the others, as engines do with a warning: what would run is not what was
measured; doing so while exporting, for the same reason.

Legend: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import ExportError
from bitwright.export.site_names import spell_sites
from bitwright.export.source import ExportSource, SiteWeight, open_source
from bitwright.inference import tensors_of
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.plan import Plan
from bitwright.plan.engine import Engine, get_engine
from bitwright.plan.rules import ties
from bitwright.quantize import ROUNDINGS, quantize
from bitwright.quantize.granularity import to_groups
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.rounding.stored import SHARED
from bitwright.quantize.scaling import find_scales


@torch.no_grad()
def share_tensor_scales(plan: Plan, loaded: LoadedModel, engine: str, *, sites: Sequence[Site] | None = None) -> Plan:
    """A plan whose matrices that an engine computes at once have one tensor scale; the plan itself where they have.

    Args:
        plan: for this model.
        loaded: fp32.
        engine: name or alias of the engine that is to load it.
        sites: the model's weight sites, if they are known already.

    Returns:
        A plan without what was measured of the other one, if anything changed.

    Raises:
        ExportError: codes of parts were found with data, under their own tensor scale: rounding them again would undo
            that.
        PlanError: the plan is for another model, or lacks tensors.
        UnknownName: there is no such engine.
    """
    record = get_engine(engine)
    source = open_source(plan, loaded, sites=sites, engine=record)
    changed: dict[str, QTensor] = {}
    for weights in _computed_at_once(source, record):
        scales = [_tensor_scale(weight) for weight in weights]
        if len({float(scale) for scale in scales}) > 1:
            _raise_if_found_with_data(weights, record)
            shared = torch.stack(scales).amax()
            changed |= {weight.site.name: _rounded(weight, shared) for weight in weights}
    return _with(plan, changed) if changed else plan


def _computed_at_once(source: ExportSource, engine: Engine) -> list[list[SiteWeight]]:
    """Weights under two levels of scales that the engine computes at once."""
    tied = ties(source.sites, engine)
    groups: dict[str, list[SiteWeight]] = {}
    for weight in (source.weight(site) for site in source.coded_sites()):
        scaling = None if weight.tensor_scheme is None else weight.tensor_scheme.scaling
        if weight.site.name in tied and scaling is not None and scaling.tensor_scale:
            groups.setdefault(tied[weight.site.name], []).append(weight)
    return list(groups.values())


def _tensor_scale(weight: SiteWeight) -> Tensor:
    scale = weight.codes().tensor_scale
    assert scale is not None
    return scale


def _raise_if_found_with_data(weights: Sequence[SiteWeight], engine: Engine) -> None:
    found = [weight for weight in weights if weight.choice is not None and ROUNDINGS[weight.choice.rounding].needs_data]
    if found:
        names = spell_sites(weight.site.name for weight in found)
        assert found[0].choice is not None
        raise ExportError(
            f"{engine.name} computes matrices at once under one tensor scale, and codes of these were found with data, "
            f"each under its own ({found[0].choice.rounding}): {names}; plan them with --rounding rtn"
        )


def _rounded(weight: SiteWeight, shared: Tensor) -> QTensor:
    """Codes to nearest under a tensor scale that is given."""
    scheme = weight.tensor_scheme
    assert scheme is not None and scheme.scaling is not None
    w_NK = weight.transform.weight(weight.loaded_NK.contiguous())
    grouped = to_groups(w_NK, scheme.scaling.granularity)
    return quantize(
        w_NK, scheme, scales=find_scales(grouped, scheme.format, scheme.scaling, tensor_scale=shared.clone())
    )


def _with(plan: Plan, changed: Mapping[str, QTensor]) -> Plan:
    tensors: dict[str, np.ndarray] = dict(plan.tensors)
    for name, q in changed.items():
        tensors |= tensors_of(name, q)
    sites = tuple(
        choice.model_copy(update={"rounding": SHARED.name}) if choice.name in changed else choice
        for choice in plan.sites
    )
    note = f"{len(changed)} sites share tensor scales with those that an engine computes at once: nothing was measured"
    return plan.replace(sites=sites, measured=None, met=False, notes=(*plan.notes, note)).attach(tensors=tensors)
