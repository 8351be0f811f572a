"""Codes improved after every site has its scheme: what `--effort high` adds to a plan.

The text runs through the model once more, and every matrix makes up for the errors of all before it
(`refine_flow.py`). It is the calibration text, and more of the same documents where there is more (`Splits.further`),
since how well codes do on other text is a matter of how much they saw: SmolLM2-135M in int4 groups of 128 comes to a KL
of 0.070 with every matrix on its own, to 0.054 in the flow of the same 8,192 tokens. What was found is then measured on
the repair text beside what the plan had, run from the tensors that a plan keeps; the lesser KL stays, and the plan says
so. Sites in question are whole matrices that store codes under scales of rows or groups, without a transform and with
inputs left as they are; all others keep what they have, and are made up for.

What a plan says of itself is measured after this, with the codes that it has by then. Nothing predicts what refining
gains, so predictions stay those of the codes that were scored, and say so.

Rejected: scales that follow the gradient of the calibration text's KL afterwards, codes held. On other text the KL rose
by 2 % for it (decision 0007).
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
from bitwright.search.subject import Subject
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
    codes = find_codes(assignment, meter, text, seed=seed, folder=folder, progress=progress)
    if not codes:
        note = "no site has codes that could be refined"
        return unrefined(replace(mended, notes=(*mended.notes, note)), meter)
    own, count = meter.with_codes(codes), meter.reference.text.num_sequences
    with progress.stage("measure the refined codes", count) as stage:
        effects = own.effects(assignment, None, stage)
    before, after = mended.effects.mean_kl, effects.mean_kl
    measured = (
        f"with {text.num_tokens:,} tokens: on {count} sequences of the repair text the KL is as chosen {before:.4g}, "
        f"errors made up for by later layers {after:.4g}"
    )
    if after >= before:
        return unrefined(replace(mended, notes=(*mended.notes, f"refined codes were no better {measured}")), meter)
    notes = (f"codes of {len(codes)} sites were refined {measured}", _BESIDE)
    return Refined(mended=replace(mended, effects=effects, notes=(*mended.notes, *notes)), own=own, codes=codes)


def find_codes(
    assignment: Assignment, meter: Meter, text: TextSet, *, seed: int, folder: Path, progress: Progress
) -> Codes:
    """Codes of every site that could be refined; none are compared.

    Args:
        assignment: what every site has.
        meter: runs it.
        text: what codes are found with.
        seed: of the search; labels are drawn by another.
        folder: on whose disk lies what the text leaves at every matrix.
        progress: shows the stages.
    """
    sites = _refinable(assignment, meter.sites)
    return _tensors_of(_flow(assignment, meter, sites, text, seed, folder, progress)) if sites else {}


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


def _tensors_of(codes: Mapping[str, QTensor]) -> dict[str, dict[str, np.ndarray]]:
    return {name: tensors_of(name, replace(q, codes_NK=q.codes_NK.float())) for name, q in codes.items()}
