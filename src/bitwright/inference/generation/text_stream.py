"""Tokens to text and back for a model: prompts, chats, and text that is shown while it comes.

A token may be half a character, and whether a space stands before a word is known with the token before. So text is
taken from a short run of tokens with and without the newest, and held back while it ends in half a character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import DataError

#: What tokenizers write for half a character.
_HALF = "�"


class TextStream:
    """Writes the text of tokens as they come.

    Args:
        tokenizer: of transformers.
        write: takes what is certain.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        #: Tokens that are decoded again for what stands before, and those whose text was written.
        self._begin = self._written = 0

    def add(self, token: int) -> None:
        """Take one more token."""
        self._ids.append(token)
        before, text = self._decode(self._written), self._decode(len(self._ids))
        if len(text) > len(before) and not text.endswith(_HALF):
            self._write(text[len(before) :])
            self._begin, self._written = self._written, len(self._ids)

    def end(self) -> None:
        """Write what was held back."""
        before, text = self._decode(self._written), self._decode(len(self._ids))
        if len(text) > len(before):
            self._write(text[len(before) :])

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[self._begin : end], skip_special_tokens=True)
        return text


def encode_prompt(tokenizer: Any, prompt: str) -> Tensor:
    """Ids of a prompt, [1, T], with what the tokenizer puts before a text.

    Raises:
        DataError: no text.
    """
    if not prompt.strip():
        raise DataError(f"the prompt is {prompt!r}, and a model goes on with some text; write one")
    ids: Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return ids


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """Ids of a chat up to where the model answers, [1, T].

    Raises:
        DataError: the tokenizer has no chat template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the model's tokenizer has no chat template, so it was not made to chat; use bitwright run with a --prompt"
        )
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:
        raise DataError(f"the model's chat template refuses the messages ({error}); leave --system out") from error
    return torch.tensor([ids], dtype=torch.int64)


def stop_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: the generation config's, else the tokenizer's."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = configured if configured is not None else getattr(tokenizer, "eos_token_id", None)
    ids = found if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in ids if token is not None)
