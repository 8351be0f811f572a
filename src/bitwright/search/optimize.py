"""The main job, as one reads it:

    load → name the sites → calibrate and score → probe → solve → measure and mend → prove → plan

Each stage is a file of its own; what they say of their work goes into the plan. Nothing is written here: the plan and
its evidence are returned.
"""

from __future__ import annotations

import math
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from bitwright import hardware as hardware_catalog
from bitwright.errors import DataError, SchemeError
from bitwright.inference import tensors_of
from bitwright.models import Site, find_sites, site_weight
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.plan import (
    Budget,
    FrontierPoint,
    ModelInfo,
    Objective,
    Plan,
    Prediction,
    Run,
    SearchOptions,
    SiteChoice,
    Summary,
    TextInfo,
    raise_if_no_scheme_fits,
    settle_budget,
)
from bitwright.quantize import ROUNDINGS, SCHEMES
from bitwright.search.cache import Cache, default_folder, open_cache
from bitwright.search.compare import Reference, run_reference
from bitwright.search.correct import Probe, choose_role_probes, fit_roles
from bitwright.search.explain import reason_for
from bitwright.search.learn import Learned, learn
from bitwright.search.measure import Meter, Quantizer
from bitwright.search.mend import Mended, mend
from bitwright.search.price import AS_LOADED, END_ROLES, Assignment, Prices, predict_latency, price_model
from bitwright.search.problem import Problem, build_problem
from bitwright.search.progress import Progress, Silent, Stage
from bitwright.search.score import Candidate, candidates_of
from bitwright.search.solve import Solution, front
from bitwright.search.text import Splits, TextSet, split_text
from bitwright.search.verify import ReferenceFacts, judge, prove, reference_facts, verify, vocabulary_size

__all__ = ["default_schemes", "optimize", "verify"]

#: Points of the front that a plan shows.
FRONT_POINTS = 14
#: Sequences of the repair text that probes are measured on.
PROBE_SEQUENCES = 16
#: Sums of predicted KLs near which whole assignments are measured, nats per token.
TOTAL_PROBE_KLS = (1.0, 0.1, 0.01)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a search was asked, checked and filled in."""

    budget: Budget
    objective: Objective
    objective_reason: str
    device: hardware_catalog.Device
    device_reason: str
    task: str
    schemes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    include_head: bool
    tokens: int
    evaluation_tokens: int
    sequence_length: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model in question and the text it is judged on."""

    loaded: LoadedModel
    sites: tuple[Site, ...]
    prices: Prices
    splits: Splits
    cache: Cache


def default_schemes() -> tuple[str, ...]:
    """What is chosen from unless told otherwise.

    Every scheme that leaves activations in 16 bits or more: no limit that can be given asks for faster matrix products,
    so rounding activations further could only lose quality. fp32 is left out, since nothing stores weights in it.
    """
    return tuple(
        name
        for name, scheme in SCHEMES.items()
        if scheme.weights is not None
        and name != "fp32"
        and (scheme.activations is None or scheme.activations.scaling is None)
    )


