"""`text`: documents as they are, every token scored.

A document is read in pieces of four sequences. They are taken in turn from all documents of a split, so that one long
document does not fill it. Two newlines end a document.
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.search.documents import Document
from bitwright.search.task import Encoder, Piece, Task

_SEQUENCES_PER_PIECE = 4


def _pieces(encoder: Encoder, document: Document, room: int) -> Iterator[Piece]:
    ids = encoder.encode(document.text.strip() + "\n\n")
    step = _SEQUENCES_PER_PIECE * room
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        yield Piece(ids=part, scored=(True,) * len(part))


TASKS = (Task(name="text", description="plain text, every token scored", packed=True, pieces=_pieces),)
