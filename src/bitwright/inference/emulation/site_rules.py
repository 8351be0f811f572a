"""A plan on its model: which codes each site runs with.

A choice whose codes depended on data carries what was found in the plan's tensors, so that what runs is what was
measured: nothing is calibrated again. All other codes follow from the weights alone.

    codes           uint8 [N, bytes of a row], as `quantize/pack.py` packs them; where codes are not the nearest ones
                    under the scales (error feedback)
    scales          fp16 or fp32 [N, G]
    offsets         uint8 zero points, or minima like the scales, [N, G]; where the scheme is not symmetric
    tensor_scale    fp32 []; where the scheme has one
    column_scales   fp32 [K]; where the transform multiplies columns
    signs           int8 [K], ±1; where the transform rotates
    input_scale     fp32 []; where the scheme's activations are static
    scale           fp32 [heads] or [1]; where a value scheme is static (`values.py`), scale_q and scale_k at q·k
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bitwright import formats
from bitwright.errors import PlanError
from bitwright.inference.counters import Counters
from bitwright.inference.emulation.emulate import SiteRule, emulate
from bitwright.inference.emulation.values import value_rules
from bitwright.models.sites import Site
from bitwright.models.spool import Originals
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Plan
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS, QTensor, quantize
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.pack import decode_numbers, pack_codes, unpack_bits
from bitwright.quantize.scaling import Scales
from bitwright.quantize.scheme import TensorScheme


class Chosen(Protocol):
    """A choice at a weight site: as a plan has it, or a search that has not written its plan yet."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def scheme(self) -> str: ...

    @property
    def rounding(self) -> str: ...

    @property
    def transform(self) -> str: ...


@contextmanager
def emulate_plan(
    plan: Plan,
    model: nn.Module,
    sites: Sequence[Site],
    *,
    in_place: bool = True,
    originals: Originals | None = None,
    counters: Counters | None = None,
) -> Iterator[nn.Module]:
    """Run `model` as the plan says, for the time of the block.

    Args:
        plan: choices for weights and for values.
        model: fp32; changed inside the block only.
        sites: all weight sites of the model.
        in_place: replace the weights once; False computes them anew on every call and keeps no copy (`emulate.py`).
        originals: where replaced weights lie meanwhile; None: in memory.
        counters: counts of rounded and of overflowing numbers are added to it, by matrix or value site.

    Raises:
        PlanError: the plan names sites that the model lacks or has in another shape, or lacks the tensors of one.
    """
    rules = site_rules(plan, sites)
    rounds_values = any(choice.kind != "weight" for choice in plan.sites)
    values = value_rules(plan, find_value_sites(model)) if rounds_values else None
    with emulate(model, sites, rules, values=values, in_place=in_place, originals=originals, counters=counters):
        yield model


def site_rules(plan: Plan, sites: Sequence[Site]) -> dict[str, SiteRule]:
    """Site name → rule, for every weight site that does not stay as it was loaded.

    Raises:
        PlanError: the plan names sites that the model lacks or has in another shape, or lacks the tensors of one.
        UnknownName: the plan chooses a scheme, rounding or transform that this version does not have.
    """
    known = {site.name: site for site in sites}
    chosen = [choice for choice in plan.sites if choice.kind == "weight"]
    missing = [choice.name for choice in chosen if choice.name not in known]
    if missing:
        site_file = plan.run.paths.get("sites")
        what, advice = "this model does not have", f"load the model that the plan is for: {plan.model.name}"
        if site_file is not None:
            what = "is not among the sites that were given"
            advice = f"the plan's sites are those that a file names: give find_sites(model, '{site_file}')"
        count = f"{len(missing)} such site{'' if len(missing) == 1 else 's'}"
        raise PlanError(f"the plan chooses for '{missing[0]}' ({count}), which {what}; {advice}")
    rules = {}
    for choice in chosen:
        if choice.shape != known[choice.name].shape:
            raise PlanError(
                f"the plan has '{choice.name}' as {list(choice.shape)}, but this model's is "
                f"{list(known[choice.name].shape)}; load the model that the plan is for: {plan.model.name}"
            )
        rule = rule_of(choice, plan.tensors)
        if rule is not None:
            rules[choice.name] = rule
    return rules


def rule_of(choice: Chosen, tensors: Mapping[str, np.ndarray]) -> SiteRule | None:
    """What one choice runs with, given what a plan keeps of it; None where the site stays as it was loaded.

    Raises:
        PlanError: the tensors lack something, or have it in another shape.
        UnknownName: this version has no such scheme, rounding or transform.
    """
    transform = _stored_transform(tensors, choice)
    scheme = SCHEMES[choice.scheme]
    if scheme.weights is None:
        return None
    codes = codes_of(choice, tensors)
    return SiteRule(
        quantize_weight=lambda weight_NK: codes(weight_NK).dequantize(),
        activations=scheme.activations,
        transform=transform,
        input_scale=_stored_input_scale(tensors, choice) if scheme.static_activations else None,
    )


def input_tensors_of(site_name: str, transform: Fitted, input_scale: Tensor | None) -> dict[str, np.ndarray]:
    """What a plan keeps of what is done to a site's input: nothing where there is no transform and no static scale."""
    kept = {f"{site_name}/{part}": array for part, array in transform.tensors().items()}
    if input_scale is not None:
        kept[f"{site_name}/input_scale"] = input_scale.cpu().numpy().astype(np.float32)
    return kept


