"""Text → three disjoint sets of token sequences: *calibrate* (learn from), *repair* (mend by), *final* (look at
once).

No document is in two of them (see `deal`), and no sequence: one that was already taken, in this split or another, is
left out. Every sequence has exactly `sequence_length` tokens. A split of `tokens` tokens has ⌈tokens /
sequence_length⌉ of them; *repair* and *final* have at least 64 where the text allows, which the bootstrap over
sequences needs. Where the tokenizer puts a token before every text (BOS), every sequence of a packed task starts with
it. A task of whole texts has one text a sequence, padded at the right, and its splits are as many tokens long as asked
for without the padding. Documents are tokenised as they are needed, and no further.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import DataError
from bitwright.search.deal import ONE_SOURCE_SHARES, Deal, deal_documents
from bitwright.search.documents import Document, TextSource, is_sampled, read_source
from bitwright.search.speaker import Speaker
from bitwright.search.task import TASKS, Encoder, Piece, Task, encoder_of

#: The fewest sequences over which an interval is worth quoting.
MIN_EVALUATION_SEQUENCES = 64


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """The sequences of one split."""

    #: A built-in set's name, or a file's name without its folder.
    source: str
    #: What the source is, in words.
    description: str
    #: int64 ``[num_sequences, sequence_length]``.
    input_ids: Tensor
    #: bool, same shape. True: the prediction OF this token counts; position 0 never. Of whole texts: every token does.
    scored: Tensor
    #: bool, same shape. True: no token, only there to fill the row at its right end (never scored).
    padding: Tensor
    #: sha256 of the shape, the ids and what is scored.
    hash: str

    @property
    def num_sequences(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """How many tokens are scored."""
        return int(self.scored.sum())

    def first(self, num_sequences: int) -> TextSet:
        """The first sequences of this set; all where it has no more."""
        some = slice(num_sequences)
        return _text_set(
            self.input_ids[some],
            self.scored[some],
            self.padding[some],
            source=self.source,
            description=self.description,
        )

    def joined(self, other: TextSet) -> TextSet:
        """The sequences of this set, then those of another from the same source."""
        return _text_set(
            torch.cat([self.input_ids, other.input_ids]),
            torch.cat([self.scored, other.scored]),
            torch.cat([self.padding, other.padding]),
            source=self.source,
            description=self.description,
        )


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Three sets without a common document or sequence."""

    calibrate: TextSet
    repair: TextSet
    final: TextSet
    #: More sequences from the documents that calibrate; None where none were asked for, or there are no more.
    further: TextSet | None = None
    #: What a reader of results on this text must know.
    notes: tuple[str, ...] = ()


def split_text(
    tokenizer: Any,
    *,
    task: str,
    calibration: str | Path,
    evaluation: str | Path,
    calibration_tokens: int,
    evaluation_tokens: int,
    sequence_length: int,
    seed: int,
    vocabulary_size: int | None = None,
    speaker: Speaker | None = None,
    further_tokens: int = 0,
) -> Splits:
    """Read the text and return the three splits; the same arguments give the same tokens.

    Args:
        tokenizer: of transformers.
        task: a name in `TASKS`.
        calibration, evaluation: a name in `CALIBRATION_SETS`, or the path of a .txt, .jsonl or .parquet file.
        calibration_tokens: tokens to calibrate on, rounded up to whole sequences.
        evaluation_tokens: the same for repair and for final, each.
        sequence_length: tokens in a sequence.
        seed: of the shuffling; torch's global generator is not touched.
        vocabulary_size: ids must be below it; by default the tokenizer's. Pass the rows of the model's embedding.
        speaker: the model, for sets that are sampled from it.
        further_tokens: how many more tokens are welcome for `further`; fewer are no error.

    Raises:
        UnknownName: no such task or set.
        DataError: the text is missing, unreadable, too short, or cannot be tokenised; says what to do.
        MissingExtra: a reader is not installed.
    """
    chosen_task = TASKS[task]
    encoder = encoder_of(tokenizer)
    room = sequence_length - (len(encoder.prefix) if chosen_task.packed else 0)
    around = len(encoder.prefix) + len(encoder.suffix)
    for option, value, least in (
        ("--tokens", calibration_tokens, 1),
        ("evaluation tokens", evaluation_tokens, 1),
        ("--sequence-length", sequence_length, around + 1 if chosen_task.whole_texts else sequence_length - room + 2),
    ):
        if value < least:
            raise DataError(f"{option} is {value}, but must be at least {least}; raise it")
    least_evaluation = MIN_EVALUATION_SEQUENCES * sequence_length
    first, second = _read_both(
        (calibration, evaluation), (calibration_tokens, max(evaluation_tokens, least_evaluation)), speaker
    )
    num_ids = vocabulary_size or encoder.vocabulary_size
    shape = _Shape(
        task=chosen_task,
        sequence_length=sequence_length,
        room=room,
        vocabulary_size=num_ids,
        filler=encoder.padding_id if encoder.padding_id < num_ids else 0,
    )
    num_evaluation = ceil(evaluation_tokens / sequence_length)
    num_calibration = ceil(calibration_tokens / sequence_length)
    learn = _Amount(num_needed=num_calibration, num_wanted=num_calibration, num_tokens=calibration_tokens)
    prove = _Amount(
        num_needed=num_evaluation,
        num_wanted=max(num_evaluation, MIN_EVALUATION_SEQUENCES),
        num_tokens=evaluation_tokens,
    )
    taken: set[bytes] = set()
    deals = deal_documents(first, second, seed)
    calibrate, repair, final = (
        found
        for name, amount in (("calibrate", learn), ("repair", prove), ("final", prove))
        if (found := _collect(deals[name], encoder, shape, amount, taken)) is not None  # some are needed of each
    )
    more = _Amount(num_needed=0, num_wanted=ceil(further_tokens / sequence_length), num_tokens=0)
    return Splits(
        calibrate=calibrate,
        repair=repair,
        final=final,
        further=_collect(deals["calibrate"], encoder, shape, more, taken) if more.num_wanted else None,
        notes=_notes(calibration, evaluation),
    )


