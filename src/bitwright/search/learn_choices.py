"""Scores of everything that can be chosen: weights from one pass, values from another, less what is ruled out."""

from __future__ import annotations

from dataclasses import replace

from bitwright.search.learn import Learned, learn
from bitwright.search.price import AS_LOADED
from bitwright.search.progress import Progress
from bitwright.search.settings import Settings
from bitwright.search.subject import Subject, kept_roles
from bitwright.search.value_learn import learn_values
from bitwright.search.value_scores import ValueLearned


def learn_scores(subject: Subject, settings: Settings, progress: Progress) -> tuple[Learned, ValueLearned | None]:
    """Scores of every choice that is left at every site that is in question, and what value sites run with."""
    wanted = [site for site in subject.sites if site.role not in kept_roles(settings)]
    learned = learn(
        subject.loaded.model,
        wanted,
        subject.splits.calibrate,
        subject.choices.of_weights(wanted),
        seed=settings.seed,
        cache=subject.cache,
        progress=progress,
        output=subject.output,
        spool=subject.spool,
        shared=subject.choices.shared,
    )
    if not subject.value_sites:
        return replace(learned, scores=subject.choices.allowed(learned.scores)), None
    values = learn_values(
        subject.loaded.model,
        subject.sites,
        subject.value_sites,
        subject.splits.calibrate,
        settings.value_schemes,
        seed=settings.seed,
        cache=subject.cache,
        progress=progress,
        output=subject.output,
    )
    staying = {AS_LOADED: 0.0} if settings.values_may_stay else {}
    of_values = {name: {**staying, **kls} for name, kls in values.scores.items()}
    scores = subject.choices.allowed({**learned.scores, **of_values})
    return replace(learned, scores=scores, overflows={**learned.overflows, **values.overflows}), values
