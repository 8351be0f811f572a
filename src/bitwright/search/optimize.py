"""The main job, as one reads it:

    load → name the sites → calibrate and score → probe → solve → measure and mend → (refine) → compare → prove → plan

Each stage is a file of its own; what they say of their work goes into the plan. Nothing is written here: the plan and
its evidence are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bitwright.models.heap import give_back_freed_memory
from bitwright.models.loaded import LoadedModel
from bitwright.plan import QUALITY_LIMITS, Budget, Plan, Prediction, Workload
from bitwright.search.clock import Clock
from bitwright.search.documents import raise_if_no_source
from bitwright.search.draft import draft_plan
from bitwright.search.learn import Learned
from bitwright.search.learn_choices import learn_scores
from bitwright.search.limits import judge, quantity_of, value_of
from bitwright.search.measure import PREDICTED_BEFORE, Meter
from bitwright.search.mend import mend
from bitwright.search.overflow_risk import risk_of
from bitwright.search.pareto import pareto_front
from bitwright.search.probe import measure_roles, probe
from bitwright.search.progress import Progress, Silent
from bitwright.search.refine import Refined, raise_if_no_room, refine, unrefined
from bitwright.search.robustness import NOT_STUDIED, study_robustness
from bitwright.search.settings import default_schemes, first_aim, settle
from bitwright.search.subject import Subject, known_reference, known_reference_facts, open_subject, spool_folder
from bitwright.search.uniform import compare_with_uniform, prefer_uniform, why_no_rival
from bitwright.search.value_scores import ValueLearned
from bitwright.search.verify import lasting_path, prove, verify

__all__ = ["default_schemes", "optimize", "verify"]


def optimize(
    model: str | Path | LoadedModel,
    *,
    budget: Budget | None = None,
    workload: Workload | None = None,
    hardware: str | None = None,
    device_file: str | Path | None = None,
    engine: str | None = None,
    task: str = "text",
    calibration: str | Path = "docs",
    evaluation: str | Path = "docs",
    tokens: int = 4096,
    evaluation_tokens: int | None = None,
    sequence_length: int = 128,
    include_head: bool = False,
    objective: str | None = None,
    schemes: Sequence[str] | None = None,
    roundings: Sequence[str] | None = None,
    transforms: Sequence[str] | None = None,
    values: str = "auto",
    effort: str = "default",
    site_file: str | Path | None = None,
    pareto_points: int | None = None,
    robustness: bool = False,
    seed: int = 0,
    cache: Path | str | None = "default",
    progress: Progress | None = None,
    allow_pickle: bool = False,
    low_memory: bool = False,
    spool: Path | str | None = None,
) -> Plan:
    """Choose the precision of every site of a model within a budget, and prove the choice on held-out text.

    Args:
        model: an HF folder, a hub id, a .gguf file, "demo", "demo-dithered", or a model in memory.
        budget: limits; none means a KL of at most 0.02 nats per token.
        workload: the context and the batch that bytes on the device and times are stated for.
        hardware: a device of `bitwright hardware`; by default the machine at hand.
        device_file: a device of one's own, in place of `hardware`.
        engine: a serving engine whose rules hold too: "vllm", "transformers", "llama.cpp", …
        task: "text" scores every token, "chat" the assistant's.
        calibration, evaluation: a built-in set or a .txt, .jsonl or .parquet file.
        tokens: calibration tokens.
        evaluation_tokens: tokens of the repair text and of the final text, each; by default 64 sequences or twice the
            calibration tokens, whichever is more.
        sequence_length: tokens per sequence.
        include_head: choose for the embedding and the output head too.
        objective: "memory", "kl" or "latency"; by default what the budget leaves open.
        schemes: names to choose from, of weights and of values; see `default_schemes`.
        roundings, transforms: names to choose from; by default those that are worth trying under each scheme.
        values: which values are in question: "none", "cache", "all", or "auto" (the cache under a context).
        effort: "default", or "high": codes are refined once every site has its scheme (`refine.py`), in minutes more.
        site_file: names the sites of a model in which none are found.
        pareto_points: measure the front over quality, memory, latency and stability at so many points; None does not.
        robustness: search again on other text and with another seed, and measure the plan on longer texts.
        seed: of splits, sampled labels and resampling.
        cache: folder of statistics and scores; None keeps nothing.
        progress: shows the stages.
        allow_pickle: load pickled checkpoints, which can run code.
        low_memory: keep statistics, codes and replaced weights on disk, and work matrix by matrix: the same plan.
        spool: the folder on whose disk they lie for the time of the search, and what effort "high" keeps; by default
            that of the cache.

    Returns:
        A plan. `plan.met` says whether every limit holds; a plan that misses one is the nearest that was found.

    Raises:
        BitwrightError: one of its kinds, for whatever the user can mend.
    """
    clock = Clock(progress if progress is not None else Silent())
    settings = settle(
        budget if budget is not None else Budget(),
        objective=objective,
        workload=workload,
        hardware=hardware,
        device_file=device_file,
        engine=engine,
        task=task,
        calibration=calibration,
        evaluation=evaluation,
        schemes=schemes,
        roundings=roundings,
        transforms=transforms,
        values=values,
        effort=effort,
        site_file=site_file,
        include_head=include_head,
        tokens=tokens,
        evaluation_tokens=evaluation_tokens,
        sequence_length=sequence_length,
        seed=seed,
    )
    folder = spool_folder(spool, cache)
    for source in (calibration, evaluation):
        raise_if_no_source(source)
    subject = open_subject(
        model,
        settings,
        cache=cache,
        allow_pickle=allow_pickle,
        progress=clock,
        spool_folder=folder if low_memory else None,
    )
    if settings.effort == "high":
        raise_if_no_room(subject, folder)
    learned, learned_values = learn_scores(subject, settings, clock)
    _give_back(subject)
    meter = open_meter(subject, learned, learned_values, clock)
    problem, probes = probe(subject, settings, learned, meter, clock)
    mended = mend(
        problem,
        meter,
        budget=settings.budget,
        objective=settings.objective,
        max_total_kl=first_aim(settings.budget),
        seed=seed,
        progress=clock,
    )
    uniform = compare_with_uniform(mended, meter, seed, clock)
    preferred = prefer_uniform(
        mended, uniform, meter, budget=settings.budget, objective=settings.objective, seed=seed, progress=clock
    )
    if preferred is not mended:
        mended, uniform = preferred, compare_with_uniform(preferred, meter, seed, clock)
    refined = unrefined(mended, meter)
    if settings.effort == "high":
        refined = refine(mended, meter, subject, seed=seed, folder=folder, progress=clock)
        mended = refined.mended
    if refined.codes:
        uniform = compare_with_uniform(mended, meter, seed, clock)
    roles = measure_roles(mended.problem, mended.assignment, refined.own, clock)
    plan = draft_plan(subject, settings, mended, (*probes, *roles), learned, learned_values, clock)
    plan = refined.written_to(plan)
    plan = plan.replace(
        notes=(*plan.notes, *why_no_rival(mended, uniform), *(() if robustness else (NOT_STUDIED,))),
        uniform=uniform,
        pareto=() if pareto_points is None else pareto_front(mended, meter, refined.own, pareto_points, seed, clock),
        robustness=study_robustness(subject, settings, mended, refined.own, clock) if robustness else None,
    )
    proved = _prove(plan, subject, refined, clock)
    paths = {
        "model": subject.loaded.name if isinstance(model, LoadedModel) else lasting_path(model),
        "calibration": lasting_path(calibration),
        "evaluation": lasting_path(evaluation),
        **({} if site_file is None else {"sites": lasting_path(site_file)}),
    }
    return proved.attach(run=clock.run(paths))


def open_meter(subject: Subject, learned: Learned, values: ValueLearned | None, progress: Progress) -> Meter:
    """What measures assignments on the repair text."""
    return Meter(
        model=subject.loaded.model,
        sites=subject.sites,
        quantizer=learned.quantizer,
        output=subject.output,
        reference=known_reference(subject, subject.splits.repair, progress),
        cache=subject.cache,
        value_sites=subject.value_sites,
        values=values,
        originals=subject.originals,
    )


def _give_back(subject: Subject) -> None:
    """With low memory, what a stage has freed is no longer the process's."""
    if subject.spool is not None:
        give_back_freed_memory()


def _prove(plan: Plan, subject: Subject, refined: Refined, progress: Progress) -> Plan:
    """Look at the final text, once, and hold every limit against what was seen."""
    mended = refined.mended
    reference = known_reference(subject, subject.splits.final, progress)
    facts = known_reference_facts(subject, reference, progress)
    _give_back(subject)
    measured = prove(
        plan,
        subject.loaded,
        subject.sites,
        reference,
        facts,
        progress,
        output=subject.output,
        originals=subject.originals,
    )
    totals = mended.problem.totals(mended.assignment)
    values = {
        name: value_of(name, totals[quantity_of(name)], subject.prices)
        for name in plan.budget.limits.keys() - QUALITY_LIMITS
    }
    # counted while the final text ran
    values["max_overflow_risk"] = risk_of(subject.prices, mended.assignment, measured.overflows or 0.0)
    limits = judge(plan.budget.limits, {**values, **measured.quality})
    whole_plan = Prediction(
        what=f"the plan, on the final text{PREDICTED_BEFORE if refined.codes else ''}",
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
