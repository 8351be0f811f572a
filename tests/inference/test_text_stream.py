"""Text that is shown while it comes: whole characters, and all of it."""

from __future__ import annotations

from typing import Any

import pytest

from bitwright.errors import DataError
from bitwright.inference.generation.text_stream import TextStream, encode_chat, encode_prompt, stop_ids_of


@pytest.mark.parametrize("text", ["plain words", "zwölf Boxkämpfer jagen Viktor", "日本語のテキスト 🙂 ok", ""])
def test_pieces_are_whole_characters_and_make_up_the_text(tiny_tokenizer: Any, text: str) -> None:
    pieces: list[str] = []
    stream = TextStream(tiny_tokenizer, pieces.append)
    for token in tiny_tokenizer(text)["input_ids"]:
        stream.add(token)
    assert not any("�" in piece for piece in pieces)
    stream.end()
    assert "".join(pieces) == text


def test_half_a_character_is_written_at_the_end(tiny_tokenizer: Any) -> None:
    pieces: list[str] = []
    stream = TextStream(tiny_tokenizer, pieces.append)
    for token in tiny_tokenizer("aé")["input_ids"][:-1]:
        stream.add(token)
    assert pieces == ["a"]
    stream.end()
    assert "".join(pieces) == "a�"


def test_prompts_and_chats(tiny_tokenizer: Any) -> None:
    assert encode_prompt(tiny_tokenizer, "ab").shape == (1, 2)
    with pytest.raises(DataError, match="the prompt is ' '"):
        encode_prompt(tiny_tokenizer, " ")
    ids = encode_chat(tiny_tokenizer, [{"role": "user", "content": "hi"}])
    assert tiny_tokenizer.decode(ids[0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert stop_ids_of(object(), tiny_tokenizer) == {256}
