"""`code`: sources of the standard library, docstrings included: Python code on every machine.

One document a module: the files directly in the library's folder, sorted by name, without private modules, of 2 to 64
KiB (shorter ones are stubs, longer ones would crowd the others out).
"""

from __future__ import annotations

import platform
import sysconfig
import tokenize
from pathlib import Path

from bitwright.errors import DataError
from bitwright.search.documents import CalibrationSet, Document

_MIN_BYTES = 2 * 1024
_MAX_BYTES = 64 * 1024


def _documents() -> tuple[Document, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(folder.glob("*.py"), key=lambda path: path.name)
        if not path.name.startswith("_") and _MIN_BYTES <= path.stat().st_size <= _MAX_BYTES
    ]
    if not paths:
        raise DataError(
            f"the set 'code' needs the standard library's sources, and '{folder}' has none; "
            "use the set 'docs', or give a file with text"
        )
    return tuple(Document(title=f"the Python module {path.stem}", text=_source(path)) for path in paths)


def _source(path: Path) -> str:
    with tokenize.open(path) as file:  # decodes as the interpreter does
        return file.read().strip()


CALIBRATION_SETS = (
    CalibrationSet(
        name="code",
        description="sources of the standard library with their docstrings, Python code",
        source=f"modules of 2 to 64 KiB in the standard library's folder, Python {platform.python_version()}",
        documents=_documents,
    ),
)
