"""Tasks of the lm-evaluation-harness: a plan beside its reference, on the same documents.

    results = run_tasks(plan, loaded, ["arc_easy", "my_task.yaml"])

Both models answer every document; the harness scores each answer by the task's own metrics. The difference of a metric
is paired, document by document, with a 95 % interval from a bootstrap over documents (`bootstrap.py`). What runs is the
plan as it was verified: emulated.

A task is a name that the harness knows, or a YAML file of its own kind. Metrics that are no mean over documents
(perplexities, corpus BLEU) are shown without an interval.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.catalog import nearest_name_hint
from bitwright.errors import DataError, MissingExtra, ModelError
from bitwright.inference import apply
from bitwright.models import Site
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Interval, Plan
from bitwright.search.bootstrap import bootstrap
from bitwright.search.progress import Progress, Silent

#: What the harness writes behind a metric's name where nothing filters answers.
_UNFILTERED = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """One metric of one task."""

    task: str
    metric: str
    reference: float
    plan: float
    #: Plan less reference, paired over documents; None where the metric is no mean over them.
    difference: Interval | None
    num_documents: int


def run_tasks(
    plan: Plan,
    loaded: LoadedModel,
    tasks: Sequence[str],
    *,
    sites: Sequence[Site] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> tuple[TaskResult, ...]:
    """Let the reference and the plan answer tasks.

    Args:
        plan: for this model.
        loaded: a causal language model of transformers.
        tasks: names that the harness knows, or its YAML files.
        sites: the model's weight sites, if they are known already.
        limit: documents of each task; None: all.
        batch_size: documents at once.
        progress: shows the stages.

    Raises:
        MissingExtra: the harness is not installed.
        DataError: no such task, or its data cannot be loaded.
        ModelError: the model is none of transformers.
    """
    harness = _open_harness()
    if not hasattr(loaded.model, "generation_config"):
        raise ModelError(
            f"{type(loaded.model).__name__} is no model of transformers, which the harness needs; leave --tasks out"
        )
    shown = progress if progress is not None else Silent()
    with _quiet():
        manager, names = harness.tasks_of(tasks)
        found = []
        for title, model in (("reference", loaded.model), ("plan", apply(plan, loaded, sites=sites))):
            with shown.stage(f"tasks, {title}", len(names)) as stage:
                found.append(harness.evaluate(model, loaded.tokenizer, manager, names, limit, batch_size))
                stage.advance(len(names))
    return tuple(_results(*found, seed=plan.seed))


def _open_harness() -> Any:
    try:
        return importlib.import_module("bitwright.search.harness_calls")
    except ImportError as error:
        package = (error.name or "lm_eval").partition(".")[0]
        raise MissingExtra(package, "eval", "verifying on tasks") from error


def _results(reference: Mapping[str, Any], plan: Mapping[str, Any], *, seed: int) -> Iterator[TaskResult]:
    for task, figures in plan["results"].items():
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            pairs = _pairs(reference["samples"].get(task, []), plan["samples"].get(task, []), metric, filtered)
            is_mean = len(pairs) > 0 and np.isclose(pairs[:, 1].mean(), value)
            yield TaskResult(
                task=task,
                metric=metric if filtered == _UNFILTERED else f"{metric} ({filtered})",
                reference=float(reference["results"][task][key]),
                plan=float(value),
                difference=_difference(pairs, seed) if is_mean else None,
                num_documents=len({sample["doc_id"] for sample in plan["samples"].get(task, [])}),
            )


def _pairs(reference: Sequence[Any], plan: Sequence[Any], metric: str, filtered: str) -> np.ndarray:
    """Scores of reference and plan of every document that has one, [documents, 2]."""
    scores = [
        {s["doc_id"]: s[metric] for s in samples if s.get("filter") == filtered and np.isscalar(s.get(metric))}
        for samples in (reference, plan)
    ]
    shared = sorted(scores[0].keys() & scores[1].keys())
    return np.array([[float(of_model[document]) for of_model in scores] for document in shared]).reshape(-1, 2)


def _difference(pairs: np.ndarray, seed: int) -> Interval:
    differences = pairs[:, 1] - pairs[:, 0]
    return bootstrap(lambda drawn: float(differences[drawn].mean()), len(differences), seed).interval


def unknown_task(name: str, known: Sequence[str]) -> DataError:
    """The error for a task that nobody knows."""
    return DataError(
        f"the harness has no task {name!r}{nearest_name_hint(name, list(known))} It knows {len(known)} by name; a task "
        "of your own is a .yaml file"
    )


def missing_file(path: Path) -> DataError:
    """The error for a task file that is not there."""
    return DataError(f"there is no task file at '{path}'; give a .yaml file of the harness, or the name of a task")


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness and the libraries below it tell much; what goes wrong is raised."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
