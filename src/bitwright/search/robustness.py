"""How a plan's choice and its quality move under other text, another seed, and a longer context.

    calibration   the search is repeated on another calibration set: learned, corrected by the same probes, solved under
                  the same limits. Told are the share of sites that keep their choice, and the measured KL of both plans
                  on the same sequences of the repair text
    seed          the same on the same text, with labels drawn by another seed: how far the choice is chance
    context       the plan itself on texts of 2 and 4 times the length, as far as the model has positions

A choice that moves while its quality does not was a near tie. A plan whose KL grows with the context was chosen on
texts that are too short.

None of this is done unless it is asked for, and a plan without it says so: learning again is what a search is made of
(with the ten default schemes 153 of 325 seconds on the built-in model, benchmarks/results/optimize-time.json), so that
doing it twice doubles the time. What cannot be done is told, and costs nothing of the plan that is there by then.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.errors import DataError, ModelError
from bitwright.plan import LongerContext, OtherChoice, Robustness
from bitwright.search.bootstrap import kl_estimate
from bitwright.search.cache import Cache
from bitwright.search.compare_plans import kl_difference
from bitwright.search.documents import CALIBRATION_SETS, is_sampled
from bitwright.search.learn_choices import learn_scores
from bitwright.search.measure import Meter
from bitwright.search.mend import Mended
from bitwright.search.problem import build_problem
from bitwright.search.progress import Progress
from bitwright.search.settings import Settings
from bitwright.search.subject import Subject, cut_text

#: What a plan says where nobody asked.
NOT_STUDIED = (
    "how the choice and its quality move under other calibration text, another seed and longer context was not looked "
    "at, as it takes two further searches: --robustness does"
)
#: Sequences of the repair text that two plans are compared on.
NUM_SEQUENCES = 32
#: How many times longer texts are.
LONGER = (2, 4)
#: Tokens that a plan is measured on at each length, and sequences at least.
LONG_TOKENS, MIN_LONG_SEQUENCES = 4096, 8


def study_robustness(
    subject: Subject, settings: Settings, mended: Mended, meter: Meter, progress: Progress
) -> Robustness:
    """Search again on other text and with another seed, and measure the plan on longer texts."""
    others, contexts, notes = [], [], []
    settings = replace(settings, effort="default")  # nothing here is refined, nor asks for the text of it
    seed = replace(settings, seed=settings.seed + 1)
    others.append(_search_again(f"seed {seed.seed}", subject, seed, mended, meter, progress))
    name = _another_set(settings)
    if name is None:
        notes.append(
            f"the built-in sets ({settings.calibration}, {settings.evaluation}) calibrate and evaluate already, so "
            "that nothing was searched on another; it is where one of the two is a file of your own"
        )
    else:
        elsewhere = replace(settings, calibration=name)
        try:
            splits = cut_text(subject.loaded, elsewhere, folder=None, progress=progress)
            again = replace(subject, splits=splits)
            others.append(_search_again(f"calibration on {name}", again, elsewhere, mended, meter, progress))
        except (DataError, ModelError) as error:
            notes.append(f"nothing was searched on {name}: {error}")
    positions = subject.loaded.num_positions
    for length in (times * settings.sequence_length for times in LONGER):
        if positions is not None and length > positions:
            notes.append(f"the model has {positions} positions, so that nothing was measured at {length} tokens")
            continue
        try:
            contexts.append(_measure_at(length, subject, settings, mended, meter, progress))
        except DataError as error:
            notes.append(f"nothing was measured at {length} tokens: {error}")
    return Robustness(others=tuple(others), contexts=tuple(contexts), notes=tuple(notes))


def _another_set(settings: Settings) -> str | None:
    """A built-in set of text that neither calibrates nor evaluates; None where there is none."""
    used = {str(settings.calibration), str(settings.evaluation)}
    return next((name for name in CALIBRATION_SETS if name not in used and not is_sampled(name)), None)


def _search_again(
    what: str, subject: Subject, settings: Settings, mended: Mended, meter: Meter, progress: Progress
) -> OtherChoice:
    """Learn and solve again; both plans on the same sequences."""
    again = replace(subject, cache=Cache(folder=None))
    learned, values = learn_scores(again, settings, progress)
    problem = build_problem(
        subject.prices,
        learned.scores,
        mended.problem.correction,
        include_head=settings.include_head,
        ties=subject.choices.ties,
        shared=subject.choices.shared,
        overflows=learned.overflows,
    )
    solution, _ = problem.solve(settings.budget, settings.objective, mended.max_total_kl)
    assignment = problem.assignment(solution)
    count = min(NUM_SEQUENCES, meter.reference.text.num_sequences)
    other_meter = replace(meter, quantizer=learned.quantizer, values=values, cache=again.cache)
    with progress.stage(f"measure: {what}", count) as stage:
        effects = other_meter.effects(assignment, count, stage)
    asked = [site.name for group in mended.problem.groups for site in group.sites]
    pairs = [(assignment[name], mended.assignment[name]) for name in asked]
    return OtherChoice(
        what=what,
        same_choice=sum(one == other for one, other in pairs) / max(1, len(pairs)),
        same_scheme=sum(one.scheme == other.scheme for one, other in pairs) / max(1, len(pairs)),
        predicted_kl=problem.total_kl(assignment),
        kl=kl_estimate(effects, settings.seed).interval,
        plan_kl=float(mended.effects.kl[:count].sum() / mended.effects.num_scored[:count].sum()),
        difference=kl_difference(mended.effects, effects, settings.seed).interval,
        weight_bytes=subject.prices.model_bytes(assignment),
        sequences=count,
    )


def _measure_at(
    length: int, subject: Subject, settings: Settings, mended: Mended, meter: Meter, progress: Progress
) -> LongerContext:
    """The plan on texts of another length, of the same documents that mending looks at."""
    longer = replace(settings, sequence_length=length, evaluation_tokens=64 * length, tokens=length)
    text = cut_text(subject.loaded, longer, folder=None, progress=progress).repair
    text = text.first(max(MIN_LONG_SEQUENCES, LONG_TOKENS // length))
    count = text.num_sequences
    with progress.stage(f"reference at {length} tokens", count) as stage:
        reference = subject.output.run_reference(subject.loaded.model, text, stage, spool=subject.spool)
    with progress.stage(f"measure at {length} tokens", count) as stage:
        effects = replace(meter, reference=reference).effects(mended.assignment, count, stage)
    return LongerContext(
        sequence_length=length,
        kl=kl_estimate(effects, settings.seed).interval,
        tokens=int(effects.num_scored.sum()),
        sequences=count,
    )
