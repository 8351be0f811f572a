"""`docs`: the language reference that every interpreter carries (what ``help("assert")`` prints): English prose with
code.

About 80 topics, 460,000 characters. The text is that of the running interpreter, so it differs a little between
Python versions; a plan tells texts apart by the hash of their tokens.
"""

from __future__ import annotations

import importlib
import platform

from bitwright.errors import DataError
from bitwright.search.documents import CalibrationSet, Document

_MODULE = "pydoc_data.topics"


def _documents() -> tuple[Document, ...]:
    try:
        topics: dict[str, str] = importlib.import_module(_MODULE).topics
    except ImportError as error:
        raise DataError(
            f"the set 'docs' needs the standard library's module '{_MODULE}', which this interpreter lacks; "
            "install the complete standard library, or give a file with text"
        ) from error
    texts = (topics[key].strip() for key in sorted(topics))
    return tuple(Document(title=text.partition("\n")[0].strip(), text=text) for text in texts)


CALIBRATION_SETS = (
    CalibrationSet(
        name="docs",
        description="the interpreter's own documentation topics, English prose with code",
        source=f"{_MODULE} of Python {platform.python_version()}",
        documents=_documents,
    ),
)