def optimize(
    model: str | Path | LoadedModel,
    *,
    budget: Budget | None = None,
    hardware: str | None = None,
    task: str = "text",
    calibration: str | Path = "docs",
    evaluation: str | Path = "docs",
    tokens: int = 4096,
    evaluation_tokens: int | None = None,
    sequence_length: int = 128,
    include_head: bool = False,
    objective: str | None = None,
    schemes: Sequence[str] | None = None,
    seed: int = 0,
    cache: Path | str | None = "default",
    progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Plan:
    """Choose the precision of every site of a model within a budget, and prove the choice on held-out text.

    Args:
        model: an HF folder, a hub id, a .gguf file, "demo", "demo-dithered", or a model in memory.
        budget: limits; none means a KL of at most 0.02 nats per token.
        hardware: a device of `bitwright hardware`; by default the machine at hand.
        task: "text" scores every token, "chat" the assistant's.
        calibration, evaluation: a built-in set or a .txt, .jsonl or .parquet file.
        tokens: calibration tokens.
        evaluation_tokens: tokens of the repair text and of the final text, each; by default 64 sequences or twice the
            calibration tokens, whichever is more.
        sequence_length: tokens per sequence.
        include_head: choose for the embedding and the output head too.
        objective: "memory" or "kl"; by default what the budget leaves open.
        schemes: names to choose from; see `default_schemes`.
        seed: of splits, sampled labels and resampling.
        cache: folder of statistics and scores; None keeps nothing.
        progress: shows the stages.
        allow_pickle: load pickled checkpoints, which can run code.

    Returns:
        A plan. `plan.met` says whether every limit holds; a plan that misses one is the nearest that was found.

    Raises:
        BitwrightError: one of its kinds, for whatever the user can mend.
    """
    clock = _Clock(progress if progress is not None else Silent())
    settings = _settle(
        budget if budget is not None else Budget(),
        objective=objective,
        hardware=hardware,
        task=task,
        schemes=schemes,
        include_head=include_head,
        tokens=tokens,
        evaluation_tokens=evaluation_tokens,
        sequence_length=sequence_length,
        seed=seed,
    )
    subject = _open(model, settings, calibration, evaluation, cache, allow_pickle, clock)
    learned = _learn(subject, settings, clock)
    meter = _meter(subject, learned, clock)
    problem, probes = _probe(subject, settings, learned, meter, clock)
    with clock.stage("solve", 1) as stage:
        solution, unreachable = problem.solve(settings.budget, settings.objective, _quality_target(settings.budget))
        stage.advance()
    mended = mend(
        problem,
        solution,
        meter,
        budget=settings.budget,
        objective=settings.objective,
        seed=seed,
        progress=clock,
    )
    plan = _draft(subject, settings, mended, probes, unreachable, meter.quantizer, clock)
    proved = _prove(plan, subject, clock)
    paths = {"model": str(model) if not isinstance(model, LoadedModel) else subject.loaded.name}
    paths |= {"calibration": str(calibration), "evaluation": str(evaluation)}
    return proved.attach(run=clock.run(paths))


# --- the stages ------------------------------------------------------------------------------------------------------


def _settle(
    budget: Budget,
    *,
    objective: str | None,
    hardware: str | None,
    task: str,
    schemes: Sequence[str] | None,
    include_head: bool,
    tokens: int,
    evaluation_tokens: int | None,
    sequence_length: int,
    seed: int,
) -> Settings:
    settled = settle_budget(budget, objective)
    names = tuple(dict.fromkeys(schemes)) if schemes is not None else default_schemes()
    if not names:
        raise SchemeError("no scheme to choose from; name at least one, or leave schemes out for the default")
    not_a_choice = [name for name in names if SCHEMES[name].weights is None]
    if not_a_choice:
        raise SchemeError(
            f"{not_a_choice[0]!r} is not a choice: it is what a site keeps when nothing is chosen; leave it out of the "
            "schemes"
        )
    if hardware is None:
        device, reason = hardware_catalog.detect()
    else:
        device, reason = hardware_catalog.get(hardware), "asked for"
    return Settings(
        budget=settled.budget,
        objective=settled.objective,
        objective_reason=settled.reason,
        device=device,
        device_reason=reason,
        task=task,
        schemes=names,
        candidates=candidates_of(names),
        include_head=include_head,
        tokens=tokens,
        evaluation_tokens=evaluation_tokens if evaluation_tokens is not None else max(64 * sequence_length, 2 * tokens),
        sequence_length=sequence_length,
        seed=seed,
    )


def _open(
    model: str | Path | LoadedModel,
    settings: Settings,
    calibration: str | Path,
    evaluation: str | Path,
    cache: Path | str | None,
    allow_pickle: bool,
    clock: _Clock,
) -> Subject:
    with clock.stage("load", 1) as stage:
        loaded = model if isinstance(model, LoadedModel) else load(model, allow_pickle=allow_pickle, seed=settings.seed)
        stage.advance()
    _raise_if_too_long(loaded, settings.sequence_length)
    sites = find_sites(loaded.model)
    prices = price_model(loaded, sites)
    raise_if_no_scheme_fits(settings.budget, _bits_by_scheme(prices, settings.schemes))
    with clock.stage("read the text", 1) as stage:
        splits = split_text(
            loaded.tokenizer,
            task=settings.task,
            calibration=calibration,
            evaluation=evaluation,
            calibration_tokens=settings.tokens,
            evaluation_tokens=settings.evaluation_tokens,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            vocabulary_size=vocabulary_size(loaded),
        )
        stage.advance()
    folder = default_folder() if cache == "default" else None if cache is None else Path(cache)
    return Subject(
        loaded=loaded,
        sites=sites,
        prices=prices,
        splits=splits,
        cache=open_cache(
            folder,
            model_hash=loaded.hash,
            text_hash=splits.calibrate.hash,
            seed=settings.seed,
            include_head=settings.include_head,
        ),
    )


def _raise_if_too_long(loaded: LoadedModel, sequence_length: int) -> None:
    positions = getattr(getattr(loaded.model, "config", None), "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise DataError(
            f"sequences of {sequence_length} tokens are longer than the {positions} positions of {loaded.name!r}; "
            f"lower --sequence-length to at most {positions}"
        )


def _learn(subject: Subject, settings: Settings, clock: _Clock) -> Learned:
    wanted = [site for site in subject.sites if settings.include_head or site.role not in END_ROLES]
    return learn(
        subject.loaded.model,
        wanted,
        subject.splits.calibrate,
        settings.candidates,
        seed=settings.seed,
        cache=subject.cache,
        progress=clock,
    )


def _meter(subject: Subject, learned: Learned, clock: _Clock) -> Meter:
    return Meter(
        model=subject.loaded.model,
        sites=subject.sites,
        quantizer=Quantizer(moments=learned.moments),
        reference=_reference(subject, subject.splits.repair, clock),
        cache=subject.cache,
    )


def _reference(subject: Subject, text: TextSet, clock: _Clock) -> Reference:
    known = subject.cache.read_reference(text.hash)
    with clock.stage("reference", text.num_sequences) as stage:
        reference = run_reference(subject.loaded.model, text, stage, known)
    if known is None and reference.head_inputs is not None:
        subject.cache.write_reference(text.hash, reference.head_inputs)
    return reference


def _probe(
    subject: Subject, settings: Settings, learned: Learned, meter: Meter, clock: _Clock
) -> tuple[Problem, tuple[Prediction, ...]]:
    """Measure one probe a role and a few whole assignments; return the corrected problem and what was predicted."""
    count = min(PROBE_SEQUENCES, meter.reference.text.num_sequences)
    scored_sites = [site for site in subject.sites if site.name in learned.scores]
    role_probes = choose_role_probes(scored_sites, learned.scores, settings.candidates)
    probes: list[Probe] = []
    with clock.stage("probe the roles", count * len(role_probes)) as stage:
        for role, assignment in role_probes.items():
            choice = next(iter(assignment.values()))
            raw = sum(learned.scores[name][choice] for name in assignment)
            probes.append(
                Probe(
                    role=role,
                    what=f"{len(assignment)} × {role} in {choice}",
                    scheme=choice.scheme,
                    predicted=raw,
                    measured=meter.kl(assignment, count, stage),
                )
            )
    predictions = [
        Prediction(
            what=p.what,
            predicted_kl=p.predicted,
            measured_kl=p.measured,
            kind="role",
            scheme=p.scheme,
            role=p.role,
        )
        for p in probes
    ]
    problem = build_problem(
        subject.prices, learned.scores, settings.candidates, fit_roles(probes), include_head=settings.include_head
    )
    points = front([group.options for group in problem.groups], FRONT_POINTS) if problem.groups else ()
    correction = problem.correction
    chosen = _spread_over(points, TOTAL_PROBE_KLS)
    with clock.stage("probe the totals", count * len(chosen)) as stage:
        for point in chosen:
            assignment = problem.assignment(point)
            measured = meter.kl(assignment, count, stage)
            predictions.append(
                Prediction(
                    what=f"whole model at {subject.prices.effective_bits(assignment):.2f} bits",
                    predicted_kl=point.kl,
                    measured_kl=measured,
                    kind="total",
                )
            )
            correction = correction.with_total(point.kl, measured)
    return replace(problem, correction=correction), tuple(predictions)


def _spread_over(points: Sequence[Solution], kls: Sequence[float]) -> list[Solution]:
    """The points whose predicted sums lie nearest to `kls`, each once."""
    usable = [point for point in points if point.kl > 0]
    if not usable:
        return []
    logs = [math.log(point.kl) for point in usable]
    nearest = [min(range(len(usable)), key=[abs(log - math.log(kl)) for log in logs].__getitem__) for kl in kls]
    return [usable[index] for index in dict.fromkeys(nearest)]


def _quality_target(budget: Budget) -> float | None:
    """The mean KL to aim for: log perplexity grows about as fast as KL, until measurements say otherwise."""
    limits = [budget.max_kl] if budget.max_kl is not None else []
    if budget.max_ppl_increase is not None:
        limits.append(math.log1p(budget.max_ppl_increase))
    return min(limits) * 0.9 if limits else None


def _draft(
    subject: Subject,
    settings: Settings,
    mended: Mended,
    predictions: Sequence[Prediction],
    unreachable: str | None,
    quantizer: Quantizer,
    clock: _Clock,
) -> Plan:
    """The plan before its proof: choices, reasons, predictions, the front."""
    problem, assignment, prices = mended.problem, mended.assignment, subject.prices
    tensors: dict[str, np.ndarray] = {}
    with clock.stage("write the codes", len(subject.sites)) as stage:
        for site in subject.sites:
            choice = assignment[site.name]
            if choice != AS_LOADED and ROUNDINGS[choice.rounding].needs_data:
                weight_NK = site_weight(subject.loaded.model, site).contiguous()
                tensors |= tensors_of(site.name, quantizer.quantize(site.name, choice, weight_NK))
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
        frontier=_frontier(problem, assignment, mended),
        predictions=tuple(predictions),
        repairs=mended.repairs,
        latency=predict_latency(prices, assignment, settings.device),
        notes=(*_notes(subject, assignment, unreachable), *mended.notes),
        versions=_versions(),
    )
    return plan.attach(tensors=tensors)


