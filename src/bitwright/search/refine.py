"""Codes improved after every site has its scheme: what `--effort high` adds to a plan.

    flow      every matrix makes up for the errors of all before it            (`refine_flow.py`)
    scales    scales follow the gradient of the true KL, codes held            (`refine_scales.py`)

Both use the calibration text alone; for the first there may be more of it (`Splits.further`), since how well codes do
on other text is a matter of how much they saw: SmolLM2-135M in int4 groups of 128 comes to a KL of 0.070 with every
matrix on its own, to 0.054 in the flow of the same 8,192 tokens. What they found is then measured on the repair text
beside what the plan had, run from the tensors that a plan keeps; the least KL stays, and the plan says so. Sites in
question are whole matrices that store codes under scales of rows or groups, without a transform and with inputs left as
they are; all others keep what they have, and are made up for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from bitwright.errors import DataError
from bitwright.inference import emulate_plan, tensors_of
from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site
from bitwright.models.spool import Spool
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import SCHEMES
from bitwright.quantize.error_feedback import can_feed_back
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.rounding.stored import LEARNED
from bitwright.search.calibrate import calibrate
from bitwright.search.output import Reference
from bitwright.search.price import END_ROLES
from bitwright.search.progress import Progress
from bitwright.search.refine_flow import find_in_flow
from bitwright.search.refine_scales import NUM_EPOCHS, scales_are_continuous, tune_scales
from bitwright.search.subject import Subject, known_reference
from bitwright.search.text import TextSet

#: Added to the seed of the plan: other labels are drawn than those that the scores saw.
REFINEMENT_SEED = 1
#: Sequences of the repair text on which what was found is compared.
NUM_SEQUENCES = 32
_LEARNED = LEARNED.name


def refine(plan: Plan, subject: Subject, repair: Reference, folder: Path, progress: Progress) -> Plan:
    """The plan with better codes, or as it is where none were found; a note tells which.

    Args:
        plan: a draft, with its tensors.
        subject: model and text.
        repair: the reference on the repair text.
        folder: on whose disk lies what the text leaves at every matrix.
        progress: shows the stages.
    """
    sites = _refinable(plan, subject.sites)
    if not sites:
        return plan.replace(notes=(*plan.notes, "no site has codes that could be refined"))
    text = _text_of(subject)
    flowed = _flow(plan, subject, sites, text, folder, progress)
    if not flowed:
        return plan.replace(notes=(*plan.notes, "no site has codes that could be refined"))
    plans = {"as chosen": plan, "errors made up for by later layers": _with_codes(plan, flowed)}
    tuned = _tune(plans["errors made up for by later layers"], subject, flowed, progress)
    plans["and scales tuned"] = _with_codes(plan, {**flowed, **tuned})
    kls = {name: _measure(tried, subject, repair, progress) for name, tried in plans.items()}
    best = min(kls, key=lambda name: kls[name])
    words = ", ".join(f"{name} {kl:.4g}" for name, kl in kls.items())
    kept = f"codes of {len(flowed)} sites were refined" if best != "as chosen" else "refined codes were no better"
    read = f"{text.num_tokens:,} tokens"
    note = f"{kept} with {read}: on {_count(repair)} sequences of the repair text the KL is {words}"
    ratio = kls[best] / kls["as chosen"] if kls["as chosen"] > 0 else 1.0
    summary = plan.summary.model_copy(update={"predicted_kl": plan.summary.predicted_kl * ratio})
    return plans[best].replace(notes=(*plan.notes, note), summary=summary)


def _refinable(plan: Plan, sites: tuple[Site, ...]) -> list[Site]:
    """Sites of matrices all of whose sites can be refined."""
    choices = {choice.name: choice for choice in plan.sites}
    return [
        site
        for matrix in matrices_of(sites)
        if all(_can_be_refined(choices[site.name]) for site in matrix.sites)
        for site in matrix.sites
    ]


def _can_be_refined(choice: SiteChoice) -> bool:
    scheme = SCHEMES[choice.scheme]
    return (
        scheme.weights is not None
        and scheme.activations is None
        and choice.transform == "none"
        and choice.role not in END_ROLES
        and can_feed_back(scheme.weights)
    )


def raise_if_no_room(subject: Subject, folder: Path) -> None:
    """Refuse before any work what would end for want of room on the disk.

    Raises:
        DataError: inputs and gradients of the text need more than is free.
    """
    decoder = [site for site in subject.sites if site.role not in END_ROLES]
    numbers = sum(site.shape[0] + site.shape[1] for site in decoder)
    num_bytes = _text_of(subject).input_ids.numel() * numbers * torch.bfloat16.itemsize
    free = shutil.disk_usage(_existing(folder)).free
    if num_bytes > free:
        raise DataError(
            f"--effort high keeps up to {num_bytes / 2**30:.1f} GiB in {folder}, where {free / 2**30:.1f} GiB are "
            "free; name a folder on a larger disk with --spool, or ask for fewer --tokens"
        )


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _flow(
    plan: Plan, subject: Subject, sites: list[Site], text: TextSet, folder: Path, progress: Progress
) -> dict[str, QTensor]:
    model = subject.loaded.model
    decoder = [site for site in subject.sites if site.role not in END_ROLES]
    names = {site.name for site in sites}
    schemes = {c.name: w for c in plan.sites if c.name in names and (w := SCHEMES[c.scheme].weights) is not None}
    waiting = _with_choices(plan, {site.name: {"scheme": "as_loaded", "rounding": "rtn"} for site in sites})
    with Spool(folder) as spool:
        with progress.stage("calibrate", text.num_sequences) as stage:
            statistics = calibrate(
                model,
                decoder,
                text,
                seed=plan.seed + REFINEMENT_SEED,
                stage=stage,
                output=subject.output,
                spool=spool,
            )
        with (
            progress.stage("refine the codes", len(matrices_of(decoder))) as stage,
            emulate_plan(waiting, model, subject.sites, originals=subject.originals),
        ):
            return find_in_flow(model, decoder, schemes, text, statistics, subject.output, stage)


def _text_of(subject: Subject) -> TextSet:
    """The calibration text, and more of the same documents where there is more."""
    splits = subject.splits
    return splits.calibrate if splits.further is None else splits.calibrate.joined(splits.further)


def _tune(plan: Plan, subject: Subject, codes: Mapping[str, QTensor], progress: Progress) -> dict[str, QTensor]:
    tunable = {name: q for name, q in codes.items() if scales_are_continuous(q.scheme)}
    if not tunable:
        return {}
    model, text = subject.loaded.model, subject.splits.calibrate
    reference = known_reference(subject, text, progress)
    with (
        progress.stage("tune the scales", NUM_EPOCHS * text.num_sequences) as stage,
        emulate_plan(plan, model, subject.sites, originals=subject.originals),
    ):
        return tune_scales(model, subject.sites, tunable, reference, subject.output, stage, seed=plan.seed)


def _with_codes(plan: Plan, codes: Mapping[str, QTensor]) -> Plan:
    """The plan with these codes at their sites."""
    tensors = {key: array for key, array in plan.tensors.items() if key.rpartition("/")[0] not in codes}
    for name, q in codes.items():
        tensors |= tensors_of(name, replace(q, codes_NK=q.codes_NK.float()))
    return _with_choices(plan, {name: {"rounding": _LEARNED} for name in codes}).attach(tensors=tensors)


def _with_choices(plan: Plan, changes: Mapping[str, Mapping[str, str]]) -> Plan:
    return plan.replace(sites=tuple(c.model_copy(update=dict(changes.get(c.name, {}))) for c in plan.sites))


def _measure(plan: Plan, subject: Subject, repair: Reference, progress: Progress) -> float:
    count = _count(repair)
    with (
        torch.no_grad(),
        progress.stage("measure the refined codes", count) as stage,
        emulate_plan(plan, subject.loaded.model, subject.sites, originals=subject.originals) as model,
    ):
        return subject.output.compare(repair, model, stage, count).mean_kl


def _count(repair: Reference) -> int:
    return min(NUM_SEQUENCES, repair.text.num_sequences)
