"""Text to fine-tune on → rows of tokens, and which of them count in the loss.

Sources, documents and what is done with them are those of calibration (`search/documents.py`, `search/tasks/`): a .txt,
.jsonl or .parquet file or a built-in set; `text` lays documents end to end and counts every token, `chat` renders one
conversation a row and counts the assistant's. Here no document is left out for fairness of a proof, and the order is
the source's own; `batches.py` shuffles.

    input_ids  int64 [rows, sequence_length]
    labels     the same, IGNORED where a token does not count: padding, other speakers, what the tokenizer puts first

Labels stand under their own token; the model shifts them, as every causal language model of transformers does.

Rows are read once and kept as int32: a token takes eight bytes with its label, so 100 million tokens take 800 MB.
Rejected: reading the file again in every epoch, which makes the position in the data a place in a file, a tokenizer's
state and a row half full; here it is one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.errors import DataError
from bitwright.formats.philox import random_words
from bitwright.search.documents import Document, is_sampled, read_source
from bitwright.search.task import TASKS, Encoder, Task, encoder_of

#: The label of a token that does not count in the loss (torch's `ignore_index`).
IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRows:
    """All rows of one source."""

    #: A built-in set's name, or a file's name without its folder.
    source: str
    #: int32 [rows, sequence_length].
    input_ids: Tensor
    #: The same; IGNORED where a token does not count.
    labels: Tensor
    #: bool, the same: True where a row is filled up. None: no row is.
    padding: Tensor | None
    #: sha256 of all of them.
    hash: str

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.input_ids.shape[0])

    @property
    def sequence_length(self) -> int:
        """Tokens in a row."""
        return int(self.input_ids.shape[1])

    @property
    def num_scored(self) -> int:
        """How many tokens count; a row's first one never does."""
        return int((self.labels[:, 1:] != IGNORED).sum())


def read_token_rows(
    source: str | Path,
    tokenizer: Any,
    *,
    sequence_length: int,
    task: str = "text",
    vocabulary_size: int | None = None,
    max_rows: int | None = None,
) -> TokenRows:
    """Read a source whole.

    Args:
        source: a name in `CALIBRATION_SETS`, or the path of a .txt, .jsonl or .parquet file.
        tokenizer: of transformers.
        sequence_length: tokens in a row, those included that the tokenizer puts first.
        task: a name in `TASKS`.
        vocabulary_size: ids must be below it; by default the tokenizer's. Pass the rows of the model's embedding.
        max_rows: stop after so many.

    Raises:
        UnknownName: no such task or set.
        DataError: the text is missing, unreadable or empty, or a token has no row in the embedding; says where.
        MissingExtra: a reader is not installed.
    """
    documents = read_training_documents(source)
    return make_token_rows(
        documents,
        tokenizer,
        source=Path(source).name,
        sequence_length=sequence_length,
        task=task,
        vocabulary_size=vocabulary_size,
        max_rows=max_rows,
    )


def read_training_documents(source: str | Path) -> tuple[Document, ...]:
    """Read a source's documents. Raises as `read_token_rows` does."""
    if is_sampled(source):
        raise DataError(
            f"the set '{source}' is what the model itself writes, and training on it teaches nothing; name a file"
        )
    return read_source(source).documents


