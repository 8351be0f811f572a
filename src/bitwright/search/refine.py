"""Codes improved after every site has its scheme: what `--effort high` adds to a plan.

    flow      every matrix makes up for the errors of all before it            (`refine_flow.py`)
    scales    scales follow the gradient of the true KL, codes held            (`refine_scales.py`)

Both use the calibration text alone; for the first there may be more of it (`Splits.further`), since how well codes do
on other text is a matter of how much they saw: SmolLM2-135M in int4 groups of 128 comes to a KL of 0.070 with every
matrix on its own, to 0.054 in the flow of the same 8,192 tokens. What they found is then measured on the repair text
beside what the plan had, run from the tensors that a plan keeps; the least KL stays, and the plan says so. Sites in
question are whole matrices that store codes under scales of rows or groups, without a transform and with inputs left as
they are; all others keep what they have, and are made up for.

What a plan says of itself is measured after this, with the codes that it has by then. Nothing predicts what refining
gains, so predictions stay those of the codes that were scored, and say so.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bitwright.errors import DataError
from bitwright.inference import tensors_of
from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site
from bitwright.models.spool import Spool
from bitwright.plan import Plan
from bitwright.quantize import SCHEMES
from bitwright.quantize.error_feedback import can_feed_back
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.rounding.stored import LEARNED
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate
from bitwright.search.measure import Meter
from bitwright.search.mend import Mended
from bitwright.search.price import AS_LOADED, END_ROLES, Assignment
from bitwright.search.progress import Progress
from bitwright.search.refine_flow import find_in_flow
from bitwright.search.refine_scales import NUM_EPOCHS, scales_are_continuous, tune_scales
from bitwright.search.subject import Subject, known_reference
from bitwright.search.text import TextSet

#: Added to the seed of the plan: other labels are drawn than those that the scores saw.
REFINEMENT_SEED = 1
#: What stands beside refined codes in a plan.
_BESIDE = (
    "only this plan's codes were refined: every predicted KL is of the codes before, and one scheme everywhere, other "
    "points of the front and other searches were measured with theirs as a search finds them"
)


#: Site → tensors of its codes, as a plan keeps them.
Codes = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Refined:
    """What became of a plan's codes."""

    #: With the effects of the codes that the plan has now, and a note of what was tried.
    mended: Mended
    #: Measures the plan with those codes on the repair text; no other assignment is to run under it.
    own: Meter
    #: Codes that took the place of those that were chosen; none where these stay.
    codes: Codes

    def written_to(self, plan: Plan) -> Plan:
        """A plan with these codes at their sites."""
        tensors = {key: array for key, array in plan.tensors.items() if key.rpartition("/")[0] not in self.codes}
        for found in self.codes.values():
            tensors |= found
        sites = (c.model_copy(update={"rounding": LEARNED.name}) if c.name in self.codes else c for c in plan.sites)
        return plan.replace(sites=tuple(sites)).attach(tensors=tensors)


def unrefined(mended: Mended, meter: Meter) -> Refined:
    """The codes that were chosen."""
    return Refined(mended=mended, own=meter, codes={})


def refine(mended: Mended, meter: Meter, subject: Subject, *, seed: int, folder: Path, progress: Progress) -> Refined:
    """Better codes for an assignment, or those that it has where none are better; a note tells which.

    Args:
        mended: what was chosen, measured on the repair text.
        meter: measures on the repair text.
        subject: model and text.
        seed: of the search.
        folder: on whose disk lies what the text leaves at every matrix.
        progress: shows the stages.
    """
    assignment, text = mended.assignment, _text_of(subject)
    tuning = replace(meter, reference=known_reference(subject, subject.splits.calibrate, progress))
    steps = find_codes(assignment, tuning, text, seed=seed, folder=folder, progress=progress)
    if not steps:
        note = "no site has codes that could be refined"
        return unrefined(replace(mended, notes=(*mended.notes, note)), meter)
    tried: dict[str, Codes] = {"as chosen": {}, **steps}
    count = meter.reference.text.num_sequences
    effects = {"as chosen": mended.effects}
    for name, codes in steps.items():
        with progress.stage("measure the refined codes", count) as stage:
            effects[name] = meter.with_codes(codes).effects(assignment, None, stage)
    best = min(effects, key=lambda name: effects[name].mean_kl)
    words = ", ".join(f"{name} {found.mean_kl:.4g}" for name, found in effects.items())
    num_refined = len(next(iter(steps.values())))
    kept = f"codes of {num_refined} sites were refined" if best != "as chosen" else "refined codes were no better"
    note = f"{kept} with {text.num_tokens:,} tokens: on {count} sequences of the repair text the KL is {words}"
    notes = [note] if best == "as chosen" else [note, _BESIDE]
    return Refined(
        mended=replace(mended, effects=effects[best], notes=(*mended.notes, *notes)),
        own=meter.with_codes(tried[best]),
        codes=tried[best],
    )