def _read_both(
    sources: tuple[str | Path, str | Path], tokens: tuple[int, int], speaker: Speaker | None
) -> tuple[TextSource, TextSource]:
    """Read the sources of calibration and evaluation; of sets that are sampled, as much as their splits will take."""
    shares = ONE_SOURCE_SHARES if all(map(is_sampled, sources)) else {"calibrate": 1.0, "final": 0.5}
    num_tokens = [ceil(tokens[0] / shares["calibrate"]), ceil(tokens[1] / shares["final"])]
    if all(map(is_sampled, sources)):
        num_tokens = [max(num_tokens)] * 2
    first, second = (
        read_source(source, None if speaker is None else partial(speaker.documents, count))
        for source, count in zip(sources, num_tokens, strict=True)
    )
    return first, second


def _notes(calibration: str | Path, evaluation: str | Path) -> tuple[str, ...]:
    if is_sampled(evaluation):
        return (
            "the text that proves this plan was sampled from the model itself, and real text can be harder; give some "
            "with --evaluation",
        )
    return ("calibrated on text that was sampled from the model itself",) if is_sampled(calibration) else ()


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """How sequences are made."""

    task: Task
    sequence_length: int
    #: Tokens of a sequence that a document can fill: all but the tokenizer's prefix.
    room: int
    vocabulary_size: int
    #: The id that fills a row up.
    filler: int


@dataclass(frozen=True, kw_only=True)
class _Amount:
    """How much text a split takes."""

    #: Sequences: without the first number of them the text is too short, at the second it is enough.
    num_needed: int
    num_wanted: int
    #: Tokens that whole texts must come to beside that.
    num_tokens: int


def _collect(deal: Deal, encoder: Encoder, shape: _Shape, amount: _Amount, taken: set[bytes]) -> TextSet | None:
    """Take new sequences from a split's documents until there are enough, and add them to `taken`; None: none left."""
    rows: list[Tensor] = []
    masks: list[tuple[Tensor, Tensor]] = []
    num_tokens, tokens_needed = 0, amount.num_tokens if shape.task.whole_texts else 0
    for ids, scored, padding in _sequences(deal.documents, encoder, shape):
        key = ids.numpy().tobytes()
        if key in taken:
            continue
        taken.add(key)
        rows.append(ids)
        masks.append((scored, padding))
        num_tokens += int(scored.sum())
        if len(rows) >= amount.num_wanted and num_tokens >= tokens_needed:
            break
    if len(rows) < amount.num_needed or num_tokens < tokens_needed:
        raise DataError(_describe_shortage(deal, encoder, shape, len(rows), amount))
    if not rows:
        return None
    input_ids = torch.stack(rows)
    scored = torch.stack([scored for scored, _ in masks])
    _raise_if_untokenised(input_ids, scored, encoder, shape, deal)
    padding = torch.stack([padding for _, padding in masks])
    return _text_set(input_ids, scored, padding, source=deal.source.name, description=deal.source.description)


def _text_set(input_ids: Tensor, scored: Tensor, padding: Tensor, *, source: str, description: str) -> TextSet:
    digest = hashlib.sha256(repr(tuple(input_ids.shape)).encode())
    digest.update(input_ids.numpy().astype("<i8").tobytes())
    digest.update(scored.numpy().tobytes())
    return TextSet(
        source=source,
        description=description,
        input_ids=input_ids,
        scored=scored,
        padding=padding,
        hash=digest.hexdigest(),
    )