def share_out(
    documents: Sequence[Document], share: float, *, seed: int
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Keep documents back for validation: (to train on, to validate on), each in the given order.

    Args:
        documents: at least two.
        share: of the characters, above 0 and below 1; at least one document stays on either side.
        seed: decides which.

    Raises:
        DataError: there is only one document.
    """
    if len(documents) < 2:
        raise DataError(
            "the text is a single document, so none can be kept back for validation; separate documents by blank lines "
            "(.txt) or rows (.jsonl), or name a file as data.validation"
        )
    order = np.argsort(random_words(seed, len(documents)), kind="stable")
    wanted = share * sum(len(document.text) for document in documents)
    kept_back: set[int] = set()
    num_chars = 0
    for index in order[:-1].tolist():
        if kept_back and num_chars + len(documents[index].text) > wanted:
            break
        kept_back.add(index)
        num_chars += len(documents[index].text)
    parts: tuple[list[Document], list[Document]] = ([], [])
    for index, document in enumerate(documents):
        parts[index in kept_back].append(document)
    return tuple(parts[0]), tuple(parts[1])


def make_token_rows(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    source: str,
    sequence_length: int,
    task: str = "text",
    vocabulary_size: int | None = None,
    max_rows: int | None = None,
) -> TokenRows:
    """Tokenise documents; `source` is what errors call them. Arguments and errors: see `read_token_rows`."""
    encoder = encoder_of(tokenizer)
    reading = TASKS[task]
    num_ids = vocabulary_size or encoder.vocabulary_size
    if sequence_length < len(encoder.prefix) + 2:
        raise DataError(
            f"a sequence of {sequence_length} tokens has no room for a token and the next one"
            f"{' behind what the tokenizer puts first' if encoder.prefix else ''}; raise sequence_length"
        )
    ids: list[Tensor] = []
    labels: list[Tensor] = []
    padding: list[Tensor] = []
    for row in _rows(documents, encoder, reading, sequence_length):
        if len(ids) == max_rows:
            break
        _raise_if_out_of_range(row.ids, num_ids, source, len(ids))
        ids.append(row.ids)
        labels.append(torch.where(row.scored, row.ids, IGNORED))
        padding.append(row.padding)
    if not ids:
        raise DataError(
            f"'{source}' gives no row to train on ({len(documents)} documents, task '{task}'); "
            f"give {'conversations with an assistant in them' if not reading.packed else 'more text'}"
        )
    found = TokenRows(
        source=source,
        input_ids=torch.stack(ids),
        labels=torch.stack(labels),
        padding=torch.stack(padding) if any(row.any() for row in padding) else None,
        hash=_hash(ids, labels, padding),
    )
    if found.num_scored == 0:
        raise DataError(f"no token of '{source}' counts in the loss; give text of at least two tokens a document")
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    """Each ``[sequence_length]``."""

    ids: Tensor
    scored: Tensor
    padding: Tensor


def _rows(documents: Sequence[Document], encoder: Encoder, task: Task, sequence_length: int) -> Iterator[_Row]:
    """Pieces end to end, the last row filled up; or one piece a row."""
    prefix = encoder.prefix
    room = sequence_length - len(prefix) if task.packed else sequence_length
    filler = encoder.padding_id
    ids: list[int] = []
    scored: list[bool] = []
    for document in documents:
        for piece in task.pieces(encoder, document, room):
            ids.extend(piece.ids)
            scored.extend(piece.scored)
            while task.packed and len(ids) >= room:
                yield _row(prefix, ids[:room], scored[:room], sequence_length, filler)
                del ids[:room], scored[:room]
            if not task.packed:
                yield _row((), ids, scored, sequence_length, filler)
                ids, scored = [], []
    if len(ids) > 1:
        yield _row(prefix, ids, scored, sequence_length, filler)


def _row(
    prefix: tuple[int, ...], ids: Sequence[int], scored: Sequence[bool], sequence_length: int, filler: int
) -> _Row:
    num_missing = sequence_length - len(prefix) - len(ids)
    num_present = sequence_length - num_missing
    return _Row(
        ids=torch.tensor([*prefix, *ids, *[filler] * num_missing], dtype=torch.int32),
        scored=torch.tensor([*[False] * len(prefix), *scored, *[False] * num_missing]),
        padding=torch.arange(sequence_length) >= num_present,
    )


def _raise_if_out_of_range(ids: Tensor, num_ids: int, source: str, row: int) -> None:
    wrong = (ids < 0) | (ids >= num_ids)
    if wrong.any():
        position = int(wrong.to(torch.uint8).argmax())
        raise DataError(
            f"row {row} of '{source}' has the token id {int(ids[position])} at position {position}, but the model's "
            f"embedding has the ids 0 to {num_ids - 1}; use the tokenizer that belongs to the model"
        )


def _hash(*parts: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(repr([len(parts[0]), *parts[0][0].shape]).encode())
    for part in parts:
        for row in part:
            array = row.numpy()
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()
