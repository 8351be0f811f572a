"""The plan before its proof: choices, reasons, predictions, the front, and what a reader must know."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch

from bitwright.models import Site
from bitwright.plan import (
    FrontierPoint,
    ModelInfo,
    Plan,
    Prediction,
    SearchOptions,
    SiteChoice,
    Summary,
    TextInfo,
)
from bitwright.quantize import SCHEMES
from bitwright.search.binding import study_limits
from bitwright.search.explain import reason_for
from bitwright.search.mend import Mended
from bitwright.search.price import AS_LOADED, Assignment, device_memory, predict_latency
from bitwright.search.problem import Problem
from bitwright.search.progress import Progress
from bitwright.search.quantizer import Quantizer
from bitwright.search.settings import Settings
from bitwright.search.subject import Subject
from bitwright.search.text import TextSet


def draft_plan(
    subject: Subject,
    settings: Settings,
    mended: Mended,
    predictions: Sequence[Prediction],
    quantizer: Quantizer,
    progress: Progress,
) -> Plan:
    """The plan before its proof: choices, reasons, predictions, the front."""
    problem, assignment, prices = mended.problem, mended.assignment, subject.prices
    tensors: dict[str, np.ndarray] = {}
    with progress.stage("write the codes", len(subject.sites)) as stage:
        for site in subject.sites:
            choice = assignment[site.name]
            if choice != AS_LOADED:
                tensors |= quantizer.tensors(site.name, choice)
            stage.advance()
    splits = subject.splits
    plan = Plan(
        model=ModelInfo(
            name=subject.loaded.name,
            hash=subject.loaded.hash,
            params=subject.loaded.num_parameters,
            notes=subject.loaded.notes,
        ),
        hardware=settings.device.name,
        hardware_reason=settings.device_reason,
        task=settings.task,
        budget=settings.budget,
        workload=settings.workload,
        objective=settings.objective,
        objective_reason=settings.objective_reason,
        seed=settings.seed,
        options=SearchOptions(
            schemes=settings.schemes,
            include_head=settings.include_head,
            sequence_length=settings.sequence_length,
            calibration_tokens=settings.tokens,
            evaluation_tokens=settings.evaluation_tokens,
        ),
        calibration=_text_info(splits.calibrate),
        repair=_text_info(splits.repair),
        evaluation=_text_info(splits.final),
        sites=tuple(_site_choice(site, assignment, mended, settings, subject) for site in subject.sites),
        summary=Summary(
            effective_bits=prices.effective_bits(assignment),
            nominal_bits=prices.nominal_bits(assignment),
            weight_bytes=prices.model_bytes(assignment),
            predicted_kl=problem.total_kl(assignment),
        ),
        met=False,
        frontier=_frontier(problem, assignment),
        predictions=tuple(predictions),
        repairs=mended.repairs,
        limit_studies=study_limits(problem, settings.budget, settings.objective, mended.max_total_kl),
        latency=predict_latency(prices, assignment),
        device_memory=device_memory(prices, assignment),
        notes=(*_notes(subject, assignment, settings, mended.unreachable), *mended.notes),
        versions=_versions(),
    )
    return plan.attach(tensors=tensors)


def _site_choice(
    site: Site, assignment: Assignment, mended: Mended, settings: Settings, subject: Subject
) -> SiteChoice:
    choice, prices = assignment[site.name], subject.prices
    num_bytes = prices.site_bytes(site, choice)
    loaded_format = subject.loaded.loaded_format[site.parameter]
    return SiteChoice(
        name=site.name,
        kind=site.kind,
        role=site.role,
        module=site.module,
        rows=site.rows,
        tied_group=site.tied_group,
        shape=site.shape,
        scheme=choice.scheme,
        rounding=choice.rounding,
        transform=choice.transform,
        reason=reason_for(
            site,
            choice,
            mended,
            asked=(settings.budget, settings.objective),
            loaded_format=loaded_format,
            include_head=settings.include_head,
        ),
        bytes=num_bytes,
        bits=8 * num_bytes / site.num_weights,
        predicted_kl=mended.problem.site_kl(site, choice),
    )


def _frontier(problem: Problem, assignment: Assignment) -> tuple[FrontierPoint, ...]:
    """The front by rising size, with the plan itself among it."""
    assignments = [(problem.assignment(point), False) for point in problem.front()]
    shown = [_frontier_point(problem, found, chosen) for found, chosen in [*assignments, (dict(assignment), True)]]
    return tuple(sorted(shown, key=lambda point: (point.weight_bytes, point.chosen)))


def _frontier_point(problem: Problem, assignment: Assignment, chosen: bool) -> FrontierPoint:
    counts = Counter(assignment[site.name].scheme for site in problem.prices.decoder_sites)
    return FrontierPoint(
        effective_bits=problem.prices.effective_bits(assignment),
        weight_bytes=problem.prices.model_bytes(assignment),
        predicted_kl=problem.total_kl(assignment),
        counts=dict(sorted(counts.items())),
        chosen=chosen,
    )


def _notes(subject: Subject, assignment: Assignment, settings: Settings, unreachable: Sequence[str]) -> list[str]:
    notes = list(subject.splits.notes)
    ragged: Counter[str] = Counter()
    for site in subject.sites:
        weights = SCHEMES[assignment[site.name].scheme].weights
        if weights is not None and weights.scaling is not None:
            granularity, columns = weights.scaling.granularity, site.shape[1]
            if granularity.has_ragged_group(columns):
                last = columns % granularity.group_size
                ragged[f"{granularity} does not divide {columns}: the last group has {last}"] += 1
    notes += [
        f"{what} ({count} {'site' if count == 1 else 'sites'}); some engines refuse shorter last groups: choose a "
        "group size that divides"
        for what, count in sorted(ragged.items())
    ]
    if unreachable:
        keeps_ends = settings.budget.max_memory_bytes is not None and not settings.include_head
        notes.append(
            f"no assignment of the allowed schemes is predicted to keep {' and '.join(unreachable)}; this plan is the "
            "nearest" + ("; --include-head makes embedding and head smaller too" if keeps_ends else "")
        )
    return notes


def _text_info(text: TextSet) -> TextInfo:
    return TextInfo(source=text.source, tokens=text.num_tokens, sequences=text.num_sequences, hash=text.hash)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch threads": str(torch.get_num_threads())}
    for package in ("bitwright", "torch", "numpy", "transformers", "highspy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
