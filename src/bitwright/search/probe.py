"""Measuring a handful of choices, so that every prediction is corrected by what was seen (`correct.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from bitwright.models import Site
from bitwright.plan import Prediction
from bitwright.quantize import SCHEMES
from bitwright.search.candidate import Candidate
from bitwright.search.correct import (
    Correction,
    Probe,
    choose_role_probes,
    choose_rounding_probes,
    fit_factors,
    label_of,
)
from bitwright.search.jumps import fit_jumps
from bitwright.search.learn import Learned
from bitwright.search.measure import PREDICTED_BEFORE, Meter
from bitwright.search.price import AS_LOADED, END_ROLES, AnySite, Assignment
from bitwright.search.problem import Problem, build_problem
from bitwright.search.progress import Progress, Stage
from bitwright.search.settings import Settings
from bitwright.search.solve import Solution
from bitwright.search.subject import Subject

#: Sequences of the repair text that a role's probe and a whole assignment are measured on.
ROLE_PROBE_SEQUENCES = 8
TOTAL_PROBE_SEQUENCES = 16
#: Sums of predicted KLs near which whole assignments are measured, nats per token.
TOTAL_PROBE_KLS = (0.3, 0.01, 0.001)


def probe(
    subject: Subject, settings: Settings, learned: Learned, meter: Meter, progress: Progress
) -> tuple[Problem, tuple[Prediction, ...]]:
    """Measure a probe of each rounding and role, and a few whole assignments.

    Returns the corrected problem, and what was predicted before.
    """
    roundings, roles = _measure_probes(subject, settings, learned, meter, progress)
    problem = _corrected(subject, settings, learned, fit_factors(roles, roundings))
    chosen = [problem.assignment(point) for point in _spread_over(problem.front(), TOTAL_PROBE_KLS)]
    count = min(TOTAL_PROBE_SEQUENCES, meter.reference.text.num_sequences)
    with progress.stage("probe the totals", count * len(chosen)) as stage:
        totals = [(assignment, meter.kl(assignment, count, stage)) for assignment in chosen]
    told = [_told_of_probe(p, "total") for p in roundings] + [_told_of_probe(p, "role") for p in roles]
    told += [
        Prediction(
            what=f"whole model at {subject.prices.effective_bits(assignment):.2f} bits",
            predicted_kl=problem.site_sum(assignment),
            measured_kl=measured,
            kind="total",
        )
        for assignment, measured in totals
    ]
    if any(site.role == "router" for site in subject.sites):
        plain = replace(problem, correction=Correction(role_factors={}))
        pairs = [(p.predicted, p.measured) for p in (*roundings, *roles)]
        pairs += [(plain.site_sum(a), kl) for a, kl in totals]
        problem = _corrected(subject, settings, learned, fit_factors(roles, roundings, fit_jumps(pairs)))
    values = {site.name for site in subject.value_sites}
    of_values = [problem.site_sum({n: c for n, c in a.items() if n in values}) for a, _ in totals]
    points = [(problem.site_sum(a) - v, v, kl) for (a, kl), v in zip(totals, of_values, strict=True)]
    correction = problem.correction.levelled(points, {p.role for p in roles if not p.of_values})
    problem = _corrected(subject, settings, learned, correction)
    for assignment, measured in totals:
        correction = correction.with_total(problem.site_sum(assignment), measured)
    return replace(problem, correction=correction), tuple(told)


def _measure_probes(
    subject: Subject, settings: Settings, learned: Learned, meter: Meter, progress: Progress
) -> tuple[list[Probe], list[Probe]]:
    """All weights in one rounding each, and all sites of one role each, in the choices that tell most."""
    count = min(ROLE_PROBE_SEQUENCES, meter.reference.text.num_sequences)
    everywhere: tuple[AnySite, ...] = (*subject.sites, *subject.value_sites)
    scored = [site for site in everywhere if site.name in learned.scores]
    of_values = [site for site in scored if site.kind != "weight"]
    of_weights = [site for site in subject.sites if site.name in learned.scores]
    by_rounding = choose_rounding_probes(
        [site for site in of_weights if site.role not in END_ROLES], learned.scores, settings.candidates
    )
    by_role = choose_role_probes(of_weights, learned.scores, settings.candidates)
    values_by_role = choose_role_probes(of_values, learned.scores, _value_choices(of_values, learned))

    def measured(label: str, assignment: Mapping[str, Candidate], stage: Stage) -> Probe:
        choice = next(iter(assignment.values()))
        found = meter.measured(assignment, count, stage)
        return Probe(
            role=label,
            what=f"{len(assignment)} × {label} in {choice}" if label else f"whole model in {choice}",
            scheme=choice.scheme,
            rounding=choice.rounding,
            predicted=math.fsum(learned.scores[name][choice] for name in assignment),
            measured=found.kl,
            relative_error=found.relative_error,
            of_values=label in values_by_role,
        )

    with progress.stage("probe the roundings", count * len(by_rounding)) as stage:
        roundings = [measured("", assignment, stage) for assignment in by_rounding.values()]
    with progress.stage("probe the roles", count * (len(by_role) + len(values_by_role))) as stage:
        roles = [measured(role, assignment, stage) for role, assignment in (by_role | values_by_role).items()]
    return roundings, roles


def _told_of_probe(found: Probe, kind: Literal["role", "total"]) -> Prediction:
    return Prediction(
        what=found.what,
        predicted_kl=found.predicted,
        measured_kl=found.measured,
        kind=kind,
        scheme=found.scheme,
        role=found.role or None,
    )


def _corrected(subject: Subject, settings: Settings, learned: Learned, correction: Correction) -> Problem:
    return build_problem(
        subject.prices,
        learned.scores,
        correction,
        include_head=settings.include_head,
        ties=subject.choices.ties,
        shared=subject.choices.shared,
        overflows=learned.overflows,
    )


def measure_roles(problem: Problem, assignment: Assignment, meter: Meter, progress: Progress) -> tuple[Prediction, ...]:
    """Every role alone, all its sites as assigned: what each part of a plan costs, predicted and measured."""
    count = min(ROLE_PROBE_SEQUENCES, meter.reference.text.num_sequences)
    by_role: dict[str, list[AnySite]] = {}
    refined = set(meter.quantizer.refined)
    joint = _roles_with_one_input(problem.prices.sites, assignment)
    for site in problem.prices.all_sites:
        if assignment[site.name] != AS_LOADED:
            label = label_of(site)
            by_role.setdefault(joint.get(label, label) if site.kind == "weight" else label, []).append(site)
    predictions = []
    with progress.stage("measure each role", count * len(by_role)) as stage:
        for role, sites in by_role.items():
            chosen = {site.name: assignment[site.name] for site in sites}
            predictions.append(
                Prediction(
                    what=f"{role} as planned{PREDICTED_BEFORE if refined & chosen.keys() else ''}",
                    predicted_kl=problem.correction.part(problem.site_sum(chosen)),
                    measured_kl=meter.kl(chosen, count, stage),
                    kind="plan_role",
                    role=role,
                )
            )
    return tuple(predictions)


def _value_choices(sites: Sequence[AnySite], learned: Learned) -> tuple[Candidate, ...]:
    """Every choice of a value site but that of leaving it alone."""
    found = dict.fromkeys(c for site in sites for c in learned.scores[site.name])
    return tuple(candidate for candidate in found if candidate != AS_LOADED)


def _roles_with_one_input(sites: Sequence[Site], assignment: Assignment) -> dict[str, str]:
    """Role → "attn.q + attn.k + attn.v" where rows of a fused matrix round their one input and so run together."""
    rounding = [s for s in sites if s.tied_group and SCHEMES[assignment[s.name].scheme].activations is not None]
    joint: dict[str, str] = {}
    for group in dict.fromkeys(site.tied_group for site in rounding):
        roles = list(dict.fromkeys(site.role for site in sites if site.tied_group == group))
        joint |= dict.fromkeys(roles, " + ".join(roles))
    return joint


def _spread_over(points: Sequence[Solution], kls: Sequence[float]) -> list[Solution]:
    """The points whose predicted sums lie nearest to `kls`, each once."""
    usable = [point for point in points if point.kl > 0]
    if not usable:
        return []
    logs = [math.log(point.kl) for point in usable]
    nearest = [min(range(len(usable)), key=[abs(log - math.log(kl)) for log in logs].__getitem__) for kl in kls]
    return [usable[index] for index in dict.fromkeys(nearest)]
