"""Text from the model itself, where there is none to calibrate on.

The model is sampled at temperature 1: its own distribution over texts is the nearest thing to what it was trained on
(Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023, section 3.1). A document
starts with the token that the tokenizer itself puts before a text; where it puts none, with a token drawn uniformly
from the vocabulary, or all documents would start alike. Documents are sampled in batches, by a seed, and kept in the
cache: the same model, seed and amount are sampled once.

What is sampled is text and goes the way of all text: it is tokenised again, dealt, and hashed. Rejected: only ever the
likeliest token (texts that repeat themselves), and lower temperatures (texts that are easier than real ones).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from bitwright.errors import DataError
from bitwright.models.loaded import LoadedModel, has_head
from bitwright.search.cache import open_cache
from bitwright.search.continuation import continuation
from bitwright.search.documents import Document
from bitwright.search.progress import Progress, Silent
from bitwright.search.task import Encoder

#: Documents that are sampled at once.
BATCH_DOCUMENTS = 32
#: Tokens of a document, sequences: enough that most text does not stand at a document's start.
DOCUMENT_SEQUENCES = 2
#: More is sampled than is needed: text that is tokenised again can come out shorter.
_SURPLUS = 1.25


@dataclass(frozen=True, kw_only=True, eq=False)
class Speaker:
    """The model in question, as something that text can be sampled from."""

    loaded: LoadedModel
    #: Tokens in a sequence of the text that is wanted.
    sequence_length: int
    seed: int
    #: Where caches lie; None keeps nothing.
    folder: Path | None = None
    progress: Progress = field(default_factory=Silent)

    def documents(self, num_tokens: int) -> tuple[Document, ...]:
        """Return documents of about `num_tokens` tokens together, and a quarter more.

        Raises:
            DataError: the model predicts no tokens.
        """
        if not has_head(self.loaded.model):
            raise DataError(
                f"the set 'self' is sampled from the model, and {self.loaded.name!r} is an encoder, which predicts no "
                "tokens; use the set 'docs', or give a file with text"
            )
        length = DOCUMENT_SEQUENCES * self.sequence_length
        if self.loaded.num_positions is not None:
            length = min(length, self.loaded.num_positions)
        count = max(BATCH_DOCUMENTS // 2, ceil(_SURPLUS * num_tokens / length))
        cache = open_cache(
            self.folder,
            model_hash=self.loaded.hash,
            text_hash=f"sampled: {count} documents of {length} tokens",
            seed=self.seed,
            include_head=False,
        )
        texts = cache.read_texts()
        if texts is None:
            texts = self._sample(count, length)
            cache.write_texts(texts)
        return tuple(Document(text=text) for text in texts)

    def _sample(self, count: int, length: int) -> tuple[str, ...]:
        encoder = Encoder(self.loaded.tokenizer)
        generator = torch.Generator().manual_seed(self.seed)
        texts: list[str] = []
        sizes = [min(BATCH_DOCUMENTS, count - start) for start in range(0, count, BATCH_DOCUMENTS)]
        with self.progress.stage("sample text from the model", len(sizes) * length) as stage:
            for size in sizes:
                first = self._first_tokens(encoder, size, generator)
                num_new = max(1, length - first.shape[1])

                def draw(logits: Tensor) -> Tensor:
                    return torch.multinomial(logits.softmax(-1), 1, generator=generator)

                rest = continuation(self.loaded.model, first, num_new, draw, stage)
                for row in torch.cat([first, rest], dim=1).tolist():
                    texts.append(self.loaded.tokenizer.decode(row, skip_special_tokens=True))
                stage.advance(length - num_new)
        return tuple(texts)

    def _first_tokens(self, encoder: Encoder, size: int, generator: torch.Generator) -> Tensor:
        """int64 [size, at least 1]."""
        if encoder.prefix:
            return torch.tensor([encoder.prefix]).expand(size, -1)
        special = set(self.loaded.tokenizer.all_special_ids)
        ordinary = torch.tensor([i for i in sorted(self.loaded.tokenizer.get_vocab().values()) if i not in special])
        return ordinary[torch.randint(len(ordinary), (size, 1), generator=generator)]
