"""Output whatever the encoding: a character that stdout cannot spell is shown by one that looks like it.

Tables use −, →, █ and more. Where the output is ASCII or Latin-1 (``LC_ALL=C``, an old code page), each becomes one
ASCII character, so that columns stay aligned and a minus stays a minus; what looks like nothing in ASCII becomes "?".
JSON is escaped instead, which every reader of JSON undoes.

Rejected: Python's own ``errors="replace"``, which makes "?0.1" of "−0.1", and the same "?" of every mark of a table.
"""

from __future__ import annotations

import codecs
import io
import json
import sys

#: Character → the ASCII character that stands for it.
LOOK_ALIKES = str.maketrans("−→│─·×…≈█▒▏▎▍▌▋▊▉", "->|-.x.~#:|||||||")
_HANDLER = "bitwright.look_alikes"


def show_look_alikes() -> None:
    """Have stdout and stderr replace what their encoding lacks, from now on, where they are files of text."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def write_json(text: str) -> None:
    """Write JSON to stdout; what its encoding lacks is escaped."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # Outside its strings JSON is ASCII.
        text = "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text)
    sys.stdout.write(text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end].translate(LOOK_ALIKES)
    return "".join(char if char.isascii() else "?" for char in lost), error.end