def _pieces_in_turn(documents: Sequence[Document], encoder: Encoder, shape: _Shape) -> Iterator[Piece]:
    """Yield one piece of every document, then the next of every document that has more, and so on."""
    waiting = deque(shape.task.pieces(encoder, document, shape.room) for document in documents)
    while waiting:
        pieces = waiting.popleft()
        piece = next(pieces, None)
        if piece is not None:
            yield piece
            waiting.append(pieces)


def _sequences(
    documents: Sequence[Document], encoder: Encoder, shape: _Shape
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (ids, scored, padding), each ``[sequence_length]``: packed pieces, or one piece and padding."""
    pieces = _pieces_in_turn(documents, encoder, shape)
    if not shape.task.packed:
        for piece in pieces:
            num_missing = shape.sequence_length - len(piece.ids)
            yield _row(
                piece.ids + (shape.filler,) * num_missing,
                piece.scored + (False,) * num_missing,
                (False,) * len(piece.ids) + (True,) * num_missing,
                whole=shape.task.whole_texts,
            )
        return
    prefix = encoder.prefix
    ids: tuple[int, ...] = ()
    scored: tuple[bool, ...] = ()
    for piece in pieces:
        ids, scored = ids + piece.ids, scored + piece.scored
        while len(ids) >= shape.room:
            yield _row(
                prefix + ids[: shape.room],
                (False,) * len(prefix) + scored[: shape.room],
                (False,) * shape.sequence_length,
            )
            ids, scored = ids[shape.room :], scored[shape.room :]


def _row(
    ids: Sequence[int], scored: Sequence[bool], padding: Sequence[bool], *, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.tensor(scored, dtype=torch.bool)
    mask[0] &= whole  # else nothing stands before it, so nothing predicts it
    return torch.tensor(ids, dtype=torch.int64), mask, torch.tensor(padding, dtype=torch.bool)


def _raise_if_untokenised(input_ids: Tensor, scored: Tensor, encoder: Encoder, shape: _Shape, deal: Deal) -> None:
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= shape.vocabulary_size:
        raise DataError(
            f"text cannot be tokenised: '{deal.source.name}' gets the token id {low if low < 0 else high}, but the "
            f"vocabulary has the ids 0 to {shape.vocabulary_size - 1}; use the tokenizer that belongs to the model"
        )
    unknown = getattr(encoder.tokenizer, "unk_token_id", None)
    if unknown is None:
        return
    share = float((input_ids[scored] == unknown).double().mean())
    if share > 0.5:
        raise DataError(
            f"text cannot be tokenised: {share:.0%} of the tokens of '{deal.source.name}' are the tokenizer's unknown "
            "token, and at most half may be; give text in a language and script that the model knows"
        )


def _describe_shortage(deal: Deal, encoder: Encoder, shape: _Shape, num_found: int, amount: _Amount) -> str:
    """Say how much text there is and how much is needed; here the whole source is tokenised, which is short."""
    source, num_needed = deal.source, amount.num_needed
    num_total = _count_tokens(source.documents, encoder, shape)
    if num_total == 0 and (shape.task.packed or shape.task.whole_texts):
        return (
            f"text cannot be tokenised: the model's tokenizer makes no token of '{source.name}' "
            f"({len(source.documents)} documents); use the tokenizer that belongs to the model, or give other text"
        )
    # Proofs never take fewer sequences than the least, however few tokens are asked for.
    is_least = deal.split != "calibrate" and num_needed <= MIN_EVALUATION_SEQUENCES
    part = f"'{source.name}' is too short: its {deal.split} split ({deal.share:.0%} of the documents)"
    if shape.task.whole_texts:
        return (
            f"{part} has {num_found} different texts of {_count_tokens(deal.documents, encoder, shape)} tokens (each "
            f"cut at {shape.sequence_length}), but {amount.num_tokens} tokens in at least {num_needed} texts are "
            f"needed; lower --tokens, or give about {ceil(amount.num_tokens / deal.share)} tokens of text"
        )
    if not shape.task.packed:
        return (
            f"{part} makes {num_found} sequences of {len(deal.documents)} documents, one of each different "
            f"conversation whose first {shape.sequence_length} tokens hold some of the assistant's, but {num_needed} "
            f"are needed; {'' if is_least else 'lower --tokens, '}raise --sequence-length, or give about "
            f"{ceil(num_needed / deal.share)} conversations"
        )
    num_there = _count_tokens(deal.documents, encoder, shape)
    num_tokens = num_needed * shape.sequence_length
    return (
        f"{part} has {num_there} tokens of the source's {num_total}, which make {num_found} different sequences of "
        f"{shape.sequence_length}, but {num_tokens} tokens in {num_needed} sequences are needed; lower "
        f"{'' if is_least else '--tokens or '}--sequence-length, or give about {ceil(num_tokens / deal.share)} tokens "
        "of text"
    )


def _count_tokens(documents: Sequence[Document], encoder: Encoder, shape: _Shape) -> int:
    return sum(len(piece.ids) for piece in _pieces_in_turn(documents, encoder, shape))
