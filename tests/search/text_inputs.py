"""What the tests of text share: a tokenizer whose tokens are bytes, and a call of `split_text` with small numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bitwright.search.text import Splits, split_text

LENGTH = 32


def byte_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """One token a byte: 0–255 (in the byte-level alphabet's order), then <s> = 256, <unk> = 257."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if options.pop("adds_bos", False):
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", **options)


def split(tokenizer: Any, path: str | Path, **options: Any) -> Splits:
    defaults: dict[str, Any] = {
        "task": "text",
        "calibration": path,
        "evaluation": path,
        "calibration_tokens": 10 * LENGTH,
        "evaluation_tokens": 20 * LENGTH,
        "sequence_length": LENGTH,
        "seed": 0,
    }
    return split_text(tokenizer, **(defaults | options))
