"""`checkpoint.json`: what a checkpoint is, and the sha256 of every file in it, its own included.

    {"schema_version": 2, "step": 200, "policy": {…}, "optimizer": "AdamW", "scheduler": "LambdaLR", "world_size": 1,
     "files": {"model.safetensors": {"bytes": 538090408, "sha256": "…"}, …}, …, "sha256": "…"}

A byte that changed on disk is found before anything is read from the file: a flipped bit of a weight would train on
without a word. sha256 reads 1.5 GiB in 2.1 s on one core, where writing them took 7.7 s; nobody can make two files that
share one, and every system has a program that checks it. Rejected: blake2b, which takes half as long again, and a CRC,
which a swapped file may pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import TrainingError
from bitwright.plan.whole_folder import write_and_sync

CHECKPOINT_FILE = "checkpoint.json"
SCHEMA_VERSION = 2


def to_json(value: Any) -> bytes:
    """One line of JSON. ValueError where a float is not finite."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def facts_of_file(path: Path) -> dict[str, Any]:
    """Return the size of a file and the sha256 of its bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_checkpoint_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `checkpoint.json`, with the sha256 of what it says as its last word."""
    signed = {"schema_version": SCHEMA_VERSION, **facts}
    signed["sha256"] = hashlib.sha256(to_json(signed)).hexdigest()
    write_and_sync(folder / CHECKPOINT_FILE, to_json(signed))


def read_checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `checkpoint.json`, its files being there in their whole size.

    Raises:
        TrainingError: it is missing, damaged, or of another release.
    """
    facts, damage = _look(folder)
    if damage is None:
        damage = next(_wrong_sizes(folder, facts["files"]), None)
    if damage is not None:
        raise damaged(folder, damage)
    return facts


def raise_if_changed(folder: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> None:
    """Raise TrainingError unless the named files have the bytes that were written."""
    for name in names:
        if name not in files:
            raise damaged(folder, f"'{folder / CHECKPOINT_FILE}' names no '{name}'")
        try:
            found = facts_of_file(folder / name)
        except OSError as error:
            raise damaged(folder, f"'{folder / name}' cannot be read ({error.strerror})") from error
        if found != files[name]:
            raise damaged(folder, f"'{folder / name}' has other bytes than were written (its sha256 differs)")


def damaged(folder: Path, damage: str) -> TrainingError:
    """The error for a checkpoint that cannot be gone on with, naming one that can."""
    other = max(_whole_ones(folder.parent, besides=folder), default=None)
    if other is None:
        return TrainingError(f"{damage}, so the checkpoint is damaged; go back to an earlier one, or begin anew")
    return TrainingError(
        f"{damage}, so the checkpoint is damaged; go on from '{other[1]}', which has {other[0]} steps (bitwright "
        f"train CONFIG.toml --resume --from {other[1]})"
    )


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps among the folders in `folder`; None: there is none.

    Raises:
        TrainingError: of some folder it cannot be read how many steps it has, so that it may be the one.
    """
    found = []
    for file in folder.glob(f"*/{CHECKPOINT_FILE}"):
        if not file.parent.name.startswith("."):
            facts, damage = _look(file.parent)
            if damage is not None:
                raise damaged(file.parent, damage)
            found.append((int(facts["step"]), file.parent))
    return max(found, default=(0, None))[1]


def _look(folder: Path) -> tuple[dict[str, Any], str | None]:
    """What `checkpoint.json` says, and what is wrong with it."""
    file = folder / CHECKPOINT_FILE
    try:
        content = file.read_bytes()
    except OSError as error:
        raise TrainingError(
            f"there is no checkpoint at '{folder}' ({error.strerror}); give a folder that holds {CHECKPOINT_FILE}"
        ) from error
    try:
        facts = json.loads(content.decode("utf-8"))
    except ValueError as error:
        return {}, f"'{file}' is damaged ({error})"
    if not isinstance(facts, dict):
        return {}, f"'{file}' holds no object"
    said = {name: value for name, value in facts.items() if name != "sha256"}
    if "sha256" in facts and (
        to_json(facts) != content or hashlib.sha256(to_json(said)).hexdigest() != facts["sha256"]
    ):
        return {}, f"'{file}' has other bytes than were written (its sha256 differs)"
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise TrainingError(
            f"'{file}' has schema version {facts.get('schema_version')}, and this bitwright reads {SCHEMA_VERSION}; "
            "use the release that wrote it"
        )
    if "sha256" not in facts:
        return {}, f"'{file}' lacks its own sha256"
    return facts, None


def _wrong_sizes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, facts in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            yield f"'{path}' is missing"
        elif found != facts["bytes"]:
            yield f"'{path}' has {found:,} bytes instead of {facts['bytes']:,}"


def _whole_ones(parent: Path, besides: Path) -> Iterator[tuple[int, Path]]:
    """Steps and folder of every other checkpoint whose files are all there."""
    for file in parent.glob(f"*/{CHECKPOINT_FILE}"):
        folder = file.parent
        if folder.name == besides.name or folder.name.startswith("."):
            continue
        try:
            facts, damage = _look(folder)
        except TrainingError:
            continue
        if damage is None and not list(_wrong_sizes(folder, facts["files"])):
            yield int(facts["step"]), folder
