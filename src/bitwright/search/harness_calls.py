"""Every call into the lm-evaluation-harness, in one place: importing this module needs it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bitwright.errors import DataError
from bitwright.search.harness import missing_file, unknown_task

# none of them has types
_LM_EVAL: Any = import_module("lm_eval")
_MODELS: Any = import_module("lm_eval.models.huggingface")
_TASKS: Any = import_module("lm_eval.tasks")
_DATASETS: Any = import_module("datasets")
_SUFFIXES = (".yaml", ".yml")
_NAME = re.compile(r"^task:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)


def tasks_of(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """What loads tasks, and their names: of YAML files, the one that the file gives.

    Raises:
        DataError: a name that nobody knows, a file that is not there or names no task.
    """
    files = [Path(task) for task in tasks if Path(task).suffix in _SUFFIXES]
    for file in files:
        if not file.is_file():
            raise missing_file(file)
    names = [_name_in(Path(task)) if Path(task).suffix in _SUFFIXES else task for task in tasks]
    folders = sorted({str(file.resolve().parent) for file in files})
    # the thousands that the harness brings are read only where one of them is asked for
    manager = _TASKS.TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
    known = sorted(manager.all_tasks)
    for name in names:
        if name not in known:
            raise unknown_task(name, known)
    return manager, names


def evaluate(
    model: Any, tokenizer: Any, manager: Any, names: Sequence[str], limit: int | None, batch_size: int
) -> Mapping[str, Any]:
    """The harness's results of a model of transformers, with the score of every document.

    Raises:
        DataError: the data of a task cannot be loaded.
    """
    runner = _MODELS.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found: Mapping[str, Any] | None = _LM_EVAL.simple_evaluate(
            model=runner,
            tasks=list(names),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
        )
    except (OSError, _DATASETS.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"the data of {', '.join(names)} cannot be loaded ({reason}); check the network, or give a .yaml file "
            "whose data lies here"
        ) from error
    assert found is not None, "one process evaluates"
    return found


def _name_in(file: Path) -> str:
    found = _NAME.search(file.read_text(encoding="utf-8"))
    if found is None:
        raise DataError(f"'{file}' names no task (it has no 'task:'); give a task file of the harness")
    return found[1]
