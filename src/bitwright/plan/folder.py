"""A plan on disk: a folder that is there completely or not at all.

    NAME/plan.json             the plan, canonical JSON
    NAME/tensors.safetensors   what cannot be recomputed from the weights (hashed in plan.json)
    NAME/run.json              timings, paths, date: not hashed
    NAME/report.html           what people read (any extra file the caller hands over)

Everything is written and flushed into a temporary sibling, which is then renamed: a full disk or Ctrl-C leaves either
the old folder or none. A folder that holds anything bitwright did not write is never replaced.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from pydantic import ValidationError
from safetensors import SafetensorError

from bitwright.errors import PlanError
from bitwright.plan.canonical import canonical_json, hash_json, hash_tensors
from bitwright.plan.old_schemas import upgrade_content
from bitwright.plan.plan import SCHEMA_VERSION, Plan
from bitwright.plan.schema import Run
from bitwright.plan.whole_folder import assembled_folder, write_and_sync

PLAN_FILE = "plan.json"
TENSORS_FILE = "tensors.safetensors"
RUN_FILE = "run.json"
REPORT_FILE = "report.html"
_OUR_FILES = frozenset({PLAN_FILE, TENSORS_FILE, RUN_FILE, REPORT_FILE})


def raise_if_not_replaceable(folder: str | os.PathLike[str], *, extra_names: frozenset[str] = frozenset()) -> None:
    """Raise ``PlanError`` unless a plan may be written at ``folder``: absent, empty, or an older plan and nothing else.

    Call it before long work; ``write_plan`` calls it again.
    """
    target = Path(folder)
    if not target.exists():
        _raise_if_blocked(target)
        return
    if not target.is_dir():
        raise PlanError(f"'{target}' is a file, and a plan is a folder; choose another --out")
    if os.path.ismount(target):
        raise PlanError(
            f"'{target}' is a mount point, and a plan folder replaces what is there whole; choose a folder in it as "
            "--out"
        )
    names = {entry.name for entry in target.iterdir()}
    if not names:
        return
    if PLAN_FILE not in names:
        raise PlanError(f"'{target}' exists and is not a plan folder (it has no {PLAN_FILE}); choose another --out")
    foreign = sorted(names - _OUR_FILES - extra_names)
    if foreign:
        raise PlanError(
            f"'{target}' also holds '{foreign[0]}', which bitwright did not write and will not delete; "
            "move it away or choose another --out"
        )


def _raise_if_blocked(target: Path) -> None:
    """Raise where the nearest ancestor that exists is no folder, or may not be written to."""
    ancestor = target.absolute().parent
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise PlanError(f"cannot write a plan at '{target}': '{ancestor}' is a file; choose another --out")
    if not os.access(ancestor, os.W_OK):
        raise PlanError(
            f"cannot write a plan at '{target}': no permission to write in '{ancestor}'; choose another --out"
        )


def write_plan(plan: Plan, folder: str | os.PathLike[str], *, extra_files: Mapping[str, bytes] | None = None) -> Path:
    """Write ``plan`` and ``extra_files`` (name → content) as ``folder``, all of it or nothing; return the folder.

    An older plan folder there is replaced. Raises ``PlanError`` where something else is there (nothing is touched) or
    where writing fails (nothing is left behind).
    """
    extra = dict(extra_files or {})
    for name in extra:
        if not name or name in (PLAN_FILE, TENSORS_FILE, RUN_FILE) or Path(name).name != name:
            raise PlanError(f"extra file {name!r} must be a plain name that the plan does not use itself")
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in plan.tensors.items()}
    files = {
        PLAN_FILE: plan.to_json().encode("utf-8"),
        TENSORS_FILE: safetensors.numpy.save(contiguous),
        RUN_FILE: canonical_json(plan.run.model_dump(mode="json")).encode("utf-8"),
        **extra,
    }
    return write_files(files, folder)


def write_files(files: Mapping[str, bytes], folder: str | os.PathLike[str]) -> Path:
    """Write the files of a plan (name → content) as ``folder``, all of them or nothing; return the folder.

    Raises ``PlanError`` as ``write_plan`` does.
    """
    target = Path(os.path.realpath(folder))
    raise_if_not_replaceable(target, extra_names=frozenset(files))
    num_bytes = sum(map(len, files.values()))
    try:
        with assembled_folder(target) as assembled:
            for name, content in files.items():
                write_and_sync(assembled / name, content)
    except OSError as error:
        raise PlanError(
            f"could not write the plan to '{target}' ({num_bytes:,} bytes): {error.strerror or error}; nothing was "
            f"written: {'free some space' if error.errno == errno.ENOSPC else 'see to that'} or choose another --out"
        ) from error
    return target


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan folder, or a ``plan.json`` (with the files beside it).

    A ``plan.json`` that lies alone gives a plan without tensors only if it never had any. A plan of an older schema
    comes back in this one, and so with another ``content_hash``.
    Raises ``PlanError`` where the plan is missing, damaged, changed by hand, or from a newer schema.
    """
    content, file = read_content(path)
    plan = _validated(content, file)
    tensors = _read_tensors(file.parent / TENSORS_FILE, plan)
    return plan.attach(tensors=tensors, run=read_run(file.parent / RUN_FILE))


