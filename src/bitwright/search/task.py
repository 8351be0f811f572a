"""What a model is asked to do with a document: which tokens it reads, and which predictions count.

A task is one file in `tasks/`, which defines ``TASKS``. It turns a document into *pieces*: token ids, and for each
whether the prediction of that token is scored. ``packed`` tasks have their pieces laid end to end and cut into
sequences; of the others each piece is one sequence, cut at the right or padded there. What of the model is compared
on them is an output (see `output.py`), which the task names.

`Encoder` is the one border to a tokenizer: whatever goes wrong in it is the user's text or tokenizer, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bitwright.catalog import Catalog
from bitwright.errors import DataError
from bitwright.search.documents import Document


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of one document."""

    ids: tuple[int, ...]
    #: For each token: does the prediction OF it count?
    scored: tuple[bool, ...]


@dataclass(frozen=True)
class Encoder:
    """A tokenizer (of transformers) as tasks use it: text → ids, without special tokens of its own."""

    tokenizer: Any

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, no special tokens added.

        Raises:
            DataError: the tokenizer fails on it.
        """
        return tuple(self._call(text, add_special_tokens=False)["input_ids"])

    def encode_with_offsets(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return ids and the character each token starts at; None where the tokenizer is not a fast one."""
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        encoded = self._call(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), tuple(start for start, _ in encoded["offset_mapping"])

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The ids that the tokenizer itself puts before a text (a BOS token); usually none or one."""
        probe = "a"
        plain = self.encode(probe)
        whole = tuple(self._call(probe, add_special_tokens=True)["input_ids"])
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return ()

    @cached_property
    def suffix(self) -> tuple[int, ...]:
        """The ids that the tokenizer itself puts behind a text ([SEP] in BERT); usually none or one."""
        probe = "a"
        whole = tuple(self._call(probe, add_special_tokens=True)["input_ids"])
        return whole[len(self.prefix) + len(self.encode(probe)) :] if whole != self.encode(probe) else ()

    @cached_property
    def padding_id(self) -> int:
        """What fills a row up: the tokenizer's own choice, since some models count positions by it; else 0."""
        found = getattr(self.tokenizer, "pad_token_id", None)
        return found if found is not None and 0 <= found < self.vocabulary_size else 0

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the largest id of the tokenizer's vocabulary."""
        vocabulary: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return max(len(self.tokenizer), max(vocabulary.values(), default=-1) + 1)

    def _call(self, text: str, **options: bool) -> Any:
        try:
            return self.tokenizer(text, verbose=False, **options)
        except Exception as error:
            # The tokenizers library raises Exception itself ("Missing [UNK] token from the vocabulary"), so no narrower
            # class catches it; other kinds are defects and pass.
            if type(error) is not Exception and not isinstance(error, ValueError | TypeError | KeyError):
                raise
            raise DataError(
                f"text cannot be tokenised: the model's tokenizer fails on {text[:40]!r} ({error}); "
                "give other text, or a model with a tokenizer that knows its characters"
            ) from error


def encoder_of(tokenizer: Any) -> Encoder:
    """Return a model's tokenizer as tasks use it.

    Raises:
        DataError: the model has none.
    """
    if tokenizer is None:
        raise DataError(
            "text cannot be tokenised: the model has no tokenizer; put tokenizer.json beside its weights, or choose "
            "another model"
        )
    return Encoder(tokenizer)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One way of reading documents."""

    name: str
    description: str
    #: True: pieces are laid end to end and cut into sequences. False: a piece is a sequence.
    packed: bool
    #: (encoder, document, room in a sequence in tokens) → pieces, made one by one as they are asked for.
    pieces: Callable[[Encoder, Document, int], Iterator[Piece]]
    #: What of the model is compared: a name in `OUTPUTS`.
    output: str = "tokens"
    #: True: a sequence is judged as a whole, so its first token counts like all others, and a split is as many tokens
    #: long as is asked for, padding not counted. False: tokens are predicted from those before them.
    whole_texts: bool = False


TASKS: Catalog[Task] = Catalog(kind="task", package="bitwright.search.tasks", attribute="TASKS", record_type=Task)
