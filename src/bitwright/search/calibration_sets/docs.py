"""`docs`: the language reference that every interpreter carries: English prose with code.

It is what ``help("assert")`` prints: about 80 topics, 380,000 characters. Some topics contain others whole ("Special
method names" holds "Emulating numeric types", "Compound statements" holds "The try statement"), a quarter of the text.
Documents must not share text, or what calibrates would also prove; so a paragraph of `_MIN_PARAGRAPH_CHARS` or more
is kept once, in the shortest topic that has it. Topics of which almost nothing is left are dropped.

The text is that of the running interpreter and differs a little between Python versions; a plan tells texts apart by
the hash of their tokens.
"""

from __future__ import annotations

import importlib
import platform
import re

from bitwright.errors import DataError
from bitwright.search.documents import MIN_DOCUMENT_CHARS, CalibrationSet, Document

_MODULE = "pydoc_data.topics"

#: Shorter paragraphs (headings, "For example:", one line of code) may stand in several topics.
_MIN_PARAGRAPH_CHARS = 60


def _documents() -> tuple[Document, ...]:
    try:
        topics: dict[str, str] = importlib.import_module(_MODULE).topics
    except ImportError as error:
        raise DataError(
            f"the set 'docs' needs the standard library's module '{_MODULE}', which this interpreter lacks; "
            "install the complete standard library, or give a file with text"
        ) from error
    kept: dict[str, Document] = {}
    seen: set[str] = set()
    for key in sorted(topics, key=lambda key: (len(topics[key]), key)):
        text = topics[key].strip()
        own = [block for block in re.split(r"\n[ \t]*\n", text) if _normal(block) not in seen]
        seen.update(words for words in map(_normal, own) if len(words) >= _MIN_PARAGRAPH_CHARS)
        rest = "\n\n".join(own)
        if len(rest) >= MIN_DOCUMENT_CHARS:
            kept[key] = Document(title=text.partition("\n")[0].strip(), text=rest)
    return tuple(kept[key] for key in sorted(kept))


def _normal(block: str) -> str:
    """Return a paragraph without its line breaks and indentation, which differ between topics."""
    return " ".join(block.split())


CALIBRATION_SETS = (
    CalibrationSet(
        name="docs",
        description="the interpreter's own documentation topics without repeated paragraphs, English prose with code",
        source=f"{_MODULE} of Python {platform.python_version()}",
        documents=_documents,
    ),
)