def read_content(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Path]:
    """Return the JSON object of a plan folder or a ``plan.json``, of whatever kind, and the file that it lies in.

    Raises ``PlanError`` where there is none.
    """
    given = Path(path)
    file = given / PLAN_FILE if given.is_dir() else given
    return _read_json(file, given), file


def parse_plan(text: str) -> Plan:
    """Return the plan in the text of a ``plan.json``, without its tensors. Raises ``PlanError`` as ``load_plan``."""
    return _validated(_parse_json(text, Path(PLAN_FILE)), Path(PLAN_FILE))


def _read_json(file: Path, given: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = f"'{given}' has no {PLAN_FILE}" if given.is_dir() else f"there is no plan at '{given}'"
        raise PlanError(f"{what}; give the folder that bitwright optimize wrote") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"'{file}' is no text in UTF-8, so it is no plan; make the plan again") from error
    except OSError as error:
        raise PlanError(f"cannot read '{file}': {error.strerror}; check the path and its permissions") from error
    return _parse_json(text, file)


def _parse_json(text: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"'{file}' is no complete JSON ({error}); the file is damaged: make the plan again") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise PlanError(f"'{file}' is JSON but no plan (it has no schema_version); give a plan folder")
    return content


def _validated(content: dict[str, Any], file: Path) -> Plan:
    if "kind" in content:
        raise PlanError(
            f"'{file}' is a {content['kind']} plan, and a plan for serving is asked for here; pass it to bitwright "
            "show, to bitwright export, or to training.prepare(policy=…)"
        )
    hashed = raise_if_changed(content, file, SCHEMA_VERSION)
    fields = upgrade_content(hashed, file)
    try:
        plan = Plan.model_validate({key: value for key, value in fields.items() if key != "decision_hash"})
    except ValidationError as error:
        raise invalid_plan(file, error) from error
    if content["schema_version"] == SCHEMA_VERSION and hashed.get("decision_hash") != plan.decision_hash:
        raise PlanError(f"'{file}': decision_hash does not fit the sites and choices; make the plan again")
    return plan


def raise_if_changed(content: dict[str, Any], file: Path, newest: int) -> dict[str, Any]:
    """Return a plan's content without its content_hash, which has to fit it.

    Raises ``PlanError`` for a schema that never existed or is newer than ``newest``, and for content that was changed.
    """
    version = content["schema_version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PlanError(f"'{file}' has the schema version {version!r}, which never existed; make the plan again")
    if version > newest:
        raise PlanError(
            f"'{file}' has schema version {version}, and this bitwright reads up to {newest}; upgrade bitwright"
        )
    hashed = {key: value for key, value in content.items() if key != "content_hash"}
    try:
        actual = hash_json(hashed)
    except ValueError as error:
        raise PlanError(f"'{file}' holds NaN or an infinity, which no plan has; make the plan again") from error
    if content.get("content_hash") != actual:
        raise PlanError(
            f"'{file}' is not what was written (content_hash is {str(content.get('content_hash'))[:12]}…, the content "
            f"gives {actual[:12]}…); restore the file or make the plan again"
        )
    return hashed


def invalid_plan(file: Path, error: ValidationError) -> PlanError:
    """The error for content that is no plan: the field at fault."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return PlanError(f"'{file}' is no valid plan: {where}: {first['msg']}; make the plan again")


def _read_tensors(file: Path, plan: Plan) -> dict[str, np.ndarray]:
    try:
        tensors: dict[str, np.ndarray] = safetensors.numpy.load(file.read_bytes())
    except FileNotFoundError:
        tensors = {}
    except (SafetensorError, OSError) as error:
        raise PlanError(f"cannot read '{file}': {error}; the file is damaged: make the plan again") from error
    actual = hash_tensors(tensors)
    if actual != plan.tensors_hash:
        state = "is missing" if not file.exists() else "belongs to another plan or is damaged"
        raise PlanError(
            f"'{file}' {state} (plan.json expects {plan.tensors_hash[:12]}…, found {actual[:12]}…); keep the files of "
            "a plan folder together"
        )
    return tensors


def read_run(file: Path) -> Run:
    """Return what ``run.json`` says; nothing where there is none. Raises ``PlanError`` where it is damaged."""
    if not file.exists():
        return Run()
    try:
        return Run.model_validate_json(file.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"cannot read '{file}': {reason}; it may be deleted, the plan stands without it") from error
