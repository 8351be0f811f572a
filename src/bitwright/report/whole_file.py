"""Files that are there completely or not at all: written beside their place, then renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from bitwright.errors import ReportError


def write_file(target: Path, content: bytes, what: str) -> Path:
    """Write a file and return its path; ``what`` names it in messages ("the report").

    Raises:
        ReportError: it cannot be written; nothing has changed then.
    """
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise ReportError(
            f"could not write {what} to '{target}': {error.strerror or error}; nothing was written: choose another path"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
