"""`embedding`: paragraphs, each a text of its own at whose vector a sentence encoder is judged.

A document is read paragraph by paragraph, since that is what people embed: a paragraph is what stands between blank
lines, and one of fewer than `_MIN_LETTERS` letters (a heading) goes with the one after it. Each is one sequence, with
the tokens that the tokenizer puts around a text, cut at the right where it is longer. All of its tokens count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bitwright.search.documents import Document
from bitwright.search.task import Encoder, Piece, Task

_MIN_LETTERS = 30


def _pieces(encoder: Encoder, document: Document, room: int) -> Iterator[Piece]:
    inside = room - len(encoder.prefix) - len(encoder.suffix)
    for paragraph in _paragraphs(document.text):
        words = encoder.encode(paragraph)[:inside]
        if words:
            ids = encoder.prefix + words + encoder.suffix
            yield Piece(ids=ids, scored=(True,) * len(ids))


def _paragraphs(text: str) -> Iterator[str]:
    waiting = ""
    for block in re.split(r"\n[ \t]*\n", text):
        waiting = f"{waiting}\n\n{block.strip()}".strip()
        if sum(map(str.isalpha, waiting)) >= _MIN_LETTERS:
            yield waiting
            waiting = ""
    if waiting:
        yield waiting


TASKS = (
    Task(
        name="embedding",
        description="paragraphs, the vector of each as a sentence encoder puts it",
        packed=False,
        pieces=_pieces,
        output="embedding",
        whole_texts=True,
    ),
)
