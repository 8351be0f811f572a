"""A plan on its model: which codes each site runs with.

A choice whose codes depended on data carries its stored scales (and offsets) in the plan's tensors, so that what runs is
what was measured: nothing is calibrated again. All other codes follow from the weights alone.

    scales    fp16 or fp32 [N, G]       offsets   uint8 zero points or minima [N, G]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.errors import PlanError
from bitwright.inference.emulate import SiteRule, emulate
from bitwright.models.sites import Site
from bitwright.plan import Plan
from bitwright.quantize import ROUNDINGS, SCHEMES, QTensor, quantize
from bitwright.quantize.scaling import Scales
from bitwright.quantize.scheme import TensorScheme


@contextmanager
def emulate_plan(plan: Plan, model: nn.Module, sites: Sequence[Site]) -> Iterator[nn.Module]:
    """Run `model` as the plan says, for the time of the block.

    Raises:
        PlanError: the plan names sites that the model does not have, or lacks the tensors of one.
    """
    with emulate(model, sites, site_rules(plan, sites)):
        yield model


def site_rules(plan: Plan, sites: Sequence[Site]) -> dict[str, SiteRule]:
    """Site name → rule, for every site that does not stay as it was loaded."""
    known = {site.name for site in sites}
    missing = [choice.name for choice in plan.sites if choice.name not in known]
    if missing:
        raise PlanError(
            f"the plan chooses for '{missing[0]}' ({len(missing)} such sites), which this model does not have; "
            f"load the model that the plan is for: {plan.model.name}"
        )
    rules = {}
    for choice in plan.sites:
        scheme = SCHEMES[choice.scheme]
        if scheme.weights is None:
            continue
        stored = _stored_scales(plan.tensors, choice.name)
        if stored is None and ROUNDINGS[choice.rounding].needs_data:
            raise PlanError(
                f"the plan's tensors hold no scales for '{choice.name}', whose rounding '{choice.rounding}' needs them; "
                "the folder's tensors.safetensors is from another plan: make the plan again"
            )
        rules[choice.name] = SiteRule(
            quantize_weight=_quantizer(scheme.weights, stored), activations=scheme.activations
        )
    return rules


def tensors_of(site_name: str, q: QTensor) -> dict[str, np.ndarray]:
    """What a plan keeps of codes that were found with data."""
    assert q.scales_NG is not None and q.scheme.scaling is not None
    kept = {f"{site_name}/scales": _as_stored(q.scales_NG, q.scheme.scaling.scale_format)}
    if q.offsets_NG is not None:
        if q.scheme.scaling.symmetry == "zero_point":
            kept[f"{site_name}/offsets"] = q.offsets_NG.numpy().astype(np.uint8)
        else:
            kept[f"{site_name}/offsets"] = _as_stored(q.offsets_NG, q.scheme.scaling.scale_format)
    return kept


def _as_stored(values: Tensor, scale_format: str) -> np.ndarray:
    return values.numpy().astype(np.float16 if scale_format == "fp16" else np.float32)


def _stored_scales(tensors: Mapping[str, np.ndarray], site_name: str) -> Scales | None:
    scales = tensors.get(f"{site_name}/scales")
    if scales is None:
        return None
    offsets = tensors.get(f"{site_name}/offsets")
    return Scales(
        scale=torch.from_numpy(scales.astype(np.float32)).unsqueeze(-1),
        offset=None if offsets is None else torch.from_numpy(offsets.astype(np.float32)).unsqueeze(-1),
        tensor_scale=None,
    )


def _quantizer(scheme: TensorScheme, stored: Scales | None) -> Callable[[Tensor], Tensor]:
    def values(weight_NK: Tensor) -> Tensor:
        return quantize(weight_NK, scheme, scales=stored).dequantize()

    return values