def find_codes(
    assignment: Assignment, meter: Meter, text: TextSet, *, seed: int, folder: Path, progress: Progress
) -> dict[str, Codes]:
    """Step → codes of every site that could be refined, after it; the last is the furthest. Nothing is compared.

    Args:
        assignment: what every site has.
        meter: runs it; its reference is of the text that scales are tuned on.
        text: what codes are found with.
        seed: of the search; labels are drawn by another.
        folder: on whose disk lies what the text leaves at every matrix.
        progress: shows the stages.
    """
    sites = _refinable(assignment, meter.sites)
    flowed = _flow(assignment, meter, sites, text, seed, folder, progress) if sites else {}
    if not flowed:
        return {}
    in_flow = _tensors_of(flowed)
    tuned = _tune(assignment, meter.with_codes(in_flow), flowed, seed, progress)
    return {"errors made up for by later layers": in_flow, "and scales tuned": {**in_flow, **_tensors_of(tuned)}}


def _refinable(assignment: Assignment, sites: Sequence[Site]) -> list[Site]:
    """Sites of matrices all of whose sites can be refined."""
    return [
        site
        for matrix in matrices_of(sites)
        if all(_can_be_refined(site, assignment.get(site.name, AS_LOADED)) for site in matrix.sites)
        for site in matrix.sites
    ]


def _can_be_refined(site: Site, choice: Candidate) -> bool:
    scheme = SCHEMES[choice.scheme]
    return (
        scheme.weights is not None
        and scheme.activations is None
        and choice.transform == "none"
        and site.role not in END_ROLES
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
    assignment: Assignment,
    meter: Meter,
    sites: Sequence[Site],
    text: TextSet,
    seed: int,
    folder: Path,
    progress: Progress,
) -> dict[str, QTensor]:
    decoder = [site for site in meter.sites if site.role not in END_ROLES]
    schemes = {site.name: w for site in sites if (w := SCHEMES[assignment[site.name].scheme].weights) is not None}
    others = {name: choice for name, choice in assignment.items() if name not in schemes}
    with Spool(folder) as spool:
        with progress.stage("calibrate", text.num_sequences) as stage:
            statistics = calibrate(
                meter.model,
                decoder,
                text,
                seed=seed + REFINEMENT_SEED,
                stage=stage,
                output=meter.output,
                spool=spool,
            )
        with progress.stage("refine the codes", len(matrices_of(decoder))) as stage, meter.running(others) as model:
            return find_in_flow(model, decoder, schemes, text, statistics, meter.output, stage)


def _text_of(subject: Subject) -> TextSet:
    """The calibration text, and more of the same documents where there is more."""
    splits = subject.splits
    return splits.calibrate if splits.further is None else splits.calibrate.joined(splits.further)


def _tune(
    assignment: Assignment, meter: Meter, codes: Mapping[str, QTensor], seed: int, progress: Progress
) -> dict[str, QTensor]:
    tunable = {name: q for name, q in codes.items() if scales_are_continuous(q.scheme)}
    if not tunable:
        return {}
    steps = NUM_EPOCHS * meter.reference.text.num_sequences
    with progress.stage("tune the scales", steps) as stage, meter.running(assignment) as model:
        return tune_scales(model, meter.sites, tunable, meter.reference, meter.output, stage, seed=seed)


def _tensors_of(codes: Mapping[str, QTensor]) -> dict[str, dict[str, np.ndarray]]:
    return {name: tensors_of(name, replace(q, codes_NK=q.codes_NK.float())) for name, q in codes.items()}
