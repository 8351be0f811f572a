"""Reading one file of facts: its bytes, its TOML, its fields, each refused with the name of the file.

Devices, engines, topologies, models and efficiencies are such files, the package's own and a user's alike; a record of
pydantic says which fields there are. Folders of them are `catalog.FileCatalog`s.

    fields = parse_facts(content, "mine.toml", _DeviceFile, kind="device", error=HardwareError)
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bitwright.errors import BitwrightError

M = TypeVar("M", bound=BaseModel)


def read_content(path: str | Path, *, kind: str, error: type[BitwrightError]) -> bytes:
    """Return the bytes of a file.

    Raises:
        error: it cannot be read; the reason is the system's.
    """
    try:
        return Path(path).read_bytes()
    except OSError as failure:
        raise error(
            f"{kind} file '{path}' cannot be read ({failure.strerror}); give the path of a .toml file"
        ) from failure


def field_of(finding: ErrorDetails) -> str:
    """The dotted name of the field that one of pydantic's findings is about."""
    return ".".join(str(part) for part in finding["loc"])


def parse_facts(
    content: bytes,
    file: str,
    record: type[M],
    *,
    kind: str,
    error: type[BitwrightError],
    describe: Callable[[ValidationError, str], str] | None = None,
) -> M:
    """Return the fields of a file's content.

    Args:
        content: of the file, TOML in UTF-8.
        file: what errors call it.
        record: which fields there are.
        kind: what the file describes, in messages.
        error: what is raised.
        describe: (findings, file) → the message about fields; None: the first field and its rule.

    Raises:
        error: no TOML, or a field is missing, unknown or impossible.
    """
    try:
        return record.model_validate(tomllib.loads(content.decode("utf-8")))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as failure:
        raise error(f"{kind} file '{file}' is no TOML ({failure}); correct it at that place") from failure
    except ValidationError as failure:
        if describe is not None:
            raise error(describe(failure, file)) from failure
        first = failure.errors()[0]
        raise error(f"{kind} file '{file}': field '{field_of(first)}': {first['msg']}; correct it") from failure
