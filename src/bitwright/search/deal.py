"""Which document goes to which split: dealt whole, by a seed, and the same whatever number of tokens is asked for.

Documents are shuffled by the seed, then each goes to the split that lacks most characters of its share. One source
for everything is shared 20 : 40 : 40 (calibrate, repair, final). Two sources: the first is all for calibration, the
second is halved between repair and final, without the documents that also stand in the first.

The shares do not depend on the tokens asked for, so a later verification on more tokens still cannot meet a document
that calibrated. Rejected: cutting one long token stream into thirds (neighbouring windows of one document then
calibrate and prove), and dealing by tokens (all text would have to be tokenised first).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bitwright.errors import DataError
from bitwright.search.documents import Document, TextSource

#: Split → its share of one source for everything.
ONE_SOURCE_SHARES: Mapping[str, float] = {"repair": 0.4, "final": 0.4, "calibrate": 0.2}
_EVALUATION_SHARES: Mapping[str, float] = {"repair": 0.5, "final": 0.5}


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The documents that one split may draw from."""

    split: str
    source: TextSource
    #: The part of the source's characters that this split gets.
    share: float
    documents: tuple[Document, ...]


def deal_documents(first: TextSource, second: TextSource, seed: int) -> dict[str, Deal]:
    """Give every document to one of the splits calibrate, repair and final.

    Args:
        first, second: the sources of calibration and of evaluation; may be the same.
        seed: of the shuffling; torch's global generator is not touched.

    Raises:
        DataError: fewer documents than splits, or the second source holds nothing new.
    """
    if first.identity == second.identity:
        return _deal_source(first, first.documents, ONE_SOURCE_SHARES, seed)
    used = {document.text for document in first.documents}
    fresh = tuple(document for document in second.documents if document.text not in used)
    if not fresh:
        raise DataError(
            f"every document of '{second.name}' also stands in '{first.name}', so it cannot prove what that "
            "calibrated; name the same source for both (it is then split), or give other text"
        )
    return {
        **_deal_source(first, first.documents, {"calibrate": 1.0}, seed),
        **_deal_source(second, fresh, _EVALUATION_SHARES, seed),
    }


def _deal_source(
    source: TextSource, documents: Sequence[Document], shares: Mapping[str, float], seed: int
) -> dict[str, Deal]:
    if len(documents) < len(shares):
        raise DataError(
            f"'{source.name}' has {len(documents)} document(s), but {len(shares)} splits need at least one each; "
            "separate documents by blank lines (.txt) or rows (.jsonl, .parquet), or give more text"
        )
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    total_chars = sum(len(document.text) for document in documents)
    lacking = {split: share * total_chars for split, share in shares.items()}
    dealt: dict[str, list[Document]] = {split: [] for split in shares}
    for position, index in enumerate(order):
        empty = [split for split in shares if not dealt[split]]
        # The last documents are kept for splits that have none yet.
        candidates = empty if len(documents) - position <= len(empty) else list(shares)
        split = max(candidates, key=lambda name: lacking[name])
        dealt[split].append(documents[index])
        lacking[split] -= len(documents[index].text)
    return {
        split: Deal(split=split, source=source, share=share, documents=tuple(dealt[split]))
        for split, share in shares.items()
    }
