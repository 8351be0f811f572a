"""A folder that is there completely or not at all: assembled beside its place, flushed, then renamed.

    with assembled_folder(target) as folder:
        …                                  # write files into `folder`

A full disk, an error or Ctrl-C inside the block leaves what was at `target` before, and nothing else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def assembled_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `target` at the end of the block, in place of a folder that is there.

    Missing ancestors are made, and removed again where the block fails.

    Args:
        target: an absolute path without links; nothing, or a folder that may be replaced.

    Raises:
        OSError: something could not be written or renamed; nothing has changed then.
    """
    with _created_parents(target.parent), _temporary_sibling(target) as assembled:
        yield assembled
        _permit_as_usual(assembled)
        _sync_folder(assembled)
        _move_into_place(assembled, target)


@contextmanager
def _created_parents(parent: Path) -> Iterator[None]:
    """Make the missing ancestors of the target; remove them again where the body fails."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for folder in missing:
                if not any(folder.iterdir()):
                    folder.rmdir()


@contextmanager
def _temporary_sibling(target: Path) -> Iterator[Path]:
    """Give a new folder beside ``target``; whatever is left of it at the end is removed."""
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _permit_as_usual(folder: Path) -> None:
    """Let those read the files who may look into the new folder: some libraries write for their own user alone."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def write_and_sync(path: Path, content: bytes) -> None:
    """Write a new file and have the disk keep it."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries; not every platform can open a folder, and there the rename has to do."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(assembled: Path, target: Path) -> None:
    """Rename ``assembled`` to ``target``; an older folder there is set aside first and put back where that fails."""
    if not target.exists():
        os.rename(assembled, target)
        _sync_folder(target.parent)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    moved = False
    try:
        os.rename(target, aside / target.name)
        os.rename(assembled, target)
        moved = True
        _sync_folder(target.parent)
    finally:
        if not moved and not target.exists():
            os.rename(aside / target.name, target)
        shutil.rmtree(aside, ignore_errors=True)