def _prove(plan: Plan, subject: Subject, clock: _Clock) -> Plan:
    """Look at the final text, once, and hold every limit against what was seen."""
    reference = _reference(subject, subject.splits.final, clock)
    facts = _reference_facts(subject, reference, clock)
    measured = prove(plan, subject.loaded, subject.sites, reference, facts, clock)
    values = {
        "max_kl": measured.kl.mean,
        "max_ppl_increase": measured.ppl.ratio - 1,
        "max_memory_bytes": float(plan.summary.weight_bytes),
        "effective_bits": plan.summary.effective_bits,
    }
    limits = judge(plan.budget.limits, values)
    whole_plan = Prediction(
        what="the plan, on the final text",
        predicted_kl=plan.summary.predicted_kl,
        measured_kl=measured.kl.mean,
        kind="total",
    )
    frontier = tuple(
        point.model_copy(update={"measured_kl": measured.kl.mean}) if point.chosen else point for point in plan.frontier
    )
    return plan.replace(
        measured=measured,
        limits=limits,
        met=all(limit.met for limit in limits),
        predictions=(*plan.predictions, whole_plan),
        frontier=frontier,
    )


def _reference_facts(subject: Subject, reference: Reference, clock: _Clock) -> ReferenceFacts:
    keys = [f"{name} {reference.text.hash}" for name in ("bf16 floor", "repetition")]
    known = subject.cache.read_measured()
    if all(key in known for key in keys):
        return ReferenceFacts(bf16_floor_kl=known[keys[0]], repetition=known[keys[1]])
    facts = reference_facts(subject.loaded, reference, clock)
    found = dict(zip(keys, (facts.bf16_floor_kl, facts.repetition), strict=True))
    subject.cache.write_measured({**subject.cache.read_measured(), **found})
    return facts