def tensors_of(site_name: str, q: QTensor) -> dict[str, np.ndarray]:
    """What a plan keeps of codes that were found with data."""
    assert q.scales_NG is not None and q.scheme.scaling is not None
    scaling = q.scheme.scaling
    kept = {f"{site_name}/scales": _as_stored(q.scales_NG, scaling.scale_format)}
    if q.offsets_NG is not None:
        zero_points = scaling.symmetry == "zero_point"
        kept[f"{site_name}/offsets"] = (
            q.offsets_NG.numpy().astype(np.uint8) if zero_points else _as_stored(q.offsets_NG, scaling.scale_format)
        )
    if q.tensor_scale is not None:
        kept[f"{site_name}/tensor_scale"] = q.tensor_scale.numpy()
    if not q.follows_from_scales:
        kept[f"{site_name}/codes"] = pack_codes(q).codes.numpy()
    return kept


def _as_stored(values: Tensor, scale_format: str) -> np.ndarray:
    return values.numpy().astype(np.float16 if scale_format == "fp16" else np.float32)


def _stored_scales(tensors: Mapping[str, np.ndarray], choice: Chosen, scheme: TensorScheme) -> Scales | None:
    """The scales that a plan holds for a choice; None where codes follow from the weights alone."""
    if scheme.scaling is None or not ROUNDINGS[choice.rounding].needs_data:
        return None
    rows, columns = choice.shape
    per_group = scheme.scaling.granularity.scale_shape(rows, columns)

    def read(part: str, shape: tuple[int, ...]) -> Tensor:
        needed_by = f"whose rounding '{choice.rounding}' needs them"
        return torch.from_numpy(_stored(tensors, choice, part, shape, needed_by).astype(np.float32))

    return Scales(
        scale=read("scales", per_group).unsqueeze(-1),
        offset=None if scheme.scaling.symmetry == "symmetric" else read("offsets", per_group).unsqueeze(-1),
        tensor_scale=read("tensor_scale", ()) if scheme.scaling.tensor_scale else None,
    )


def _stored_transform(tensors: Mapping[str, np.ndarray], choice: Chosen) -> Fitted:
    """The transform that a plan holds for a choice."""
    parts = TRANSFORMS[choice.transform].parts
    needed_by = f"whose transform '{choice.transform}' needs them"
    return Fitted.from_tensors(
        {part: _stored(tensors, choice, part, (choice.shape[1],), needed_by) for part in sorted(parts)}
    )


def _stored_input_scale(tensors: Mapping[str, np.ndarray], choice: Chosen) -> Tensor:
    needed_by = f"whose scheme '{choice.scheme}' has static activations"
    return torch.from_numpy(_stored(tensors, choice, "input_scale", (), needed_by).astype(np.float32))


def _stored(
    tensors: Mapping[str, np.ndarray], choice: Chosen, part: str, shape: tuple[int, ...], needed_by: str
) -> np.ndarray:
    """One tensor of a choice. Raises PlanError where the plan lacks it or has it in another shape."""
    found = tensors.get(f"{choice.name}/{part}")
    if found is None or found.shape != shape:
        what = f"no {part}" if found is None else f"{part} of shape {list(found.shape)} instead of {list(shape)}"
        raise PlanError(
            f"the plan's tensors hold {what} for '{choice.name}', {needed_by}; "
            "the folder's tensors.safetensors is from another plan: make the plan again"
        )
    return found


def _stored_codes(tensors: Mapping[str, np.ndarray], choice: Chosen, scheme: TensorScheme) -> Tensor | None:
    """Values of the codes that a plan holds for a choice, fp32 [N, K]; None where they follow from the scales."""
    packed = _packed_codes(tensors, choice, scheme)
    if packed is None:
        return None
    number = formats.FORMATS[scheme.format]
    return decode_numbers(unpack_bits(torch.from_numpy(packed), number.bits, choice.shape[1]), number)


def _packed_codes(tensors: Mapping[str, np.ndarray], choice: Chosen, scheme: TensorScheme) -> np.ndarray | None:
    if scheme.scaling is None or not ROUNDINGS[choice.rounding].keeps_codes:
        return None
    rows, columns = choice.shape
    needed_by = f"whose rounding '{choice.rounding}' needs them"
    row_bytes = -(-columns * formats.FORMATS[scheme.format].bits // 8)
    return _stored(tensors, choice, "codes", (rows, row_bytes), needed_by)


def codes_of(choice: Chosen, tensors: Mapping[str, np.ndarray]) -> Callable[[Tensor], QTensor]:
    """What turns a site's loaded weight, fp32 [N, K], into the codes and scales that the choice stands for.

    They are the codes that the plan holds, else the nearest ones under the scales that it holds, else those that follow
    from the weight alone; of the changed weight, where there is a transform.

    Raises:
        PlanError: the tensors lack something, or have it in another shape; told here, before anything runs.
        UnknownName: this version has no such scheme, rounding or transform.
    """
    scheme = SCHEMES[choice.scheme].weights
    assert scheme is not None, f"{choice.name} stays as it was loaded"
    transform = _stored_transform(tensors, choice)
    stored = _stored_scales(tensors, choice, scheme)
    _packed_codes(tensors, choice, scheme)

    def found(weight_NK: Tensor) -> QTensor:
        # unpacked on every call: values of all codes at once are as large as the model
        codes_NK = _stored_codes(tensors, choice, scheme)
        if codes_NK is None:
            return quantize(transform.weight(weight_NK), scheme, scales=stored)
        assert stored is not None
        return QTensor(
            scheme=scheme,
            codes_NK=codes_NK,
            scales_NG=stored.scale.squeeze(-1),
            offsets_NG=None if stored.offset is None else stored.offset.squeeze(-1),
            tensor_scale=stored.tensor_scale,
            follows_from_scales=False,
        )

    return found