# --- what a plan says ------------------------------------------------------------------------------------------------


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
        reason=reason_for(site, choice, mended, settings.objective, loaded_format, settings.include_head),
        bytes=num_bytes,
        bits=8 * num_bytes / site.num_weights,
        predicted_kl=mended.problem.site_kl(site, choice),
    )


def _frontier(problem: Problem, assignment: Assignment, mended: Mended) -> tuple[FrontierPoint, ...]:
    """The front by rising size, with the plan itself among it."""
    points = front([group.options for group in problem.groups], FRONT_POINTS) if problem.groups else ()
    assignments = [(problem.assignment(point), False) for point in points]
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


def _notes(subject: Subject, assignment: Assignment, unreachable: str | None) -> list[str]:
    notes = []
    ragged: Counter[str] = Counter()
    for site in subject.sites:
        weights = SCHEMES[assignment[site.name].scheme].weights
        if weights is not None and weights.scaling is not None:
            granularity, columns = weights.scaling.granularity, site.shape[1]
            if granularity.has_ragged_group(columns):
                last = columns % granularity.group_size
                ragged[f"{granularity} does not divide {columns}: the last group has {last}"] += 1
    notes += [
        f"{what} ({count} sites); some engines refuse shorter last groups: choose a group size that divides"
        for what, count in sorted(ragged.items())
    ]
    if unreachable is not None:
        notes.append(
            f"no assignment of the allowed schemes is predicted to keep the {unreachable} limit; this plan is the "
            "nearest"
        )
    return notes


def _bits_by_scheme(prices: Prices, schemes: Sequence[str]) -> dict[str, float]:
    linears = prices.decoder_sites
    num_weights = max(1, sum(site.num_weights for site in linears))
    return {
        name: 8 * sum(prices.site_bytes(site, Candidate(scheme=name)) for site in linears) / num_weights
        for name in schemes
    }


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


@dataclass(kw_only=False)
class _Clock:
    """Passes stages on to whoever shows them, and keeps their times."""

    shown: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        begin = time.perf_counter()
        with self.shown.stage(name, total) as stage:
            yield stage
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def run(self, paths: dict[str, str]) -> Run:
        """What happened to be so: never hashed."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Run(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            timings={**self.seconds, "total": time.perf_counter() - self.started},
            paths=paths,
            peak_memory_bytes=peak if sys.platform == "darwin" else peak * 1024,
        )
